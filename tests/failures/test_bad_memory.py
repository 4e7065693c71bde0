# SPDX-License-Identifier: Apache-2.0
"""A rank that gives memory which is not there: all others learn who it was, whatever becomes of that rank itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.failures.losses import Loss
from tests.launch import Job

UNREADABLE = """
    import ctypes, mmap, os, sys
    import numpy as np, commlib
    from commlib.api import session
    from tests.failures.losses import give_loss

    COUNT = 1_000_000
    commlib.init()
    tensor = np.ones(COUNT)
    address = tensor.ctypes.data
    if commlib.rank() == 1:
        memory = mmap.mmap(-1, 8 * COUNT)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(address, 8 * COUNT, 0) == 0  # unmapped, but that nobody else gets these addresses
    if sys.argv[1] == "sum":
        give_loss(lambda: commlib.push_pull_ptr(address, COUNT, "float64", name="bad", op=commlib.Sum).wait(20))
    else:
        give_loss(lambda: session().worker.broadcast_ptr(address, COUNT, "float64", 1, "bad", 0, tensor).wait(20))
    if commlib.rank() == 1:
        os._exit(0)  # and no destructor looks for the memory
"""


@pytest.mark.parametrize("what", ["sum", "broadcast"])
@pytest.mark.parametrize("hosts", [[2], [3], [1, 1]])
def test_who_gave_it_is_named(hosts: Sequence[int], what: str) -> None:
    with Job(UNREADABLE, hosts=hosts, args=[what]) as job:
        outcomes = job.await_end(range(sum(hosts)), timeout=30)
        job.wait(10)
    for rank, outcome in enumerate(outcomes):
        if rank == 1 and outcome.status != 0:
            continue  # its own processor has found out
        assert isinstance(outcome.value, Loss), outcome
        assert outcome.value.rank == 1, outcome
        # Between hosts the connection on which it would be said is the one that fails.
        if outcomes[1].status == 0 and len(hosts) == 1:
            assert "cannot be read" in outcome.value.text, outcome
