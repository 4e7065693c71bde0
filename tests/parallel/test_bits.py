# SPDX-License-Identifier: Apache-2.0
"""The bits of a result depend on the inputs and on which rank is on which host; on nothing else, and not on chance."""

from __future__ import annotations

import contextlib

import pytest

from tests.lab import Lab
from tests.launch import run_job
from tests.parallel.jostle import jostled

KIB, MIB = 1 << 10, 1 << 20
HOSTS = [1, 2, 1]
RANKS = sum(HOSTS)

# The digests of all results, one a round. Ranks submit in an order of their own, and dawdle as the run's seed says.
SCRIPT = """
    import hashlib, os, sys, time
    import numpy as np, commlib
    from commlib import Average, Product, Sum
    from tests.launch import give
    from tests.parallel import matrix, reference

    commlib.init()
    rank = commlib.rank()
    chance = np.random.default_rng([int(sys.argv[1]), rank])
    kinds = [k for k in ("ordinary", "arena", "unaligned") if sys.argv[2] != "arena" or k == "arena"]
    tensors = {}
    for dtype in ("float32", "float16"):
        for op in (Sum, Average, Product):
            for count in (1, 1023, 20011, 90001):
                tensors[f"{dtype} {op!r} {count}"] = op, reference.contribution(dtype, op, count, rank, count)
    digests = []
    for _ in range(3):
        handles = {}
        for name in map(str, chance.permutation(list(tensors))):
            op, mine = tensors[name]
            if chance.random() < 0.3:
                time.sleep(chance.exponential(0.003))
            array = matrix.place(mine, chance.choice(kinds))
            out = matrix.place(mine, chance.choice(kinds))
            handles[name] = commlib.push_pull_async(array, name=name, op=op, out=out, priority=int(chance.integers(3)))
        digest = hashlib.sha256()
        for name in tensors:
            digest.update(handles[name].wait().tobytes())
        digests.append(digest.hexdigest())
    give(digests)
    commlib.shutdown()
"""


def digests(
    lab: Lab, seed: int, *, servers: int = 0, route: str = "auto", jostle: bool = False, **env: int
) -> set[str]:
    """Every digest of one run, over ranks and rounds."""
    settings = {f"COMMLIB_{name.upper()}": str(value) for name, value in env.items()}
    disturbed = jostled(lab, len(HOSTS) + servers, seed) if jostle else contextlib.nullcontext()
    with disturbed:
        results = run_job(
            SCRIPT,
            hosts=HOSTS,
            servers=servers,
            lab=lab,
            args=[str(seed), route],
            env={"COMMLIB_LOCAL_ROUTE": route, **settings},
            timeout=60,
        )
    return {digest for result in results for digest in result}


@pytest.mark.lab
def test_ten_runs_have_the_same_bits(lab: Lab) -> None:
    runs = [
        digests(lab, 0),
        digests(lab, 1, jostle=True),
        digests(lab, 2, jostle=True, servers=1),
        digests(lab, 3, jostle=True, servers=2, streams=2),
        digests(lab, 4, servers=1, streams=4, partition_bytes=64 * KIB),
        digests(lab, 5, jostle=True, streams=4, partition_bytes=64 * KIB, credit_bytes=64 * KIB),
        digests(lab, 6, servers=2, streams=2, partition_bytes=256 * KIB, route="cma"),
        digests(lab, 7, jostle=True, partition_bytes=192 * KIB, credit_bytes=16 * MIB, route="staged"),
        digests(lab, 8, jostle=True, servers=2, streams=4, partition_bytes=64 * KIB),
        digests(lab, 9, servers=1, partition_bytes=128 * KIB, route="arena"),
    ]
    for run in runs:
        assert run == runs[0]
    assert len(runs[0]) == 1
