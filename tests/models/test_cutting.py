"""Any module that ends in a linear layer is cut before it, and others are refused with the reason."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from unskew.errors import UsageError
from unskew.models.cutting import rejoined, split
from unskew.models.networks import Split, build, linear_of, networks, small_cnn
from unskew.models.transforms import Transform


def count(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())


# -------- Found by a forward pass --------


class Torchvision(nn.Module):
    """A trunk, `avgpool`, `flatten`, `fc`, as torchvision's ResNet has them."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(5)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(5, 4)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.relu(self.bn1(self.conv1(x)))), 1)
        x = self.fc(x)
        return x if self.after is None else self.after(x)


class Timm(nn.Module):
    """`forward_features`, then `forward_head` through dropout and a head that may have parts."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 6, 4, 4)
        self.blocks = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())
        self.fc_norm = nn.LayerNorm(6)
        self.head_drop = nn.Dropout(0.5)
        self.head = head

    def forward_features(self, x: Tensor) -> Tensor:
        return self.blocks(self.patch_embed(x).flatten(2).transpose(1, 2))  # (B, tokens, 6)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.head_drop(self.fc_norm(x.mean(1))))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None


class Transformers(nn.Module):
    """Pooled tokens, dropout, classifier; takes named inputs and returns an object with `logits`."""

    def __init__(self, wrap=Answer) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(11, 6)
        self.pooler = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(6, 3)
        self.wrap = wrap

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None):
        tokens = self.embeddings(input_ids)  # (B, tokens, 6)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.wrap(self.classifier(self.dropout(torch.tanh(self.pooler(pooled)))))


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = {
    "input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
}


@pytest.mark.parametrize(
    ("module", "layer", "dimension", "classes"),
    [
        (Torchvision(), "fc", 5, 4),
        (Torchvision(nn.Identity()), "fc", 5, 4),
        (Torchvision(nn.Dropout(0.3)), "fc", 5, 4),
        (Timm(nn.Linear(6, 4)), "head", 6, 4),
        (Timm(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))), "head.2", 7, 4),
        (Timm(nn.Sequential(OrderedDict(fc=nn.Linear(6, 4), flatten=nn.Identity()))), "head.fc", 6, 4),
        (nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(192, 4))), "1", 192, 4),
    ],
)
def test_split_of_image_classifiers(module: nn.Module, layer: str, dimension: int, classes: int) -> None:
    module.train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    net = split(module, IMAGES)
    assert (net.layer, net.dimension, net.classes) == (layer, dimension, classes)
    assert all(key.startswith(("features.", "classifier.")) for key in net.state_dict())
    assert count(net) == count(module)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert module.get_submodule(layer) is not net.classifier
    assert module.training
    assert all(part.training for part in net.modules())
    x = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(net.eval()(x), module.eval()(x))
    assert net.features(x).shape == (3, dimension)


class Decoder(nn.Module):
    """As GPT-2 classifies: a layer gives logits for each word, and those of the last word are taken, or their mean."""

    def __init__(self, bias: bool, pool) -> None:
        super().__init__()
        self.embeddings, self.score, self.pool = nn.Embedding(11, 6), nn.Linear(6, 4, bias=bias), pool

    def forward(self, input_ids: Tensor, attention_mask: Tensor):
        return Answer(self.pool(self.score(self.embeddings(input_ids)), attention_mask))


def last_word(logits: Tensor, mask: Tensor) -> Tensor:
    return logits[torch.arange(len(logits)), mask.sum(1) - 1]


def mean_word(logits: Tensor, mask: Tensor) -> Tensor:
    return (logits * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pool", [last_word, mean_word])
def test_a_layer_before_the_choice_of_a_word_is_found(pool, bias: bool) -> None:
    module = Decoder(bias, pool)
    net = split(module, TOKENS)
    assert (net.layer, net.dimension, net.classes) == ("score", 6, 4)
    assert net.features(TOKENS).shape == (2, 6)
    net.classifier = nn.Linear(6, 4, bias=bias)
    module.load_state_dict(rejoined(net, module))
    torch.testing.assert_close(module(**TOKENS).logits, net(TOKENS))


@pytest.mark.parametrize(
    "pool",
    [
        lambda logits, mask: last_word(logits, mask).relu(),
        lambda logits, mask: logits.max(1).values,
        lambda logits, mask: last_word(logits, mask) + 1,
        lambda logits, mask: last_word(logits, mask).flip(1),
        lambda logits, mask: logits.sum(1),  # a bias would count for each word
    ],
)
def test_what_else_acts_on_the_logits_is_refused(pool) -> None:
    with pytest.raises(UsageError, match="after Linear 'score' through something else"):
        split(Decoder(True, pool), TOKENS)


@pytest.mark.parametrize("words", [1, 5])
@pytest.mark.parametrize("fill", [torch.zeros, torch.ones, torch.randn])
def test_a_maximum_over_words_is_not_taken_for_their_mean(fill, words: int) -> None:
    """Not even where all words of the example are the same, or there is one."""

    class Highest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).amax(1)

    with pytest.raises(UsageError, match="through something else.*several words"):
        split(Highest(), fill(2, words, 4))


def test_the_mean_over_words_in_bfloat16() -> None:
    module = Decoder(True, mean_word).bfloat16()
    assert split(module, TOKENS).layer == "score"


def test_a_layer_that_is_called_by_name() -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=x)

    assert split(Called(), VECTORS).layer == "fc"


def test_inputs_in_a_list() -> None:
    inputs = [TOKENS["input_ids"], TOKENS["attention_mask"]]
    module = Transformers().eval()
    torch.testing.assert_close(split(module, inputs)(inputs), module(*inputs).logits)


def test_a_layer_under_two_names_whose_weight_is_made_of_others() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
            self.alias = self.head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    module = Twice()
    net = split(module, VECTORS)
    net.classifier = nn.Linear(4, 3)
    with torch.no_grad():
        net.classifier.weight[1] = 0.0  # as of a class without examples
    module.load_state_dict(rejoined(net, module))
    torch.testing.assert_close(module(VECTORS), net(VECTORS))


def test_weights_that_are_not_made_yet_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"weights that are not made yet: 1\.weight, 1\.bias\. Run it on an input"):
        split(module, VECTORS)
    module(VECTORS)
    assert split(module, VECTORS).layer == "1"


def test_what_can_not_be_copied_is_refused() -> None:
    with pytest.warns(FutureWarning):
        module = nn.utils.weight_norm(nn.Linear(4, 3))
    module(VECTORS)
    with pytest.raises(UsageError, match="can't be copied"):
        split(module, VECTORS)


def test_a_layer_whose_weight_is_made_of_others_is_put_back() -> None:
    module = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(192, 4)))
    net = split(module, IMAGES)
    net.classifier = nn.Linear(192, 4)
    module.load_state_dict(rejoined(net, module))
    torch.testing.assert_close(module(IMAGES), net(IMAGES))
    net.classifier = nn.Linear(192, 5)
    with pytest.raises(UsageError, match="layer '1' makes its weight of other tensors"):
        rejoined(net, module)


class LowRank(nn.Module):
    """What LoRA adds to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(1, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


def low_rank() -> nn.Linear:
    layer = nn.Linear(4, 3)
    nn.utils.parametrize.register_parametrization(layer, "weight", LowRank())
    return layer


@pytest.mark.parametrize("example", [torch.ones(2, 4), None])
@pytest.mark.parametrize(
    "make",
    [
        low_rank,
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
        lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_a_weight_that_can_not_be_set_is_refused_before_any_work(make, example: Tensor | None) -> None:
    with pytest.raises(UsageError, match="layer '0' makes its weight of other tensors, as LoRA.*remove_parametriz"):
        split(nn.Sequential(make()).eval(), example, "0")
    merged = nn.Sequential(make()).eval()
    if nn.utils.parametrize.is_parametrized(merged[0]):
        nn.utils.parametrize.remove_parametrizations(merged[0], "weight")  # the remedy
        torch.testing.assert_close(split(merged, VECTORS)(VECTORS), merged(VECTORS))


def first_of(logits: Tensor) -> tuple[Tensor, str]:
    return logits, "more"


@pytest.mark.parametrize("wrap", [Answer, lambda logits: {"loss": None, "logits": logits}, first_of])
def test_split_of_text_classifiers(wrap) -> None:
    module = Transformers(wrap).eval()
    net = split(module, TOKENS)
    assert (net.layer, net.dimension, net.classes) == ("classifier", 6, 3)
    assert not any(part.training for part in net.modules())
    module.wrap = lambda logits: logits
    expected = module(**TOKENS)
    for got in (net(TOKENS), net(**TOKENS), net(tuple(TOKENS.values())), net(*TOKENS.values())):
        torch.testing.assert_close(got, expected)
    assert net(TOKENS["input_ids"]).shape == (2, 3)
    assert split(module, tuple(TOKENS.values())).layer == "classifier"


def test_split_keeps_which_parts_were_in_training() -> None:
    module = Torchvision()
    module.bn1.eval()
    net = split(module, IMAGES)
    modes = {name: part.training for name, part in net.features.module.named_modules()}
    assert modes.pop("bn1") is False
    assert all(modes.values())


def test_split_of_a_linear_layer() -> None:
    layer = nn.Linear(4, 3)
    net = split(layer, torch.ones(2, 4))
    x = torch.randn(5, 4)
    assert net.layer == ""
    assert torch.equal(net.features(x), x)
    assert torch.equal(net(x), layer(x))


def test_split_of_a_layer_with_two_names() -> None:
    module = Torchvision()
    module.alias = module.fc
    assert split(module, IMAGES).layer == "fc"


@pytest.mark.parametrize("name", networks)
def test_split_of_our_own(name: str) -> None:
    size = 8 if name == "small-cnn" else 32
    net = build(name, 10, 3, size).eval()
    again = split(nn.Sequential(net.features, net.classifier), torch.randn(1, 3, size, size))
    assert (again.layer, again.dimension, again.classes) == ("1", net.dimension, net.classes)


def test_split_of_a_split() -> None:
    net = small_cnn()
    for again in (split(net), split(net, torch.zeros(1, 1, 8, 8)), split(net, layer="classifier")):
        assert again.layer == "classifier"
        assert again.classifier is not net.classifier
        torch.testing.assert_close(again(torch.ones(2, 1, 8, 8)), net(torch.ones(2, 1, 8, 8)))


@settings(max_examples=15, deadline=None)
@given(widths=st.lists(st.integers(1, 6), min_size=2, max_size=5), batch=st.integers(1, 3))
def test_split_finds_the_last_layer_of_any_chain(widths: list[int], batch: int) -> None:
    layers = [nn.Linear(*pair) for pair in pairwise(widths)]
    module = nn.Sequential(*[part for layer in layers for part in (nn.Tanh(), layer)])
    net = split(module, torch.randn(batch, widths[0]))
    assert net.layer == str(2 * len(layers) - 1)
    x = torch.randn(4, widths[0])
    torch.testing.assert_close(net(x), module(x))


class Positive(nn.Module):
    """A ReLU after the logits that has nothing to do on the example."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fc.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.first(x))


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.to(self.fc.weight.dtype))


class Strange(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "logits"


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fc.weight)


VECTORS = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("module", "example", "says"),
    [
        (
            Torchvision(nn.ReLU(inplace=True)),
            IMAGES,
            r"after Linear 'fc' through something else.*ReLU 'after'",
        ),
        (Positive(), torch.ones(3, 2), "after Linear 'fc' through something else"),
        (nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten()), IMAGES, r"no nn\.Linear at all; .* Flatten '1'"),
        (Functional(), VECTORS, r"no nn\.Linear at all; it runs no layer"),
        (Twice(), VECTORS, "Linear 'fc' is used 2 times"),
        (Tied(), VECTORS, "Linear 'fc' shares its weights"),
        (Peeking(), VECTORS, "without Linear 'fc' it fails"),
        (nn.Linear(4, 3), torch.ones(2, 5, 4), r"shape \(2, 5, 3\), not \(B, C\)"),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), VECTORS, r"shape \(2,\), not \(B, C\)"),
        (Strange(), VECTORS, "Strange returned str"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_split_refuses(module: nn.Module, example: Tensor, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        split(module, example)
    if not isinstance(module, Strange):
        by_hand = "Split(features, classifier) by hand", "return unskew.split(net, layer='fc')"
        assert any(words in str(caught.value) for words in by_hand)


def test_a_layer_that_does_more_than_it_says_is_not_cut() -> None:
    class Cosine(nn.Linear):
        def forward(self, z: Tensor) -> Tensor:
            return nn.functional.linear(nn.functional.normalize(z), nn.functional.normalize(self.weight))

    x = torch.randn(3, 4)
    with pytest.raises(UsageError, match="does more than multiply"):
        split(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), Cosine(5, 3, bias=False)), x)
    with pytest.raises(UsageError, match="through something else"):
        split(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Hardtanh(-50, 50)), x)


# -------- Told by name --------


def test_a_layer_by_its_name_needs_no_example() -> None:
    module = Timm(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4)))
    module.fc_norm.eval()
    for net in (split(module, layer="head.2"), split(module, IMAGES, layer="head.2")):
        assert (net.layer, net.dimension, net.classes) == ("head.2", 7, 4)
        assert net.training
        assert not net.features.module.fc_norm.training
        torch.testing.assert_close(net.eval()(IMAGES), copy.deepcopy(module).eval()(IMAGES))
    early = split(module, layer="head.0")  # unchecked, as there is nothing to run
    assert (early.layer, early.dimension, early.classes) == ("head.0", 6, 7)
    aliased = Torchvision()
    aliased.alias = aliased.fc
    assert split(aliased, layer="alias").layer == "alias"


@pytest.mark.parametrize(
    ("module", "example", "layer", "says"),
    [
        (Torchvision(), None, None, "can't cut Torchvision .*give an example.* or the layer's name, as in layer='fc'"),
        (Torchvision(), None, "fx", "unknown layer 'fx': did you mean 'fc'. There are: fc"),
        (Torchvision(), IMAGES, "head.fc", "unknown layer 'head.fc'. There are: fc"),
        (Torchvision(), None, "conv1", r"layer is 'conv1', which is Conv2d, not nn\.Linear\. There are: fc"),
        (Torchvision(nn.ReLU()), IMAGES, "fc", "after Linear 'fc' through something else.*ReLU 'after'"),
        (Timm(nn.Linear(6, 4)), IMAGES, "blocks.1", "after Linear 'blocks.1' through something else"),
        (Torchvision(nn.Identity()), IMAGES, "after", "which is Identity"),
        (nn.Sequential(nn.Flatten()), None, "fc", r"it has no nn\.Linear at all, and so none of the name 'fc'"),
    ],
)
def test_a_name_that_can_not_be_meant_is_refused(module: nn.Module, example: Any, layer: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        split(module, example, layer)


def test_what_needs_no_example_is_checked_without_one() -> None:
    with pytest.raises(UsageError, match="Linear 'fc' shares its weights"):
        split(Tied(), layer="fc")
    unused = Tied()
    unused.other = nn.Linear(4, 3)
    with pytest.raises(UsageError, match="Linear 'other' is not run on this example"):
        split(unused, VECTORS, "other")
    with pytest.raises(UsageError, match=r"can't cut str: give an nn\.Module"):
        split("net", VECTORS)


# -------- Exported programs --------


class Network(nn.Module):
    """What programs are made of: batch norm, dropout, a buffer that is not saved, a constant, a head."""

    def __init__(self, bias: bool = True, end: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.norm.running_mean.fill_(0.3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.shift = torch.tensor(0.5)
        self.head = nn.ModuleDict({"fc": nn.Linear(5, 4, bias)})
        self.end = end

    def forward(self, x: Tensor) -> Any:
        z = F.relu(self.norm(self.conv(x)) * self.scale + self.shift).mean((2, 3))
        return self.end(self.head["fc"](self.drop(z)))


def program(module: nn.Module, x: Any = IMAGES) -> torch.export.ExportedProgram:
    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in range(1))
    return torch.export.export(module, (x,), dynamic_shapes=shapes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("end", [lambda y: y, lambda y: {"aux": torch.ones(2), "logits": y}, lambda y: (y, 1)])
def test_split_of_a_program(bias: bool, end: Callable[[Tensor], Any]) -> None:
    module = Network(bias, end).eval()
    made = program(module)
    module.end = lambda logits: logits
    x = torch.randn(5, 3, 8, 8)
    graph = made.module()
    for net in (split(made), split(made, IMAGES), split(graph, layer="head.fc"), split(graph, IMAGES, "head.fc")):
        assert (net.layer, net.dimension, net.classes) == ("head.fc", 5, 4)
        assert (net.classifier.bias is not None) == bias
        assert not any(name.startswith("features.module.head") for name in net.state_dict())
        net.eval().train()  # without effect, and without an error
        again = copy.deepcopy(net).train()
        torch.testing.assert_close(net(x), module(x))
        torch.testing.assert_close(again(x), module(x))
        assert net.features(x).shape == (5, 5)


def test_split_of_a_program_with_named_inputs() -> None:
    module = Transformers(lambda logits: {"logits": logits}).eval()
    made = torch.export.export(module, (), dict(TOKENS))
    net = split(made, TOKENS)
    torch.testing.assert_close(net(TOKENS), module(**TOKENS)["logits"])
    assert split(torch.export.export(nn.Linear(4, 3), (VECTORS,)), VECTORS).layer == ""
    after = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval()
    torch.testing.assert_close(split(program(after, VECTORS), VECTORS)(VECTORS), after(VECTORS))


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix)


@pytest.mark.parametrize(
    ("module", "x", "says"),
    [
        (Network(end=lambda y: y.relu()).eval(), IMAGES, r"comes from aten\.relu\.default, not from a linear layer"),
        (Network(end=lambda y: y.softmax(0)).eval(), IMAGES, r"comes from aten\.softmax\.int, not from a linear layer"),
        (Network(end=lambda y: 2 * y.softmax(1)).eval(), IMAGES, r"comes from aten\.softmax\.int, not from a linear"),
        (Network(end=lambda y: {"answer": -1 * y}).eval(), IMAGES, r"comes from aten\.mul\.Tensor, not from"),
        (Network(), IMAGES, r"exported in training mode \(aten.*export it after \.eval\(\)"),
        (Twice(), VECTORS, "'fc' shares its weights"),
        (Tied(), VECTORS, "'fc' shares its weights"),
        (nn.Linear(4, 3), torch.ones(2, 5, 4), r"has the shape \(.*5, 3\), not \(B, C\)"),
        (Loose(), VECTORS, "not from a linear layer"),
        (nn.Sequential(nn.Flatten()), IMAGES, "not from a linear layer"),
    ],
)
def test_programs_that_can_not_be_cut(module: nn.Module, x: Tensor, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        split(program(module, x))


def test_a_wrong_name_in_a_program() -> None:
    made = program(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), VECTORS)
    with pytest.raises(UsageError, match="unknown layer '3'.* There are: 0, 2"):
        split(made, layer="3")
    with pytest.raises(UsageError, match="comes from 2, not from the layer '0'"):
        split(made, layer="0")


@pytest.mark.parametrize("strict", [True, False])
def test_programs_keep_the_number_of_examples_that_they_were_made_for(strict: bool) -> None:
    net = split(torch.export.export(Network().eval(), (IMAGES,), strict=strict), IMAGES)
    assert (net.layer, net.dimension) == ("head.fc", 5)
    with pytest.raises(AssertionError, match="Guard failed"):
        net(torch.ones(5, 3, 8, 8))
    for module in (Network().eval(), torch.export.export(Network().eval(), (IMAGES,))):
        with pytest.raises(UsageError, match=r"fails on an input of shape \(5, 1, 8, 8\): .*Give an input"):
            split(module, torch.ones(5, 1, 8, 8))


# -------- And together again --------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("new_bias", [True, False])
def test_rejoined_weights_load_in_the_module(bias: bool, new_bias: bool) -> None:
    module = Network(bias).eval()
    made = program(module)
    weight, shift = torch.randn(4, 5), torch.randn(4)
    for source in (module, made.module()):
        cut = split(source, IMAGES)
        before = rejoined(cut, source)
        assert list(before) == list(source.state_dict())
        assert all(torch.equal(value, before[name]) for name, value in source.state_dict().items())
        cut.classifier = linear_of(weight, shift if new_bias else None)
        tree = rejoined(cut, source)
        assert ("head.fc.bias" in tree) == (bias or new_bias)
        if bias or not new_bias:
            fresh = Network(bias).eval()
            fresh.load_state_dict(tree)
            torch.testing.assert_close(fresh(IMAGES), cut(IMAGES))
    cut.classifier = nn.Sequential(Transform("relu"), linear_of(weight, shift))
    assert torch.equal(rejoined(cut, module)["head.fc.weight"], weight)


def test_rejoined_features_are_those_of_the_cut() -> None:
    module = Torchvision()
    module.alias = module.fc
    cut = split(module, IMAGES)
    cut.features.module.bn1.running_mean.fill_(7.0)
    cut.classifier = nn.Linear(5, 9)
    tree = rejoined(cut, module)
    assert tree["bn1.running_mean"].eq(7).all()
    assert module.bn1.running_mean.eq(0).all()
    assert set(tree) == set(module.state_dict())
    assert tree["fc.weight"].shape == tree["alias.weight"].shape == (9, 5)
    assert set(rejoined(split(nn.Linear(4, 3), VECTORS), nn.Linear(4, 3))) == {"weight", "bias"}


def test_rejoined_networks_of_our_own() -> None:
    net = small_cnn()
    assert list(rejoined(split(net), net)) == list(net.state_dict())
    behind = Split(net.features, nn.Sequential(Transform("unit"), net.classifier))
    calibrated = split(behind)
    calibrated.classifier[1] = nn.Linear(64, 10)
    tree = rejoined(calibrated, behind)
    assert torch.equal(tree["classifier.1.weight"], calibrated.classifier[1].weight)
    behind.load_state_dict(tree)
    with pytest.raises(UsageError, match="not made from this Linear"):
        rejoined(net, nn.Linear(4, 3))
