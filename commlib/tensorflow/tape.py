# SPDX-License-Identifier: Apache-2.0
"""A gradient tape whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from commlib import Average, ReduceOp, Sum
from commlib.api import session
from commlib.tensorflow import host
from commlib.tensorflow.compression import Cast, Compression, checked
from commlib.tensorflow.reducer import reduce_gradients


class _DistributedGradientTape(tf.GradientTape):
    """What DistributedGradientTape puts in front of the user's class. Options lie in a slot, apart from its state."""

    __slots__ = ("_commlib",)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any) -> Any:
        """The gradients, as the wrapped tape has them, reduced over all ranks; blocks."""
        gradients = super().gradient(target, sources, output_gradients, **kwargs)
        options = self._commlib
        local = options["local"]
        flat_sources = tf.nest.flatten(sources)
        flat = tf.nest.flatten(gradients)
        chosen = [i for i, source in enumerate(flat_sources) if _key(source) not in local]
        reduced = reduce_gradients(
            [flat[i] for i in chosen],
            [host.plain_name(flat_sources[i]) for i in chosen],
            op=options["op"],
            name=host.site("GradientTape", options["name"]),
            compression=options["compression"],
            sparse_as_dense=options["sparse_as_dense"],
        )
        for index, one in zip(chosen, reduced, strict=True):
            flat[index] = one
        return tf.nest.pack_sequence_as(gradients, flat)


def DistributedGradientTape(  # noqa: N802 - the name scripts use
    gradtape: tf.GradientTape,
    op: ReduceOp = Average,
    compression: Cast = Compression.none,
    sparse_as_dense: bool = False,
    local_variables: Iterable[Any] = (),
    name: str | None = None,
) -> Any:
    """Wrap a ``tf.GradientTape``: ``gradient()`` returns gradients averaged (or summed) over all ranks.

        with tf.GradientTape() as tape:
            loss = loss_function(model(x), y)
        tape = bps.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    Wrap it before or after it has recorded. ``local_variables`` are those whose gradients stay this rank's own (a
    *partial* tape). ``sparse_as_dense`` makes ``tf.IndexedSlices`` dense before they travel; else the slices of all
    ranks are gathered. A ``name`` is needed only where tapes are used by several threads at once.

    ``gradient()`` blocks and must be called on all ranks in the same order, with the same sources. It raises
    ``MismatchError`` on all ranks where these differ, otherwise what ``push_pull`` raises.
    """
    session()
    if op not in (Average, Sum):
        raise ValueError(f"gradients can be reduced by Average or Sum, not by {op!r}")
    if isinstance(gradtape, _DistributedGradientTape):
        raise ValueError("the tape is a DistributedGradientTape already")
    wrapper: Any = object.__new__(_derived(type(gradtape)))
    wrapper.__dict__ = gradtape.__dict__
    wrapper._commlib = {
        "op": op,
        "compression": checked(compression),
        "sparse_as_dense": sparse_as_dense,
        "local": {_key(variable) for variable in local_variables},
        "name": name,
    }
    return wrapper


_classes: dict[type, type] = {}


def _derived(base: type) -> type:
    """One class for all tapes of a class: a class each would be a leak."""
    if base not in _classes:
        _classes[base] = type(base.__name__, (_DistributedGradientTape, base), {"__module__": base.__module__})
    return _classes[base]


def _key(source: Any) -> int:
    """What a variable is known by, whether it is Keras's or TensorFlow's."""
    return id(getattr(source, "value", source) if not isinstance(source, tf.Variable) else source)
