# SPDX-License-Identifier: Apache-2.0
"""commlib as a backend of torch.distributed.

    import commlib.torch.distributed
    torch.distributed.init_process_group("commlib")

Under torchrun, or with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set, or with any other store and
rank that torch is given; and under ``commlib run`` and the other launchers that commlib knows, where it calls
``commlib.init()`` to find torch's store. Otherwise it neither needs nor disturbs ``commlib.init()``. On several hosts
all need the job's secret, see ``COMMLIB_SECRET``. ``COMMLIB_*`` variables of tuning and time limits count.

What there is: all_reduce (SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR, BXOR; sparse ones by SUM and AVG), reduce,
reduce_scatter, broadcast, all_gather, gather, scatter, all_to_all, send, recv, barrier, in all their forms, of tensors
in CPU memory; and what torch builds on them: object collectives, functional collectives, DistributedDataParallel,
FSDP2, DTensor. Not: ``recv`` from any source, PREMUL_SUM, ``monitored_barrier`` (gloo's alone), other devices.

Numerics are those of :func:`commlib.push_pull`: a 16-bit sum is accumulated in float32, all ranks get the same bits.
What is only moved arrives bit for bit, whatever its dtype.

The rules are those of gloo and NCCL: all ranks of a group start its operations in the same order. Tensors belong to an
operation until its ``wait()`` has returned. Unlike there, ranks that disagree about the order, the kind, the reduction,
the root, a dtype or a shape get MismatchError, all of them, and the group can be used further. Messages too must agree
in dtype and shape; they match by group, sender, receiver and tag, in order. When a member is lost, all others get
PeerLostError. ``wait`` raises what has happened, as OperationTimeout when the group's ``timeout`` has passed; the
operation then stays in flight and may be waited for again.

How it is done. Each group has a session of commlib of its own: the group of the whole job from the beginning, others
from their first operation on; and so have two ranks that exchange messages in a group. A session costs some threads, 20
descriptors, and a small process at its first rank, and is made in about 0.3 s, during which asynchronous operations
wait in the background. The core can sum and broadcast, so gathering is one broadcast for each rank (one sum where
little is gathered), and a reduce_scatter is a sum of which each rank keeps its part. gather, scatter and all_to_all
bring everything to everybody: they are complete, not fast.

A group has 64 names for its operations, used in turn, so that is how many may be in flight at once; further ones are
begun when the oldest have ended, in the background too.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from commlib.torch.distributed.group import ProcessGroup
from commlib.torch.distributed.rendezvous import register
from commlib.torch.distributed.work import Work

__all__ = ["BACKEND", "ProcessGroup", "Work"]

BACKEND = "commlib"


def _make(options: Any, _: Any) -> ProcessGroup:
    """What torch calls when a group of this backend is made; `options` say which."""
    return ProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,
    )


if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    register()
