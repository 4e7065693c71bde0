# SPDX-License-Identifier: Apache-2.0
"""commlib for PyTorch. A BytePS script runs with ``import commlib.torch as bps``."""

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
    rank,
    shutdown,
    size,
)
from commlib.elastic import resume, suspend
from commlib.torch import amp, cross_barrier, parallel
from commlib.torch.compression import Compression
from commlib.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from commlib.torch.ops import (
    Handle,
    broadcast,
    broadcast_,
    byteps_torch_set_num_grads,
    declare,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_group_sync_inplace,
    push_pull_inplace,
    synchronize,
)
from commlib.torch.optimizer import DistributedOptimizer

byteps_push_pull = push_pull_async_inplace

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "amp",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "byteps_torch_set_num_grads",
    "cross_barrier",
    "declare",
    "get_push_pull_speed",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "parallel",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group_sync_inplace",
    "push_pull_inplace",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]
