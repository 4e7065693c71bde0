# SPDX-License-Identifier: Apache-2.0
"""What one operation moves on, and what its ranks must agree about: in numbers for the core, in words for people.

The core compares shapes. What is given to it as one says the kind of operation, a number (the reduction, or the root),
and dtype and shape of each tensor; so a difference in any of that, or in the order of operations, is found by the core,
on all ranks, before anything is moved.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import commlib
from commlib import ReduceOp
from commlib.errors import CommlibError, MismatchError, UnsupportedError
from commlib.torch.distributed.channel import Channel
from commlib.torch.ops import DTYPES

__all__ = ["NUMBER_OF_OP", "REDUCTIONS", "Lane", "described", "operation_name"]

KINDS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send and recv",
    "barrier",
    "all_reduce of a sparse tensor",
)
REDUCTIONS = {
    "SUM": ReduceOp.Sum,
    "AVG": ReduceOp.Average,
    "MIN": ReduceOp.Min,
    "MAX": ReduceOp.Max,
    "PRODUCT": ReduceOp.Product,
}
BITWISE_NAMES = ("BAND", "BOR", "BXOR")
NUMBER_OF_OP = {name: number for number, name in enumerate((*REDUCTIONS, *BITWISE_NAMES))}
OP_OF_NUMBER = {number: name for name, number in NUMBER_OF_OP.items()}
ROOTED = ("broadcast", "gather", "scatter")


def _code(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


_DTYPE_OF_CODE = {_code(value): str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class Lane:
    """What a plan needs: the channel it moves on, a name that is free, and what ranks must agree about."""

    channel: Channel
    name: str
    subject: str  # in words, for errors
    kind: str
    detail: int = 0  # number of the reduction, or the root
    tensors: tuple[tuple[int, ...], ...] = ()  # of each: code of the dtype, then the shape

    @property
    def rank(self) -> int:
        """This rank's number among the members of the channel."""
        return self.channel.session.rank

    @property
    def size(self) -> int:
        """Number of members of the channel."""
        return len(self.channel.members)

    @functools.cached_property
    def signature(self) -> tuple[int, ...]:
        """What ranks must agree about, as numbers."""
        flat = [number for tensor in self.tensors for number in (len(tensor) - 1, *tensor)]
        return (KINDS.index(self.kind), self.detail, len(self.tensors), *flat)

    def reduce(
        self, source: torch.Tensor, target: torch.Tensor, op: ReduceOp, part: int | None = None
    ) -> commlib.Handle:
        """Combine `source` over all ranks into `target`, both contiguous, which may be the same."""
        dtype = DTYPES.get(source.dtype)
        if dtype is None:
            raise UnsupportedError(f"a tensor of {source.dtype} cannot be reduced; convert it to another dtype first")
        worker = self.channel.session.worker
        out = None if target is source else target.data_ptr()
        name = self.name if part is None else f"{self.name}.{part}"
        handle: commlib.Handle = worker.push_pull_ptr(
            source.data_ptr(), source.numel(), dtype, out, name, op, 0, (source, target), self.signature
        )
        return handle

    def broadcast(self, data: torch.Tensor, root: int, part: int | None = None) -> commlib.Handle:
        """Overwrite contiguous bytes with those of rank `root`."""
        worker = self.channel.session.worker
        name = self.name if part is None else f"{self.name}.{part}"
        handle: commlib.Handle = worker.broadcast_ptr(
            data.data_ptr(), data.numel(), "uint8", root, name, 0, data, self.signature
        )
        return handle

    def agree(self) -> commlib.Handle:
        """Find out, together with all other ranks, whether all do the same; it also is a barrier."""
        nothing = torch.empty(0, dtype=torch.uint8)
        return self.reduce(nothing, nothing, ReduceOp.Sum)

    def explain(self, error: CommlibError) -> CommlibError:
        """An error of the core in words about this operation, with ranks as the group's users know them."""
        if not isinstance(error, MismatchError):
            return self.channel.explained(error)
        if error.tensor == self.subject:  # `_refuse` has found the words
            return error
        members = self.channel.ranks
        values = {members[rank]: value for rank, value in error.values.items()}
        own = in_words(self.signature)
        if error.field == "shape":
            values = {rank: in_words(value) for rank, value in values.items()}
            what = "; ".join(f"{value} on rank {rank}" for rank, value in values.items())
        elif values:
            what = "; ".join(f"{value} on rank {rank}" for rank, value in values.items()) + f". This one called {own}"
        else:
            what = f"this one called {own}"
        return MismatchError(
            f"{self.subject}: the ranks disagree: {what}", tensor=self.subject, field=error.field, values=values
        )


def described(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """What ranks must agree about of each tensor."""
    return tuple((_code(tensor.dtype), *tensor.shape) for tensor in tensors)


def in_words(signature: Sequence[int]) -> str:
    """What a rank has called, from the numbers of :meth:`Lane.signature`."""
    number, detail, count, *rest = signature
    kind = KINDS[number]
    text = kind
    if kind in ("all_reduce", "reduce_scatter"):
        text += f"({OP_OF_NUMBER[detail]})"
    elif kind == "reduce":
        text += f"({OP_OF_NUMBER[detail % len(OP_OF_NUMBER)]}, rank {detail // len(OP_OF_NUMBER)})"
    elif kind in ROOTED:
        text += f"(rank {detail})"
    tensors = []
    for _ in range(count):
        ndim, code, *rest = rest
        shape, rest = rest[:ndim], rest[ndim:]
        tensors.append(f"{_DTYPE_OF_CODE.get(code, 'an unknown dtype').removeprefix('torch.')} {list(shape)}")
    return text + (f" of {', '.join(tensors)}" if tensors else "")


def operation_name(op: Any) -> str:
    """The name of a ``ReduceOp``: SUM, AVG, …. Raises UnsupportedError for those that are not carried out here."""
    name: str = getattr(op, "op", op).name
    if name not in NUMBER_OF_OP:
        raise UnsupportedError(f"ReduceOp.{name} is not supported; commlib has {', '.join(NUMBER_OF_OP)}")
    return name
