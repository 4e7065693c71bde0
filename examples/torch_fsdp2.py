# SPDX-License-Identifier: Apache-2.0
"""FSDP2, torch's sharding of parameters, gradients and optimizer states over ranks, on commlib.

    commlib run -n 2 -- python examples/torch_fsdp2.py
    torchrun --nproc-per-node 2 examples/torch_fsdp2.py

Learns to read the handwritten digits of scikit-learn. ``--bf16`` computes in bfloat16 and adds gradients in float32.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commlib.torch.distributed  # noqa: F401 - its import makes the backend known


def main() -> None:
    """Train, and let rank 0 say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, of all ranks together")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("commlib")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train_x, train_y, test_x, test_y = x[:1500], y[:1500], x[1500:], y[1500:]

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy if options.bf16 else MixedPrecisionPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    began = time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(2)
        for batch in order.split(options.batch):
            mine = batch[rank::size]
            loss = torch.nn.functional.cross_entropy(model(train_x[mine]), train_y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}")

    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean()
    dist.all_reduce(accuracy, dist.ReduceOp.AVG)
    if rank == 0:
        speed = options.epochs * len(train_x) / (time.perf_counter() - began)
        print(f"test accuracy: {accuracy:.3f}")
        print(f"samples per second: {speed:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
