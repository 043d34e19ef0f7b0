"""The benchmark by Flower's simulation: its FedAvg, its Ray backend, a client app as in its tutorials.

To its advantage a client keeps the network and the images from one visit of its process to the next.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
from pathlib import Path

import torch
from definition import Benchmark, Clock, Images, answer, evaluate, images, network
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

client = ClientApp()


@functools.cache
def held(folder: str) -> tuple[Benchmark, nn.Sequential, Tensor, Tensor]:
    """What a client's process keeps."""
    benchmark = Benchmark.read(Path(folder))
    x, y, _, _ = images(Path(folder)).normalised("cpu")
    return benchmark, network(benchmark), x, y


@client.train()
def train(message: Message, context: Context) -> Message:
    """One visit of a user."""
    config = message.content["config"]
    torch.set_num_threads(config["threads"])
    benchmark, net, x, y = held(config["folder"])
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=benchmark.lr)
    first = context.node_config["partition-id"] * benchmark.images
    for rows in (first + torch.randperm(benchmark.images)).split(benchmark.batch):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": benchmark.images})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


def measure(benchmark: Benchmark, data: Images, given: argparse.Namespace) -> tuple[Clock, nn.Module, str]:
    """Train by Flower's simulation."""
    _, _, x_test, y_test = data.normalised("cpu")
    net, clock, server = network(benchmark), Clock(benchmark), ServerApp()
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        def after(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            """Called before the first round with number 0, and after each."""
            if number == 0:
                return None
            made = None
            if clock.due(number - 1):
                net.load_state_dict(arrays.to_torch_state_dict())
                loss, accuracy = evaluate(net, x_test, y_test, benchmark.evaluation_batch)
                made = MetricRecord({"loss": loss, "accuracy": accuracy})
            clock.end(number - 1)
            return made

        strategy = FedAvg(
            fraction_train=benchmark.cohort / benchmark.users, fraction_evaluate=0.0,
            min_train_nodes=benchmark.cohort, min_available_nodes=benchmark.users,
        )  # fmt: skip
        config = ConfigRecord({"folder": str(given.folder), "threads": threads})
        rounds = benchmark.rounds + 1
        result = strategy.start(grid, ArrayRecord(net.state_dict()), rounds, train_config=config, evaluate_fn=after)
        net.load_state_dict(result.arrays.to_torch_state_dict())

    backend = {
        "client_resources": {"num_cpus": threads, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "_temp_dir": str(given.folder / "ray")},
    }
    run_simulation(server, client, num_supernodes=benchmark.users, backend_config=backend)
    if len(clock.marks) != benchmark.rounds + 1:
        raise SystemExit(f"Flower ended {len(clock.marks)} of {benchmark.rounds + 1} rounds: see its log above")
    versions = {name: importlib.metadata.version(name) for name in ("flwr", "ray", "torch")}
    return clock, net, ", ".join(f"{name} {version}" for name, version in versions.items())


if __name__ == "__main__":
    from with_flower import measure as imported  # so that clients' processes find this module by its name

    answer(imported)
