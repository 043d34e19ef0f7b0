"""Norms and means of plain operations, for the step of lanes on a GPU.

torch's own group norm gives its result back with the channels first, whatever it gets, so that cuDNN turns images round
before and behind every convolution; and under `vmap` torch's batch norm takes no mixture of precisions. These leave
images as they lie, and a compiler joins them with what is beside them.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


class _Norm(nn.Module):
    """A norm of images, in float32 at least; what it gives is as wide as its input."""

    eps: float
    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            if x.dim() != 4:
                made: Tensor = super().forward(wide)
                return made.to(x.dtype)
            mean, variance = self.moments(wide)
            scale = (variance + self.eps).rsqrt()
            if self.weight is not None:
                scale = scale * self.weight[:, None, None]
            y = (wide - mean) * scale
            return (y if self.bias is None else y + self.bias[:, None, None]).to(x.dtype)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance to norm by, for each channel."""
        raise NotImplementedError


class PlainGroupNorm(_Norm, nn.GroupNorm):
    """A group norm of plain operations, which leave channels last and a compiler joins with what is beside them."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each image's groups: from the moments of its channels."""
        variance, mean = torch.var_mean(x, (2, 3), correction=0)  # (B, C)
        means = mean.unflatten(1, (self.num_groups, -1))
        center = means.mean(-1, keepdim=True)
        within = variance.unflatten(1, (self.num_groups, -1)).mean(-1, keepdim=True)
        spread = (within + (means - center).square().mean(-1, keepdim=True)).expand_as(means)
        return center.expand_as(means).flatten(1)[:, :, None, None], spread.flatten(1)[:, :, None, None]


class PlainBatchNorm(_Norm, nn.BatchNorm2d):
    """A batch norm of plain operations."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of the batch's channels, which running statistics follow; or these."""
        if not self.training and self.running_mean is not None and self.running_var is not None:
            return self.running_mean[:, None, None], self.running_var[:, None, None]
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        self.follow(mean.detach(), variance.detach(), x.shape[0] * x.shape[2] * x.shape[3])
        return mean[:, None, None], variance[:, None, None]

    def follow(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Let the running statistics follow those of a batch of so many pixels."""
        if self.running_mean is not None and self.running_var is not None and self.momentum is not None:
            unbiased = variance * (count / max(count - 1, 1))
            for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.copy_((1 - self.momentum) * running + self.momentum * now.to(running.dtype))


class PlainMean(nn.AdaptiveAvgPool2d):
    """The mean of an image's pixels; torch's own writes strides, for which `vmap` has no rule."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, 1, 1)."""
        return x.mean((-2, -1), keepdim=True)


def plain(model: Model) -> Model:
    """A copy of the model with such layers; names and values of tensors stay."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if type(part) is nn.GroupNorm:
            part.__class__ = PlainGroupNorm
        elif type(part) is nn.BatchNorm2d:
            part.__class__ = PlainBatchNorm
        elif type(part) is nn.AdaptiveAvgPool2d and part.output_size in (1, (1, 1)):
            part.__class__ = PlainMean
    return model
