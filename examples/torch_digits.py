# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional network in PyTorch on handwritten digits, on any number of processes.

    python examples/torch_digits.py                          one process
    commlib run -n 4 -- python examples/torch_digits.py      four processes, each on its part of every batch

Four lines make a script data-parallel: `bps.init()`, `bps.broadcast_parameters(…)`, `bps.DistributedOptimizer(…)`, and
the one that gives each rank its part of the data.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import commlib.torch as bps

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from error


def build_model() -> nn.Module:
    """Return a network for 8×8 images in 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def same_on_all_ranks(model: nn.Module) -> bool:
    """Compare the weights of all ranks, to the last bit."""
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()
    return len({bps.broadcast_object(digest, root_rank=rank) for rank in range(bps.size())}) == 1


def main() -> None:
    """Train, test, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all ranks together")
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--save", metavar="FILE", help="write the weights to FILE, as torch.save does")
    args = parser.parse_args()

    bps.init()
    rank, size = bps.rank(), bps.size()
    torch.set_num_threads(1)  # several processes share the cores of this machine
    torch.manual_seed(rank)

    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x = (x / 16).float().view(-1, 1, 8, 8)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]

    model = build_model()
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters()
    )

    losses: list[float] = []
    steps = samples = 0
    started = time.perf_counter()
    for epoch in range(args.epochs):
        # All ranks draw the same global batches, and each takes its part of every one.
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        batches = shuffled.split(args.batch)[: None if args.steps is None else args.steps - steps]
        if not batches:
            break
        total = torch.zeros(())
        for batch in batches:
            mine = batch.tensor_split(size)[rank]
            optimizer.zero_grad()
            # Dividing by len(batch)/size, not by len(mine), makes the average over the ranks the mean over the whole
            # batch even where the ranks' parts of it differ in size.
            loss = cross_entropy(model(x[mine]), y[mine], reduction="sum") * size / len(batch)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        steps += len(batches)
        samples += sum(map(len, batches))
        losses.append(bps.push_pull(total / len(batches), name="loss").item())
        if rank == 0:
            print(f"epoch {epoch + 1:3}: loss {losses[-1]:.4f}", flush=True)
    elapsed = time.perf_counter() - started

    # Only with COMMLIB_ASYNC=1 have some hosts steps to add that others have not seen yet.
    bps.barrier()
    optimizer.pull()

    model.eval()
    with torch.no_grad():
        accuracy = (model(x[test]).argmax(dim=1) == y[test]).float().mean().item()
    identical = same_on_all_ranks(model)
    if rank == 0:
        if args.save:
            torch.save(model.state_dict(), args.save)
        print(f"loss: {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last")
        print(f"test accuracy: {accuracy:.4f}")
        print(f"samples per second: {samples / elapsed:.0f}")
        print(f"weights identical on all ranks: {'yes' if identical else 'no'}")
    bps.shutdown()
    if not identical:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
