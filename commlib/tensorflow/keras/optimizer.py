# SPDX-License-Identifier: Apache-2.0
"""Keras optimizers whose gradients are reduced over all ranks before they are applied.

Design notes. The user's object stays the same object; it only gets a class derived from its own, and does not let on.
So it is saved, configured and loaded as the plain optimizer, by programs that know no commlib.

``fit``, ``apply_gradients`` and ``apply`` all come by ``_clip_gradients``: after Keras has accumulated gradients over
steps, before it clips them. There they are reduced. An optimizer whose ``apply`` takes another way raises while it is
traced: silently, nothing would be reduced.

A LossScaleOptimizer skips a step when a gradient is not finite. Ranks have to agree about that before anything is
skipped, or one would wait for the others for ever. So it gets a class of its own too, wherever it comes from: given to
``DistributedOptimizer``, or put around one by ``compile()``, which is noticed when it has the optimizer built.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import commlib
from commlib import Average, Min, ReduceOp, Sum
from commlib.api import session
from commlib.errors import UnsupportedError
from commlib.tensorflow.compression import Cast, Compression, checked
from commlib.tensorflow.ops import push_pull
from commlib.tensorflow.reducer import reduce_gradients

# Told apart by the order in which the program makes them, which is the same on all ranks.
_instances = itertools.count()
_STATE = "_commlib"  # in the optimizer's __dict__, where Keras does not track it
_classes: dict[tuple[type, type], type] = {}


class _State:
    def __init__(self, op: ReduceOp, compression: Cast, sparse_as_dense: bool) -> None:
        self.op = op
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.name = f"keras.DistributedOptimizer.{next(_instances)}"
        self.is_reached = False  # by the `apply` that runs

    def __deepcopy__(self, memo: Any) -> _State:
        return _State(self.op, self.compression, self.sparse_as_dense)


class _DistributedOptimizer:
    """The methods in front of those of the user's class."""

    def build(self, variables: Sequence[Any]) -> None:
        """Build as the plain optimizer does. Whoever scales the loss around this one is made to agree with others."""
        outer = _loss_scale_around(self)
        if outer is not None:
            _agree_about_finiteness(outer)
        super().build(variables)  # type: ignore[misc]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Apply gradients, reduced over all ranks."""
        state = self.__dict__[_STATE]
        outer = _loss_scale_around(self)
        if outer is not None and not isinstance(outer, _LossScale):
            raise UnsupportedError(
                "a LossScaleOptimizer was put around a DistributedOptimizer after that had been built, and would skip "
                "steps without asking the other ranks: wrap it instead, DistributedOptimizer(LossScaleOptimizer(…))"
            )
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise UnsupportedError(
                "DistributedOptimizer is for one replica a process; give a MirroredStrategy of several "
                "cross_device_ops=commlib.tensorflow.distribute.CrossDeviceOps(), and use the plain optimizer"
            )
        state.is_reached = False
        super().apply(grads, trainable_variables)  # type: ignore[misc]
        if not state.is_reached and any(grad is not None for grad in grads):
            raise UnsupportedError(
                f"{type(self).__name__} does not call _clip_gradients() where Keras's own optimizers do, so its "
                "gradients cannot be reduced: use DistributedGradientTape in a train_step() of your own"
            )

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        state = self.__dict__[_STATE]
        state.is_reached = True
        reduced = reduce_gradients(
            grads,
            [f"gradient {index}" for index in range(len(grads))],
            op=state.op,
            name=state.name,
            compression=state.compression,
            sparse_as_dense=state.sparse_as_dense,
        )
        return super()._clip_gradients(reduced)  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """A plain optimizer: whoever reads a configuration may not have the same ranks, or any."""
        return _plain(cls).from_config(config)


class _LossScale:
    """The methods in front of those of LossScaleOptimizer."""

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Whether all gradients of all ranks are finite."""
        here = super().check_finite(grads)  # type: ignore[misc]
        if commlib.size() == 1:
            return here
        name = f"{_innermost(self).__dict__[_STATE].name}.finite"
        return push_pull(here, op=Min, name=name)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """A plain one."""
        return _plain(cls).from_config(config, custom_objects=custom_objects)


def DistributedOptimizer(  # noqa: N802 - the name scripts use
    optimizer: Any,
    op: ReduceOp = Average,
    compression: Cast = Compression.none,
    sparse_as_dense: bool = False,
) -> Any:
    """Make a Keras 3 optimizer reduce gradients over all ranks before it applies them; returns it.

        model.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1 * bps.size())), loss=…)

    It works in ``fit``, in ``apply_gradients`` and in ``apply``. Gradients are averaged (``op=Average``) or summed
    (``op=Sum``) after Keras has accumulated them over ``gradient_accumulation_steps``, before clipping and weight
    decay, which so see what one process would see with the whole batch. ``optimizer`` stays the same object and of the
    same class as far as ``isinstance``, ``get_config()``, saving and loading are concerned: what is loaded is plain
    (see ``load_model``). A ``LossScaleOptimizer``, given here or put around it by ``compile()`` under
    ``mixed_float16``, skips the same steps on all ranks. ``sparse_as_dense`` makes sparse gradients dense before they
    travel.

    All ranks must make their optimizers in the same order and apply gradients equally often. A step raises
    ``MismatchError`` on all ranks if their variables differ, ``PeerLostError`` if a rank is gone; inside ``fit``
    TensorFlow raises these as ``tf.errors.OpError`` (see ``commlib.tensorflow.last_error``).

    Raises ``TypeError`` for what is no Keras 3 optimizer, ``ValueError`` for one that is wrapped already or another
    ``op``, ``NotInitializedError``.
    """
    session()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"expected a keras.optimizers.Optimizer of Keras 3, got {type(optimizer).__name__}")
    if op not in (Average, Sum):
        raise ValueError(f"gradients can be reduced by Average or Sum, not by {op!r}")
    inner = _innermost(optimizer)
    if isinstance(inner, _DistributedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    inner.__dict__[_STATE] = _State(op, checked(compression), sparse_as_dense)
    inner.__class__ = _derived(_DistributedOptimizer, type(inner))
    if optimizer is not inner:
        _agree_about_finiteness(optimizer)
    return optimizer


def load_model(filepath: Any, custom_objects: Any = None, **options: Any) -> Any:
    """Load a model as ``keras.models.load_model`` does, and wrap its optimizer; ``options`` as there."""
    model = keras.models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, **options)
    return model


def _innermost(optimizer: Any) -> Any:
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _agree_about_finiteness(optimizer: Any) -> None:
    if not isinstance(optimizer, _LossScale):
        optimizer.__class__ = _derived(_LossScale, type(optimizer))


def _derived(front: type, base: type) -> type:
    key = front, base
    if key not in _classes:
        # Keras looks at `__class__` to name what it saves.
        names = {"__module__": base.__module__, "__doc__": base.__doc__, "__class__": property(lambda _: base)}
        _classes[key] = type(base.__name__, (front, base), names)
    return _classes[key]


def _plain(cls: type) -> Any:
    return next(base for base in cls.__mro__[1:] if not issubclass(base, (_DistributedOptimizer, _LossScale)))


def _loss_scale_around(optimizer: Any) -> Any:
    """The LossScaleOptimizer that calls this one, if any: it stands in a frame of the stack."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, keras.optimizers.LossScaleOptimizer) and candidate.inner_optimizer is optimizer:
            return candidate
        frame = frame.f_back
    return None
