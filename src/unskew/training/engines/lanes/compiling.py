"""A function of tensors as one compiled program.

The function is traced once, and the trace goes to torch's compiler as it is. `torch.compile` would take it apart again,
operation by operation, before it asks the compiler: that was half of the time of preparing where the program lies in
torch's cache already (benchmarks/notes/lanes.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

OPTIONS: dict[str, Any] = {"combo_kernels": True, "benchmark_combo_kernel": False}  # of the compiler: join small ones


def compiled(function: Callable[..., None], values: Sequence[Tensor]) -> Callable[..., None]:
    """A function that writes some of its tensors in place, compiled for tensors of these shapes.

    It is traced with shapes alone: nothing is computed, and `values` stay as they are. What the compiler warns of is
    its own business: a user can do nothing about it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Slow to load, hence here.
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        shapes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # such as the data
        given = [shapes.from_tensor(value, static_shapes=True) for value in values]
        with shapes:
            graph = make_fx(function)(*given)
        with tracing(TracingContext(shapes)):
            return cast(Callable[..., None], compile_fx(graph, given, config_patches=OPTIONS))
