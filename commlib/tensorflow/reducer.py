# SPDX-License-Identifier: Apache-2.0
"""The gradients of a step, reduced over all ranks through few calls of the host.

Design notes. A call from a graph to the host costs as much for each result as a small gradient takes to be summed. So
dense gradients are dealt into at most four groups a dtype, in the order in which a backward pass computes them. One
call for each group copies them into a flat buffer of the arena and submits that, as soon as the last of them is there;
that of the last group then waits for all groups and gives the flat buffers to TensorFlow, which splits them in the
graph. What the next forward pass needs first has the highest priority.

Ranks must agree about names (as ``host.plain_name`` has them), shapes and dtypes of the variables. The first time they
compare them, so that a disagreement is told in words; later the shapes, as a part of what the core compares in each
round, guard against changes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import commlib
from commlib import ReduceOp
from commlib.agreement import agree
from commlib.api import session
from commlib.tensorflow import flights, host
from commlib.tensorflow.compression import Cast
from commlib.tensorflow.sparse import gathered

MAX_GROUPS = 4  # a dtype
LEAST_GROUP_BYTES = 1 << 20

# Names whose gradients have been compared, by session: in another one there may be ranks that have not.
_agreed: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class _Group:
    """Gradients of one dtype that travel together."""

    def __init__(self, members: list[int], shapes: list[tuple[int, ...]], dtype: tf.DType, wire: tf.DType) -> None:
        self.members = members  # numbers of gradients
        self.shapes = shapes
        self.dtype = dtype
        self.wire = wire
        self.counts = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        self.are_flat = all(len(shape) == 1 for shape in shapes)
        # What ranks must agree on: all shapes, one after the other.
        self.signature = [number for shape in shapes for number in (len(shape), *shape)]


class _Step:
    """One call site: what its host calls share."""

    def __init__(self, groups: list[_Group], op: ReduceOp, name: str, facts: list[tuple[str, str]]) -> None:
        self._groups = groups
        self._op = op
        self._name = name
        self._facts = facts
        self._lock = threading.Lock()
        self._pending: dict[int, flights.Flight] = {}  # by group
        commlib.declare([(self._name_of(i), sum(g.counts) * g.wire.size) for i, g in enumerate(groups)])

    def _name_of(self, number: int) -> str:
        return f"{self._name}.{number}"

    def submit(self, number: int, *arrays: Any) -> list[Any]:
        """Copy the gradients of a group into a flat buffer, and start to reduce it."""
        group = self._groups[number]
        self._compare()
        flat = host.empty((sum(group.counts),), group.wire)
        # A view of each costs as much as a small gradient's copy.
        parts = arrays if group.are_flat else [array.reshape(-1) for array in arrays]
        np.concatenate(parts, out=flat, casting="unsafe")
        with self._lock:
            left_over = self._pending.pop(number, None)  # of a step that ended before its last call
        if left_over is not None:
            flights.leave([left_over])
        name = self._name_of(number)
        flights.settle(name)
        handle = session().worker.push_pull_ptr(
            flat.ctypes.data,
            flat.size,
            group.wire.name,
            None,
            name,
            self._op,
            number,  # the last to come is the first that is needed
            flat,
            group.signature,
        )
        with self._lock:
            self._pending[number] = name, handle
        return [np.zeros((), np.int32)]

    def finish(self, *inputs: Any) -> list[Any]:
        """Submit the last group, after what the calls for the others have returned; the flat buffers, reduced."""
        before = len(self._groups) - 1
        self.submit(before, *inputs[before:])
        results = []
        with self._lock:
            pending = [self._pending.pop(number) for number in range(len(self._groups))]
        flats = flights.wait(pending)
        for group, flat in zip(self._groups, flats, strict=True):
            if group.wire is not group.dtype:
                wide = host.empty(flat.shape, group.dtype)
                np.copyto(wide, flat, casting="unsafe")
                results.append(wide)
            else:
                results.append(flat)
        return results

    def _compare(self) -> None:
        agreed = _agreed.setdefault(session(), set())
        if self._name in agreed:
            return
        agree("gradients", self._facts, None, self._name)
        agreed.add(self._name)


def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    *,
    op: ReduceOp,
    name: str,
    compression: Cast,
    sparse_as_dense: bool,
) -> list[Any]:
    """Reduce gradients (tensors, ``tf.IndexedSlices`` or None) over all ranks; blocks, or is traced.

    ``names`` say what each is the gradient of. All ranks call this with as many, of the same shapes and dtypes, and
    None in the same places. ``name`` is what the names of the operations begin with.
    """
    results = list(gradients)
    if commlib.size() == 1:
        return results
    host.refuse_xla("the reduction of gradients")
    sparse = []
    dense: dict[int, tf.Tensor] = {}
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
            sparse.append(index)
        elif gradient is not None:
            dense[index] = tf.convert_to_tensor(gradient)
            host.check_dtype(dense[index].dtype)
            if not dense[index].shape.is_fully_defined():
                raise ValueError(f"the gradient of {names[index]!r} has no static shape: {dense[index].shape}")
    facts = [(names[index], _described(gradient, index in dense)) for index, gradient in enumerate(gradients)]
    groups = _groups(dense, compression)
    step = _Step(groups, op, name, facts)
    # In the order in which a backward pass computes them: the last ones first.
    tokens = [
        host.call(
            lambda *arrays, number=number: step.submit(number, *arrays), [dense[i] for i in group.members], [tf.int32]
        )
        for number, group in enumerate(groups[:-1])
    ]
    if sparse:
        together = gathered([gradients[index] for index in sparse], op, f"{name}.sparse")
        for index, one in zip(sparse, together, strict=True):
            results[index] = one
    if groups:
        inputs = [token for (token,) in tokens] + [dense[i] for i in groups[-1].members]
        for group, flat in zip(groups, host.call(step.finish, inputs, [group.dtype for group in groups]), strict=True):
            flat.set_shape([sum(group.counts)])
            for index, shape, part in zip(group.members, group.shapes, tf.split(flat, group.counts), strict=True):
                results[index] = part if len(shape) == 1 else tf.reshape(part, shape)
    return results


def _described(gradient: Any, is_dense: bool) -> str:
    if gradient is None:
        return "no gradient"
    kind = "" if is_dense else "sparse "
    return f"{kind}{gradient.dtype.name} of shape {tuple(gradient.shape)}"


def _groups(dense: dict[int, tf.Tensor], compression: Cast) -> list[_Group]:
    """At most four for each dtype, of about the same number of bytes, from the last gradient to the first."""
    by_dtype: dict[tf.DType, list[int]] = {}
    for index in sorted(dense, reverse=True):
        by_dtype.setdefault(dense[index].dtype, []).append(index)
    groups = []
    for dtype, indices in by_dtype.items():
        total = sum(dense[index].shape.num_elements() for index in indices) * dtype.size
        least = max(LEAST_GROUP_BYTES, -(-total // MAX_GROUPS))
        members: list[int] = []
        held = 0
        for index in indices:
            members.append(index)
            held += dense[index].shape.num_elements() * dtype.size
            if held >= least or index == indices[-1]:
                shapes = [tuple(dense[i].shape.as_list()) for i in members]
                groups.append(_Group(members, shapes, dtype, compression.on_wire(dtype)))
                members, held = [], 0
    return groups
