# SPDX-License-Identifier: Apache-2.0
"""Operations on torch tensors.

The core knows no tensors: it gets an address, a number of elements and a dtype, and holds the tensor until the
operation is done. Nothing here is compiled against torch.

Gradients. What is differentiated is the *sum over all ranks of what each of them calls its loss*. A rank's input goes
into the results of all ranks, so its gradient is the sum of what all of them have to say: that of a Sum is the sum of
the incoming gradients, that of an Average their average, that of a broadcast their sum at the root and zero elsewhere.
(A script that trains on the mean of the ranks' losses divides by ``size()``, or averages gradients, itself.) Each
gradient is an operation of its own, so ``backward()`` must run on all ranks or on none: a tensor requires a gradient
on all of them or on none. They are differentiable again, any number of times, and in forward mode.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

import commlib
from commlib import Average, ReduceOp, Sum
from commlib.api import session
from commlib.errors import OperationTimeout, UnsupportedError
from commlib.torch.compression import Compression, Compressor

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = {
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

_in_functorch: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` from looking into a function: it is called between two graphs, as it is without.

    ``torch.compiler.disable`` as a decorator would do the same, and import the compiler (2 s) into every script.
    """

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # seen by the tracer alone
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return entry


class Handle:
    """An operation in flight. The tensors belong to it until ``wait()`` has returned: neither read nor change them.

    May be waited for from any thread, polled, and awaited in an asyncio event loop.
    """

    __slots__ = ("_core", "_finish", "_lock", "_result")

    def __init__(self, core: commlib.Handle, finish: Callable[[], torch.Tensor]) -> None:
        self._core = core
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._lock = threading.Lock()  # the result is unpacked once, whoever waits
        self._result: torch.Tensor

    def done(self) -> bool:
        """Say, without blocking, whether ``wait()`` would return (or raise) at once."""
        return self._core.done()

    def exception(self) -> BaseException | None:
        """Return the error the operation ended with, None if it succeeded.

        Does not block. Raises ``OperationTimeout`` if it has not ended yet.
        """
        try:
            return self._core.exception()
        except OperationTimeout as error:
            error.handle = self
            raise

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Block until the operation is done and return its tensor; may be called again.

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
        with self._lock:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
        return self._result


def check(tensor: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` with a way out if commlib cannot work on the memory of ``tensor``."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise UnsupportedError("a nested tensor cannot be sent; send those that tensor.unbind() gives, or its values()")
    if tensor.is_quantized:
        raise UnsupportedError(
            "a quantized tensor cannot be sent; send tensor.dequantize(), or tensor.int_repr() and what it is scaled by"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"a tensor of layout {tensor.layout} cannot be sent; send tensor.to_dense()")
    if tensor.device.type == "meta":
        raise UnsupportedError(
            "a tensor on the meta device has no data that could be sent; give it memory first, "
            'as torch.empty_like(tensor, device="cpu") or module.to_empty(device="cpu") do'
        )
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"a tensor on {tensor.device} cannot be sent, only tensors in CPU memory can; "
            "send tensor.cpu() and copy the result back with tensor.copy_(result)"
        )
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        _check_class(tensor)


def _check_class(tensor: torch.Tensor) -> None:
    kind = type(tensor).__name__
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError(f"{kind} has no shape yet; let the module compute something once, before it is sent")
    if hasattr(tensor, "fake_mode"):
        raise UnsupportedError(f"a {kind} has no data that could be sent")
    if hasattr(tensor, "__tensor_flatten__"):
        hint = "tensor.to_local()" if hasattr(tensor, "to_local") else "the tensors inside"
        raise UnsupportedError(f"a {kind} has no memory of its own; send {hint}")


@outside_graphs
def push_pull(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
) -> torch.Tensor:
    """Return the average (or ``op``) of ``tensor`` over all ranks; blocks.

    The result is a new tensor of the same shape and dtype, contiguous whatever the memory format of ``tensor``: ranks
    may differ in that. Every rank must call this with the same name, shape, dtype and operation. Calls without a name
    are matched by their order in the program. ``average=False`` is short for ``op=Sum``. Operations with a higher
    ``priority`` overtake others. ``version`` is accepted for BytePS scripts and has no meaning.

    Differentiable for Average and Sum (see the head of this module), also inside ``torch.func``'s grad, vjp, jvp and
    vmap, where all ranks must have the same batch. Under ``torch.compile`` it is called between two graphs.

    Dtypes: bool (not Average), uint8, int8 to int64, float16, bfloat16, float32, float64; complex ones for Average and
    Sum. Raises ``ValueError`` if ``average`` and ``op`` contradict each other, ``UnsupportedError`` for dtypes, layouts
    and devices that cannot be sent, ``MismatchError`` if the ranks disagree, ``PeerLostError`` if one is gone.
    """
    operation = _operation(average, op)
    check(tensor)
    if _is_differentiated(tensor):
        reduced: torch.Tensor = _PushPull.apply(tensor, operation, name, priority, compression)
        return reduced
    return submit(tensor, operation, name, priority, compression).wait()


@outside_graphs
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


@outside_graphs
def push_pull_inplace(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
) -> torch.Tensor:
    """Like ``push_pull``, but write the result into ``tensor``, which is returned and keeps its memory format.

    A leaf that requires a gradient (a parameter) is changed as under ``torch.no_grad()``. A tensor that autograd has
    computed stays differentiable. Either way autograd knows that the memory has changed: a backward pass that needs
    the old values fails.

    Raises further ``UnsupportedError`` for tensors whose elements share memory, and where torch itself would refuse an
    in-place operation (inference tensors outside inference mode), ``RuntimeError`` for a view of a parameter.
    """
    return push_pull_async_inplace(tensor, average, name, version, priority, compression, op).wait()


@outside_graphs
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
    if not tensor.is_leaf and _is_differentiated(tensor):
        check_writable(tensor)
        _dtype_on_wire(compression.compress(_detached(tensor))[0], operation)
        # Only noted here. Where autograd forbids it, it raises before anything is sent.
        tensor = _InPlace.apply(tensor, operation, name, priority, compression)
    return submit(tensor, operation, name, priority, compression, inplace=True)


class _Group:
    """The counter behind push_pull_group_sync_inplace."""

    members = 0
    submitted = 0


def byteps_torch_set_num_grads(num_grads: int) -> None:
    """Say how many operations form a group for ``push_pull_group_sync_inplace``, and begin a new group."""
    _Group.members, _Group.submitted = num_grads, 0


@outside_graphs
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


@outside_graphs
def synchronize(handle: Handle, timeout: float | None = None) -> torch.Tensor:
    """Block until the operation is done and return its tensor; see ``Handle.wait``."""
    return handle.wait(timeout)


def declare(name: str) -> None:
    """Do nothing: names need no declaration, in no particular order. Here for BytePS scripts."""


@outside_graphs
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the tensor of rank ``root_rank`` (a global rank), in a new contiguous tensor; blocks.

    All ranks give a tensor of the same shape and dtype; of the others' nothing but that matters. Any dtype will do, but
    for quantized ones. Differentiable (see the head of this module), also inside ``torch.func``'s transforms.

    Raises ``ValueError`` for a root that there is not, otherwise what ``push_pull`` raises.
    """
    check(tensor)
    if _is_differentiated(tensor):
        received: torch.Tensor = _Broadcast.apply(tensor, root_rank, name)
        return received
    return _broadcast(tensor, root_rank, name)


@outside_graphs
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite ``tensor`` with that of rank ``root_rank``, as under ``torch.no_grad()``, and return it; blocks."""
    submit_broadcast(tensor, root_rank, name).wait()
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
        check_writable(tensor)
    source = _detached(tensor)
    packed, ctx = compression.compress(source)
    dtype, kind = _dtype_on_wire(packed, op)
    wire = dense_of(packed)
    # The caller's memory is written only where that is asked for; a copy made above is as good as a new tensor.
    result = wire if inplace or not _share_memory(wire, source) else torch.empty_like(wire)
    numbers, target = (torch.view_as_real(wire), torch.view_as_real(result)) if kind else (wire, result)
    core = session().worker.push_pull_ptr(
        _address(numbers),
        numbers.numel(),
        dtype,
        None if target is numbers else target.data_ptr(),
        name,
        op,
        priority,
        (wire, result),
        numbers.shape,
        kind,
    )
    if inplace:
        mark_changed(tensor)  # whoever drops the handle has changed it too

    def finish() -> torch.Tensor:
        reduced = compression.decompress(result, ctx)
        if not inplace:
            return reduced
        _write_back(tensor, source, reduced)
        return tensor

    return Handle(core, finish)


def submit_broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, priority: int = 0) -> Handle:
    """Start a broadcast into ``tensor`` that autograd does not see; the handle's result is ``tensor``."""
    check(tensor)
    check_writable(tensor)
    target = _detached(tensor)
    dense = dense_of(target)
    core = start_broadcast(dense, root_rank, name, priority)
    mark_changed(tensor)

    def finish() -> torch.Tensor:
        _write_back(tensor, target, dense)
        return tensor

    return Handle(core, finish)


def _broadcast(tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
    source = _detached(tensor)
    received = torch.empty_like(source, memory_format=torch.contiguous_format)
    if commlib.rank() == root_rank:
        # As bytes where it can be: there are dtypes that torch itself cannot copy.
        as_bytes = source.is_contiguous() and not (source.is_conj() or source.is_neg())
        bytes_of(received).copy_(bytes_of(source)) if as_bytes else received.copy_(source)
    start_broadcast(received, root_rank, name, 0).wait()
    return received


def start_broadcast(dense: torch.Tensor, root_rank: int, name: str | None, priority: int) -> commlib.Handle:
    """Start a broadcast from or into the memory of a contiguous tensor, of which autograd is not told.

    Nothing is computed in a broadcast, so any dtype will do: those that the core does not have travel as bytes.
    """
    dtype, count, shape = DTYPES.get(dense.dtype), dense.numel(), tuple(dense.shape)
    if dtype is None:
        # Behind the shape is what tells the dtype: the ranks must agree about both.
        dtype, count = "uint8", dense.nbytes
        shape = (*shape, dense.element_size(), zlib.crc32(str(dense.dtype).encode()))
    worker = session().worker
    return worker.broadcast_ptr(_address(dense), count, dtype, root_rank, name, priority, dense, shape)


class _PushPull(torch.autograd.Function):
    """push_pull as autograd and torch.func see it."""

    @staticmethod
    def forward(
        tensor: torch.Tensor, op: ReduceOp, name: str | None, priority: int, compression: Compressor
    ) -> torch.Tensor:
        return submit(tensor, op, name, priority, compression).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _reduced_again(grads[0], "grad", *ctx.options), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return _reduced_again(tangents[0], "tangent", *ctx.options)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], tensor: torch.Tensor, *options: Any) -> Any:
        """Each element by itself is reduced, so a batch of tensors is reduced as one tensor."""
        if in_dims[0] is None:
            return _PushPull.apply(tensor, *options), None
        return _PushPull.apply(tensor.movedim(in_dims[0], 0), *options), 0


class _InPlace(torch.autograd.Function):
    """Tells autograd that its tensor is about to be reduced in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *options: Any) -> torch.Tensor:
        ctx.options = options
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _reduced_again(grads[0], "grad", *ctx.options), None, None, None, None


class _Broadcast(torch.autograd.Function):
    """broadcast as autograd and torch.func see it."""

    @staticmethod
    def forward(tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        return _broadcast(tensor, root_rank, name)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.root_rank, ctx.name = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = push_pull(grads[0], name=_derived(ctx.name, "grad"), op=Sum)
        # All ranks keep the reduction in the graph, for a second derivative.
        is_other = torch.tensor(commlib.rank() != ctx.root_rank)
        return total.masked_fill(is_other, 0), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return broadcast(tangents[0], ctx.root_rank, _derived(ctx.name, "tangent"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], tensor: torch.Tensor, *options: Any) -> Any:
        if in_dims[0] is None:
            return _Broadcast.apply(tensor, *options), None
        return _Broadcast.apply(tensor.movedim(in_dims[0], 0), *options), 0


def _reduced_again(
    tensor: torch.Tensor, what: str, op: ReduceOp, name: str | None, priority: int, compression: Compressor
) -> torch.Tensor:
    if op not in (Average, Sum):
        raise UnsupportedError(
            f"push_pull with {op!r} has no gradient, only Average and Sum have; call it on tensor.detach()"
        )
    return push_pull(tensor, None, _derived(name, what), 0, priority, compression, op)


def _derived(name: str | None, what: str) -> str | None:
    return None if name is None else f"{name}.{what}"


def _is_differentiated(tensor: torch.Tensor) -> bool:
    """Does anybody want to know how results depend on ``tensor``?"""
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return _in_functorch() or forward_ad._current_level >= 0


def _operation(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is None:
        return Average if op is None else op
    meant = Average if average else Sum
    if op is not None and op != meant:
        raise ValueError(f"average={average} means op={meant!r}, but op={op!r} was given too; give one of the two")
    return meant


def _dtype_on_wire(packed: torch.Tensor, op: ReduceOp) -> tuple[str, str]:
    """What the core takes the elements for, and a word that ranks must agree on besides: of complex numbers, it gets
    the parts.
    """
    if packed.is_complex() and op in (Average, Sum):
        return DTYPES[packed.dtype.to_real()], "complex"
    dtype = DTYPES.get(packed.dtype)
    if dtype is None:
        hint = "convert it to another dtype"
        if packed.is_complex():
            hint = "only Average and Sum work on complex numbers; of the parts, send torch.view_as_real(tensor)"
        raise UnsupportedError(f"a tensor of {packed.dtype} cannot be reduced by {op!r}; {hint}")
    return dtype, ""


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its history, and certainly with memory."""
    try:
        detached = tensor.detach()
    except RuntimeError as error:  # of the batching that torch.func has replaced
        raise UnsupportedError(
            f"autograd's is_grads_batched and vectorize cannot be used here ({error}); torch.func.jacrev, jacfwd and "
            "hessian can"
        ) from error
    _address(detached)
    return detached


def _address(tensor: torch.Tensor) -> int:
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise UnsupportedError(
            "inside a torch.func transform, or traced, a tensor has no memory: push_pull and broadcast work in "
            "grad, vjp, jvp and vmap, their in-place and asynchronous forms do not"
        ) from error
    if address == 0 and tensor.numel() > 0:
        raise UnsupportedError(f"the {type(tensor).__name__} has no memory that could be sent")
    return address


def dense_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if its elements lie in order without gaps, else a copy that does."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def bytes_of(contiguous: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of uint8."""
    return contiguous.view(-1).view(torch.uint8)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def check_writable(tensor: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` if ``tensor``, for which ``check`` is content, cannot be written in place."""
    if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UnsupportedError("an expanded tensor cannot be written in place: elements share memory; clone it first")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "a tensor made in inference mode cannot be written in place outside of it; do it inside "
            "torch.inference_mode(), or clone it first"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise UnsupportedError("a tensor with a tangent cannot be written in place; use push_pull or broadcast")


def _write_back(tensor: torch.Tensor, detached: torch.Tensor, result: torch.Tensor) -> None:
    """Bring ``result`` to where ``tensor`` is, unless it is there, and tell autograd."""
    if result is detached:
        mark_changed(tensor)
    else:
        with torch.inference_mode(detached.is_inference()):
            detached.copy_(result)


def mark_changed(tensor: torch.Tensor) -> None:
    """Tell autograd that the memory was written, so that a backward pass that needs the old values fails."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
