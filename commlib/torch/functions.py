# SPDX-License-Identifier: Apache-2.0
"""Making all ranks start from the same state.

What is to be sent is agreed about first: names, shapes and dtypes, by one operation of a few bytes. Then all of it is
under way at once: small tensors packed into one buffer of bytes, large ones from where they lie to where they belong.
Nothing is cast, and nothing waits for one tensor after another.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import commlib
from commlib.agreement import agree
from commlib.errors import CommlibError, UnsupportedError
from commlib.torch import ops
from commlib.torch.optimizer import _parameters

Params = Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]

SMALL_BYTES = 1 << 20  # up to which a tensor is packed with others: a copy is cheaper than an operation
ALIGNMENT = 64
# What belongs to a process, not to the state of its optimizer.
_OWN_OPTIONS = frozenset({"params", "param_names"})


def broadcast_parameters(params: Params, root_rank: int, prefix: str = "Parameter.") -> None:
    """Overwrite parameters and buffers with those of rank ``root_rank`` (a global rank), bit by bit; blocks.

    ``params`` is a ``model.state_dict()`` (or another mapping, in any order), ``model.named_parameters()``, or an
    iterable of tensors in the same order on all ranks. They are changed in place, as under ``torch.no_grad()``, in
    whatever layout they have. Entries that are ``None`` are skipped; a tensor that occurs under several names (tied
    weights) is sent once. ``prefix`` is what the names of the operations begin with.

    Raises the same on all ranks, before anything is changed: ``MismatchError`` (a ``ValueError``) that names the first
    difference in names, shapes, dtypes or ties; ``ValueError`` for names that occur twice, or a root that there is not;
    ``UnsupportedError`` for entries that are not tensors (send those with ``broadcast_object``), or cannot be sent.
    """
    tensors: dict[str, torch.Tensor] = {}
    problem: Exception | None = None
    commlib.size()  # NotInitializedError is no matter for the others
    try:
        _check_root(root_rank)
        tensors = _collected(params)
    except (TypeError, ValueError) as error:  # UnsupportedError is the former
        problem = error
    firsts: dict[Any, str] = {}
    facts = [("root_rank", str(root_rank))]
    for name, tensor in tensors.items():
        first = firsts.setdefault(_identity(tensor, name), name)
        facts.append((name, _described(tensor) if first == name else f"the same as {first}"))
    _agree("parameters", facts, problem, prefix)
    chosen = [tensors[name] for name in firsts.values()]
    _broadcast_all(chosen, root_rank, prefix)
    for tensor in chosen:
        ops.mark_changed(tensor)  # on the root as well: autograd refuses the same on all ranks


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "OptimizerState."
) -> None:
    """Give all ranks the state and the options of rank ``root_rank``'s optimizer, bit by bit; blocks.

    For every optimizer that keeps its state in ``state`` and ``param_groups``, as those of ``torch.optim`` do, wrapped
    by ``DistributedOptimizer`` on any of the ranks or not. State that only the root has appears on the others, state
    that only they have goes; no ``step()`` is taken. An option that is a tensor, as a learning rate may be, stays the
    same object with another value; it, and all other options, may be of any type that can be pickled. What an optimizer
    keeps elsewhere, and what learning-rate schedulers know, is not sent.

    Raises the same on all ranks, before anything is changed: ``MismatchError`` (a ``ValueError``) if the classes, the
    groups, or the number, shapes or dtypes of the parameters differ; ``CommlibError``, and on the root its cause, if
    something in the root's state cannot be pickled or sent.
    """
    problem: Exception | None = None
    facts: list[tuple[str, str]] = []
    commlib.size()
    try:
        _check_root(root_rank)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        facts = [("root_rank", str(root_rank)), ("optimizer", type(optimizer).__name__)]
        for index, group in enumerate(optimizer.param_groups):
            facts.append((f"group {index}", f"{len(group['params'])} parameters"))
            facts += [(f"parameter {i} of group {index}", _described(p)) for i, p in enumerate(group["params"])]
    except (TypeError, ValueError) as error:
        problem = error
    _agree("parameters of the optimizer", facts, problem, prefix)
    if commlib.size() == 1:
        return
    if commlib.rank() == root_rank:
        _send_state(optimizer, root_rank, prefix)
    else:
        _receive_state(optimizer, root_rank, prefix)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the object of rank ``root_rank``, whatever ``obj`` is on the other ranks; blocks.

    The others get a copy, the root ``obj`` itself. A ``name`` may be used again for an object of another size. The
    object is pickled, so it must come from a rank that you trust, and all ranks must be able to import its class.

    If the root cannot pickle it, all ranks raise: the root what pickle says, the others ``CommlibError``.
    """
    return commlib.broadcast_object(obj, root_rank, name=name)


def _check_root(root_rank: int) -> None:
    if not 0 <= root_rank < commlib.size():
        raise ValueError(f"root_rank is {root_rank}, but ranks go from 0 to {commlib.size() - 1}")


def _agree(subject: str, facts: list[tuple[str, str]], problem: Exception | None, prefix: str) -> None:
    if commlib.size() > 1:
        agree(subject, facts, problem, f"{prefix}broadcast")
    elif problem is not None:
        raise problem


def _collected(params: Params) -> dict[str, torch.Tensor]:
    """The tensors by name, in an order that is the same on all ranks. Raises for what cannot be sent."""
    tensors: dict[str, torch.Tensor] = {}
    entries: Iterable[Any] = params
    if isinstance(params, Mapping):
        entries = sorted(params.items(), key=lambda item: str(item[0]))
    for index, entry in enumerate(entries):
        name, value = entry if isinstance(entry, tuple) else (str(index), entry)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(f"{name!r} is a {type(value).__name__}, not a tensor; send it with broadcast_object")
        if name in tensors:
            raise ValueError(f"{name!r} occurs twice")
        try:
            ops.check(value)
            ops.check_writable(value)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name!r}: {error}") from error
        tensors[name] = value
    return tensors


def _identity(tensor: torch.Tensor, name: str) -> Any:
    """Equal for tensors that are the same elements of the same memory."""
    if tensor.numel() == 0:
        return name
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), bits


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


# --- Many tensors at once


def _broadcast_all(tensors: Sequence[torch.Tensor], root_rank: int, prefix: str) -> None:
    """Fill ``tensors``, which have the same shapes and dtypes on all ranks, with those of the root."""
    if commlib.size() == 1:
        return
    is_root = commlib.rank() == root_rank
    large = [tensor for tensor in tensors if tensor.nbytes > SMALL_BYTES]
    small = [tensor for tensor in tensors if 0 < tensor.nbytes <= SMALL_BYTES]
    offsets, packed_bytes = _layout(small)
    names = [f"{prefix}large.{index}" for index in range(len(large))]
    commlib.declare([(f"{prefix}packed", packed_bytes), *zip(names, (t.nbytes for t in large), strict=True)])
    # The large ones come first: while they travel, the others are packed.
    waiting: list[commlib.Handle | ops.Handle] = []
    for name, tensor in zip(names, large, strict=True):
        if is_root:
            waiting.append(ops.start_broadcast(ops.dense_of(tensor.detach()), root_rank, name, 0))
        else:
            waiting.append(ops.submit_broadcast(tensor, root_rank, name))
    if small:
        packed = torch.from_numpy(commlib.empty(packed_bytes, "uint8"))
        if is_root:
            for tensor, offset in zip(small, offsets, strict=True):
                packed[offset : offset + tensor.nbytes].copy_(ops.bytes_of(ops.dense_of(tensor.detach())))
        ops.start_broadcast(packed, root_rank, f"{prefix}packed", 0).wait()
        if not is_root:
            for tensor, offset in zip(small, offsets, strict=True):
                _fill(tensor.detach(), packed[offset : offset + tensor.nbytes])
    for handle in waiting:
        handle.wait()


def _layout(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor lies in the packed buffer, and the size of that."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _fill(target: torch.Tensor, data: torch.Tensor) -> None:
    """Write the bytes of a dense tensor into ``target``, which may have gaps."""
    dense = ops.dense_of(target)
    ops.bytes_of(dense).copy_(data)
    if dense is not target:
        target.copy_(dense)


# --- The state of an optimizer
#
# Pickle walks through it, whatever containers it is made of. Parameters in it become their numbers, so that each rank
# finds its own in their place; other tensors become numbers too and travel beside it, with their bits as they are.


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, params: Sequence[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers = {id(param): ("param", number) for number, param in enumerate(params)}

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._numbers:
            ops.check(obj)
            self._numbers[id(obj)] = ("tensor", len(self.tensors))
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, params: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._found = {"param": params, "tensor": tensors}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        kind, number = pid
        return self._found[kind][number]


def _send_state(optimizer: torch.optim.Optimizer, root_rank: int, prefix: str) -> None:
    params = _parameters(optimizer)
    known = {id(param) for param in params}
    file = io.BytesIO()
    pickler = _Pickler(file, params)
    try:
        pickler.dump(
            (
                # What is kept for a parameter that is in no group any more is nobody's.
                [(k, v) for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor) or id(k) in known],
                [{k: v for k, v in group.items() if k not in _OWN_OPTIONS} for group in optimizer.param_groups],
            )
        )
    except Exception as error:
        commlib.broadcast_object(f"{type(error).__name__}: {error}", root_rank, name=f"{prefix}structure")
        raise
    forms = [_form(tensor) for tensor in pickler.tensors]
    commlib.broadcast_object((file.getvalue(), forms), root_rank, name=f"{prefix}structure")
    _broadcast_all(pickler.tensors, root_rank, prefix)


def _receive_state(optimizer: torch.optim.Optimizer, root_rank: int, prefix: str) -> None:
    structure = commlib.broadcast_object(None, root_rank, name=f"{prefix}structure")
    if isinstance(structure, str):
        raise CommlibError(f"rank {root_rank} cannot send the state of its optimizer: {structure}")
    pickled, forms = structure
    tensors = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype, _ in forms]
    _broadcast_all(tensors, root_rank, prefix)
    for tensor, (*_, requires_grad) in zip(tensors, forms, strict=True):
        tensor.requires_grad_(requires_grad)
    state, groups = _Unpickler(io.BytesIO(pickled), _parameters(optimizer), tensors).load()
    optimizer.state.clear()
    optimizer.state.update(state)
    kept = _KeptTensors()
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for name in group.keys() - options.keys() - _OWN_OPTIONS:
            del group[name]
        for name, value in options.items():
            group[name] = kept.instead_of(value, group.get(name))


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor like this one is made of: as dense as it can be, in the same order."""
    stride = torch.empty_like(tensor, device="meta").stride()
    return tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad and tensor.is_leaf


class _KeptTensors:
    """Tensors among the options stay the objects they were: the program may hold them, or have compiled them in."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # new and kept

    def instead_of(self, new: Any, old: Any) -> Any:
        """Return ``old`` with the value of ``new`` if they are alike enough, else ``new``; in tuples and lists too."""
        if type(new) in (tuple, list) and type(old) is type(new) and len(old) == len(new):
            return type(new)(self.instead_of(n, o) for n, o in zip(new, old, strict=True))
        if not isinstance(new, torch.Tensor):
            return new
        for known, kept in self._pairs:
            if known is new:
                return kept  # one tensor of the root's, in several places
            if kept is old:
                old = None  # here one tensor, on the root several
        result = new
        if _are_alike(new, old):
            old.detach().copy_(new.detach())
            result = old
        self._pairs.append((new, result))
        return result


def _are_alike(new: torch.Tensor, old: Any) -> bool:
    if not isinstance(old, torch.Tensor) or old.device != new.device or old.layout != new.layout:
        return False
    return (old.dtype, old.shape, old.requires_grad) == (new.dtype, new.shape, new.requires_grad)
