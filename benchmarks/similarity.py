"""How long linear CKA takes: all layers of ten ResNet18, compared on random images.

python benchmarks/similarity.py --size 8 --images 2000
"""

import argparse
import time

import torch

import unskew


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8, help="pixels each way")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    models = [
        unskew.build("resnet18", 10, 3, given.size, generator=torch.Generator().manual_seed(seed))
        for seed in range(given.models)
    ]
    x = torch.randn(given.images, 3, given.size, given.size)
    began = time.perf_counter()
    found = unskew.layer_similarities(models, x.split(125))
    print(f"{len(found)} layers, {given.images} images of {given.size}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
