# SPDX-License-Identifier: Apache-2.0
"""An optimizer that lets the next forward pass begin before all gradients of the last step have arrived.

Design notes. Gradients travel as DistributedOptimizer's do (``commlib/torch/reducer.py``), but buckets may still be in
flight when ``step()`` returns, and when the next iteration begins. What ``step()`` would do to their parameters is an
*update*. It is carried out, with the options that the parameter groups had at ``step()``, when somebody needs one of
the parameters and the bucket has arrived: before the forward pass of the module that owns it, in ``state_dict()``, in
``synchronize()``, at the latest in the next ``step()``. What forward needs first has the highest priority on its way.

An optimizer's step on some of its parameters is its ordinary step, with parameter groups that have no others. That is
right where a step treats each parameter without regard to the others, which is known of torch's own (except L-BFGS),
and has to be promised for other ones.

Parameters that are not in a bucket are reduced and changed within ``step()``; so are all in the first one. While a
bucket is in flight its parameters have no ``grad``. Should backward compute one, they have been used before they were
changed, and that is an error. A bucket leaves when it is complete or in ``step()``, so no gradient comes after it.

Modules hold the optimizer while there are updates, and only then, so that the last step is not lost with it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from commlib import Average, ReduceOp
from commlib.errors import CommlibError, UnsupportedError
from commlib.torch import ops
from commlib.torch.compression import Compression, Compressor
from commlib.torch.deltas import refuse_asynchronous
from commlib.torch.optimizer import _check, _DistributedOptimizer, _instances, _named, _positive, _wrapped
from commlib.torch.reducer import Reducer, Slot, _Bucket, _remove_all

# Classes whose step treats each parameter without regard to the others. Which there are depends on torch's version.
_SEPARABLE = tuple(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
    if hasattr(torch.optim, name)
)
# Modules that may use the parameters of modules inside them without calling these.
_REACHING_IN = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)  # modules that are never called


class _Options:
    """What an optimizer's parameter groups said when step() was called, and which parameter is in which."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        groups = enumerate(optimizer.param_groups)
        self._place = {id(param): index for index, group in groups for param in group["params"]}

    def restricted_to(self, slots: Iterable[Slot]) -> list[dict[str, Any]]:
        """The groups, with these parameters alone, those that have a gradient."""
        groups: list[dict[str, Any]] = [{**options, "params": []} for options in self.groups]
        for slot in slots:
            if slot.param.grad is not None:
                groups[self._place[id(slot.param)]]["params"].append(slot.param)
        return [group for group in groups if group["params"]]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value  # a learning rate, which a scheduler may change


class _StepReducer(Reducer):
    """A reducer whose buckets may be in flight when the next step has begun."""

    def __init__(
        self, prefix: str, named: list[tuple[str, torch.Tensor]], compression: Compressor, passes: int, op: ReduceOp
    ) -> None:
        self.updates: dict[_Bucket, _Options] = {}
        self.by_id: dict[int, Slot] = {}
        super().__init__(prefix, named, compression, passes, op, sparse_as_dense=False, waits=False)

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().add(named)
        self.by_id = {id(slot.param): slot for slot in self.slots}

    def _check(self, slot: Slot) -> None:
        if slot.bucket in self.updates:
            raise RuntimeError(
                f"{slot.name!r} was used outside the forward() of the module that owns it, and before the last step() "
                "had been carried out on it: call synchronize() of the optimizer before that"
            )
        if slot.bucket is not None and not slot.fits():
            raise RuntimeError(
                f"{slot.name!r} has another dtype or shape than before: unwrap the optimizer before that"
            )
        super()._check(slot)

    def reduce_rest(self) -> list[Slot]:
        """Submit what has not been, and wait for those that are in no bucket, which are returned.

        May be called again after ``OperationTimeout``.
        """
        slots = self._submit_rest()
        errors = self._reduce_irregular()
        self._conclude(is_good=not errors)
        self._raise_first(errors)
        return slots

    def synchronize(self) -> None:
        if not self.is_active or self.reduced:
            return
        self._submit_rest()
        errors = self._reduce_irregular()
        self._finish_buckets()
        errors += [bucket.error for bucket in self.buckets if bucket.error is not None]
        self._rearrange(is_good=not errors)
        self.restart()
        self._raise_first(errors)
        self.reduced = True

    def _submit_rest(self) -> list[Slot]:
        self.flush()
        slots = [slot for slot in self.slots if slot.bucket is None]
        if slots and self._used is None:
            self._used = self._ask_who_used(set())
        return slots

    def hand_over(self, options: _Options) -> None:
        """Begin a new step while the buckets of the last one are in flight."""
        for bucket in self.buckets:
            if bucket.has_left:
                self.updates[bucket] = options
                for slot in bucket.members():
                    slot.param.grad = None
        self.restart()

    def receive(self, bucket: _Bucket) -> list[Slot]:
        """Wait for a bucket that is due; return those whose gradient has come back with it.

        Raises ``OperationTimeout``, after which it may be called again.
        """
        self.finish(bucket)
        slots, error = bucket.members(), bucket.error
        if error is None:
            self._release(bucket)
        del self.updates[bucket]
        bucket.restart()
        bucket.dissolve()
        if not bucket.members():
            self.buckets.remove(bucket)
        if error is not None:
            raise error
        return slots

    def restart(self) -> None:
        self._restart_slots()
        for bucket in self.buckets:
            if bucket not in self.updates:
                bucket.restart()

    def discard(self) -> bool:
        if self.is_begun():
            return super().discard()
        self.restart()
        return False


class _Gate:
    """Called before a module computes, or is saved or loaded. A copy of a model gets one that does nothing."""

    def __init__(self) -> None:
        self.held: _CrossBarrier | None = None  # while something is due

    @ops.outside_graphs
    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        optimizer = self.held
        if optimizer is not None:
            optimizer._carry_out_for(_parameters_used_by(module))

    def before_all(self, *_: Any) -> None:
        optimizer = self.held
        if optimizer is not None:
            optimizer._carry_out_all()

    def __reduce__(self) -> Any:
        return _Gate, ()


class _CrossBarrier(_DistributedOptimizer):
    """The methods that CrossBarrier puts in front of those of the user's class."""

    __slots__ = ("_gate", "_hooks")

    _reducer: _StepReducer
    _gate: _Gate
    _hooks: list[Any]

    def step(self, closure: Any = None) -> None:
        """Submit what is left of the gradients and return. Parameters change when somebody needs them.

        The gradients are used up by that: there are none after it, as after ``zero_grad()``. After ``synchronize()``,
        the step is taken at once. The step hooks of the optimizer run here. Raises what went wrong with the last step
        where nobody has needed a parameter since.
        """
        if closure is not None:
            raise UnsupportedError("CrossBarrier takes no closure: a closure has to see all parameters changed")
        reducer = self._reducer
        self._carry_out_all()
        if not reducer.is_active or reducer.reduced or reducer.skip:
            if reducer.is_active and reducer.skip:
                reducer.require_reduced()
            _step_of(type(self._original))(self)
            reducer.restart()
            super(_DistributedOptimizer, self).zero_grad()
            return
        slots = reducer.reduce_rest()
        options = _Options(self)
        self._step_on(slots, options)
        reducer.hand_over(options)
        self._gate.held = self if reducer.updates else None

    step = Optimizer.profile_hook_step(step)
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Block until the last step is carried out on all parameters and, after backward passes, gradients are reduced.

        Call it before parameters are read or changed outside the ``forward`` of the module that owns them: to clip,
        average or copy them, for example; and before ``step()`` to see or change gradients.
        """
        self._carry_out_all()
        if self._reducer.is_begun():
            self._reducer.synchronize()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop gradients that have not been used by a ``step()``; those that have are used up anyway."""
        if self._reducer.is_begun():
            self._carry_out_all()
        if self._reducer.discard():
            warnings.warn("zero_grad() before step(): gradients that were being reduced are thrown away", stacklevel=2)
        super(_DistributedOptimizer, self).zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Carry out what is due, then do as the wrapped optimizer does."""
        self._carry_out_all()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Carry out what is due, then do as the wrapped optimizer does."""
        self._carry_out_all()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Carry out what is due, then add a group, whose parameters must be of the model's modules."""
        self._carry_out_all()
        super().add_param_group(param_group)

    def unwrap(self) -> Optimizer:
        """Carry out what is due, stop reducing, and return the wrapped optimizer; this one must not be used again."""
        self._carry_out_all()
        _remove_all(self._hooks)
        return super().unwrap()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._carry_out_all()
        return super().__reduce_ex__(protocol)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() of torch asks for this before it does anything.
        raise UnsupportedError(
            "a GradScaler cannot be used with CrossBarrier, as it must see all gradients before step(); use "
            "DistributedOptimizer, or bfloat16, which needs no scaling"
        )

    def _carry_out_for(self, params: Iterable[torch.Tensor]) -> None:
        reducer = self._reducer
        for param in params:
            slot = reducer.by_id.get(id(param))
            if slot is not None and slot.bucket in reducer.updates:
                assert slot.bucket is not None
                self._carry_out(slot.bucket)

    def _carry_out_all(self) -> None:
        errors: list[CommlibError] = []
        for bucket in list(self._reducer.updates):
            try:
                self._carry_out(bucket)
            except CommlibError as error:
                if bucket in self._reducer.updates:  # a timeout
                    raise
                errors.append(error)
        if errors:
            raise errors[0]

    def _carry_out(self, bucket: _Bucket) -> None:
        """Do what the last step() would have done to the parameters of a bucket."""
        reducer = self._reducer
        options = reducer.updates[bucket]
        try:
            self._step_on(reducer.receive(bucket), options)
        finally:
            if not reducer.updates:
                self._gate.held = None

    def _step_on(self, slots: Sequence[Slot], options: _Options) -> None:
        """Let the wrapped class take a step on some parameters, with their reduced gradients, and drop these."""
        groups = options.restricted_to(slots)
        members = self.__dict__
        usual, members["param_groups"] = members["param_groups"], groups
        try:
            # A forward pass may be what this happens in.
            with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
                if groups:
                    _step_of(type(self._original))(self)
        finally:
            members["param_groups"] = usual
        for slot in slots:
            slot.param.grad = None


def CrossBarrier(  # noqa: N802 - the name scripts use
    model: torch.nn.Module,
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    separable: bool = False,
) -> _CrossBarrier:
    """Wrap ``optimizer`` as DistributedOptimizer does, but let ``step()`` return before all gradients have arrived.

    Each module of ``model`` waits, before its ``forward``, for what belongs to its own parameters, and these are
    changed then, as the parameter groups said when ``step()`` was called. Results are the same, bit by bit.
    ``optimizer`` may be a DistributedOptimizer; it is unwrapped, and its options are taken over. ``named_parameters``:
    default, those of ``model``. For the other arguments see DistributedOptimizer.

    What else reads or changes parameters has to call ``synchronize()`` before: evaluation that uses them not by calling
    the modules of ``model`` that own them, averaging of weights, ``copy.deepcopy``, and what runs after the last step;
    also before ``commlib.shutdown()``. ``state_dict()`` and ``load_state_dict()`` of the model and of the optimizer do
    it themselves. A parameter used too early in a forward pass raises ``RuntimeError`` in the backward pass. Gradients
    are used up by ``step()``: after it ``grad`` is None. What went wrong with a step is raised where it is waited for.

    A model may be compiled by ``torch.compile``, after this or before, but not called before: a compiled model does not
    see the hooks that modules get later (nor does a second model that can use what was compiled for one without them;
    ``torch._dynamo.reset()`` helps). The error above says so.

    The step must treat each parameter without regard to the others: so do those of ``torch.optim``, but for L-BFGS. Of
    others, also classes derived from them, that has to be promised by ``separable=True``. A GradScaler, closures and
    sparse gradients are refused.

    Raises ``ValueError`` for other optimizers, and parameters that are not of ``model``; further what
    DistributedOptimizer raises.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    _check(optimizer, compression, op)
    refuse_asynchronous("CrossBarrier")
    if isinstance(optimizer, _CrossBarrier):
        raise ValueError("the optimizer is a CrossBarrier already")
    original = optimizer._original if isinstance(optimizer, _DistributedOptimizer) else optimizer
    _check_separable(original, separable)
    named = _named(optimizer, model.named_parameters() if named_parameters is None else named_parameters)
    owned = {id(param) for param in model.parameters()}
    strangers = [name for name, param in named if id(param) not in owned]
    if strangers:
        raise ValueError(f"{strangers[0]!r} is not a parameter of the model, so nobody would wait for it")
    if isinstance(optimizer, _DistributedOptimizer):
        taken = optimizer._reducer
        compression, backward_passes_per_step, op = taken._compression, taken.passes, taken.op
        optimizer.unwrap()
    prefix = f"CrossBarrier.{next(_instances)}."
    reducer = _StepReducer(prefix, named, compression, _positive(backward_passes_per_step), op)
    wrapper: _CrossBarrier = _wrapped(original, _CrossBarrier, reducer)
    wrapper._gate, wrapper._hooks = _Gate(), []
    if reducer.is_active:
        wrapper._hooks += _installed(model, wrapper._gate)
        weakref.finalize(reducer, _remove_all, wrapper._hooks).atexit = False
    return wrapper


def _check_separable(optimizer: Optimizer, is_promised: bool) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("CrossBarrier cannot be used with L-BFGS, whose step looks at all parameters together")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("CrossBarrier cannot be used with SparseAdam: sparse gradients cannot be put off")
    if type(optimizer) not in _SEPARABLE and not is_promised:
        raise ValueError(
            f"{name} is not one of torch's own optimizers. If its step treats each parameter without regard to the "
            "others, and keeps nothing in its parameter groups, say so: CrossBarrier(…, separable=True)"
        )


def _step_of(kind: type[Optimizer]) -> Any:
    """The step of a class, without what torch puts around it to run hooks."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _parameters_used_by(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What ``module.forward`` may use while no other module's is called."""
    if isinstance(module, _REACHING_IN):
        yield from module.parameters()
        return
    yield from (param for param in module._parameters.values() if param is not None)
    for child in module._modules.values():
        if isinstance(child, _LISTS):
            yield from child.parameters()


def _installed(model: torch.nn.Module, gate: _Gate) -> list[Any]:
    """Let all modules of ``model`` call ``gate``, before what else they do first; return what takes that back."""
    hooks: list[Any] = []
    for module in model.modules():
        if next(_parameters_used_by(module), None) is not None:
            hooks.append(module.register_forward_pre_hook(gate, prepend=True))
        hooks.append(module.register_state_dict_pre_hook(gate.before_all))
        hooks.append(module._register_load_state_dict_pre_hook(gate.before_all))
    return hooks
