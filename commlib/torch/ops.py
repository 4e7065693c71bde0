# SPDX-License-Identifier: Apache-2.0
"""Operations on torch tensors.

The core knows no tensors: it gets an address, a number of elements and a dtype, and holds the tensor until the
operation is done. Nothing here is compiled against torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

import commlib
from commlib import Average, ReduceOp, Sum
from commlib.errors import OperationTimeout, UnsupportedError
from commlib.torch.compression import Compression, Compressor

_DTYPES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


class Handle:
    """A push_pull in flight. The tensors belong to it until ``wait()`` has returned: neither read nor change them."""

    __slots__ = ("_core", "_finish", "_result")

    def __init__(self, core: commlib.Handle, finish: Callable[[], torch.Tensor]) -> None:
        self._core = core
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor

    def done(self) -> bool:
        """Say, without blocking, whether ``wait()`` would return (or raise) at once."""
        return self._core.done()

    def exception(self) -> BaseException | None:
        """Return the error the operation ended with, if it did."""
        return self._core.exception()

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Block until the operation is done and return the reduced tensor; may be called again.

        Raises ``OperationTimeout`` after ``timeout`` seconds (the operation stays in flight), or what the operation
        itself failed with: ``MismatchError``, ``PeerLostError``, …
        """
        try:
            self._core.wait(timeout)
        except OperationTimeout as error:
            error.handle = self
            raise
        return self._complete()

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        yield from self._core.__await__()
        return self._complete()

    def _complete(self) -> torch.Tensor:
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def check(tensor: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` with a way out if commlib cannot work on the memory of ``tensor``."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"a tensor of layout {tensor.layout} cannot be sent; send tensor.to_dense()")
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"a tensor on {tensor.device} cannot be sent, only tensors in CPU memory can; "
            "send tensor.cpu() and copy the result back with tensor.copy_(result)"
        )


def push_pull(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
) -> torch.Tensor:
    """Return the average (or ``op``) of ``tensor`` over all ranks, in a new contiguous tensor; blocks.

    Every rank must call this with the same name, shape, dtype and operation. Calls without a name are matched by
    their order in the program. ``average=False`` is short for ``op=Sum``. Operations with a higher ``priority``
    overtake others. ``version`` is accepted for BytePS scripts and has no meaning.

    Differentiable for Average and Sum: the gradient is reduced in the same way, so ``backward()`` must run on every
    rank too, and in the same order where no names are given.

    Raises ``ValueError`` if ``average`` and ``op`` contradict each other, ``UnsupportedError`` for dtypes and devices
    that cannot be sent, ``MismatchError`` if the ranks disagree, ``PeerLostError`` if one is gone.
    """
    operation = _operation(average, op)
    check(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _apply(tensor, None, operation, name, priority, compression)
    return submit(tensor, operation, name, priority, compression).wait()


def push_pull_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
) -> Handle:
    """Like ``push_pull``, but return a handle at once. The result is detached from autograd's graph."""
    return submit(tensor, _operation(average, op), name, priority, compression)


def push_pull_inplace(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
) -> torch.Tensor:
    """Like ``push_pull``, but write the result into ``tensor``, which is returned.

    A leaf that requires a gradient (a parameter) is changed as under ``torch.no_grad()``. A tensor that autograd has
    computed stays differentiable.
    """
    return push_pull_async_inplace(tensor, average, name, version, priority, compression, op).wait()


def push_pull_async_inplace(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
) -> Handle:
    """Like ``push_pull_inplace``, but return a handle at once."""
    operation = _operation(average, op)
    check(tensor)
    check(tensor)
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        handles: list[Handle] = []
        _apply(tensor, handles, operation, name, priority, compression)
        return handles[0]
    return submit(tensor, operation, name, priority, compression, inplace=True)


class _Group:
    """The counter behind push_pull_group_sync_inplace."""

    members = 0
    submitted = 0


def byteps_torch_set_num_grads(num_grads: int) -> None:
    """Say how many operations form a group for ``push_pull_group_sync_inplace``, and begin a new group."""
    _Group.members, _Group.submitted = num_grads, 0


def push_pull_group_sync_inplace(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
) -> tuple[Handle, int]:
    """Like ``push_pull_async_inplace``, and count: returns the handle and its number in the group, from 1.

    The count begins anew after the number of operations given to ``byteps_torch_set_num_grads``.
    """
    handle = push_pull_async_inplace(tensor, average, name, version, priority)
    _Group.submitted += 1
    number = _Group.submitted
    if number == _Group.members:
        _Group.submitted = 0
    return handle, number


def poll(handle: Handle) -> bool:
    """Say, without blocking, whether the operation is done."""
    return handle.done()


def synchronize(handle: Handle, timeout: float | None = None) -> torch.Tensor:
    """Block until the operation is done and return its tensor; see ``Handle.wait``."""
    return handle.wait(timeout)


def declare(name: str) -> None:
    """Do nothing: names need no declaration, in no particular order. Here for BytePS scripts."""


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the tensor of rank ``root_rank``, in a new contiguous tensor; blocks. Not differentiable."""
    return broadcast_(tensor.detach().clone(memory_format=torch.contiguous_format), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite ``tensor`` with that of rank ``root_rank``, as under ``torch.no_grad()``, and return it; blocks."""
    check(tensor)
    _check_writable(tensor)
    target = tensor.detach()
    dense = _dense(target)
    # Nothing is computed here, so any dtype will do: those that NumPy does not have travel as bytes.
    known = dense.dtype in _DTYPES and dense.dtype is not torch.bfloat16
    commlib.broadcast_((dense if known else dense.view(-1).view(torch.uint8)).numpy(), root_rank, name=name)
    if dense is target:
        _mark_changed(tensor)
    else:
        target.copy_(dense)
    return tensor


def submit(
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    priority: int,
    compression: Compressor,
    *,
    inplace: bool = False,
) -> Handle:
    """Start a push_pull that autograd does not see. The other forms are made of this one."""
    check(tensor)
    if inplace:
        _check_writable(tensor)
    source = tensor.detach()
    packed, ctx = compression.compress(source)
    dtype = _DTYPES.get(packed.dtype)
    if dtype is None:
        hint = "send torch.view_as_real(tensor)" if packed.is_complex() else "convert it to another dtype"
        raise UnsupportedError(f"a tensor of {packed.dtype} cannot be reduced; {hint}")
    wire = _dense(packed)
    # The caller's memory is written only where that is asked for; a copy made above is as good as a new tensor.
    result = wire if inplace or wire.data_ptr() != source.data_ptr() else torch.empty_like(wire)
    core = commlib.push_pull_ptr(
        wire.data_ptr(),
        wire.numel(),
        dtype,
        out_ptr=result.data_ptr(),
        name=name,
        op=op,
        priority=priority,
        owner=(wire, result),
        shape=wire.shape,
    )

    def finish() -> torch.Tensor:
        reduced = compression.decompress(result, ctx)
        if not inplace:
            return reduced
        if reduced is source:
            _mark_changed(tensor)
        else:
            source.copy_(reduced)
        return tensor

    return Handle(core, finish)


class _PushPull(torch.autograd.Function):
    """push_pull as autograd sees it. With ``handles``, in place and not waited for."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        handles: list[Handle] | None,
        op: ReduceOp,
        name: str | None,
        priority: int,
        compression: Compressor,
    ) -> torch.Tensor:
        ctx.op, ctx.name, ctx.priority, ctx.compression = op, name, priority, compression
        handle = submit(tensor, op, name, priority, compression, inplace=handles is not None)
        if handles is None:
            return handle.wait()
        handles.append(handle)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.op not in (Average, Sum):
            raise UnsupportedError(
                f"push_pull with {ctx.op!r} has no gradient, only Average and Sum have; call it on tensor.detach()"
            )
        name = None if ctx.name is None else f"{ctx.name}.grad"
        reduced = push_pull(grads[0], None, name, 0, ctx.priority, ctx.compression, ctx.op)
        return reduced, None, None, None, None, None


def _apply(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    return _PushPull.apply(tensor, *args)


def _operation(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is None:
        return Average if op is None else op
    meant = Average if average else Sum
    if op is not None and op != meant:
        raise ValueError(f"average={average} means op={meant!r}, but op={op!r} was given too; give one of the two")
    return meant


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if its elements lie in order without gaps, else a copy that does."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _check_writable(tensor: torch.Tensor) -> None:
    if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UnsupportedError("an expanded tensor cannot be written in place: elements share memory; clone it first")


def _mark_changed(tensor: torch.Tensor) -> None:
    """Tell autograd that the memory was written, so that a backward pass that needs the old values fails."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
