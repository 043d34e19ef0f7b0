"""The preparation that a library's models expect: pixel by pixel what the library does, or refused by name."""

import json
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.libraries import zoo
from unskew.data.preparation import Preparation
from unskew.data.sites import site_data
from unskew.errors import DataError, UsageError
from unskew.models.foreign_preparation import own_preparation

RANDOM = np.random.default_rng(0)
SIZES = ((301, 200), (200, 301), (47, 33), (100, 21))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Class folders of one image each, of different sizes."""
    root = tmp_path_factory.mktemp("photos")
    for number, (width, height) in enumerate(SIZES):
        (root / str(number)).mkdir()
        coarse = Image.fromarray(RANDOM.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize((width, height))
        rough = np.asarray(coarse).astype(int) + RANDOM.integers(-30, 31, (height, width, 3))
        Image.fromarray(rough.clip(0, 255).astype(np.uint8)).save(root / str(number) / "a.png")
    return root


def differs(preparation, theirs, photos):
    """The largest difference between what a site gives a model and what a library would."""
    found = torch.cat([x for x, _ in site_data(str(photos), preparation=preparation).batches()])
    images = [Image.open(photos / str(number) / "a.png") for number in range(len(SIZES))]
    expected = torch.stack([theirs(image) for image in images])
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


def refused(kind, words, model):
    with pytest.raises(kind) as error:
        own_preparation(str(model))
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"
    assert str(model) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("model", ["cnn:channels=3", "net.py:build", "model.pt2", "nothing"])
def test_models_that_do_not_say_are_refused(model):
    refused(UsageError, ["does not say how its images are prepared", "prep.py:transform"], model)


# timm


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",  # bilinear, 0.875 or 0.95
        "vit_tiny_patch16_224",  # bicubic, 0.9, another mean
        "vit_tiny_patch16_224.augreg_in21k",
        "convnext_atto",
        "tf_efficientnet_b0",
        "vit_base_patch16_siglip_224",  # squashed
        "inception_v3",
    ],
)
def test_timm(name, photos):
    timm = zoo("timm")
    config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    made = own_preparation(f"timm:{name}")
    assert differs(made, timm.data.create_transform(**config), photos) < 1e-6
    assert Preparation.parse(str(made)) == made


def test_what_timm_does_otherwise_is_refused():
    timm = zoo("timm")
    refused(UsageError, ["unknown model 'resnet18x'", "resnet18"], "timm:resnet18x")
    refused(UsageError, ["Invalid pretrained tag"], "timm:resnet18.nothing")
    configs = {name: timm.get_pretrained_cfg(name) for name in timm.list_models()}
    border = next(name for name, config in configs.items() if config.crop_mode == "border")
    refused(UsageError, ["crop_mode 'border'", "prep.py:transform"], f"timm:{border}")
    wide = next(name for name, config in configs.items() if config.input_size[1] != config.input_size[2])
    refused(UsageError, ["input_size (3, ", "which is no square"], f"timm:{wide}")


@pytest.mark.slow
def test_every_preparation_of_timm_is_mapped_or_refused(photos):
    timm = zoo("timm")
    seen, odd = {}, []
    for name in timm.list_models():
        try:
            seen.setdefault(str(own_preparation(f"timm:{name}")), name)
        except UsageError as error:
            odd.append(str(error))
    assert len(odd) < 20
    assert all("crop_mode 'border'" in text or "no square" in text for text in odd)
    for text, name in seen.items():
        made = Preparation.parse(text)
        if (made.crop or made.image_size) < 300:
            config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
            assert differs(made, timm.data.create_transform(**config), photos) < 1e-6, name


# torchvision


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "efficientnet_b0", "vit_b_16", "swin_v2_t", "inception_v3"])
def test_torchvision(name, photos):
    models = zoo("torchvision").models
    made = own_preparation(f"torchvision:{name}")
    assert differs(made, models.get_model_weights(name).DEFAULT.transforms(), photos) < 1e-6
    assert made.crop is not None


def test_torchvision_has_no_other_names():
    zoo("torchvision")
    refused(UsageError, ["unknown model 'resnet19' of torchvision", "'resnet18'"], "torchvision:resnet19")


STEPS = (
    "transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor(), "
    "transforms.Normalize([0.5] * 3, [0.25] * 3)"
)


def composed(path, steps):
    path.write_text(f"from torchvision import transforms\n\ntransform = transforms.Compose([{steps}])\n")
    return Preparation.of_function(f"{path}:transform")


def test_a_compose_of_torchvision_is_a_function_of_the_users(tmp_path, photos):
    zoo("torchvision")
    plain = Preparation(resize=40, crop=32, mean=(0.5,) * 3, std=(0.25,) * 3)
    ours, theirs = (
        torch.cat([x for x, _ in site_data(str(photos), preparation=preparation).batches()])
        for preparation in (plain, composed(tmp_path / "prep.py", STEPS))
    )
    assert torch.allclose(ours, theirs, atol=1e-6)
    random = composed(tmp_path / "random.py", f"transforms.RandomCrop(9), {STEPS}")
    with pytest.raises(UsageError, match="makes something else of .* each time: leave out what is random"):
        list(site_data(str(photos), preparation=random).batches())


def test_a_folder_gives_what_image_folder_gives(tmp_path):
    """Of every mode, a photo that a camera turned among them; but torchvision makes all of them colour."""
    zoo("torchvision")
    from torchvision import datasets, transforms

    rgb = Image.fromarray(RANDOM.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    for name, image, options in (
        ("a/rgb.png", rgb, {}),
        ("a/turned.jpg", rgb, {"exif": turned}),
        ("a/cmyk.jpg", rgb.convert("CMYK"), {}),
        ("b/alpha.png", Image.merge("RGBA", (*rgb.split(), rgb.split()[0])), {}),
        ("b/palette.png", rgb.quantize(20), {"transparency": bytes(range(20))}),
        ("c/grey.png", rgb.convert("L"), {}),
        ("c/grey-alpha.png", rgb.convert("LA"), {}),
        ("c/black-white.png", rgb.convert("1"), {}),
        ("c/large.tif", rgb, {"compression": "tiff_lzw"}),
        ("c/small.webp", rgb, {}),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.save(tmp_path / name, **options)
    theirs = datasets.ImageFolder(tmp_path, transforms.ToTensor())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, of the palette
        expected = [theirs[row] for row in range(len(theirs))]
    site = site_data(str(tmp_path))
    ((x, y),) = site.batches()
    assert site.labels == tuple(theirs.classes)
    assert y.tolist() == [label for _, label in expected]
    assert torch.equal(x, torch.stack([image for image, _ in expected]))


# transformers


def processor(kind, folder, **options):
    """An image processor of transformers that works on images, kept in a folder as people have it."""
    library = zoo("transformers")
    getattr(library, f"{kind}ImageProcessorPil")(**options).save_pretrained(folder)
    found = getattr(library, f"{kind}ImageProcessorPil").from_pretrained(folder)
    return lambda image: found(image, return_tensors="pt")["pixel_values"][0]


SMALL = {"size": {"height": 40, "width": 40}}
EDGE = {"size": {"shortest_edge": 40}}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ViT", SMALL),
        ("ViT", {**SMALL, "do_normalize": False}),
        ("ViT", {**SMALL, "do_rescale": False}),
        ("ViT", {**SMALL, "do_rescale": False, "do_normalize": False}),
        ("ViT", {**SMALL, "rescale_factor": 1 / 127.5}),
        ("ViT", {**SMALL, "image_mean": 0.4, "image_std": 0.2}),
        ("ViT", {"do_resize": False, "do_center_crop": True, "crop_size": 40}),
        ("ViT", {**SMALL, "do_center_crop": True, "crop_size": 40}),
        *(("ViT", {**SMALL, "resample": resample}) for resample in range(6)),
        ("DeiT", {"size": {"height": 41, "width": 41}, "crop_size": 36}),
        ("DeiT", {"size": {"height": 33, "width": 33}, "crop_size": 36}),  # black around it
        ("Beit", SMALL),
        ("Bit", {**EDGE, "crop_size": 35}),
        ("CLIP", {**EDGE, "crop_size": 40}),
        ("Siglip", SMALL),
        ("Pvt", SMALL),
        ("Segformer", SMALL),
        ("MobileNetV1", {**EDGE, "crop_size": 35}),
        ("MobileNetV2", {**EDGE, "crop_size": 35}),
        ("ConvNext", {}),  # 384: squashed
        ("ConvNext", EDGE),
        ("ConvNext", {**EDGE, "crop_pct": 0.93, "do_center_crop": True, "crop_size": 40}),
        ("Levit", {**EDGE, "crop_size": 40}),
        ("Levit", {**SMALL, "crop_size": 35}),
        ("PoolFormer", {**EDGE, "crop_size": 40}),
        ("PoolFormer", {**SMALL, "crop_size": 35, "crop_pct": 0.8}),
        ("EfficientNet", {**SMALL, "do_center_crop": True, "crop_size": 35}),
        ("EfficientNet", {**SMALL, "rescale_offset": True, "rescale_factor": 1 / 127.5, "include_top": False}),
        ("EfficientNet", {**SMALL, "rescale_offset": True, "do_normalize": False}),
    ],
)
def test_transformers(kind, options, tmp_path, photos):
    theirs = processor(kind, tmp_path, **options)
    made = own_preparation(f"transformers:{tmp_path}")
    assert differs(made, theirs, photos) < (1e-6 if min(made.std) > 0.02 else 1e-4)
    assert Preparation.parse(str(made)) == made


def test_what_scales_tensors_does_the_same_but_for_rounding(tmp_path, photos):
    library = zoo("transformers")
    library.DeiTImageProcessor(size={"height": 61, "width": 61}, crop_size=40, do_normalize=False).save_pretrained(
        tmp_path
    )
    found = library.DeiTImageProcessor.from_pretrained(tmp_path)
    made = own_preparation(f"transformers:{tmp_path}")
    assert differs(made, lambda image: found(image, return_tensors="pt")["pixel_values"][0], photos) < 5 / 255


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("ViT", {"size": {"height": 40, "width": 41}}, "size {'height': 40, 'width': 41}"),
        ("ViT", {**SMALL, "do_pad": True}, "do_pad=true"),
        ("CLIP", {"size": {"shortest_edge": 40, "longest_edge": 60}}, "'longest_edge': 60"),
        ("CLIP", {**EDGE, "crop_size": {"height": 40, "width": 30}}, "crop_size {'height': 40, 'width': 30}"),
        ("ConvNext", {**EDGE, "do_center_crop": True, "crop_size": 30}, "crop_size 30 after scaling to"),
        ("Perceiver", {}, "PerceiverImageProcessor (known are those of ViT, "),
        ("MobileViT", {}, "MobileViTImageProcessor (known are those of ViT, "),
    ],
)
def test_what_transformers_does_otherwise_is_refused(kind, options, word, tmp_path):
    processor(kind, tmp_path, **options)
    refused(UsageError, ["its own preparation has", word, "prep.py:transform"], f"transformers:{tmp_path}")


def test_files_of_older_transformers(tmp_path):
    zoo("transformers")
    file = tmp_path / "preprocessor_config.json"
    old = {"do_normalize": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    file.write_text(json.dumps({**old, "feature_extractor_type": "ViTFeatureExtractor", "size": 224}))
    told = "image_size=224 channels=3 mean=0.5,0.5,0.5 std=0.5,0.5,0.5"
    assert str(own_preparation(f"transformers:{tmp_path}")) == told
    file.write_text(json.dumps({**old, "image_processor_type": "ViTImageProcessorFast", "size": 224}))
    assert str(own_preparation(f"transformers:{tmp_path}")) == told
    file.write_text(
        json.dumps({**old, "image_mean": [0.5], "image_std": [0.5], "image_processor_type": "ViTImageProcessor"})
    )
    assert str(own_preparation(f"transformers:{tmp_path}")) == "image_size=224 channels=1 mean=0.5 std=0.5"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "can't be read by transformers"),
        ("[]", "can't be read by transformers"),
        ("{}", "can't be read by transformers (ValueError: Unrecognized image processor"),
        ('{"image_processor_type": "ConvNextImageProcessor", "size": 224, "crop_pct": null}', "can't be meant"),
        ('{"image_processor_type": "ViTImageProcessor", "resample": 77}', "can't be meant (KeyError: 77)"),
    ],
)
def test_damaged_configurations_are_refused(content, word, tmp_path):
    zoo("transformers")
    (tmp_path / "preprocessor_config.json").write_text(content)
    assert len(refused(DataError, [word, "preprocessor_config.json"], f"transformers:{tmp_path}")) < 600


def test_a_folder_without_a_configuration(tmp_path):
    zoo("transformers")
    for name in (tmp_path, "vit", "google/vit"):
        refused(
            UsageError, ["there is no", "preprocessor_config.json", "nothing is downloaded"], f"transformers:{name}"
        )
