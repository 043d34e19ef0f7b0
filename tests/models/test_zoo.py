"""Networks of torchvision, timm and transformers: found by their names, cut, calibrated and put together again."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.libraries import folder, goes_round, zoo
from unskew.conversation.model_file import open_model
from unskew.errors import DataError, UsageError
from unskew.files.writing import load_tree, save_tree
from unskew.models.cutting import rejoined, split
from unskew.models.foreign import brings_weights, load_module
from unskew.models.networks import Split, linear_of
from unskew.models.programs import exported
from unskew.models.weights import load_weights
from unskew.seeds import seeded

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = {
    "input_ids": torch.tensor([[1, 2, 3, 4], [4, 5, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}


def test_torchvision(tmp_path: Path) -> None:
    zoo("torchvision")
    goes_round(load_module("torchvision:resnet18", classes=5), IMAGES, "fc", tmp_path)
    assert load_module("torchvision:resnet18").fc.out_features == 1000
    mobile = split(load_module("torchvision:mobilenet_v3_small", classes=5), IMAGES)
    assert (mobile.layer, mobile.classes) == ("classifier.3", 5)
    for name in ("resnet-18", "fasterrcnn_resnet50_fpn", "resnet18:size=3"):  # a detector would fetch its backbone
        with pytest.raises(UsageError, match=f"unknown model '{name}' of torchvision"):
            load_module(f"torchvision:{name}")


def test_timm(tmp_path: Path) -> None:
    zoo("timm")
    images = torch.randn(2, 3, 224, 224)
    goes_round(load_module("timm:vit_tiny_patch16_224", classes=5), images, "head", tmp_path)
    assert load_module("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k", classes=5).head.out_features == 5
    for name in ("vit_tini_patch16_224", "hf-hub:timm/resnet18"):
        with pytest.raises(UsageError, match=f"unknown model '{name}' of timm"):
            load_module(f"timm:{name}")


def test_transformers_for_images(tmp_path: Path) -> None:
    spec = folder(tmp_path / "vit", "vit", image_size=32, patch_size=8)
    goes_round(load_module(spec, classes=5), {"pixel_values": IMAGES}, "classifier", tmp_path)


def test_transformers_for_texts(tmp_path: Path) -> None:
    spec = folder(tmp_path / "bert", "bert", vocab_size=20, num_labels=7)
    goes_round(load_module(spec, classes=5), TOKENS, "classifier", tmp_path)
    assert load_module(spec, classes=5).classifier.out_features == 5
    assert split(load_module(spec), TOKENS).classes == 7
    module = load_module(spec, classes=5).eval()
    cut = split(torch.export.export(module, (), TOKENS), TOKENS)
    torch.testing.assert_close(cut(TOKENS), module(**TOKENS).logits)
    module.save_pretrained(tmp_path / "saved")  # transformers' own way to write weights
    load_weights(load_module(spec, classes=5), tmp_path / "saved" / "model.safetensors")


@pytest.mark.parametrize(("kind", "layer"), [("bert", "classifier"), ("gpt2", "score")])
def test_programs_of_texts_take_any_length(kind: str, layer: str, tmp_path: Path) -> None:
    spec = folder(tmp_path / kind, kind, vocab_size=20, pad_token_id=0)
    cut = split(load_module(spec, classes=5), TOKENS).eval()
    assert cut.layer == layer
    exported(cut, TOKENS, tmp_path / "text.pt2")
    program = torch.export.load(tmp_path / "text.pt2").module()
    for examples, length in ((1, 5), (4, 17)):
        ids = torch.randint(1, 20, (examples, length))
        texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            torch.testing.assert_close(program(**texts), cut(texts), rtol=1e-3, atol=1e-4)


def test_transformers_by_their_type(tmp_path: Path) -> None:
    transformers = zoo("transformers")
    module = load_module("transformers:mobilenet_v2", classes=5)
    assert module.classifier.out_features == 5
    for name, says in {
        "bret": "unknown model 'bret' of transformers: did you mean 'bert'",
        "someone/bert": "there is no someone/bert/config.json, and nothing is downloaded",
        "vits": "no classifier of texts or images of the type 'vits'",
    }.items():
        with pytest.raises(UsageError, match=says):
            load_module(f"transformers:{name}")
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}')
    with pytest.raises(UsageError, match="fails"):
        load_module(f"transformers:{tmp_path}")
    assert transformers


# -------- Folders of transformers --------

SMALL = {
    "vit": {"image_size": 32, "patch_size": 8},
    "dinov2": {"image_size": 32, "patch_size": 8},
    "beit": {"image_size": 32, "patch_size": 8},
    "swin": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "bert": {"vocab_size": 20},
}


def saved(path: Path, kind: str, classes: int = 7, **settings: Any) -> tuple[str, Any]:
    """A small transformer in a folder, as its authors would save it, and its spec."""
    spec = folder(path / "config", kind, num_labels=classes, **SMALL[kind], **settings)
    with seeded(1):
        module = load_module(spec).eval()
    module.save_pretrained(path / "saved")
    return f"transformers:{path / 'saved'}", module


@pytest.mark.parametrize("kind", SMALL)
def test_a_folder_of_transformers_has_its_weights(kind: str, tmp_path: Path) -> None:
    spec, module = saved(tmp_path, kind)
    example = TOKENS if kind == "bert" else {"pixel_values": IMAGES}
    with torch.no_grad():
        expected = module(**example).logits
        for classes in (None, 7, 3):  # a folder has its own number
            torch.testing.assert_close(load_module(spec, classes).eval()(**example).logits, expected)
        assert brings_weights(spec)
        assert not brings_weights(f"transformers:{tmp_path / 'config'}")
        fresh = load_module(f"transformers:{tmp_path / 'config'}").eval()  # which has the configuration alone
        assert not torch.equal(fresh(**example).logits, expected)
        load_weights(fresh, tmp_path / "saved" / "model.safetensors")  # whose names are those of older versions
        torch.testing.assert_close(fresh(**example).logits, expected)
    goes_round(load_module(spec), example, "classifier", tmp_path)


def test_weights_of_transformers_that_do_not_fit(tmp_path: Path) -> None:
    _, module = saved(tmp_path, "vit")
    tree = load_tree(tmp_path / "saved" / "model.safetensors")[0]
    less = {name: value for name, value in tree.items() if "query.bias" not in name}
    save_tree(tmp_path / "less.safetensors", less | {"more": torch.ones(1)})
    with pytest.raises(DataError, match=r"missing are vit.layers.0.attention.q_proj.bias.*does not have more"):
        load_weights(module, tmp_path / "less.safetensors")
    other = load_module(f"transformers:{tmp_path / 'config'}", classes=3)
    with pytest.raises(DataError, match=r"of another shape are classifier.weight \(7, 16\), in the model \(3, 16\)"):
        load_weights(other, tmp_path / "saved" / "model.safetensors")
    save_tree(tmp_path / "saved" / "model.safetensors", less)
    with pytest.raises(DataError, match=r"saved: its weights don't fit its config.json.*q_proj"):
        load_module(f"transformers:{tmp_path / 'saved'}")


@pytest.mark.parametrize("file", [False, True])
def test_a_new_head_on_a_folder(file: bool, tmp_path: Path) -> None:
    spec, module = saved(tmp_path, "vit")
    weights = tmp_path / "saved" / "model.safetensors" if file else None
    example = {"pixel_values": IMAGES}
    for classes, fresh, width in ((None, False, 7), (7, False, 7), (5, True, 5)):
        made = open_model(spec, weights, classes=classes, example=example)
        assert (made.fresh, made.model.classes) == (fresh, width)
        torch.testing.assert_close(made.model.eval().features(example), split(module, example).features(example))


def test_a_backbone_without_a_head_needs_the_number_of_classes(tmp_path: Path) -> None:
    _, module = saved(tmp_path, "vit")
    module.vit.save_pretrained(tmp_path / "backbone")
    spec = f"transformers:{tmp_path / 'backbone'}"
    with pytest.raises(UsageError, match=r"backbone holds no classifier \(missing are classifier.bias.*give --classes"):
        load_module(spec)
    made = open_model(spec, None, classes=2, example={"pixel_values": IMAGES})
    assert made.fresh
    assert not made.model.classifier.weight.any()
    made.model.eval()
    again = split(module, {"pixel_values": IMAGES})
    torch.testing.assert_close(made.model.features(pixel_values=IMAGES), again.features(pixel_values=IMAGES))


def test_other_files_of_a_folder(tmp_path: Path) -> None:
    """Shards, and tensors that torch.save wrote; code in a folder is not run."""
    _, module = saved(tmp_path, "vit")
    module.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    torch.save(load_tree(tmp_path / "saved" / "model.safetensors")[0], tmp_path / "pytorch_model.bin")
    shutil.copy(tmp_path / "saved" / "config.json", tmp_path)
    for place in (tmp_path / "shards", tmp_path):
        found = load_module(f"transformers:{place}")
        assert all(torch.equal(value, found.state_dict()[name]) for name, value in module.state_dict().items())
    torch.save({"classifier.weight": Trap(tmp_path / "sprung")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="fails"):
        load_module(f"transformers:{tmp_path}")
    assert not (tmp_path / "sprung").exists()


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


# -------- Many architectures --------

COMMON = """
torchvision: alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3@299 maxvit_t@224
mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 swin_t swin_v2_t
vgg11 vit_b_16@224 wide_resnet50_2
timm: resnet18 resnetv2_50x1_bit vit_tiny_patch16_224@224 deit_tiny_distilled_patch16_224@224 levit_128s@224
swin_tiny_patch4_window7_224@224 convnext_atto efficientnet_b0 mobilenetv3_small_050 ghostnet_100 repvgg_a0 dpn68
densenet121 xception41 nfnet_l0 regnetx_002 mixer_b16_224@224 beit_base_patch16_224@224 cait_xxs24_224@224
crossvit_tiny_240@240 pvt_v2_b0@224 poolformer_s12 edgenext_xx_small mobilevit_xxs eva02_tiny_patch14_224@224
coat_tiny@224 efficientformer_l1@224 visformer_tiny@224 xcit_nano_12_p16_224@224 fastvit_t8 hrnet_w18_small
res2net50_26w_4s tresnet_m rexnet_100
"""


def architectures() -> list[str]:
    found, library = [], ""
    for word in COMMON.split():
        library, found = (word[:-1], found) if word.endswith(":") else (library, [*found, f"{library}:{word}"])
    return found


def comes_back(spec: str) -> Split:
    """Cut a network, and put another head back: what the module gives is what its parts do."""
    name, _, size = spec.partition("@")
    zoo(name.partition(":")[0])
    module = load_module(name, classes=7).eval()
    images = torch.randn(2, 3, int(size or 64), int(size or 64), generator=torch.Generator().manual_seed(0))
    cut = split(module, images)
    with torch.no_grad():
        torch.testing.assert_close(cut(images), module(images), rtol=1e-4, atol=1e-5)
        old = cut.classifier
        draw = torch.Generator().manual_seed(1)
        bias = None if old.bias is None else torch.randn(7, generator=draw)
        cut.classifier = linear_of(torch.randn(old.weight.shape, generator=draw), bias)
        module.load_state_dict(rejoined(cut, module))
        answer, expected = module(images), cut(images)
    torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(answer.argmax(1), expected.argmax(1))
    return cut


@pytest.mark.sampled(0, 18)
@pytest.mark.parametrize("spec", architectures())
def test_common_architectures_come_back(spec: str) -> None:
    comes_back(spec)


@pytest.mark.parametrize(
    ("spec", "layer", "dimension"),
    [
        ("torchvision:mnasnet0_5", "classifier.1", 1280),
        ("timm:resnetv2_50x1_bit", "head.fc", 2048),
        ("timm:deit_tiny_distilled_patch16_224@224", "head+head_dist", 384),
        ("timm:efficientformer_l1@224", "head+head_dist", 448),  # on the same features
    ],
)
def test_heads_of_other_kinds(spec: str, layer: str, dimension: int) -> None:
    cut = comes_back(spec)
    assert (cut.layer, cut.dimension) == (layer, dimension)


def test_heads_that_are_not_linear_are_refused_with_lines_that_help() -> None:
    """SqueezeNet averages a ReLU of its convolution; VOLO adds the maximum over all patches."""
    for name, layer, size in (("torchvision:squeezenet1_1", "classifier.1", 64), ("timm:volo_d1_224", "head", 224)):
        zoo(name.partition(":")[0])
        module, images = load_module(name, classes=7).eval(), torch.randn(1, 3, size, size)
        with pytest.raises(UsageError, match=f"unskew.split\\(net, layer='{layer}'\\)"):
            split(module, images)
        cut = split(module, layer=layer)
        assert cut(images).shape == (1, 7)


def test_names_of_older_torchvision(tmp_path: Path) -> None:
    """Of files that torchvision's own loaders rename as they read them."""
    zoo("torchvision")
    for name in ("densenet121", "mnasnet0_5"):
        module = load_module(f"torchvision:{name}", classes=5)
        tree = module.state_dict()
        older = {
            re.sub(r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2.", key): value for key, value in tree.items()
        }
        save_tree(tmp_path / "older.safetensors", older)
        fresh = load_module(f"torchvision:{name}", classes=5)
        load_weights(fresh, tmp_path / "older.safetensors")
        assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in tree.items())
