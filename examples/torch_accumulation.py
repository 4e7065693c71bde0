# SPDX-License-Identifier: Apache-2.0
"""Accumulates gradients, clips them and changes the learning rate, on any number of processes.

    python examples/torch_accumulation.py                          one process
    commlib run -n 4 -- python examples/torch_accumulation.py      four processes
    torchrun --nproc-per-node 4 examples/torch_accumulation.py     the same, started by torch

A batch that is too large for the memory is taken in several passes. Gradients are summed over the passes, and cross the
network once a step. An epoch ends with a smaller batch, which takes fewer passes.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import commlib.torch as bps

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from error


def build_model() -> nn.Module:
    """Return a network for 64 pixels and 10 classes."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def same_on_all_ranks(model: nn.Module) -> bool:
    """Compare the weights of all ranks, to the last bit."""
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()
    return len({bps.broadcast_object(digest, root_rank=rank) for rank in range(bps.size())}) == 1


def main() -> None:
    """Train, test, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128, help="samples per step, over all ranks and passes together")
    parser.add_argument("--passes", type=int, default=4, help="backward passes per step")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients together")
    parser.add_argument("--save", metavar="FILE", help="write the weights to FILE, as torch.save does")
    args = parser.parse_args()

    bps.init()
    rank, size = bps.rank(), bps.size()
    torch.set_num_threads(1)  # several processes share the cores of this machine
    torch.manual_seed(rank)

    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x = (x / 16).float()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]

    model = build_model()
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        model.named_parameters(),
        backward_passes_per_step=args.passes,
    )
    steps = args.epochs * math.ceil(len(train) / args.batch)
    # It computes the same on all ranks, so nothing of it has to be sent.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)

    losses: list[float] = []
    started = time.perf_counter()
    for epoch in range(args.epochs):
        # All ranks draw the same global batches, and each takes its part of every pass.
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        total = torch.zeros(())
        clipped = 0
        for batch in shuffled.split(args.batch):
            optimizer.zero_grad()
            for part in batch.split(math.ceil(args.batch / args.passes)):
                mine = part.tensor_split(size)[rank]
                # Summed over the passes and averaged over the ranks, these are the mean over the whole batch.
                loss = cross_entropy(model(x[mine]), y[mine], reduction="sum") * size / len(batch)
                loss.backward()
                total += loss.detach() * len(batch) / len(train)
            optimizer.synchronize()  # from here on gradients are those of all ranks
            clipped += int(clip_grad_norm_(model.parameters(), args.clip) > args.clip)
            optimizer.step()  # does not reduce again
            scheduler.step()
        losses.append(bps.push_pull(total, name="loss").item())
        if rank == 0:
            rate = scheduler.get_last_lr()[0]
            print(f"epoch {epoch + 1:3}: clipped {clipped:2}, rate {rate:.4f}, loss {losses[-1]:.4f}", flush=True)
    elapsed = time.perf_counter() - started

    with torch.no_grad():
        accuracy = (model(x[test]).argmax(dim=1) == y[test]).float().mean().item()
    identical = same_on_all_ranks(model)
    if rank == 0:
        if args.save:
            torch.save(model.state_dict(), args.save)
        print(f"loss: {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last")
        print(f"test accuracy: {accuracy:.4f}")
        print(f"samples per second: {args.epochs * len(train) / elapsed:.0f}")
        print(f"weights identical on all ranks: {'yes' if identical else 'no'}")
    bps.shutdown()
    if not identical:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
