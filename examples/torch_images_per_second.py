# SPDX-License-Identifier: Apache-2.0
"""Images per second of a small residual network, trained on made-up images.

    commlib run -n 2 -- python examples/torch_images_per_second.py
    torchrun --nproc-per-node 2 examples/torch_images_per_second.py --compression bf16

First one process trains alone, with an optimizer of torch, while the others sleep. Then all of them train together,
each on as many images, with a DistributedOptimizer. What is lost on the way from one to all is the share of
communication, and of what processes on one machine take from each other: cores, caches, memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import commlib.torch as bps

CLASSES = 100


class Block(nn.Module):  # type: ignore[misc]
    """Two convolutions, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Identity() if inputs == outputs and stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return images of `outputs` channels, smaller by `stride`."""
        return torch.relu(self.body(x) + self.around(x))


def build_model(width: int) -> nn.Module:
    """Return a network of seven convolutions one after another, the first with `width` channels."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with no state yet."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def measure(step: Callable[[], None], rounds: int, steps: int) -> list[float]:
    """Return the seconds that each of `rounds` rounds of `steps` steps takes, after one to warm up."""
    seconds = []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        for _ in range(steps):
            step()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def main() -> None:
    """Measure one process, then all, and say how fast they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="images of each process per step")
    parser.add_argument("--pixels", type=int, default=32, help="width and height of an image")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps of a round")
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none")
    parser.add_argument("--quick", action="store_true", help="few small images, to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.batch, args.pixels, args.width, args.rounds, args.steps = 4, 16, 8, 2, 2

    bps.init()
    rank, size = bps.rank(), bps.size()
    torch.manual_seed(rank)
    model = build_model(args.width)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    images = torch.randn(args.batch, 3, args.pixels, args.pixels)
    labels = torch.randint(CLASSES, (args.batch,))
    optimizer = plain_optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    def say(what: str, seconds: list[float], processes: int) -> float:
        count: int = processes * args.batch * args.steps
        speed, least, most = count / statistics.median(seconds), count / max(seconds), count / min(seconds)
        if rank == 0:
            print(f"{what}: {speed:.1f} images per second ({least:.1f} to {most:.1f})", flush=True)
        return speed

    if rank == 0:
        parameters = sum(param.numel() for param in model.parameters())
        print(
            f"model: {parameters:,} parameters; images: {args.batch} of {args.pixels} × {args.pixels} for each process"
        )
        alone = say("one process", measure(step, args.rounds, args.steps), 1)
    bps.barrier()

    compression = getattr(bps.Compression, args.compression)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)  # of which one has learned something
    optimizer = bps.DistributedOptimizer(plain_optimizer(model), model.named_parameters(), compression=compression)
    # A round has ended when the slowest has ended it.
    seconds = torch.tensor(measure(step, args.rounds, args.steps), dtype=torch.float64)
    together = say(f"{size} processes", bps.push_pull(seconds, name="seconds", op=bps.Max).tolist(), size)
    if rank == 0:
        print(f"speed-up: {together / alone:.2f} with {size} processes")
    bps.shutdown()


if __name__ == "__main__":
    main()
