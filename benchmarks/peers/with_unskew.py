"""The benchmark by Unskew, with an engine of the name that is given."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from definition import Benchmark, Clock, Images, answer, network
from torch import nn

import unskew
from unskew import Split, fedavg
from unskew.data.datasets import dataset
from unskew.data.partition import Federation
from unskew.models.evaluate import batches, score
from unskew.training.engines.lanes.engine import Lanes
from unskew.training.engines.registry import engines
from unskew.training.functional import installed
from unskew.training.training import Round, Training


def rounds(run: Training, given: argparse.Namespace, precision: str) -> Iterator[Round]:
    """The rounds of a training by an engine, or on lanes."""
    engine = engines[given.engine]
    if given.engine == "lanes":
        engine = Lanes(int(given.lanes or 0), given.layout or "auto", precision)
    return (round for _, round in engine.rounds([run]))


def measure(benchmark: Benchmark, images: Images, given: argparse.Namespace) -> tuple[Clock, nn.Module, str]:
    """Train by Unskew."""
    data = dataset("images", *images, [str(label) for label in range(10)]).to(benchmark.device)
    users = torch.arange(benchmark.users * benchmark.images, device=benchmark.device).split(benchmark.images)
    net = network(benchmark)
    model = Split(net[:-1], net[-1]).to(benchmark.device)
    run = Training(
        model, Federation(data, users), fedavg(), rounds=benchmark.rounds + 1, batch=benchmark.batch, lr=benchmark.lr,
        momentum=0.0, weight_decay=0.0, fraction=benchmark.cohort / benchmark.users,
    )  # fmt: skip
    clock = Clock(benchmark)
    for round in rounds(run, given, benchmark.precision):
        if clock.due(round.number - 1):
            tests = batches(data, test=True, size=benchmark.evaluation_batch)
            score(installed(model, round.params), tests, data.classes)
        clock.end(round.number - 1)
    trained = installed(model, round.params)
    versions = f"unskew {unskew.__version__}, torch {torch.__version__}"
    return clock, nn.Sequential(*trained.features, trained.classifier), versions


if __name__ == "__main__":
    answer(measure, "--engine", "--lanes", "--layout")
