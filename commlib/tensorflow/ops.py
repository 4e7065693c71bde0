# SPDX-License-Identifier: Apache-2.0
"""Operations on TensorFlow's tensors, in eager mode and in ``tf.function``.

Gradients. What is differentiated is the *sum over all ranks of what each of them calls its loss*. A rank's input goes
into the results of all ranks, so its gradient is the sum of what all of them have to say: that of a Sum is the sum of
the incoming gradients, that of an Average their average, that of a broadcast their sum at the root and zero elsewhere.
Each gradient is an operation of its own, differentiable again, so all ranks have to take it or none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import commlib
from commlib import Average, ReduceOp, Sum
from commlib.api import session
from commlib.tensorflow import host
from commlib.tensorflow.compression import Cast, Compression, checked


def push_pull(
    tensor: Any,
    scope: str = "",
    average: bool | None = None,
    op: ReduceOp | None = None,
    name: str | None = None,
    compression: Cast = Compression.none,
) -> Any:
    """Return the average (or ``op``) of ``tensor`` over all ranks, in the same shape and dtype; blocks.

    ``tensor`` is a tensor, a variable, what can be converted to one, a ``tf.IndexedSlices`` (of which the slices of all
    ranks are gathered; Average or Sum only), or a nested structure of these, one after the other.
    Every rank must call this with the same structure, shapes, dtypes and operation. ``average=False`` is short for
    ``op=Sum``. Without a ``name`` (``scope`` goes before it), calls are matched by their order in the program, and in a
    ``tf.function`` by their place in it. The result is nobody else's: later operations do not change it.

    Differentiable for Average and Sum (see the head of this module), any number of times.

    Dtypes: bool (not Average), uint8, int8 to int64, float16, bfloat16, float32, float64. Raises ``ValueError`` if
    ``average`` and ``op`` contradict each other, ``UnsupportedError`` for what cannot be sent, or compiled by XLA;
    ``MismatchError`` if the ranks disagree, ``PeerLostError`` if one is gone. Inside a ``tf.function`` TensorFlow
    raises a ``tf.errors.OpError`` with the text of these; see ``last_error()``.
    """
    operation = _operation(average, op)
    checked(compression)
    session()
    host.refuse_xla("push_pull")
    full_name = None if name is None and not scope else f"{scope}{name or ''}"
    leaves = tf.nest.flatten(tensor, expand_composites=False)
    names = [full_name if full_name is None or len(leaves) == 1 else f"{full_name}.{i}" for i in range(len(leaves))]
    reduced = [_push_pull(leaf, operation, one, compression) for leaf, one in zip(leaves, names, strict=True)]
    return tf.nest.pack_sequence_as(tensor, reduced, expand_composites=False)


def _operation(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if op is None:
        return Sum if average is False else Average
    if average is not None and average != (op == Average):
        raise ValueError(f"average={average} contradicts op={op!r}")
    return ReduceOp(op)


def _push_pull(tensor: Any, op: ReduceOp, name: str | None, compression: Cast) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        from commlib.tensorflow.sparse import gathered

        return gathered([tensor], op, host.site("push_pull", name))[0]
    tensor = tf.convert_to_tensor(tensor)
    host.check_dtype(tensor.dtype)
    return _differentiable(tensor, op, host.site("push_pull", name), compression)


def _differentiable(tensor: tf.Tensor, op: ReduceOp, name: str, compression: Cast) -> tf.Tensor:
    @tf.custom_gradient
    def reduced(x: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            if op not in (Average, Sum):
                raise LookupError(f"push_pull has no gradient for op={op!r}, only for Average and Sum")
            return _differentiable(tf.convert_to_tensor(upstream), op, f"{name}/gradient", compression)

        return _reduce(x, op, name, compression), gradient

    return reduced(tensor)


def _reduce(tensor: tf.Tensor, op: ReduceOp, name: str, compression: Cast) -> tf.Tensor:
    wire = compression.on_wire(tensor.dtype)

    def run(array: Any) -> Any:
        out = host.empty(array.shape, wire)
        commlib.push_pull(array, name=name, op=op, out=out)
        return [out]

    (result,) = host.call(run, [tf.cast(tensor, wire)], [wire])
    result.set_shape(tensor.shape)
    return tf.cast(result, tensor.dtype)


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Return the tensor of rank ``root_rank`` (a global rank), in a new tensor; blocks.

    All ranks give a tensor of the same shape and dtype; of the others' nothing but that matters. Differentiable.
    Raises ``ValueError`` for a root that there is not, otherwise what ``push_pull`` raises.
    """
    check_root(root_rank)
    host.refuse_xla("broadcast")
    tensor = tf.convert_to_tensor(tensor)
    host.check_dtype(tensor.dtype)
    return _broadcast(tensor, root_rank, host.site("broadcast", name))


def _broadcast(tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
    is_root = commlib.rank() == root_rank

    def run(array: Any) -> Any:
        out = host.empty(array.shape, tensor.dtype)
        if is_root:
            np.copyto(out, array)
        commlib.broadcast_(out, root_rank, name=name)
        return [out]

    @tf.custom_gradient
    def received(x: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            total = _differentiable(tf.convert_to_tensor(upstream), Sum, f"{name}/gradient", Compression.none)
            return total if is_root else tf.zeros_like(total)

        (result,) = host.call(run, [x], [x.dtype])
        result.set_shape(x.shape)
        return result, gradient

    return received(tensor)


def check_root(root_rank: int) -> None:
    """Raise ``ValueError`` for a root that there is not."""
    if not 0 <= root_rank < commlib.size():
        raise ValueError(f"root_rank is {root_rank}, but ranks go from 0 to {commlib.size() - 1}")
