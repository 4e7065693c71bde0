# SPDX-License-Identifier: Apache-2.0
"""What a worker does to show that sums are right: many operations, each with data and ways of its own.

A rank chooses by itself where its buffers lie, where the result goes, and whether it waits at once; ranks must not need
to agree about that. What they have to agree about is the same for all: names, shapes and order.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import commlib
from tests.parallel import reference
from tests.parallel.reference import Array

# The script of a worker; its argument is a Plan as JSON.
SCRIPT = """
    import commlib
    from tests.launch import give
    from tests.parallel import matrix

    commlib.init()
    give(matrix.run(matrix.Plan.from_argument()))
    commlib.shutdown()
"""

IN_FLIGHT = 24


@dataclass(frozen=True)
class Plan:
    """Every dtype with every operation and size; `placement` is the ranks by host."""

    placement: list[list[int]]
    partition_bytes: int
    dtypes: Sequence[str] = reference.DTYPES
    ops: Sequence[int] = reference.OPS
    counts: Sequence[int] = (0, 1, 3, 17, 1023)
    partitions: Sequence[float] = (1, 2.5)  # sizes in partitions, each also one element less and one more
    buffers: Sequence[str] = ("ordinary", "arena", "unaligned")
    seed: int = 0

    def to_argument(self) -> str:
        return json.dumps(self.__dict__)

    @staticmethod
    def from_argument() -> Plan:
        return Plan(**json.loads(sys.argv[1]))

    def cases(self) -> Iterator[Case]:
        """All cases, shuffled: the same on all ranks."""
        found = []
        for dtype in self.dtypes:
            item = reference.dtype_of(dtype).itemsize
            large = [int(p * self.partition_bytes) // item for p in self.partitions]
            counts = sorted({*self.counts, *(n + d for n in large for d in (-1, 0, 1))})
            found += [(dtype, op, count) for op in self.ops if reference.is_supported(dtype, op) for count in counts]
        shuffle = np.random.default_rng([self.seed, 1])
        for number, index in enumerate(shuffle.permutation(len(found))):
            dtype, op, count = found[index]
            shapes = [(count,)] + [()] * (count == 1) + [(3, count // 3)] * (count % 3 == 0) + [(count, 1, 1)]
            shape = shapes[shuffle.integers(len(shapes))]
            name = f"{dtype} {op!r} {count}" if shuffle.integers(2) else None
            yield Case(self, number, dtype, commlib.ReduceOp(op), shape, name)


@dataclass
class Case:
    """One operation, and what a rank needs to look at its result."""

    plan: Plan
    number: int
    dtype: str
    op: commlib.ReduceOp
    shape: tuple[int, ...]
    name: str | None
    way: str = ""
    tensor: Any = None
    out: Any = None
    handle: commlib.Handle | None = None
    result: Any = None
    digest: str = ""

    def input_of(self, rank: int) -> Array:
        """What a rank puts in."""
        count = int(np.prod(self.shape, dtype=np.int64))
        seed = 1000 * self.plan.seed + self.number
        return reference.contribution(self.dtype, self.op, count, rank, seed).reshape(self.shape)

    def start(self, choose: np.random.Generator, kinds: Sequence[str]) -> None:
        """Submit it, in a way of this rank's own, with buffers of these kinds."""
        mine = self.input_of(commlib.rank())
        buffers = [str(choose.choice(kinds)) for _ in range(2)]
        where = str(choose.choice(["new", "out", "in place", "out in place"]))
        self.way = f"{buffers} {where}"
        self.tensor = place(mine, buffers[0])
        self.out = {"out": place(np.zeros_like(mine), buffers[1]), "out in place": self.tensor}.get(where)
        if where == "new" or where.startswith("out"):
            if choose.integers(2):
                self.result = commlib.push_pull(self.tensor, name=self.name, op=self.op, out=self.out)
            else:
                self.handle = commlib.push_pull_async(self.tensor, name=self.name, op=self.op, out=self.out)
        elif choose.integers(2):
            self.result = commlib.push_pull_(self.tensor, name=self.name, op=self.op)
        else:
            self.handle = commlib.push_pull_async_(self.tensor, name=self.name, op=self.op)
        self.way += " at once" if self.handle is None else " later"

    def finish(self) -> None:
        """Wait if need be, and look at the result."""
        if self.handle is not None:
            self.result = self.handle.wait()
        try:
            if self.out is not None:
                assert self.result is self.out
            elif "in place" in self.way:
                assert self.result is self.tensor
            else:
                assert not np.shares_memory(self.result, self.tensor)
            if self.result is not self.tensor:
                assert self.tensor.tobytes() == self.input_of(commlib.rank()).tobytes(), "the input was changed"
            assert self.result.shape == self.shape
            assert self.result.dtype == reference.dtype_of(self.dtype)
            if self.number % commlib.size() == commlib.rank():
                inputs = [self.input_of(rank) for rank in range(commlib.size())]
                reference.check_value(self.result, inputs, self.op, len(self.plan.placement))
                reference.check_bits(self.result, inputs, self.op, self.plan.placement)
        except AssertionError as error:
            raise AssertionError(f"{self}, {self.way}: {error}") from error
        self.digest = f"{self}: {hashlib.sha256(self.result.tobytes()).hexdigest()}"
        self.tensor = self.out = self.result = self.handle = None

    def __str__(self) -> str:
        return f"{self.dtype} {self.op!r} {self.shape} {self.name}"


def place(values: Array, kind: str) -> Array:
    """A copy of `values`: in the arena, in ordinary memory, or there at an odd address."""
    if kind == "arena":
        array = commlib.empty(values.shape, values.dtype)
    elif kind == "ordinary":
        array = np.empty(values.shape, values.dtype)
    else:
        array = np.ndarray(values.shape, values.dtype, buffer=bytearray(values.nbytes + 1), offset=1)
    array[...] = values
    return array


def run(plan: Plan) -> list[str]:
    """All cases, with up to IN_FLIGHT of them in flight: a digest of each result.

    Each rank compares its share of the results with the truth. Digests tell whether the others have the same.
    """
    choose = np.random.default_rng([plan.seed, 2, commlib.rank()])
    # By this route other memory is refused.
    kinds = ("arena",) if commlib.Config.from_environment().local_route == "arena" else plan.buffers
    cases: list[Case] = []
    in_flight: list[Case] = []
    for case in plan.cases():
        case.start(choose, kinds)
        cases.append(case)
        in_flight.append(case)
        if len(in_flight) == IN_FLIGHT:
            in_flight.pop(int(choose.integers(IN_FLIGHT))).finish()
    for index in choose.permutation(len(in_flight)):
        in_flight[index].finish()
    return [case.digest for case in cases]
