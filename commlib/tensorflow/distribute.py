# SPDX-License-Identifier: Apache-2.0
"""Reduction over processes for a ``tf.distribute`` strategy that has several replicas in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import commlib
from commlib import Average
from commlib.tensorflow.compression import Compression
from commlib.tensorflow.ops import push_pull


class CrossDeviceOps(tf.distribute.CrossDeviceOps):
    """Reduces over the replicas of this process, as TensorFlow does, and then over all ranks.

        strategy = tf.distribute.MirroredStrategy(cross_device_ops=CrossDeviceOps())

    For a strategy of two or more replicas in each process; they have to be as many on all ranks. TensorFlow asks a
    strategy of one replica for nothing, so with one device this raises ``ValueError``: use ``DistributedOptimizer`` or
    ``DistributedGradientTape`` there.

    Scaling: what TensorFlow calls a mean becomes the mean over all replicas of all ranks. What it calls a sum becomes
    the *average over ranks* of their replicas' sums, because ``num_replicas_in_sync``, by which scripts divide the
    loss, counts the replicas of this process alone. So a script that is right in one process is right in several.
    """

    def __init__(self) -> None:
        super().__init__()
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        if len(devices) < 2:
            raise ValueError(
                "with one device TensorFlow reduces nothing, and would never call this: use DistributedOptimizer or "
                "DistributedGradientTape instead of a strategy"
            )
        commlib.size()
        self._local = tf.distribute.ReductionToOneDevice()

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """One value."""
        return self._over_ranks(
            self._local.reduce_implementation(reduce_op, per_replica_value, destinations, options), 0
        )

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        """Several."""
        reduced = self._local.batch_reduce_implementation(reduce_op, value_destination_pairs, options)
        return [self._over_ranks(value, index) for index, value in enumerate(reduced)]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """To the replicas of this process."""
        return self._local.broadcast_implementation(tensor, destinations)

    def _gather_implementation(self, *args: Any, **kwargs: Any) -> Any:
        return self._local._gather_implementation(*args, **kwargs)

    def _over_ranks(self, value: Any, index: int) -> Any:
        if commlib.size() == 1:
            return value
        copies = list(getattr(value, "values", [value]))
        total = push_pull(copies[0], op=Average, compression=Compression.none)
        if len(copies) == 1 and not hasattr(value, "values"):
            return total
        return type(value)([tf.identity(total) for _ in copies])
