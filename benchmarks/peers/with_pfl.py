"""The benchmark by pfl-research, as its own image_classification benchmark sets it up.

What is left out, to its advantage: its evaluation of each user before and after training. Several processes take part
where PFL_WORKER_ADDRESSES and PFL_WORKER_RANK say so. On a machine without the packages that pfl imports for its
accounts of privacy, stand-ins take their place: the benchmark uses none of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable

import numpy as np
import torch
from definition import Benchmark, Clock, Images, answer, network
from torch import Tensor, nn

ACCOUNTING = {
    "scipy": ["scipy.special", "scipy.stats"],
    "dp_accounting": ["dp_accounting.pld", "dp_accounting.rdp"],
    "prv_accountant": [],
}  # what pfl imports of them


class StandIn(types.ModuleType):
    """A module that can be imported from, but not used."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> None:
            raise ImportError(f"{self.__name__} is not installed")

        return refuse


def stand_in() -> str:
    """Put stand-ins in place of what is not installed; says which."""
    missing = [name for name in ACCOUNTING if not importlib.util.find_spec(name)]
    for package in missing:
        for name in (package, *ACCOUNTING[package]):
            sys.modules[name] = StandIn(name)
    return f", without {', '.join(missing)}" if missing else ""


def share_a_device() -> None:
    """Let several processes of pfl use one GPU: it would choose NCCL, which wants a GPU for each, so give it Gloo."""
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **rest: begin(backend="gloo", **rest)


def measure(benchmark: Benchmark, images: Images, given: argparse.Namespace) -> tuple[Clock, nn.Module, str]:
    """Train by pfl's simulation."""
    os.environ["PFL_PYTORCH_DEVICE"] = benchmark.device
    share_a_device()
    without = stand_in()
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        """The network with what pfl asks of one."""

        def __init__(self) -> None:
            super().__init__()
            self.net = network(benchmark)

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return nn.functional.cross_entropy(self.net(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Weighted]:
            self.train(not eval)
            logits = self.net(x)
            loss = nn.functional.cross_entropy(logits, y, reduction="sum").item()
            right = (logits.argmax(1) == y).sum().item()
            return {"loss": Weighted(loss, len(y)), "accuracy": Weighted(right, len(y))}

    class Timer(TrainingProcessCallback):
        """Reads the clock at the end of each round, after the evaluation."""

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            clock.end(central_iteration)
            return False, Metrics()

    np.random.seed(0)  # noqa: NPY002  # it is what pfl draws from
    torch.manual_seed(0)
    x, y, x_test, y_test = images.normalised(benchmark.device)
    x, x_test = (part.contiguous(memory_format=torch.channels_last) for part in (x, x_test))  # as pfl's network has it
    n = benchmark.images
    users = {user: (x[user * n : (user + 1) * n], y[user * n : (user + 1) * n]) for user in range(benchmark.users)}
    federation = FederatedDataset.from_slices(users, get_user_sampler("minimize_reuse", range(benchmark.users)))
    net = Net()
    server = torch.optim.SGD(net.parameters(), lr=1.0)
    amp = torch.bfloat16 if benchmark.precision == "bfloat16" else None
    model = PyTorchModel(net, local_optimizer_create=torch.optim.SGD, central_optimizer=server, amp_dtype=amp)
    evaluation = NNEvalHyperParams(local_batch_size=benchmark.evaluation_batch)
    central = CentralEvaluationCallback(Dataset(raw_data=[x_test, y_test]), evaluation, benchmark.evaluate_every)
    clock = Clock(benchmark)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=benchmark.rounds + 1, evaluation_frequency=10**9,
            train_cohort_size=benchmark.cohort, val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=federation, val_data=federation, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=benchmark.lr, local_num_epochs=1, local_batch_size=benchmark.batch
        ),
        model_eval_params=evaluation,
        callbacks=[central, Timer()],
    )  # fmt: skip
    return clock, net.net, f"pfl {importlib.metadata.version('pfl')}, torch {torch.__version__}{without}"


if __name__ == "__main__":
    answer(measure)
