# SPDX-License-Identifier: Apache-2.0
"""A module whose gradients are averaged over all ranks by the time that ``backward()`` returns.

Design notes. Gradients are reduced as DistributedOptimizer's are (``commlib/torch/reducer.py``), but nobody says here
when a step is taken: all there is has to be reduced when a backward pass ends. Of backward passes within backward
passes (reentrant checkpointing) that is the outermost one. It reaches the module's outputs first; so a hook on these
asks the autograd engine for a call at the end. The engine holds the callback until then and no longer, even if the pass
is broken off, so a weak reference to it tells whether the pass still runs.

Averages may be taken more than once: averaging what is the same everywhere changes nothing. So it is right, too, where
gradients are accumulated over several reduced passes, and where a pass that is taken for the outermost one is not.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from commlib import Average
from commlib.errors import CommlibError, OperationTimeout
from commlib.torch import ops
from commlib.torch.compression import Compression, Compressor
from commlib.torch.deltas import refuse_asynchronous
from commlib.torch.functions import broadcast_parameters
from commlib.torch.reducer import Reducer, Slot

# Told apart by the order in which the program makes them, which is the same on all ranks.
_instances = itertools.count()


class _End:
    """Is called when a backward pass ends, for all modules that it has reached, in the same order on all ranks."""

    _of_tasks: ClassVar[weakref.WeakValueDictionary[int, _End]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self._reducers: list[_PassReducer] = []

    @classmethod
    def of_this_pass(cls, reducer: _PassReducer) -> _End:
        """Have ``reducer`` called. The engine, and nobody else, holds what is returned."""
        task = int(torch._C._current_graph_task_id())
        end = cls._of_tasks.get(task)
        if end is None:
            end = cls._of_tasks[task] = cls()
            torch.autograd.Variable._execution_engine.queue_callback(end)
        end._reducers.append(reducer)
        return end

    def __call__(self) -> None:
        errors: list[CommlibError] = []
        for reducer in sorted(self._reducers, key=lambda reducer: reducer.number):
            try:
                reducer.end()
            except OperationTimeout:
                raise
            except CommlibError as error:  # other ranks may wait for the next module
                errors.append(error)
        if errors:
            raise errors[0]


class _PassReducer(Reducer):
    """Reduces whatever there is when the outermost backward pass ends."""

    def __init__(
        self, number: int, named: list[tuple[str, torch.Tensor]], compression: Compressor, sparse_as_dense: bool
    ) -> None:
        prefix = f"DistributedDataParallel.{number}."
        super().__init__(prefix, named, compression, 1, Average, sparse_as_dense, waits=False)
        self.number = number
        self.is_paused = False
        self._held: set[int] = set()  # those that have got a gradient while it was paused
        self._end: weakref.ref[_End] | None = None  # of the backward pass that runs
        # A backward pass has begun, has ended, and what it has computed has not been reduced yet.
        self._is_open = self._has_ended = False

    def watch(self, outputs: Any) -> None:
        """Note when a backward pass reaches one of these outputs."""
        reference = weakref.ref(self)

        def reached(_: torch.Tensor) -> None:
            reducer = reference()
            if reducer is not None:
                reducer._reached()

        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(reached)

    def tidy(self) -> None:
        """If a backward pass was broken off: take part in what the other ranks may wait for, and drop its gradients."""
        if not self._is_open or self._runs():
            return
        if self._has_ended:
            raise RuntimeError("the last backward() timed out before gradients were reduced: call synchronize() first")
        dropped = [None if slot.param.grad is None else torch.zeros_like(slot.param) for slot in self.slots]
        for slot in self.slots:
            slot.grad = None  # whatever has become of it, it is no use
        self.synchronize()
        for slot, grad in zip(self.slots, dropped, strict=True):
            slot.param.grad = grad

    def restart(self) -> None:
        super().restart()
        self._held.clear()
        self._is_open = self._has_ended = False

    def _runs(self) -> bool:
        return self._end is not None and self._end() is not None

    def _reached(self) -> None:
        if self._runs() or not _accumulates(torch._C._current_autograd_node()):
            return
        self.reduced = False
        if not self.is_paused:
            self._expect_end()

    def _ready(self, slot: Slot) -> None:
        if self.is_paused:
            self.reduced = False
            self._held.add(slot.index)
        else:
            self._expect_end()
            super()._ready(slot)

    def _check(self, slot: Slot) -> None:
        if slot.passes > 0 and slot.bucket is not None and slot.bucket.has_left:
            raise RuntimeError(
                f"the gradient of {slot.name!r} was computed a second time in one backward pass, after it had been "
                "reduced; use torch.utils.checkpoint with use_reentrant=False"
            )

    def _expect_end(self) -> None:
        if self._runs():
            return
        if self._is_open:
            raise RuntimeError("the last backward() failed before all gradients were reduced: call synchronize() first")
        self._is_open = True
        self._end = weakref.ref(_End.of_this_pass(self))

    def end(self) -> None:
        """Reduce all there is, as the backward pass is over."""
        self._end, self._has_ended = None, True
        self.synchronize()

    def _has_grad(self, slot: Slot) -> bool:
        held = slot.index in self._held and slot.param.grad is not None and slot.fits()
        return held or super()._has_grad(slot)


class DistributedDataParallel(torch.nn.Module):
    """Wrap ``module`` so that ``backward()`` leaves the averages over all ranks in the gradients of its parameters.

    When ``backward()`` returns, all gradients are reduced: they may be clipped, and any optimizer may use them. Each
    rank computes the loss of its own part of the batch, a mean over it. All ranks make their wrappers in the same order
    and call ``forward`` and ``backward`` equally often. Where one does not, the others raise ``OperationTimeout`` after
    ``COMMLIB_OPERATION_TIMEOUT_S``, or ``PeerLostError`` when it is gone.

    Parameters may be used by all ranks, by some or by none, without any flag: where some have not used one, theirs
    counts as zero, and where nobody has, there is no gradient. Frozen parameters may be thawed later.

    Making it blocks: parameters and buffers become those of rank 0. With ``broadcast_buffers``, buffers do so again
    before each forward pass in training mode, outside ``no_sync()``. ``device_ids`` is there for scripts, and must be
    empty: parameters are in CPU memory. ``compression`` is what is done to gradients that travel; with
    ``sparse_as_dense`` sparse gradients become dense ones, otherwise they are refused. ``find_unused_parameters``,
    ``static_graph``, ``gradient_as_bucket_view`` and ``bucket_cap_mb`` are accepted for scripts written for torch's own
    and have no meaning.

    The module itself is ``.module``; in ``state_dict()`` all names begin with "module.", as with torch's own. A copy or
    a pickle of this object computes the same and reduces nothing. In a job of one process nothing is changed at all.

    Raises ``MismatchError`` on all ranks if their modules differ, ``ValueError`` for a parameter that another wrapper
    reduces, ``UnsupportedError`` for parameters that are not in CPU memory, ``NotInitializedError``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        broadcast_buffers: bool = True,
        compression: Compressor = Compression.none,
        *,
        sparse_as_dense: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}")
        if device_ids:
            raise ValueError(f"device_ids is {device_ids!r}, but parameters must be in CPU memory: leave it out")
        refuse_asynchronous("DistributedDataParallel")
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        named = list(module.named_parameters())
        self._reducer: _PassReducer | None = _PassReducer(next(_instances), named, compression, sparse_as_dense)
        try:
            broadcast_parameters([*named, *module.named_buffers()], 0, prefix=self._reducer.prefix)
        except BaseException:
            self.unwrap()
            raise

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        reducer = self._reducer
        if reducer is None or not reducer.is_active:
            return self.module(*inputs, **kwargs)
        self._prepare(reducer)
        outputs = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._watch(reducer, outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduce nothing inside the ``with`` block: gradients add up on each rank.

        The first ``backward()`` outside of it reduces the sum, or ``synchronize()`` does. All ranks enter it together.
        """
        reducer = self._reducer
        if reducer is None:
            yield
            return
        before, reducer.is_paused = reducer.is_paused, True
        try:
            yield
        finally:
            reducer.is_paused = before

    def synchronize(self) -> None:
        """Block until all gradients are reduced. ``backward()`` has done that, unless it was inside ``no_sync()``.

        Also to be called, on all ranks, to go on after a ``backward()`` that has raised ``OperationTimeout``.
        """
        if self._reducer is not None:
            self._reducer.synchronize()

    def unwrap(self) -> torch.nn.Module:
        """Stop reducing and return the module. This wrapper then is as good as a copy of it."""
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None
        return self.module

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reducer": None}

    @ops.outside_graphs
    def _prepare(self, reducer: _PassReducer) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputing, within a backward pass
            return
        reducer.tidy()
        if self.broadcast_buffers and self.training and not reducer.is_paused:
            _broadcast_buffers(self.module, reducer.prefix)

    @ops.outside_graphs
    def _watch(self, reducer: _PassReducer, outputs: Any) -> None:
        if any(slot.param.requires_grad for slot in reducer.slots):
            reducer.watch(outputs)


def _accumulates(node: Any) -> bool:
    """Whether the backward pass that has come to ``node`` leaves gradients in leaves, as ``autograd.grad`` does not."""
    seen, nodes = {node}, [node]
    for current in nodes:  # grows: the nearest leaf is searched for
        for following, _ in current.next_functions:
            if following is None or following in seen:
                continue
            if following.name() == "torch::autograd::AccumulateGrad":
                try:
                    return bool(torch._C._will_engine_execute_node(following))
                except RuntimeError:  # its gradient is what autograd.grad was asked for
                    return False
            seen.add(following)
            nodes.append(following)
    return False


def _broadcast_buffers(module: torch.nn.Module, prefix: str) -> None:
    """Make all buffers those of rank 0, in one operation a dtype."""
    groups: dict[torch.dtype, list[tuple[torch.Tensor, bool]]] = {}
    for owner in module.modules():
        for buffer in owner._buffers.values():
            if buffer is not None:
                groups.setdefault(buffer.dtype, []).append((buffer.detach(), isinstance(owner, _NormBase)))
    flats = [torch.cat([buffer.reshape(-1) for buffer, _ in group]) for group in groups.values()]
    handles = [
        ops.submit_broadcast(flat, 0, f"{prefix}buffers.{dtype}") for dtype, flat in zip(groups, flats, strict=True)
    ]
    for group, flat, handle in zip(groups.values(), flats, handles, strict=True):
        handle.wait()
        parts = flat.split([buffer.numel() for buffer, _ in group])
        for (buffer, is_statistic), part in zip(group, parts, strict=True):
            # What is the same is left alone: it may be needed by a backward pass, which must not find it changed.
            # Running statistics are not needed by any, as torch changes them without a word in each forward pass.
            received = part.view(buffer.shape)
            if not torch.equal(buffer, received):
                (buffer.data if is_statistic else buffer).copy_(received)
