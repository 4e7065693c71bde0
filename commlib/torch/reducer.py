# SPDX-License-Identifier: Apache-2.0
"""Gradients, reduced over all ranks while backward still computes others.

Design notes. A parameter that every rank uses in every step is *regular*: its gradient lies in a flat bucket in the
arena, ``param.grad`` is a view into it, and the bucket is reduced in one operation as soon as the last of its gradients
has been computed. The buckets are made after the first step, in the order in which gradients became ready on rank 0.
All other parameters are *irregular*, and so is every one before that: they are reduced when ``synchronize()`` is
called, each for itself, those of them that any rank has used.

Ranks must never wait for each other with different things in hand, and what a rank will use is known to it alone. So

- each bucket carries two flags a parameter: has this rank a gradient, and has it none? A rank that has none after the
  backward pass in which it had one in earlier steps (``_Bucket.due``) sends zeros there, and does not keep the others
  waiting. Whether anybody has set a flag can be told from sum and average alike, exactly, in any dtype.
- a parameter that a rank had no gradient for is irregular from then on, on all ranks, for all have seen the flags. If
  its gradient comes after all, in a later backward pass of the same step, ``synchronize()`` reduces and adds it.

When ``backward()`` returns, what it has submitted has been waited for, so nobody sees a gradient in flight. That takes
place in a callback of the autograd engine. Reentrant checkpointing has backward passes within backward passes, with
callbacks of their own; each waits for what has been submitted, and that is always right.

Hooks know the reducer by weak reference only: otherwise every parameter would keep the optimizer alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

import commlib
from commlib import ReduceOp, Sum
from commlib.errors import CommlibError, OperationTimeout, UnsupportedError
from commlib.torch import ops
from commlib.torch.compression import Compressor

BUCKET_BYTES = 1 << 20  # the first one leaves soon
_LEAST_BUCKET_BYTES = 1 << 17  # of those at the end, so that little is left when the last one leaves
_LINE_BYTES = 64  # what a gradient in a bucket is aligned to
_NEVER = 1 << 62
_REPEATED = 1 << 16  # more than there are ranks, and told of by all of them in 32 bits

# Who reduces a parameter: two would average the average.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(named: Iterable[tuple[str, torch.Tensor]], owner: Any) -> list[torch.Tensor]:
    """Note who reduces these parameters, and return them; ``ValueError`` for one that another, living, reduces."""
    named = list(named)
    for name, param in named:
        known = _owners.get(param)
        if known is not None and known() is not None and known() is not owner:
            raise ValueError(
                f"{name!r} is a parameter of another DistributedOptimizer or DistributedDataParallel, which "
                "reduces its gradient: unwrap that one first"
            )
    for _, param in named:
        _owners[param] = weakref.ref(owner)
    return [param for _, param in named]


def disown(params: Iterable[torch.Tensor], owner: Any) -> None:
    """Take back what ``claim`` has noted for ``owner``."""
    for param in params:
        known = _owners.get(param)
        if known is not None and known() is owner:
            del _owners[param]


class Slot:
    """One parameter, and what is known of its gradient in this step."""

    __slots__ = (
        "address",
        "bucket",
        "grad",
        "index",
        "is_demoted",
        "is_late",
        "name",
        "param",
        "passes",
        "place",
        "ready_at",
        "ready_in",
        "room",
        "version",
        "view",
    )

    def __init__(self, index: int, name: str, param: torch.Tensor) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.passes = 0  # backward passes since the last reduction
        self.ready_at = -1  # when its gradient was computed, among all of this step
        self.ready_in = 0  # in which backward pass of this step
        self.bucket: _Bucket | None = None
        self.place = 0  # in the bucket
        self.room: torch.Tensor | None = None  # in the bucket
        self.view: torch.Tensor | None = None  # the same, as a gradient
        self.address = 0  # of it
        self.is_late = False  # its gradient came after its bucket had left without it
        self.is_demoted = False  # it was regular once, and proved not to be
        # An irregular gradient, and how often it had been changed, when backward had computed it.
        self.grad: torch.Tensor | None = None
        self.version = 0

    def fits(self) -> bool:
        """Whether the bucket still is where this gradient can be.

        ``module.to(dtype)`` gives the parameter another dtype, and its gradient, which may be our view, other memory.
        """
        view, param = self.view, self.param
        if view is None or self.room is None or view.dtype != param.dtype or view.shape != param.shape:
            return False
        return view.dtype == self.room.dtype and view.data_ptr() == self.address

    def is_in_place(self) -> bool:
        """Whether the gradient is the view, and that is still where it was made."""
        view = self.view
        return view is not None and self.param.grad is view and view.data_ptr() == self.address


class _Bucket:
    """Gradients of one dtype, one after another in the arena. In front of them are two flags for each."""

    def __init__(self, name: str, slots: Sequence[Slot], priority: int) -> None:
        self.name = name
        self.slots = list(slots)
        self.priority = priority
        self.due = _NEVER  # after this backward pass of a step it leaves, complete or not
        self.missing = 0
        self.is_whole = True  # all are still members
        self.has_left = False
        self.handle: ops.Handle | None = None  # while it is in flight
        self.lacking: list[Slot] = []  # those that a rank had no gradient for
        self.error: CommlibError | None = None
        dtype = slots[0].param.dtype
        unit = _LINE_BYTES // dtype.itemsize
        offsets, end = [], _rounded(2 * len(slots), unit)
        for slot in slots:
            offsets.append(end)
            end += _rounded(slot.param.numel(), unit)
        memory = commlib.zeros(end * dtype.itemsize, np.uint8)
        self.flat = torch.from_numpy(memory).view(dtype)
        self.flags = self.flat[: 2 * len(slots)].view(2, -1)  # has one, has none
        for place, (slot, offset) in enumerate(zip(slots, offsets, strict=True)):
            slot.bucket, slot.place = self, place
            slot.room = self.flat[offset : offset + slot.param.numel()]
            slot.view = _view(self.flat, offset, slot.param)
            slot.address = slot.view.data_ptr()
        self.restart()

    def members(self) -> list[Slot]:
        """Those that have not proved irregular since."""
        return [slot for slot in self.slots if slot.bucket is self]

    def dissolve(self) -> None:
        """Let all go if many have gone. They will be in another one soon."""
        members = self.members()
        if 4 * sum(slot.param.nbytes for slot in members) < 3 * sum(slot.param.nbytes for slot in self.slots):
            for slot in members:
                _move_out(slot)

    def restart(self) -> None:
        self.missing = len(self.members())
        self.is_whole = self.missing == len(self.slots)
        self.has_left = False
        self.handle, self.error, self.lacking = None, None, []


class Reducer:
    """Reduces the gradients of a list of named parameters.

    ``passes``: backward passes until a gradient is complete. ``waits``: whether ``backward()`` submits what is due, if
    incomplete, and waits for what it has submitted. In a job of one process there are no hooks and no buckets.
    """

    def __init__(
        self,
        prefix: str,
        named: list[tuple[str, torch.Tensor]],
        compression: Compressor,
        passes: int,
        op: ReduceOp,
        sparse_as_dense: bool,
        waits: bool = True,
    ) -> None:
        self.prefix = prefix
        self.passes = passes
        self.op = op
        self.is_active = commlib.size() > 1
        self.skip = False  # what is asked for in `step`
        self.reduced = False  # all gradients are, and no backward pass has run since
        self.buckets: list[_Bucket] = []
        self.slots: list[Slot] = []
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._waits = waits
        self._size = commlib.size()
        self._generation = 0  # of buckets
        self._backwards: set[int] = set()  # graph tasks that will call back
        self._ended = 0  # backward passes that have ended since the last reduction
        self._clock = 0
        self._used: commlib.Handle | None = None  # who used the irregular ones; until all is reduced
        self._pending: dict[int, ops.Handle] = {}  # irregular gradients in flight
        self._extras: dict[int, torch.Tensor] = {}  # those of them that are added to what has been reduced
        self._counts: list[int] = []
        self._touched: str | None = None
        self._hooks: list[Any] = []
        self.add(named)
        weakref.finalize(self, _remove_all, self._hooks).atexit = False

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Watch further parameters. Raises ``ValueError`` for one that a living reducer watches already."""
        named = list(named)
        for _, param in named:
            if self.is_active:
                ops.check(param)
        claim(named, self)
        known = len(self.slots)
        for name, param in named:
            slot = Slot(len(self.slots), self.prefix + name, param)
            self.slots.append(slot)
            if self.is_active:
                self._hooks.append(_register(param, _ready_hook(self, slot.index)))
        if self.is_active:
            commlib.declare([(slot.name, slot.param.nbytes) for slot in self.slots[known:]])

    def remove(self) -> None:
        """Finish what is in flight, stop watching, and leave the parameters to others."""
        self.discard()
        for bucket in self.buckets:
            for slot in bucket.members():
                _move_out(slot)
        _remove_all(self._hooks)
        disown((slot.param for slot in self.slots), self)

    def set_passes(self, passes: int) -> None:
        """Change how many passes make a gradient complete. When buckets are due has to be learned anew."""
        self.passes = passes
        for bucket in self.buckets:
            bucket.due = _NEVER

    # While backward runs --------------------------------------------------------------------------------------------

    def _ready(self, slot: Slot) -> None:
        """A backward pass has computed a gradient, and added it to what was there."""
        self._check(slot)
        self.reduced = False
        is_in_place = slot.is_in_place()
        grad = slot.view if is_in_place else self._dense(slot)
        self._expect_end()
        slot.passes += 1
        slot.ready_at, slot.ready_in = self._clock, self._ended + 1
        self._clock += 1
        bucket = slot.bucket
        if bucket is None or bucket.has_left or not (is_in_place or slot.fits()):
            assert grad is not None
            slot.is_late = bucket is not None
            slot.grad, slot.version = grad, grad._version
            return
        if not is_in_place:
            self._move_in(slot)
        if slot.passes == self.passes:
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.due = slot.ready_in
                self._submit(bucket)

    def _check(self, slot: Slot) -> None:
        """Raise if a gradient must not be computed now."""
        if slot.passes >= self.passes or self._pending:
            raise RuntimeError(
                f"the gradient of {slot.name!r} was computed again before it was used: call step() or zero_grad() "
                f"after every {self.passes} backward passes, or set backward_passes_per_step"
            )
        if self.reduced and self.op == Sum:
            raise RuntimeError(
                f"the gradient of {slot.name!r} has been summed over the ranks already and would be again: call step() "
                "or zero_grad() of this optimizer before the next backward()"
            )

    def _dense(self, slot: Slot) -> torch.Tensor:
        grad = slot.param.grad
        assert grad is not None
        if grad.layout is torch.strided:
            return grad
        if not self._sparse_as_dense:
            raise UnsupportedError(
                f"the gradient of {slot.name!r} is sparse; wrap with sparse_as_dense=True to make it dense"
            )
        slot.param.grad = grad = grad.to_dense()
        return grad

    def _move_in(self, slot: Slot) -> None:
        """Make the gradient a view of the bucket, if it is not."""
        if slot.param.grad is slot.view:
            return
        grad = self._dense(slot)
        assert slot.view is not None
        slot.view.copy_(grad.detach())
        slot.param.grad = slot.view

    def _expect_end(self) -> None:
        task = _graph_task()
        if task in self._backwards:
            return
        self._backwards.add(task)
        reference = weakref.ref(self)

        def ended() -> None:
            reducer = reference()
            if reducer is not None:
                reducer._end_of_backward(task)

        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _end_of_backward(self, task: int) -> None:
        self._backwards.discard(task)
        self._ended += 1
        if not self._waits:
            return
        for bucket in self.buckets:
            if not bucket.has_left and self._ended >= bucket.due and self._is_over(bucket):
                self._submit(bucket)
        self._finish_buckets()
        error = next((bucket.error for bucket in self.buckets if bucket.error is not None), None)
        if error is not None:
            raise error

    def _is_over(self, bucket: _Bucket) -> bool:
        return all(slot.passes in (0, self.passes) for slot in bucket.members())

    def _submit(self, bucket: _Bucket) -> None:
        if bucket.missing == 0 and bucket.is_whole and all(slot.is_in_place() for slot in bucket.slots):
            bucket.flags[0].fill_(1)
            bucket.flags[1].zero_()
        else:
            self._fill(bucket)
        bucket.handle = ops.submit(bucket.flat, self.op, bucket.name, bucket.priority, self._compression, inplace=True)
        bucket.has_left = True

    def _fill(self, bucket: _Bucket) -> None:
        """Put in what there is, zeros where there is nothing, and the flags that say so."""
        has: list[bool] = []
        for slot in bucket.slots:
            has_grad = slot.bucket is bucket and self._has_grad(slot)
            has.append(has_grad)
            if has_grad:
                self._move_in(slot)
            elif slot.bucket is bucket:
                assert slot.room is not None
                slot.room.zero_()
                if not slot.is_late:
                    slot.param.grad = None
        bucket.flags.copy_(torch.tensor([has, [not one for one in has]]))

    def _has_grad(self, slot: Slot) -> bool:
        """Whether there is a gradient that this rank has put there, and not only zeros where one may come."""
        grad = slot.param.grad
        if grad is None or not slot.fits():
            return False
        return slot.passes > 0 or grad is not slot.view or bool(torch.any(grad))

    def finish(self, bucket: _Bucket) -> None:
        """Wait for a bucket that has left. Raises only ``OperationTimeout``; it is still in flight then."""
        if bucket.handle is None:
            return
        bucket.error = _error_of(bucket.handle)
        bucket.handle = None
        if bucket.error is not None:
            return
        for slot, lacks in zip(bucket.slots, bucket.flags[1].tolist(), strict=True):
            if slot.bucket is not bucket:
                continue
            if lacks > 0:
                bucket.lacking.append(slot)
            elif slot.param.grad is None:  # put away while it was in flight
                slot.param.grad = slot.view

    def _finish_buckets(self) -> None:
        for bucket in self.buckets:
            self.finish(bucket)

    # Between backward and step --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Submit all buckets that have not left, with zeros for gradients that there are none of."""
        for bucket in self.buckets:
            if not bucket.has_left:
                bucket.due = _NEVER
                self._submit(bucket)

    def synchronize(self) -> None:
        """Reduce what backward has not submitted, wait for everything, then raise the first error.

        May be called again after ``OperationTimeout``, which leaves everything as it is.
        """
        if not self.is_active or self.reduced:
            return
        if self._used is None:
            self.flush()
            self._finish_buckets()
            lacking = {slot.index for bucket in self.buckets for slot in bucket.lacking}
            if any(slot.bucket is None or slot.index in lacking for slot in self.slots):
                self._used = self._ask_who_used(lacking)
        errors = [bucket.error for bucket in self.buckets if bucket.error is not None] + self._reduce_irregular()
        self._rearrange(is_good=not errors)
        self.restart()
        self._raise_first(errors)
        self.reduced = True

    def _reduce_irregular(self) -> list[CommlibError]:
        """Reduce what there is of those that ``_ask_who_used`` has asked for, and return what went wrong.

        May be called again after ``OperationTimeout``.
        """
        if self._used is None:
            return []
        if (error := _error_of(self._used)) is not None:
            return [error]
        if not self._counts:
            self._counts = self._used.wait().tolist()
            self._touched = self._find_touched()
        self._submit_irregular()
        return [error for handle in self._pending.values() if (error := _error_of(handle)) is not None]

    def _raise_first(self, errors: list[CommlibError]) -> None:
        touched, self._touched = self._touched, None
        if errors:
            raise errors[0]
        if touched is not None:
            raise RuntimeError(
                f"the gradient of {touched!r} was changed after backward had computed it and before it was reduced: "
                "call synchronize() before changing gradients (to clip or unscale them, for example)"
            )

    def _ask_who_used(self, lacking: set[int]) -> commlib.Handle:
        """Start to count, for each irregular parameter, the ranks that have a gradient for it."""
        here = [
            ((slot.is_late if slot.index in lacking else slot.bucket is None) and slot.param.grad is not None)
            + _REPEATED * (slot.bucket is None and slot.passes > self.passes)
            for slot in self.slots
        ]
        return commlib.push_pull_async_(np.array(here, np.int32), name=f"{self.prefix}used", op=Sum, priority=1)

    def _submit_irregular(self) -> None:
        for slot, count in zip(self.slots, self._counts, strict=True):
            if count == 0 or slot.index in self._pending:
                continue
            if slot.bucket is None:
                if slot.param.grad is None:
                    slot.param.grad = torch.zeros_like(slot.param)
                grad = self._dense(slot)
            else:  # what has come after the bucket had left is added to what has come back with it
                grad = slot.param.grad.detach() if slot.is_late and slot.param.grad is not None else None
                grad = torch.zeros_like(slot.param) if grad is None else grad.clone()
                self._extras[slot.index] = grad
            self._pending[slot.index] = ops.submit(
                grad, self.op, slot.name, -slot.index, self._compression, inplace=True
            )

    def _find_touched(self) -> str | None:
        """The name of an irregular gradient that is not what backward has computed. None at all is none.

        Of views, all of one memory count their changes together: they tell nothing.
        """
        for slot in self.slots:
            grad = slot.param.grad
            if slot.bucket is not None or slot.grad is None or grad is None:
                continue
            if grad is not slot.grad or (grad._version != slot.version and not grad._is_view()):
                return slot.name
        return None

    def _release(self, bucket: _Bucket) -> None:
        """Let those go that a rank had no gradient for, with what there is for them nevertheless."""
        for slot in bucket.lacking:
            assert slot.view is not None
            extra = self._extras.get(slot.index)
            slot.is_demoted = slot.is_demoted or slot.fits()
            if extra is not None and slot.fits():
                slot.view.add_(extra)
            elif extra is not None or bucket.flags[0, slot.place].item() == 0:
                slot.view = extra
            slot.param.grad = None if slot.view is None else slot.view.clone()
            slot.bucket = slot.view = slot.room = None
        bucket.lacking = []

    def _rearrange(self, is_good: bool) -> None:
        """Move parameters out of buckets and into new ones, as this step has shown what they are."""
        for bucket in self.buckets:
            if is_good:
                self._release(bucket)
            bucket.dissolve()
        self.buckets = [bucket for bucket in self.buckets if bucket.members()]
        self._conclude(is_good)

    def _conclude(self, is_good: bool) -> None:
        """Put what has been reduced by itself into buckets where it shall be from now on."""
        if is_good and self._counts:
            self._promote(self._counts)
        self._pending.clear()
        self._extras.clear()
        self._used, self._counts = None, []

    def _promote(self, counts: list[int]) -> None:
        """Put those that all ranks have used, once a pass, and that never disappointed, into buckets."""
        for slot, count in zip(self.slots, counts, strict=True):
            slot.is_demoted |= count >= _REPEATED
        chosen = [
            slot
            for slot, count in zip(self.slots, counts, strict=True)
            if count == self._size and slot.bucket is None and not slot.is_demoted and not slot.param.is_complex()
        ]
        if not chosen:
            return
        order = np.array([slot.ready_at for slot in chosen], np.int64)
        commlib.broadcast_(order, 0, name=f"{self.prefix}order")
        by_readiness = [chosen[i] for i in np.argsort(order, kind="stable")]
        for slots in _divided(by_readiness):
            name = f"{self.prefix}bucket.{self._generation}"
            self._generation += 1
            # What forward needs first is what backward computes last.
            bucket = _Bucket(name, slots, priority=len(self.buckets))
            if all(slot.passes == self.passes for slot in slots):
                bucket.due = max(slot.ready_in for slot in slots)
            for slot in slots:
                self._move_in(slot)
            self.buckets.append(bucket)

    def restart(self) -> None:
        """Begin a new step: what is in ``grad`` from now on has not been reduced."""
        self._restart_slots()
        for bucket in self.buckets:
            bucket.restart()

    def _restart_slots(self) -> None:
        self.reduced = False
        self._ended = self._clock = 0
        for slot in self.slots:
            slot.passes, slot.is_late, slot.grad = 0, False, None

    def require_reduced(self) -> None:
        """Raise if a step taken now would use gradients that have not been reduced."""
        if self.is_begun():
            raise RuntimeError("step() inside skip_synchronize() needs a synchronize() before it")

    def is_begun(self) -> bool:
        """Whether there are gradients that have not been reduced, or not to the end."""
        return bool(self._pending) or self._used is not None or any(slot.passes for slot in self.slots)

    def discard(self) -> bool:
        """Forget gradients that are about to be reset; say whether there were any that had been submitted.

        What is in flight has to land first, on all ranks.
        """
        has_left = any(bucket.has_left for bucket in self.buckets) or self._used is not None
        # Where one rank has submitted something, another may not have: it has to, lest it be taken for the next step's.
        if self.is_active and self.is_begun() and (self.buckets or self._used is not None):
            for slot in self.slots:
                slot.grad = None  # may have been changed: nobody will use it
            self.synchronize()
        self.restart()
        return has_left

    def zero(self) -> None:
        """Zero the buckets, and make them the gradients of their parameters again."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            for slot in bucket.members():
                if slot.fits():
                    slot.param.grad = slot.view


def _move_out(slot: Slot) -> None:
    """Give a parameter a gradient of its own again, with what there is in the bucket."""
    if slot.param.grad is not None and slot.param.grad is slot.view:
        slot.param.grad = slot.view.clone()
    slot.bucket = slot.view = slot.room = None


def _error_of(handle: ops.Handle | commlib.Handle) -> CommlibError | None:
    """Wait for it, and say what it has failed with. Raises only ``OperationTimeout``; it is still in flight then."""
    try:
        handle.wait()
    except OperationTimeout:
        raise
    except CommlibError as error:
        return error
    return None


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _view(flat: torch.Tensor, offset: int, param: torch.Tensor) -> torch.Tensor:
    """A part of a bucket in the shape, and where that has no gaps in the strides, of a parameter."""
    strides = torch.empty_like(param, device="meta").stride()
    return flat.as_strided(param.shape, strides, offset)


def _divided(slots: Sequence[Slot]) -> Iterable[list[Slot]]:
    """In groups of one dtype, in the order in which they are complete: the smaller, the less comes after them.

    Nobody waits for a large one at the end, which backward reaches last and forward needs first.
    """
    left = sum(slot.param.nbytes for slot in slots)
    open_groups: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        left -= slot.param.nbytes
        group = open_groups.setdefault(slot.param.dtype, [])
        group.append(slot)
        enough = min(BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, left // 2))
        if sum(member.param.nbytes for member in group) >= enough:
            yield open_groups.pop(slot.param.dtype)
    yield from open_groups.values()


def _graph_task() -> int:
    """The number of the backward pass that runs."""
    return int(torch._C._current_graph_task_id())


def _ready_hook(reducer: Reducer, index: int) -> Callable[[torch.Tensor], None]:
    reference = weakref.ref(reducer)

    def hook(param: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._ready(alive.slots[index])

    return hook


def _register(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register ``hook`` on a parameter even if it is frozen now: it may be thawed later."""
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    try:
        return param.register_post_accumulate_grad_hook(hook)
    finally:
        if frozen:
            param.requires_grad_(False)


def _remove_all(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
