# SPDX-License-Identifier: Apache-2.0
"""Every owner carries its share of the bytes: what makes the two hops between hosts take the least possible time."""

from __future__ import annotations

import re

import pytest

from tests.lab import Lab
from tests.launch import Job

KIB = 1 << 10

SCRIPT = """
    import numpy as np, commlib
    from commlib import Sum, api
    from tests.launch import give

    commlib.init()
    arrays = [np.full(300 * 1024 // 4, t + commlib.rank(), np.float32) for t in range(64)]
    handles = [commlib.push_pull_async_(array, name=f"t{t}", op=Sum) for t, array in enumerate(arrays)]
    for t, handle in enumerate(handles):
        assert np.all(handle.wait() == 4 * t + 6)
    session = api.session()
    commlib.shutdown()
    give(session.worker.owner_bytes())
"""


@pytest.mark.lab
@pytest.mark.parametrize("partition_kib", [4096, 64])
def test_owners_carry_their_shares(partition_kib: int, lab: Lab) -> None:
    n, k = 4, 2
    total = 64 * 300 * KIB
    env = {"COMMLIB_LOG_LEVEL": "INFO", "COMMLIB_PARTITION_BYTES": str(partition_kib * KIB)}
    with Job(SCRIPT, hosts=[1] * n, servers=k, lab=lab, env=env) as job:
        outcomes = job.wait(60)
    assert [outcome.status for outcome in outcomes] == [0] * (n + k), "\n".join(map(str, outcomes))
    colocated = [outcome.value for outcome in outcomes[:n]]
    dedicated = []
    for outcome in outcomes[n:]:
        served = re.search(r"received (\d+) bytes of pushes, sent (\d+) bytes of results", outcome.stderr)
        assert served is not None, outcome
        dedicated.append((int(served[1]), int(served[2])))

    # A colocated owner needs nothing from its own host over the network.
    parts = n * n + k * n - 2 * k
    for carried, share, hosts in [(colocated, (n - k) / parts, n - 1), (dedicated, 2 * (n - 1) / parts, n)]:
        for received, sent in carried:
            assert received == pytest.approx(share * hosts * total, rel=0.03)
            assert sent == pytest.approx(share * hosts * total, rel=0.03)
    assert (
        sum(received for received, _ in colocated) / (n - 1) + sum(received for received, _ in dedicated) / n == total
    )
