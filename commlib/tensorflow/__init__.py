# SPDX-License-Identifier: Apache-2.0
"""commlib for TensorFlow and Keras 3. A BytePS script runs with ``import commlib.tensorflow as bps``."""

from __future__ import annotations

from commlib import (
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    barrier,
    get_push_pull_speed,
    init,
    is_initialized,
    local_rank,
    local_size,
    num_nodes,
    rank,
    shutdown,
    size,
)
from commlib.elastic import resume, suspend
from commlib.tensorflow.compression import Compression
from commlib.tensorflow.functions import broadcast_object, broadcast_variables
from commlib.tensorflow.host import last_error
from commlib.tensorflow.ops import broadcast, push_pull
from commlib.tensorflow.tape import DistributedGradientTape

__all__ = [
    "Average",
    "Compression",
    "DistributedGradientTape",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "get_push_pull_speed",
    "init",
    "is_initialized",
    "last_error",
    "local_rank",
    "local_size",
    "num_nodes",
    "push_pull",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
]
