"""A model as a function of its tensors, and back: `network` and `installed`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from unskew.errors import UsageError
from unskew.methods.algorithm import Output
from unskew.models.networks import Split
from unskew.tree import Tree


@dataclass(frozen=True)
class Network:
    """A model as a function of its tensors: `network(tree, x) -> (features, logits)`."""

    modes: Mapping[bool, nn.Module]
    tree: Tree  # the module's own values
    learnable: frozenset[str]
    moving: frozenset[str]  # running statistics

    @property
    def size(self) -> int:
        """Numbers in all its tensors."""
        return sum(value.numel() for value in self.tree.values())

    def __call__(self, tree: Tree, x: Tensor, train: bool = False) -> Output:
        """One forward pass with these tensors; in training mode it writes the running statistics inside `tree`."""
        return functional_call(self.modes[train], tree, (x,))


class _Both(Split):
    """A Split that gives features and logits."""

    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        features = self.features(x)
        return Output(features, self.classifier(features))


def network(model: Split, device: torch.device | None = None) -> Network:
    """The network of a model, on a device if one is given. The model itself is copied and stays as it is.

    Parameters that do not require gradients and integer buffers are constants; other buffers are running statistics.
    """
    both = _Both(model.features, model.classifier)
    modes = {train: copy.deepcopy(both).to(device).train(train) for train in (True, False)}
    for module in (*modes[True].modules(), *modes[False].modules()):
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            if module.momentum is None:
                raise UsageError(
                    "a batch norm layer has momentum=None (a cumulative average): give it a momentum, such as 0.1"
                )
            module.num_batches_tracked = None  # a counter nobody reads; updating it would break vmap(grad)
    parameters, buffers = dict(modes[True].named_parameters()), dict(modes[True].named_buffers())
    buffers = {name: value for name, value in buffers.items() if value.is_floating_point()}
    tree = {name: value.detach().clone() for name, value in {**parameters, **buffers}.items()}
    learnable = frozenset(name for name, value in parameters.items() if value.requires_grad)
    low = [name for name in learnable if torch.finfo(tree[name].dtype).bits < 32]
    if low:
        raise UsageError(f"parameters are {tree[low[0]].dtype}, too coarse to count and to average: use model.float()")
    return Network(modes, tree, learnable, frozenset(buffers))


def installed(model: Split, tree: Tree) -> Split:
    """A copy of the model that holds the values of `tree`, on their device.

    >>> model = unskew.build("small-cnn", classes=3, channels=1, size=8)
    >>> zero = {name: 0 * value for name, value in model.state_dict().items()}
    >>> unskew.installed(model, zero).classifier.weight.abs().sum().item()
    0.0
    """
    model = copy.deepcopy(model).to(next(iter(tree.values())).device)
    strange = model.load_state_dict(tree, strict=False).unexpected_keys
    if strange:
        raise UsageError(f"the model has no tensors {', '.join(strange[:3])}: these values belong to another one")
    return model
