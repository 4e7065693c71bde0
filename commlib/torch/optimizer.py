# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose gradients are reduced over all ranks before it steps.

Design notes. The wrapper is an object of a class made on the spot, derived from the user's optimizer class, and shares
the ``__dict__`` of the user's object: groups, state and learning rates are the same for both, ``isinstance`` holds, and
no constructor runs a second time. What commlib adds lies in two slots, outside that ``__dict__``, so it gets neither
into checkpoints nor into the user's object.

Hooks on the parameters know the reducer by weak reference only: otherwise every parameter would keep the optimizer
alive, which keeps all parameters alive.
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

import commlib
from commlib import Average, Max, ReduceOp, Sum
from commlib.errors import CommlibError, OperationTimeout, UnsupportedError
from commlib.torch import ops
from commlib.torch.compression import Compression, Compressor

# Optimizers are told apart by the order in which the program makes them, which is the same on all ranks.
_instances = itertools.count()


@dataclass(slots=True)
class _Reduction:
    """A gradient in flight, how often it had been changed when it took off, and what became of it."""

    handle: ops.Handle
    grad: torch.Tensor
    version: int
    is_done: bool = False
    error: Exception | None = None

    def finish(self, param: torch.Tensor, name: str) -> None:
        """Wait for it, once. Raises only ``OperationTimeout``; it is still in flight then."""
        if self.is_done:
            return
        # A gradient that the user has dropped since is not missed, but one that was changed is lost.
        replaced = param.grad is not self.grad and param.grad is not None
        if replaced or self.grad._version != self.version:
            self.error = RuntimeError(
                f"the gradient of {name!r} was changed while it was being reduced: call synchronize() before reading "
                "or changing gradients (to clip or unscale them, for example)"
            )
        try:
            self.handle.wait()
        except OperationTimeout:
            raise
        except CommlibError as error:
            self.error = error
        self.is_done = True


class Reducer:
    """Reduces the gradients of a list of named parameters, each as soon as backward has computed it."""

    def __init__(
        self,
        named: list[tuple[str, torch.Tensor]],
        compression: Compressor,
        passes: int,
        op: ReduceOp,
        sparse_as_dense: bool,
    ) -> None:
        self.prefix = f"DistributedOptimizer.{next(_instances)}."
        self.passes = passes
        self.op = op
        self.skip = False
        # Whether all gradients are reduced and no backward pass has run since.
        self.reduced = False
        self._active = commlib.size() > 1
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._names: list[str] = []
        self._params: list[torch.Tensor] = []
        self._passes_done: list[int] = []
        self._pending: dict[int, _Reduction] = {}
        # Which parameters have been used, by any rank; from the first synchronize() of a step until all is reduced.
        self._used: commlib.Handle | None = None
        self._hooks: list[Any] = []
        self.add(named)
        weakref.finalize(self, _remove_all, self._hooks).atexit = False

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Watch further parameters. They go behind those already known in priority."""
        known = len(self._names)
        for name, param in named:
            self._names.append(self.prefix + name)
            self._params.append(param)
            self._passes_done.append(0)
            if self._active:
                ops.check(param)
                self._hooks.append(_register(param, _ready_hook(self, len(self._params) - 1)))
        if self._active:
            commlib.declare([(n, p.nbytes) for n, p in zip(self._names[known:], self._params[known:], strict=True)])

    def remove_hooks(self) -> None:
        """Finish what is in flight and stop watching."""
        if self._pending:
            self.synchronize()
        _remove_all(self._hooks)

    def ready(self, index: int) -> None:
        """Note a pass over a parameter, and start the reduction of its gradient after the last one."""
        if index in self._pending:
            raise RuntimeError(
                f"the gradient of {self._names[index]!r} was computed again while it was being reduced: call step() or "
                f"zero_grad() after every {self.passes} backward passes, or set backward_passes_per_step"
            )
        if self.reduced and self.op == Sum:
            raise RuntimeError(
                f"the gradient of {self._names[index]!r} has been summed over the ranks already and would be again: "
                "call step() or zero_grad() of this optimizer before the next backward()"
            )
        self.reduced = False
        self._passes_done[index] += 1
        if self._passes_done[index] >= self.passes:
            self._submit(index)

    def synchronize(self) -> None:
        """Reduce what backward has not submitted, wait for everything, then raise the first error.

        May be called again after ``OperationTimeout``, which leaves everything as it is.
        """
        if not self._active or self.reduced:
            return
        if self._used is None:
            self._used = self._ask_who_used()
        for index, used in enumerate(self._used.wait()):
            if used and index not in self._pending:
                param = self._params[index]
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                self._submit(index)
        for index, reduction in self._pending.items():
            reduction.finish(self._params[index], self._names[index])
        error = next((reduction.error for reduction in self._pending.values() if reduction.error), None)
        self._pending.clear()
        self._used = None
        if error is not None:
            raise error
        self._passes_done = [0] * len(self._params)
        self.reduced = True

    def require_idle(self) -> None:
        """Raise if a step taken now would read gradients while they are written."""
        if self._pending:
            raise RuntimeError("step() inside skip_synchronize() needs a synchronize() before it")

    def restart(self) -> None:
        """Begin a new step: what is in ``grad`` from now on has not been reduced."""
        self.reduced = False

    def discard(self) -> None:
        """Forget gradients that are about to be reset. What is in flight has to land first, on all ranks."""
        if self._pending:
            warnings.warn("zero_grad() before step(): gradients that were being reduced are thrown away", stacklevel=3)
            for index, reduction in self._pending.items():
                self._params[index].grad, reduction.version = reduction.grad, reduction.grad._version
            self.synchronize()
        self._passes_done = [0] * len(self._params)
        self.reduced = False

    def mean_loss(self, loss: Any) -> Any:
        """Return the loss over all ranks, reduced as the gradients are."""
        if not self._active:
            return loss
        return ops.push_pull(torch.as_tensor(loss).detach(), name=self.prefix + "loss", op=self.op)

    def _submit(self, index: int) -> None:
        param = self._params[index]
        grad = param.grad
        assert grad is not None
        if grad.layout is not torch.strided and self._sparse_as_dense:
            param.grad = grad = grad.to_dense()
        elif grad.layout is not torch.strided:
            raise UnsupportedError(
                f"the gradient of {self._names[index]!r} is sparse; use DistributedOptimizer(…, sparse_as_dense=True)"
            )
        # What forward needs first is sent first; its gradient is the last that backward computes.
        handle = ops.submit(grad, self.op, self._names[index], -index, self._compression, inplace=True)
        self._pending[index] = _Reduction(handle, grad, grad._version)

    def _ask_who_used(self) -> commlib.Handle:
        """Start to find out for each parameter whether any rank has a gradient for it.

        A parameter that only some ranks have used is reduced by all of them, with zeros from the others. One that no
        rank has used keeps ``grad = None``: a gradient of zeros would not be the same, many optimizers move weights
        on zeros too.
        """
        here = [index in self._pending or param.grad is not None for index, param in enumerate(self._params)]
        return commlib.push_pull_async_(np.array(here, np.uint8), name=self.prefix + "used", op=Max, priority=1)


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
        self._reducer.discard()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as the wrapped optimizer does. Its gradients are reduced too, named by their place."""
        known = len(_parameters(self))
        super().add_param_group(param_group)
        self._reducer.add((f"added.{i}", p) for i, p in enumerate(_parameters(self)[known:], known))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change over how many backward passes gradients are summed before they are reduced."""
        self._reducer.passes = _positive(passes)

    def unwrap(self) -> Optimizer:
        """Stop reducing and return the wrapped optimizer, which has all state. This wrapper must not be used again."""
        self._reducer.remove_hooks()
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
            self._reducer.require_idle()
        else:
            self._reducer.synchronize()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._reducer.restart()
        loss = closure()
        self._reduce()
        return self._reducer.mean_loss(loss) if isinstance(self, torch.optim.LBFGS) else loss


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
    ``set_backward_passes_per_step(n)`` and ``unwrap()``.

    Raises ``NotInitializedError`` before ``commlib.init()``; ``ValueError`` for duplicate or missing names, or another
    ``op``; ``UnsupportedError`` for parameters that are not in CPU memory.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if op not in (Average, Sum):
        raise ValueError(f"gradients can be reduced by Average or Sum, not by {op!r}")
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(f"compression is {compression!r}; expected one as Compression.fp16")
    named = _named(optimizer, named_parameters)
    reducer = Reducer(named, compression, _positive(backward_passes_per_step), op, sparse_as_dense)

    base = type(optimizer)
    derived = type(base.__name__, (_DistributedOptimizer, base), {"__module__": base.__module__})
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


def _ready_hook(reducer: Reducer, index: int) -> Callable[[torch.Tensor], None]:
    reference = weakref.ref(reducer)

    def hook(param: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.ready(index)

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
