# SPDX-License-Identifier: Apache-2.0
"""The process group that torch calls."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from commlib.control.interrupt import uninterrupted
from commlib.errors import CommlibError, NotInitializedError, UnsupportedError
from commlib.torch.distributed import collectives
from commlib.torch.distributed.channel import SLOTS, Channel, Directory, Slot
from commlib.torch.distributed.lane import NUMBER_OF_OP, Lane, described, operation_name
from commlib.torch.distributed.messages import Messages
from commlib.torch.distributed.work import Plan, Work
from commlib.torch.ops import check

__all__ = ["ProcessGroup"]

Tensors = Sequence[torch.Tensor]


class ProcessGroup(dist.ProcessGroup):
    """torch's interface of a process group over sessions of commlib; see the package's head.

    Operations return at once, with a :class:`Work`. All tensors are in CPU memory. Options are torch's; where torch has
    a second form with the options' fields as arguments, that works too.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]) -> None:
        """`ranks` of the group's members in the whole job; none: the group is the whole job, and connects now."""
        super().__init__(rank, size)
        self._rank, self._size, self._group_name, self._group_desc = rank, size, name, "undefined"
        self._timeout_s = timeout.total_seconds()
        self._ranks = tuple(ranks) or tuple(range(size))
        self._directory = Directory(store, rank, size, self._timeout_s)
        self._slots = [Slot(f"torch.{number}") for number in range(SLOTS)]
        self._channel = Channel(self._directory, range(size), self._ranks, [slot.name for slot in self._slots])
        self._messages = Messages(self._directory, self._ranks, self._channel, _hopeless)
        self._lock = threading.Lock()  # guards what follows
        self._count = 0  # of operations
        self._is_shut_down = False
        _groups.add(self)
        if not ranks:
            _world.append(self)
            try:
                uninterrupted(self._channel.connect, self.shutdown)
            except BaseException:
                self.shutdown()
                raise

    # --- Words

    def getBackendName(self) -> str:  # noqa: N802 - torch's name, as those below
        """The name under which it is registered."""
        return "commlib"

    def name(self) -> str:
        """As :meth:`getBackendName`."""
        return "commlib"

    def rank(self) -> int:
        """This process's number in the group."""
        return self._rank

    def size(self) -> int:
        """Number of members of the group."""
        return self._size

    def getRank(self) -> int:  # noqa: N802
        """As :meth:`rank`."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        """As :meth:`size`."""
        return self._size

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch has given to it."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """See :meth:`getGroupName`."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """A description that torch or the user has given to it."""
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """See :meth:`getGroupDesc`."""
        self._group_desc = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:
        """The name that torch has given to it."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """A description that torch or the user has given to it."""
        return self._group_desc

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of later operations."""
        self._timeout_s = timeout.total_seconds()

    # --- Operations

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """One tensor, in place. Sparse ones can be added."""
        return self._all_reduce(_checked(tensors, sparse=True), opts, timeout)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Several tensors, in place."""
        return self._all_reduce(_checked(tensors), opts, None)

    def _all_reduce(self, tensors: Tensors, opts: Any, timeout: timedelta | None) -> Work:
        op = _reduction(opts)
        number = NUMBER_OF_OP[op]
        if any(tensor.is_sparse for tensor in tensors):
            return self._all_reduce_sparse(tensors, op, number, opts)
        return self._start(
            "all_reduce",
            number,
            tensors,
            lambda lane: collectives.all_reduce(lane, tensors, op),
            tensors,
            opts,
            timeout,
        )

    def _all_reduce_sparse(self, tensors: Tensors, op: str, number: int, opts: Any) -> Work:
        if len(tensors) != 1 or op not in ("SUM", "AVG"):
            raise UnsupportedError("sparse tensors can be reduced one at a time, by SUM or AVG")
        return self._start(
            "all_reduce of a sparse tensor",
            number,
            tensors,
            lambda lane: collectives.sparse_all_reduce(lane, tensors[0], op),
            tensors,
            opts,
        )

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: timedelta | None = None) -> Work:
        """The root's tensor into that of all others."""
        (tensor,), root = _checked(tensors), self._root(opts)
        return self._start(
            "broadcast", root, [tensor], lambda lane: collectives.broadcast(lane, tensor, root), [tensor], opts, timeout
        )

    def reduce(self, tensors: Any, opts: Any = 0, op: Any = None, timeout: timedelta | None = None) -> Work:
        """Into the root's tensor; those of the others stay as they are."""
        (tensor,), root = _checked(tensors), self._root(opts)
        name = _reduction(opts if op is None and not isinstance(opts, int) else op)
        return self._start(
            "reduce",
            root * len(NUMBER_OF_OP) + NUMBER_OF_OP[name],
            [tensor],
            lambda lane: collectives.reduce(lane, tensor, name, root),
            [tensor],
            opts,
            timeout,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """The tensors of all ranks into a list of one for each. They may differ in size, if all ranks know."""
        (tensor,) = _checked(inputs)
        row = self._row(outputs)
        _expect_as_much(row[self._rank], tensor)
        is_even = all(output.shape == tensor.shape for output in row)
        rows = [[output] for output in row]
        return self._gather("all_gather", 0, [tensor], rows, [tensor] if is_even else row, opts, timeout)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Several inputs: ``outputs[r][i]`` gets input i of rank r."""
        tensors, rows = _checked(inputs), [_checked(row) for row in outputs]
        self._expect_one_each(rows)
        for row in rows:
            for output, tensor in zip(row, tensors, strict=True):
                _expect_as_much(output, tensor)
        return self._gather("all_gather", 0, tensors, rows, tensors, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Several inputs: each output gets those of all ranks in a row."""
        targets, tensors = _checked(outputs), _checked(inputs)
        for target, tensor in zip(targets, tensors, strict=True):
            _expect_as_much(target, tensor, self._size)
        return self._start(
            "all_gather", 0, tensors, lambda lane: collectives.gather_rows(lane, tensors, targets), targets, opts
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """One tensor gets those of all ranks in a row."""
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    all_gather_single = _allgather_base

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0, timeout: timedelta | None = None) -> Work:
        """The tensors of all ranks into the root's list."""
        (tensor,), root = _checked(inputs), self._root(opts)
        rows: list[Any] = [None] * self._size
        if self._rank == root:
            rows = [[output] for output in self._row(outputs)]
            for (output,) in rows:
                _expect_as_much(output, tensor)
        return self._gather("gather", root, [tensor], rows, [tensor], opts, timeout)

    def _gather(
        self,
        kind: str,
        detail: int,
        inputs: Tensors,
        rows: Sequence[Tensors | None],
        agreed: Tensors,
        opts: Any,
        timeout: timedelta | None = None,
    ) -> Work:
        outputs = [tensor for row in rows if row is not None for tensor in row]
        return self._start(
            kind, detail, agreed, lambda lane: collectives.gather(lane, inputs, rows), outputs, opts, timeout
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0, timeout: timedelta | None = None) -> Work:
        """One tensor of the root's list to each rank."""
        (output,), root = _checked(outputs), self._root(opts)
        row: list[torch.Tensor] = []
        if self._rank == root:
            row = self._row(inputs)
            for tensor in row:
                _expect_as_much(output, tensor)
        return self._start(
            "scatter",
            root,
            [output],
            lambda lane: collectives.scatter(lane, output, row, root),
            [output],
            opts,
            timeout,
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Each rank's part of what is reduced, from a list of one tensor for each rank."""
        (output,), op = _checked(outputs), _reduction(opts)
        row = self._row(inputs)
        _expect_as_much(output, row[self._rank])
        return self._start(
            "reduce_scatter",
            NUMBER_OF_OP[op],
            row,
            lambda lane: collectives.reduce_scatter(lane, output, row, op),
            [output],
            opts,
            timeout,
        )

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Several: each input has the parts of all ranks in a row."""
        targets, tensors, op = _checked(outputs), _checked(inputs), _reduction(opts)
        for target, tensor in zip(targets, tensors, strict=True):
            _expect_as_much(tensor, target, self._size)
        return self._start(
            "reduce_scatter",
            NUMBER_OF_OP[op],
            tensors,
            lambda lane: collectives.reduce_scatter_rows(lane, targets, tensors, op),
            targets,
            opts,
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """One input with the parts of all ranks in a row."""
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """``inputs[r]`` to rank r, ``outputs[r]`` from rank r. Sizes may differ."""
        targets, tensors = self._row(outputs), self._row(inputs)
        return self._all_to_all(tensors, lambda lane: collectives.all_to_all(lane, targets, tensors), targets, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """As :meth:`alltoall`, of parts of one tensor into parts of another one, along the first dimension."""
        target, source = _checked([output, tensor])
        sizes = self._split_sizes(target, output_split_sizes), self._split_sizes(source, input_split_sizes)
        return self._all_to_all(
            [source], lambda lane: collectives.all_to_all_rows(lane, target, source, *sizes), [target], opts
        )

    all_to_all_single = alltoall_base

    def _all_to_all(self, inputs: Tensors, plan: Callable[[Lane], Plan], outputs: Tensors, opts: Any) -> Work:
        # Only the dtype is the same everywhere; who sends how much to whom the plan finds out.
        return self._start("all_to_all", 0, [inputs[0].new_empty(0)], plan, outputs, opts)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Ends when all ranks have called it."""
        return self._start("barrier", 0, [], collectives.barrier, [], opts, timeout)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """A tensor to one rank. Ends when it has arrived."""
        (tensor,) = _checked(tensors)
        return self._messages.send(tensor, peer, tag, self._group_name, self._timeout_s)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """A tensor from one rank, of the same dtype and shape."""
        (tensor,) = _checked(tensors)
        return self._messages.receive(tensor, peer, tag, self._group_name, self._timeout_s)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Not supported: messages move between two ranks that both know of each other."""
        raise UnsupportedError("commlib cannot receive from just any rank; expected recv to name its src")

    def shutdown(self) -> None:
        """Leave all sessions of this group in order. What is in flight is waited for up to half a second each."""
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
        _groups.discard(self)
        with contextlib.suppress(ValueError):
            _world.remove(self)
        error = NotInitializedError("the process group has been destroyed")
        self._channel.close(error)
        self._messages.close(error)

    def lost(self) -> CommlibError | None:
        """The error that the group as a whole has failed with, if it has."""
        return self._channel.lost()

    def abort(self) -> None:
        """As :meth:`shutdown`."""
        self.shutdown()

    # --- Common to all

    def _start(
        self,
        kind: str,
        detail: int,
        agreed: Tensors,
        plan: Callable[[Lane], Plan],
        outputs: Tensors,
        opts: Any,
        timeout: timedelta | None = None,
    ) -> Work:
        """The next operation of the group. `agreed`: tensors whose dtype and shape are the same on all ranks."""
        with self._lock:
            number = self._count
            self._count += 1
        slot = self._slots[number % SLOTS]
        subject = f"operation {number + 1} of the process group {self._group_name!r}"
        lane = Lane(self._channel, slot.name, subject, kind, detail, described(agreed))
        limit = timeout if timeout is not None else getattr(opts, "timeout", None)
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else 0.0
        work = Work(plan(lane), outputs, seconds if seconds > 0 else self._timeout_s, explain=lane.explain)
        self._channel.submit(work, slot, _hopeless)
        return work

    def _root(self, opts: Any) -> int:
        root = int(getattr(opts, "rootRank", opts))
        if not 0 <= root < self._size:
            raise ValueError(f"there is no rank {root} in a group of {self._size}")
        return root

    def _expect_one_each(self, items: Sequence[Any]) -> None:
        if len(items) != self._size:
            raise ValueError(f"{len(items)} tensors were given; expected one for each of the {self._size} ranks")

    def _row(self, tensors: Any) -> list[torch.Tensor]:
        """One tensor for each rank; torch puts them into a list of one list."""
        row = _checked(tensors[0] if len(tensors) > 0 and not isinstance(tensors[0], torch.Tensor) else tensors)
        self._expect_one_each(row)
        return row

    def _split_sizes(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """Extents of the parts along the first dimension, one for each rank: equal ones where none are given."""
        extent = tensor.shape[0] if tensor.dim() > 0 else 0
        if not sizes:
            if extent % self._size:
                raise ValueError(f"{extent} rows cannot be dealt evenly to {self._size} ranks")
            return [extent // self._size] * self._size
        self._expect_one_each(sizes)
        if sum(sizes) != extent:
            raise ValueError(f"the split sizes {list(sizes)} do not add up to {extent}, the first dimension")
        return list(sizes)


def _checked(tensors: Any, *, sparse: bool = False) -> list[torch.Tensor]:
    """Tensors that commlib can work on, of one or several. Raises UnsupportedError."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in found:
        if not (sparse and tensor.is_sparse and tensor.device.type == "cpu"):
            check(tensor)
    return found


def _expect_as_much(large: torch.Tensor, small: torch.Tensor, times: int = 1) -> None:
    if large.dtype != small.dtype or large.numel() != times * small.numel():
        raise ValueError(
            f"the tensors do not fit: {large.dtype} with {large.numel()} elements and {small.dtype} with "
            f"{small.numel()}; expected one dtype, and {times * small.numel()} elements"
        )


def _reduction(opts: Any) -> str:
    """The name of the reduction: in torch's options, by itself, or the sum where none is given."""
    op = getattr(opts, "reduceOp", opts)
    return operation_name(dist.ReduceOp.SUM if op is None else op)


def _forget_in_child() -> None:
    """A forked child leaves nothing: its parent is still there."""
    _groups.clear()
    _world.clear()


_groups: WeakSet[ProcessGroup] = WeakSet()
_world: list[ProcessGroup] = []  # the group of the whole job, whose session watches over all members


def _hopeless() -> CommlibError | None:
    """Why no other group can connect any more."""
    return next(filter(None, (group.lost() for group in _world)), None)


def _shutdown_at_exit() -> None:
    for group in list(_groups):
        group.shutdown()


atexit.register(_shutdown_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
