# SPDX-License-Identifier: Apache-2.0
"""Nothing grows with the number of operations: neither memory nor descriptors."""

from __future__ import annotations

import json

import pytest

from tests.lab import Lab
from tests.launch import run_job

# 1 KiB again and again, in every way there is to submit it. What is left over is measured after the first few
# thousand, when every key of the 1,024 for what has no name has been used in an even and an odd round, and at the end.
SCRIPT = """
    import gc, json, os, sys
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    total = json.loads(sys.argv[1])
    commlib.init()
    size = commlib.size()
    ordinary, arena = np.ones(256, np.float32), commlib.empty(256, np.float32)
    ways = [
        lambda: commlib.push_pull(ordinary, name="named", op=Sum),
        lambda: commlib.push_pull(ordinary, op=Sum),
        lambda: commlib.push_pull_async(arena, name="in the arena", op=Sum).wait(),
        lambda: [handle.wait() for handle in [commlib.push_pull_async(ordinary, op=Sum) for _ in range(5)]][-1],
        lambda: commlib.push_pull(arena, name="to there", op=Sum, out=ordinary.copy()),
    ]

    def run(operations):
        for _ in range(operations // 9):
            for way in ways:
                arena.fill(1)
                result = way()
            assert np.all(result == size)

    def held():
        commlib.barrier()
        gc.collect()
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    run(4000)
    before = held()
    run(total)
    give((before, held()))
    commlib.shutdown()
"""


def check(results: list[tuple[tuple[int, int, int], tuple[int, int, int]]]) -> None:
    for before, after in results:
        assert after[0] - before[0] < 1 << 20
        # Fewer are no leak: what the start has needed may be given back late.
        assert after[1] <= before[1]
        assert after[2] <= before[2]


def test_one_host() -> None:
    check(run_job(SCRIPT, hosts=[2], args=[json.dumps(100_000)], timeout=100))


@pytest.mark.lab
@pytest.mark.parametrize(("hosts", "servers", "operations"), [([1, 1], 0, 40_000), ([2, 1], 1, 20_000)], ids=str)
def test_several_hosts(hosts: list[int], servers: int, operations: int, lab: Lab) -> None:
    check(run_job(SCRIPT, hosts=hosts, servers=servers, lab=lab, args=[json.dumps(operations)], timeout=100))
