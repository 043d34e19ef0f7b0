"""What calibration costs: collecting statistics beside a bare forward pass, and the server's work beside a plain one.

    python benchmarks/calibration.py collect                  ResNet18 on a CPU, or --device cuda
    python benchmarks/calibration.py server                   FFC at d = 1280; CCVR at d = 512, beside numpy and SGD

Sides take turns within a run; ratios are taken within a turn, and their median and range are given. Where the machine
is shared, others' work slows two threads that wait for each other more than one: so the best times' ratio is given too.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from torch import nn

from unskew.calibration.ridge import ffc
from unskew.calibration.virtual import ccvr
from unskew.models.networks import build, evaluating
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FORMS, FeatureStats


def timed(function, device="cpu"):
    began = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def told(values, unit=""):
    return f"{statistics.median(values):.3f}{unit} ({min(values):.3f} to {max(values):.3f}, n = {len(values)})"


def collecting(args):
    """The time that `collect` takes over a forward pass of the same batches; batches lie ready in memory."""
    draw = torch.Generator().manual_seed(0)
    model = build("resnet18", classes=100, channels=3, size=32, norm=args.norm, generator=draw).to(args.device)
    x = torch.randn(args.images, 3, 32, 32, generator=draw).to(args.device)
    y = torch.randint(100, (args.images,), generator=draw).to(args.device)
    batches = list(zip(x.split(args.batch), y.split(args.batch), strict=True))

    def forward():
        with evaluating(model), torch.no_grad():
            for inputs, _ in batches:
                model(inputs)

    sides = {"forward": forward, **{form: lambda form=form: collect(model, batches, 100, form) for form in FORMS}}
    for side in sides.values():
        side()  # warms up
    times = {name: [] for name in sides}
    for _ in range(args.repeat):
        for name, side in sides.items():
            times[name].append(timed(side, args.device))
    print(f"forward pass of {args.images} images, batch {args.batch}, {args.device}: {told(times['forward'], ' s')}")
    for form in FORMS:
        ratios = [mine / bare for mine, bare in zip(times[form], times["forward"], strict=True)]
        print(f"collect, form {form}: {told(ratios)} times the forward pass")


def reference(means, covariances, samples, classes, weight, bias):
    """What one writes first: numpy's sampler class by class, then a linear layer trained by an eager loop."""
    draw = np.random.RandomState(0)
    parts = [draw.multivariate_normal(mean, cov, samples) for mean, cov in zip(means, covariances, strict=True)]
    z = torch.from_numpy(np.concatenate(parts)).float()
    y = torch.arange(classes).repeat_interleave(samples)
    head = nn.Linear(z.shape[1], classes)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    sgd = torch.optim.SGD(head.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-5)
    data = torch.utils.data.TensorDataset(z, y)
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    for _ in range(10):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(head(inputs), labels)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    return head


def server(args):
    draw = torch.Generator().manual_seed(0)

    def stats(d, classes, n, form):
        centres = torch.randn(classes, d, generator=draw)
        y = torch.randint(classes, (n,), generator=draw)
        return FeatureStats.of(centres[y] + torch.randn(n, d, generator=draw), y, classes, form)

    wide, old = stats(1280, 100, 20_000, "pooled"), nn.Linear(1280, 100)
    for name, maker in (("FFC", ffc()), ("FFC, ridge chosen", ffc(choose=True))):
        taken = [timed(lambda maker=maker: maker(wide, old, draw)) for _ in range(args.repeat + 1)][1:]
        print(f"{name}, d = 1280, C = 100: {told(taken, ' s')}")
    given, old = stats(512, 100, 60_000, "class"), nn.Linear(512, 100)
    maker = ccvr(samples=500)
    means, covariances = given.mean.numpy(), given.covariance.numpy()
    ours, theirs = [], []
    for _ in range(args.slow):
        ours.append(timed(lambda: maker(given, old, draw)))
        theirs.append(timed(lambda: reference(means, covariances, 500, 100, old.weight.detach(), old.bias.detach())))
    print(f"CCVR, d = 512, C = 100, 500 samples a class, 10 epochs: {told(ours, ' s')}")
    print(f"numpy.random.multivariate_normal and eager SGD: {told(theirs, ' s')}")
    ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
    print(f"ratio: {told(ratios)}; of the best times {min(theirs) / min(ours):.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["collect", "server"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--slow", type=int, default=3, help="repetitions of what takes long")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    {"collect": collecting, "server": server}[args.what](args)


if __name__ == "__main__":
    main()
