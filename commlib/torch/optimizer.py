# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose gradients are reduced over all ranks before it steps.

Design notes. The wrapper is an object of a class made on the spot, derived from the user's optimizer class, and shares
the ``__dict__`` of the user's object: groups, state and learning rates are the same for both, ``isinstance`` holds, and
no constructor runs a second time. What commlib adds lies in two slots, outside that ``__dict__``, so it gets neither
into checkpoints nor into the user's object.

When and how gradients are reduced is the matter of ``commlib/torch/reducer.py``.
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

import commlib
from commlib import Average, ReduceOp, Sum
from commlib.api import session
from commlib.torch import ops
from commlib.torch.compression import Compression, Compressor
from commlib.torch.deltas import Deltas, is_asynchronous
from commlib.torch.reducer import Reducer

log = logging.getLogger("commlib")

# Optimizers are told apart by the order in which the program makes them, which is the same on all ranks.
_instances = itertools.count()


class _DistributedOptimizer(Optimizer):
    """The methods that DistributedOptimizer puts in front of those of the user's class."""

    __slots__ = ("_original", "_reducer")

    _original: Optimizer
    _reducer: Reducer

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Wait until all gradients are reduced, then take one step of the wrapped optimizer and return what it does.

        With a closure, gradients are reduced each time after it has run. L-BFGS looks at the loss as well: it gets
        that of all ranks, reduced as the gradients are.
        """
        if closure is None:
            self._reduce()
            result = super().step(*args, **kwargs)
        else:
            result = super().step(functools.partial(self._evaluate, closure), *args, **kwargs)
        self._reducer.restart()
        return result

    # torch wraps the step of each optimizer class to run its step hooks. The user's class, which this calls, has been
    # wrapped; wrapped as well, this one would run them twice.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Block until all gradients are reduced. ``step()`` does it by itself and does not reduce them again.

        Call it to see or change gradients before the step: to clip them, for example.
        """
        self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` use the gradients as they are inside the ``with`` block."""
        self._reducer.skip = True
        try:
            yield
        finally:
            self._reducer.skip = False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset gradients as the wrapped optimizer does; warns if they have not been used by a ``step()``."""
        if self._reducer.discard():
            warnings.warn("zero_grad() before step(): gradients that were being reduced are thrown away", stacklevel=2)
        super().zero_grad(*args, **kwargs)
        self._reducer.zero()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as the wrapped optimizer does. Its gradients are reduced too, named by their place."""
        known = len(_parameters(self))
        super().add_param_group(param_group)
        self._reducer.add((f"added.{i}", p) for i, p in enumerate(_parameters(self)[known:], known))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change over how many backward passes gradients are summed before they are reduced."""
        self._reducer.set_passes(_positive(passes))

    def pull(self) -> None:
        """In asynchronous training, block until the parameters are those that all hosts have by now; else do nothing.

        The ranks of a host have to call it together. After a ``barrier()`` it gives all ranks the same parameters, bit
        by bit.
        """

    def unwrap(self) -> Optimizer:
        """Stop reducing and return the wrapped optimizer, which has all state. This wrapper must not be used again."""
        self._reducer.remove()
        _rebind_step(self._original)
        return self._original

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the wrapped optimizer: whoever loads it may not have the same ranks, or any."""
        make, arguments, *rest = self._original.__reduce_ex__(protocol)
        # pickle wants `copyreg.__newobj__` to make the class that is pickled; this one does the same for any class.
        make = object.__new__ if make is copyreg.__newobj__ else make  # type: ignore[attr-defined]
        return make, arguments, *rest

    def _reduce(self) -> None:
        if self._reducer.skip:
            self._reducer.require_reduced()
        else:
            self._reducer.synchronize()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._reducer.restart()
        loss = closure()
        self._reduce()
        if not isinstance(self, torch.optim.LBFGS) or not self._reducer.is_active:
            return loss
        name = f"{self._reducer.prefix}loss"
        return ops.push_pull(torch.as_tensor(loss).detach(), name=name, op=self._reducer.op)


class _AsynchronousOptimizer(_DistributedOptimizer):
    """The same with ``COMMLIB_ASYNC=1``: gradients stay as they are, and what a step changes is added everywhere."""

    __slots__ = ()

    _reducer: Deltas  # type: ignore[assignment]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step of the wrapped optimizer, add it to those of the other hosts, and take over theirs."""
        self._reducer.begin_step()
        result = super(_DistributedOptimizer, self).step(*args, **kwargs)
        self._reducer.end_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Do nothing: each rank uses its own gradients, as they are."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Change nothing: gradients are not reduced anyway."""
        yield

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset gradients as the wrapped optimizer does."""
        super(_DistributedOptimizer, self).zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change nothing: a step may come after any number of backward passes."""
        _positive(passes)

    def pull(self) -> None:
        self._reducer.begin_step()
        self._reducer.end_step()


def DistributedOptimizer(  # noqa: N802 - the name scripts use
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    sparse_as_dense: bool = False,
) -> _DistributedOptimizer:
    """Wrap ``optimizer`` so that each ``step()`` uses gradients reduced over all ranks.

    Gradients are summed over ``backward_passes_per_step`` passes and then averaged (``op=Average``) or summed
    (``op=Sum``) over the ranks, in place in ``param.grad``. Each starts as soon as ``backward()`` has computed it;
    ``step()``, or ``synchronize()`` before it, waits. Until then gradients must not be touched.

    ``named_parameters`` (usually ``model.named_parameters()``) names every parameter of the optimizer; further ones do
    no harm. Without it, parameters are named by their order in the parameter groups. All ranks must make their
    optimizers in the same order.

    The result is an instance of ``type(optimizer)`` and shares all state with ``optimizer``, so learning-rate
    schedulers, ``state_dict()`` and ``load_state_dict()`` work with either, in any order; pickling or copying it gives
    the plain optimizer. It has the further methods ``synchronize()``, ``skip_synchronize()``,
    ``set_backward_passes_per_step(n)``, ``pull()`` and ``unwrap()``.

    With ``COMMLIB_ASYNC=1`` in a job on several hosts no gradient is reduced. Each rank takes its steps on its own;
    what they change, averaged (``op=Average``) or summed (``op=Sum``) over the ranks of a host, is added to the
    parameters of all hosts, none of which waits for another (Downpour SGD: Dean et al., "Large Scale Distributed Deep
    Networks", 2012). The first ``step()`` waits for all ranks and begins with the parameters of rank 0. See
    docs/torch.md.

    Raises ``NotInitializedError`` before ``commlib.init()``; ``ValueError`` for duplicate or missing names, or another
    ``op``; ``UnsupportedError`` for parameters that are not in CPU memory.
    """
    _check(optimizer, compression, op)
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    named = _named(optimizer, named_parameters)
    prefix = f"DistributedOptimizer.{next(_instances)}."
    if is_asynchronous():
        return _wrapped(optimizer, _AsynchronousOptimizer, Deltas(prefix, named, op))
    if session().parameters.asynchronous and commlib.size() > 1:
        log.warning("COMMLIB_ASYNC does nothing here: all ranks are on one host, and those take their steps together")
    reducer = Reducer(prefix, named, compression, _positive(backward_passes_per_step), op, sparse_as_dense)
    return _wrapped(optimizer, _DistributedOptimizer, reducer)


def _check(optimizer: Optimizer, compression: Compressor, op: ReduceOp) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if op not in (Average, Sum):
        raise ValueError(f"gradients can be reduced by Average or Sum, not by {op!r}")
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(f"compression is {compression!r}; expected one as Compression.fp16")


def _wrapped(optimizer: Optimizer, front: type[_DistributedOptimizer], reducer: Reducer | Deltas) -> Any:
    """An optimizer with the methods of ``front`` in front of those of its class."""
    base = type(optimizer)
    derived = type(base.__name__, (front, base), {"__module__": base.__module__})
    wrapper: Any = object.__new__(derived)
    wrapper.__dict__ = optimizer.__dict__
    wrapper._original = optimizer
    wrapper._reducer = reducer
    _rebind_step(wrapper)
    return wrapper


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _positive(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
    return passes


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters with their names, in the order of the names."""
    params = _parameters(optimizer)
    if named_parameters is None:
        return [(f"param.{index}", param) for index, param in enumerate(params)]
    named = list(named_parameters)
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError("named_parameters must be pairs of name and parameter, such as model.named_parameters()")
    seen: set[str] = set()
    twice = sorted({name for name, _ in named if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise ValueError(f"names in named_parameters must be unique, these are not: {', '.join(twice)}")
    wanted = {id(param) for param in params}
    # A parameter tied under several names goes by the first.
    by_id: dict[int, tuple[str, torch.Tensor]] = {}
    for name, param in named:
        if id(param) in wanted:
            by_id.setdefault(id(param), (name, param))
    if len(by_id) < len(wanted):
        raise ValueError(
            f"named_parameters must name all parameters of the optimizer: {len(wanted) - len(by_id)} of {len(wanted)} "
            "are missing"
        )
    return list(by_id.values())


def _rebind_step(optimizer: Optimizer) -> None:
    """Let a ``step`` that a learning-rate scheduler has put on the instance call that of the class of ``optimizer``.

    A scheduler replaces ``step`` to see that it is called. Made for the plain optimizer, such a replacement would call
    the plain ``step`` for ever, also when it is looked up through the wrapper.
    """
    patched = optimizer.__dict__.pop("step", None)
    if patched is None:
        return
    if not hasattr(patched, "_wrapped_by_lr_sched"):
        optimizer.__dict__["step"] = patched
        raise ValueError("the step method of this optimizer object has been replaced; wrap it before that is done")
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        if alive is None:
            raise RuntimeError("the DistributedOptimizer that wrapped this optimizer is gone")
        alive._opt_called = True
        return type(alive).step(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = step
