# SPDX-License-Identifier: Apache-2.0
"""Making all ranks start from the same state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

import commlib
from commlib.agreement import agree
from commlib.tensorflow import host
from commlib.tensorflow.ops import check_root

_ALIGNMENT = 64


def broadcast_variables(variables: Iterable[Any], root_rank: int, prefix: str = "Variable.") -> None:
    """Overwrite variables (of TensorFlow or Keras) with those of rank ``root_rank`` (a global rank); blocks.

    All ranks give as many variables, of the same shapes and dtypes, in the same order; all travel in one operation,
    bit by bit.
    Raises the same on all ranks, before anything is changed: ``MismatchError`` (a ``ValueError``) that names the first
    difference, ``ValueError`` for a root that there is not, ``UnsupportedError`` for dtypes that cannot be sent.
    ``RuntimeError`` inside a ``tf.function``: call it before, or between two steps.
    """
    if host.in_graph():
        raise RuntimeError("broadcast_variables() works at once: call it outside of tf.function")
    listed = list(variables)
    problem: Exception | None = None
    commlib.size()  # NotInitializedError is no matter for the others
    try:
        check_root(root_rank)
        for variable in listed:
            host.check_dtype(tf.as_dtype(variable.dtype))
    except (TypeError, ValueError) as error:
        problem = error
    facts = [("root_rank", str(root_rank))]
    facts += [(host.plain_name(v), f"{tf.as_dtype(v.dtype).name} of shape {tuple(v.shape)}") for v in listed]
    if commlib.size() == 1:
        if problem is not None:
            raise problem
        return
    agree("variables", facts, problem, f"{prefix}broadcast")
    offsets, end = [], 0
    for variable in listed:
        offsets.append(end)
        nbytes = int(np.prod(tuple(variable.shape), dtype=np.int64)) * tf.as_dtype(variable.dtype).size
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = commlib.empty(end, np.uint8)
    is_root = commlib.rank() == root_rank
    views = [_view(packed, offset, variable) for offset, variable in zip(offsets, listed, strict=True)]
    if is_root:
        for view, variable in zip(views, listed, strict=True):
            np.copyto(view, host.array_of(tf.convert_to_tensor(variable)))
    commlib.broadcast_(packed, root_rank, name=f"{prefix}packed")
    if not is_root:
        for view, variable in zip(views, listed, strict=True):
            variable.assign(tf.convert_to_tensor(view))


def _view(packed: Any, offset: int, variable: Any) -> Any:
    dtype = host.DTYPES[tf.as_dtype(variable.dtype)]
    shape = tuple(variable.shape)
    count = int(np.prod(shape, dtype=np.int64))
    return packed[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the object of rank ``root_rank``, whatever ``obj`` is on the other ranks; blocks. See the core's."""
    return commlib.broadcast_object(obj, root_rank, name=name)
