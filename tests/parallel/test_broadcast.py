# SPDX-License-Identifier: Apache-2.0
"""Broadcasts of arrays and objects from every root, and barriers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab import Lab
from tests.launch import run_job

KIB = 1 << 10

ARRAYS = """
    import json, os, sys
    import numpy as np, commlib
    from tests.launch import give
    from tests.parallel import matrix, reference

    kinds = json.loads(sys.argv[1])
    partition = int(os.environ["COMMLIB_PARTITION_BYTES"])
    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    choose = np.random.default_rng([3, rank])
    number = 0

    def check(result, expected, title):
        assert result.dtype == expected.dtype and result.shape == expected.shape, title
        assert result.tobytes() == expected.tobytes(), title

    for root in range(size):
        for dtype in reference.DTYPES:
            item = reference.dtype_of(dtype).itemsize
            for count in (0, 1, 3, 17, 1023, *(partition // item + d for d in (-1, 0, 1)), 5 * partition // item // 2):
                number += 1
                expected = reference.contribution(dtype, 1, count, root, number)
                if count == 1 and number % 2:
                    expected = expected.reshape(())
                name = [None, f"{dtype} {count}"][number % 2]
                title = f"{name} from {root}"
                if rank == root:
                    mine = matrix.place(expected, choose.choice(kinds))
                    mine.flags.writeable = False
                else:
                    mine = matrix.place(np.zeros_like(expected), choose.choice(kinds))
                if number % 3 == 0:
                    result = commlib.broadcast(mine, root, name=name)
                    assert not np.shares_memory(result, mine)
                    check(result, expected, title)
                    assert result.flags.writeable
                    if rank != root:
                        check(mine, np.zeros_like(expected), title)
                else:
                    assert commlib.broadcast_(mine, root, name=name) is mine
                    check(mine, expected, title)
    give(number)
    commlib.shutdown()
"""

OBJECTS = """
    import numpy as np, commlib
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    objects = [None, {"lr": 0.1, "betas": (0.9, 0.999)}, "x" * 1_000_000, b"", ["a"], "x" * 100_001,
               np.arange(7), {1: {2: [3] * 300}}, set(), 5]
    for name in ("state", None):
        for root in range(size):
            for number, thing in enumerate(objects):
                mine = thing if rank == root else f"not it: {rank}"
                found = commlib.broadcast_object(mine, root, name=name)
                assert (found is mine) == (rank == root)
                assert type(found) is type(thing) and np.all(found == thing), (root, number)
    assert commlib.broadcast_object(rank) == 0
    for root in range(size):  # what cannot be pickled fails everywhere
        try:
            commlib.broadcast_object((lambda: None) if rank == root else None, root)
        except commlib.errors.CommlibError as error:
            assert rank != root and f"rank {root} cannot pickle" in str(error)
        except Exception as error:
            assert rank == root, error
        else:
            raise AssertionError("a lambda")
    assert commlib.broadcast_object(rank) == 0
    give("right")
    commlib.shutdown()
"""

# When each rank came to each barrier and left it, on the clock that all processes of a machine share.
BARRIERS = """
    import random, time
    import commlib
    from tests.launch import give

    commlib.init()
    times = []
    for _ in range(40):
        time.sleep(random.Random().expovariate(200))
        came = time.monotonic()
        commlib.barrier()
        times.append((came, time.monotonic()))
    # One that did not wait long enough has come all the same.
    if commlib.rank() == 0:
        try:
            commlib.barrier(timeout=0.05)
        except commlib.errors.OperationTimeout:
            times.append("late")
    commlib.push_pull(b"the others may come now", op=commlib.Sum)
    if commlib.rank() != 0:
        commlib.barrier()
        times.append("late")
    commlib.barrier(timeout=20)
    give(times)
    commlib.shutdown()
"""


@pytest.mark.parametrize(("size", "route"), [(1, "auto"), (3, "auto"), (2, "cma"), (3, "staged")])
def test_arrays_on_one_host(size: int, route: str) -> None:
    env = {"COMMLIB_PARTITION_BYTES": str(64 * KIB), "COMMLIB_LOCAL_ROUTE": route}
    kinds = json.dumps(["ordinary", "arena", "unaligned"])
    assert run_job(ARRAYS, hosts=[size], args=[kinds], env=env, timeout=100) == [90 * size] * size


def test_arrays_in_the_arena_alone() -> None:
    env = {"COMMLIB_PARTITION_BYTES": str(128 * KIB), "COMMLIB_LOCAL_ROUTE": "arena"}
    assert run_job(ARRAYS, hosts=[2], args=['["arena"]'], env=env, timeout=100) == [180] * 2


@pytest.mark.lab
@pytest.mark.parametrize(
    ("hosts", "servers", "route"),
    [([2, 2], 0, "auto"), ([1, 1, 1], 1, "auto"), ([1, 2, 1], 2, "cma"), ([3, 1], 0, "staged")],
    ids=str,
)
def test_arrays_on_several_hosts(hosts: list[int], servers: int, route: str, lab: Lab) -> None:
    env = {"COMMLIB_PARTITION_BYTES": str(128 * KIB), "COMMLIB_LOCAL_ROUTE": route}
    kinds = json.dumps(["ordinary", "arena", "unaligned"])
    results = run_job(ARRAYS, hosts=hosts, servers=servers, lab=lab, args=[kinds], env=env, timeout=100)
    assert results == [90 * sum(hosts)] * sum(hosts)


@pytest.mark.parametrize("size", [1, 3])
def test_objects_on_one_host(size: int) -> None:
    assert run_job(OBJECTS, hosts=[size], timeout=60) == ["right"] * size


@pytest.mark.lab
def test_objects_on_several_hosts(lab: Lab) -> None:
    assert run_job(OBJECTS, hosts=[2, 1], servers=1, lab=lab, timeout=60) == ["right"] * 3


def check_barriers(times: list[list[Any]]) -> None:
    assert [of_rank.pop() for of_rank in times] == ["late"] * len(times)
    for barrier in zip(*times, strict=True):
        assert max(came for came, _ in barrier) <= min(left for _, left in barrier)


@pytest.mark.parametrize("size", [2, 3])
def test_barriers_on_one_host(size: int) -> None:
    check_barriers(run_job(BARRIERS, hosts=[size], timeout=60))


@pytest.mark.lab
@pytest.mark.parametrize(("hosts", "servers"), [([1, 1], 0), ([2, 1, 2], 1)], ids=str)
def test_barriers_on_several_hosts(hosts: list[int], servers: int, lab: Lab) -> None:
    check_barriers(run_job(BARRIERS, hosts=hosts, servers=servers, lab=lab, timeout=60))


# Pages that nobody may write to: a checkpoint that the root has mapped from its file.
READ_ONLY_PAGES = """
    import tempfile
    import numpy as np, commlib
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    for root in range(size):
        for count in (1, 1000, 100_001, 1_500_001):
            expected = np.random.default_rng([root, count]).random(count)
            if rank == root:
                with tempfile.NamedTemporaryFile() as file:
                    expected.tofile(file.name)
                    mine = np.memmap(file.name, expected.dtype, mode="r")
            else:
                mine = np.zeros(count)
            assert commlib.broadcast_(mine, root, name=f"pages {count}") is mine
            assert mine.tobytes() == expected.tobytes(), (root, count)
            assert commlib.broadcast(mine, root).tobytes() == expected.tobytes(), (root, count)
    give("right")
    commlib.shutdown()
"""


@pytest.mark.parametrize("route", ["auto", "cma", "staged"])
@pytest.mark.parametrize("hosts", [[2], [3], [2, 1], [1, 1]], ids=str)
def test_the_root_may_send_what_cannot_be_written(hosts: list[int], route: str) -> None:
    env = {"COMMLIB_LOCAL_ROUTE": route}
    assert run_job(READ_ONLY_PAGES, hosts=hosts, env=env, timeout=60) == ["right"] * sum(hosts)
