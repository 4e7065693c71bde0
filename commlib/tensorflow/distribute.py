# SPDX-License-Identifier: Apache-2.0
"""Reduction over processes for a ``tf.distribute`` strategy that has several replicas in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import commlib
from commlib import Average
from commlib.tensorflow import host
from commlib.tensorflow.compression import Cast, Compression, checked
from commlib.tensorflow.reducer import reduce_gradients


class CrossDeviceOps(tf.distribute.CrossDeviceOps):
    """Reduces over the replicas of this process, as TensorFlow does, and then over all ranks.

        strategy = tf.distribute.MirroredStrategy(cross_device_ops=CrossDeviceOps())

    For a ``MirroredStrategy`` of two or more replicas in each process, as many on all ranks, with a plain optimizer.
    TensorFlow reduces nothing for a strategy of one replica, so with one device this raises ``ValueError``: use
    ``DistributedOptimizer`` or ``DistributedGradientTape`` there.

    What comes here is what replicas reduce among themselves, by ``tf.distribute.get_replica_context().all_reduce()``:
    the gradients of every Keras optimizer do. What a strategy reduces onto a CPU, by ``strategy.reduce()`` or into a
    variable with an ``aggregation``, TensorFlow does itself, and it stays this process's own: average it with
    ``push_pull()``.

    Scaling: what TensorFlow calls a mean becomes the mean over all replicas of all ranks. What it calls a sum becomes
    the *average over ranks* of their replicas' sums, because ``num_replicas_in_sync``, by which scripts and Keras
    divide the loss, counts the replicas of this process alone. So a script that is right in one process is right in
    several, and its learning rate means the same.
    """

    def __init__(self, *, compression: Cast = Compression.none, sparse_as_dense: bool = False) -> None:
        """``compression`` and ``sparse_as_dense`` are as ``DistributedOptimizer``'s. Call ``init()`` first."""
        super().__init__()
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        if len(devices) < 2:
            raise ValueError(
                "with one device TensorFlow reduces nothing, and would never call this: use DistributedOptimizer or "
                "DistributedGradientTape instead of a strategy"
            )
        commlib.size()
        self._compression = checked(compression)
        self._sparse_as_dense = sparse_as_dense
        self._local = tf.distribute.ReductionToOneDevice()

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """One value."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        """Several, together."""
        of_process = self._local.batch_reduce_implementation(reduce_op, value_destination_pairs, options)
        if commlib.size() == 1:
            return list(of_process)
        of_all = reduce_gradients(
            [getattr(value, "values", [value])[0] for value in of_process],
            [f"value {number}" for number in range(len(of_process))],
            op=Average,
            name=host.site("CrossDeviceOps"),
            compression=self._compression,
            sparse_as_dense=self._sparse_as_dense,
        )
        return [
            self._local.broadcast_implementation(value, destinations)
            for value, (_, destinations) in zip(of_all, value_destination_pairs, strict=True)
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """To the replicas of this process."""
        return self._local.broadcast_implementation(tensor, destinations)

    def _gather_implementation(self, *args: Any, **kwargs: Any) -> Any:
        return self._local._gather_implementation(*args, **kwargs)
