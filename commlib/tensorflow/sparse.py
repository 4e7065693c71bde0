# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients (``tf.IndexedSlices``): the slices of all ranks, one rank's after the other's, none made dense.

How many each rank has is found out first, by one sum of a few numbers for all of them together. Then everybody adds its
slices, and zeros where those of the others are, so that the sum is what all have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import commlib
from commlib import Average, ReduceOp, Sum
from commlib.errors import CommlibError, OperationTimeout
from commlib.tensorflow import host


def gathered(slices: Sequence[tf.IndexedSlices], op: ReduceOp, name: str) -> list[tf.IndexedSlices]:
    """The slices of all ranks; for Average their values are divided by the number of ranks. Blocks.

    A sum over them is what a sum over the ranks of dense gradients would be. Ranks may have different numbers of
    slices, also none. Raises ``ValueError`` for another ``op``.
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors can be combined by Average or Sum, not by {op!r}")
    if commlib.size() == 1:
        return list(slices)
    for one in slices:
        host.check_dtype(one.values.dtype)
    rank, size = commlib.rank(), commlib.size()

    def run(*arrays: Any) -> list[Any]:
        counts = np.zeros((size, len(slices)), np.int64)
        counts[rank] = [len(values) for values in arrays[0::2]]
        commlib.push_pull_(counts, name=f"{name}.counts", op=Sum)
        results, handles = [], []
        for number, array in enumerate(arrays):
            column = counts[:, number // 2]
            begin = int(column[:rank].sum())
            result = commlib.zeros((int(column.sum()), *array.shape[1:]), array.dtype)
            result[begin : begin + len(array)] = array
            if op == Average and number % 2 == 0:
                np.divide(result, size, out=result, casting="unsafe")
            results.append(result)
            handles.append(commlib.push_pull_async_(result, name=f"{name}.{number}", op=Sum))
        _await_all(handles)
        return results

    inputs = [tensor for one in slices for tensor in (one.values, one.indices)]
    outputs = host.call(run, inputs, [tensor.dtype for tensor in inputs])
    together = []
    for one, values, indices in zip(slices, outputs[0::2], outputs[1::2], strict=True):
        values.set_shape([None, *one.values.shape[1:]])
        indices.set_shape([None])
        together.append(tf.IndexedSlices(values, indices, one.dense_shape))
    return together


def _await_all(handles: Sequence[commlib.Handle]) -> None:
    """Wait for all, then raise the first error: what is left in flight has its name, which the next step needs."""
    errors = []
    for handle in handles:
        try:
            handle.wait()
        except OperationTimeout:
            raise
        except CommlibError as error:
            errors.append(error)
    if errors:
        raise errors[0]
