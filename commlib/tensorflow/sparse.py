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
from commlib.api import session
from commlib.tensorflow import flights, host


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

    def add_up(step: int, name: str, array: Any) -> flights.Flight:
        flights.settle(name)
        # That all are in the same step is a part of what the core compares.
        shape = [step, *array.shape]
        return name, session().worker.push_pull_ptr(
            array.ctypes.data, array.size, array.dtype.name, None, name, Sum, 0, array, shape
        )

    def run(*arrays: Any) -> list[Any]:
        step = flights.step(name)
        counts = np.zeros((size, len(slices)), np.int64)
        counts[rank] = [len(values) for values in arrays[0::2]]
        flights.wait([add_up(step, f"{name}.counts", counts)])
        submitted: list[flights.Flight] = []
        try:
            for number, array in enumerate(arrays):
                column = counts[:, number // 2]
                begin = int(column[:rank].sum())
                result = commlib.zeros((int(column.sum()), *array.shape[1:]), array.dtype)
                result[begin : begin + len(array)] = array
                if op == Average and number % 2 == 0:
                    np.divide(result, size, out=result, casting="unsafe")
                submitted.append(add_up(step, f"{name}.{number}", result))
        except BaseException:
            flights.leave(submitted)
            raise
        return flights.wait(submitted)

    inputs = [tensor for one in slices for tensor in (one.values, one.indices)]
    outputs = host.call(run, inputs, [tensor.dtype for tensor in inputs])
    together = []
    for one, values, indices in zip(slices, outputs[0::2], outputs[1::2], strict=True):
        values.set_shape([None, *one.values.shape[1:]])
        indices.set_shape([None])
        together.append(tf.IndexedSlices(values, indices, one.dense_shape))
    return together
