# SPDX-License-Identifier: Apache-2.0
"""What several benchmarks compare: a sum of `count` float32 in each rank, in place but where said, and a memcpy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import commlib
from harness.libraries import GLOO, OPEN_MPI, Joined
from harness.turns import Contender, checked

ARENA = "commlib, arena"
ORDINARY = "commlib, ordinary"
OUT_OF_PLACE = "commlib, out of place"
MEMCPY = "memcpy"

Array = npt.NDArray[np.float32]


def in_arena(count: int) -> Contender:
    """commlib, with a buffer of its arena."""
    return _push_pull(ARENA, commlib.empty(count, np.float32))


def in_ordinary_memory(count: int) -> Contender:
    """commlib, with a buffer that NumPy has allocated."""
    return _push_pull(ORDINARY, np.empty(count, np.float32))


def out_of_place(count: int) -> Contender:
    """commlib, from one buffer of its arena into another."""
    source, result = commlib.empty(count, np.float32), commlib.empty(count, np.float32)
    name = f"{OUT_OF_PLACE}/{count}"

    def action() -> None:
        commlib.push_pull(source, out=result, name=name, op=commlib.Sum)

    return Contender(OUT_OF_PLACE, action, checked([source], [result], action))


def of_mpi(libraries: Joined, count: int) -> list[Contender]:
    """Open MPI, if it is here, with each rank on a CPU of its own where that is possible."""
    if libraries.mpi is None:
        return []
    buffer = np.empty(count, np.float32)
    in_place, add, world = libraries.mpi.IN_PLACE, libraries.mpi.SUM, libraries.mpi.COMM_WORLD

    def action() -> None:
        world.Allreduce(in_place, buffer, op=add)

    return [Contender(OPEN_MPI, action, checked([buffer], [buffer], action), on_one_cpu)]


def of_gloo(libraries: Joined, count: int) -> list[Contender]:
    """gloo through torch.distributed, if it is here."""
    if libraries.gloo is None:
        return []
    tensor = libraries.torch.empty(count, dtype=libraries.torch.float32)
    buffer, all_reduce = tensor.numpy(), libraries.gloo.all_reduce

    def action() -> None:
        all_reduce(tensor)

    return [Contender(GLOO, action, checked([buffer], [buffer], action))]


def memcpy(count: int) -> Contender:
    """A copy of as many bytes by each rank, all at once: what the machine's memory gives."""
    source, destination = np.ones(count, np.float32), np.ones(count, np.float32)
    return Contender(MEMCPY, lambda: np.copyto(destination, source))


@contextlib.contextmanager
def on_one_cpu() -> Iterator[None]:
    """Bind this thread to a CPU of its own, if there are as many as ranks, as `mpirun` does with two: who waits by
    spinning would otherwise be slowed down a thousand times whenever two share one.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if commlib.local_size() > len(cpus):
        yield
        return
    os.sched_setaffinity(0, {cpus[commlib.local_rank()]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def _push_pull(name: str, buffer: Array) -> Contender:
    tensor_name = f"{name}/{buffer.size}"

    def action() -> None:
        commlib.push_pull_(buffer, name=tensor_name, op=commlib.Sum)

    return Contender(name, action, checked([buffer], [buffer], action))
