# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not agree: all of them hear who said what, and the job goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab import Lab
from tests.launch import run_job

KIB = 1 << 10

# Every kind of disagreement, each about one rank that says something else; then the same name and another in agreement.
KINDS = """
    import json, sys, time
    import numpy as np, commlib
    from commlib import Average, Max, Sum
    from commlib.errors import MismatchError
    from tests.launch import give

    late_s = json.loads(sys.argv[1])
    commlib.init()
    rank, size = commlib.rank(), commlib.size()

    def array(*shape, dtype=np.float32):
        return np.ones(shape, dtype)

    def reduce(tensor, op=Sum):
        return lambda name: commlib.push_pull(tensor, name=name, op=op)

    def later(tensor, op=Sum):
        return lambda name: commlib.push_pull_async(tensor, name=name, op=op).wait()

    # Field, what all do, what one does instead, and what the two say. Partitions are 64 KiB.
    kinds = [
        ("shape", reduce(array(6)), reduce(array(7)), (6,), (7,)),
        ("shape", reduce(array(6)), reduce(array(2, 3)), (6,), (2, 3)),
        ("shape", reduce(array(1)), reduce(array()), (1,), ()),
        ("shape", reduce(array(0)), reduce(array(1)), (0,), (1,)),
        ("shape", reduce(array(100)), reduce(array(60_000)), (100,), (60_000,)),
        ("shape", later(array(60_000)), later(array(100)), (60_000,), (100,)),
        ("shape", reduce(array(60_000)), later(array(200_001)), (60_000,), (200_001,)),
        ("shape", later(array(300, 200)), reduce(array(200, 300)), (300, 200), (200, 300)),
        ("dtype", reduce(array(6)), reduce(array(6, dtype=np.int32)), "float32", "int32"),
        ("dtype", reduce(array(60_000)), reduce(array(60_000, dtype=np.float64)), "float32", "float64"),
        ("op", reduce(array(6)), reduce(array(6), Average), "sum", "average"),
        ("op", later(array(60_000)), reduce(array(60_000), Max), "sum", "max"),
        ("collective", reduce(array(6)), lambda name: commlib.broadcast(array(6), 0, name=name),
         "push_pull", "broadcast"),
        ("root", lambda name: commlib.broadcast_(array(6), 0, name=name),
         lambda name: commlib.broadcast_(array(6), 1, name=name), 0, 1),
        ("root", lambda name: commlib.broadcast_(array(60_000), 1, name=name),
         lambda name: commlib.broadcast_(array(60_000), 0, name=name), 1, 0),
    ]
    for number, (field, usual, unusual, said, said_else) in enumerate(kinds):
        for odd in range(size):
            name = f"kind {number}"
            for again in range(2):
                if late_s and rank == size - 1:
                    time.sleep(late_s)
                try:
                    (unusual if rank == odd else usual)(name)
                except MismatchError as error:
                    expected = {r: said_else if r == odd else said for r in range(size)}
                    title = f"{name} {field} {odd}: {error}"
                    assert error.tensor == name and error.field == field and error.values == expected, title
                    others = [r for r in range(size) if r != odd]
                    assert f'tensor "{name}"' in str(error) and f"about {field}" in str(error), title
                    assert f"on rank {odd}" in str(error), title
                    assert isinstance(error, ValueError)
                else:
                    raise AssertionError(f"{name} {field} {odd}: no mismatch")
                count = [5, 50_000][again]
                assert np.all(commlib.push_pull(array(count), name=name, op=Sum) == size)
                assert np.all(commlib.push_pull_(array(count), name="another", op=Sum) == size)
    give("right")
    commlib.shutdown()
"""

# Many at once, all in flight together with others that agree.
MANY = """
    import numpy as np, commlib
    from commlib import Sum
    from commlib.errors import MismatchError
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    for round_number in range(3):
        handles = []
        for t in np.random.default_rng([round_number, rank]).permutation(600):
            count = 20_000 if t % 5 == 0 else 3  # two partitions, or one
            wrong = t % 2 == 0 and t % size == rank
            handles.append((t, commlib.push_pull_async(np.full(count + wrong, t), name=f"t{t}", op=Sum)))
        for t, handle in handles:
            if t % 2 == 1:
                assert np.all(handle.wait() == t * size)
                continue
            try:
                handle.wait()
            except MismatchError as error:
                assert error.tensor == f"t{t}" and error.field == "shape" and len(error.values) == size, error
            else:
                raise AssertionError(t)
    give("right")
    commlib.shutdown()
"""

# Unnamed ones meet by their order, so that everything after a forgotten one may disagree; the ranks must be told.
UNNAMED = """
    import numpy as np, commlib
    from commlib import Sum
    from commlib.errors import MismatchError
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    texts = []
    for number in range(1100):
        array = np.ones(3 if number % 100 else 3 + rank)
        try:
            commlib.push_pull(array, op=Sum)
        except MismatchError as error:
            texts.append((number, str(error)))
    assert [number for number, _ in texts] == list(range(0, 1100, 100))
    for number, text in texts:
        assert f"unnamed push_pull number {number + 1}:" in text, text
    give("right")
    commlib.shutdown()
"""

# All ranks change their minds together: nothing is wrong with that.
TOGETHER = """
    import numpy as np, commlib
    from commlib import Average, Max, Sum
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) / 2
    for _ in range(3):
        for count in (3, 100_001, 0, 16_384, 16_385, 1, 1_000_003):
            for dtype in (np.float32, np.int64, np.float16):
                mine = np.full(count, rank + 1, dtype)
                assert np.all(commlib.push_pull(mine, name="same", op=Sum) == total)
                assert np.all(commlib.push_pull_(mine.reshape(1, count), name="same", op=Max) == size)
                assert np.all(commlib.broadcast(np.full(count, rank, dtype), size - 1, name="same") == size - 1)
    give("right")
    commlib.shutdown()
"""

SMALL_PARTS = {"COMMLIB_PARTITION_BYTES": str(64 * KIB)}


def check(script: str, hosts: list[int], *args: str, **settings: Any) -> None:
    assert run_job(script, hosts=hosts, args=args, env=SMALL_PARTS, timeout=60, **settings) == ["right"] * sum(hosts)


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_on_one_host(size: int) -> None:
    check(KINDS, [size], "0")


def test_every_kind_when_one_rank_of_a_host_comes_late() -> None:
    check(KINDS, [3], "0.01")


@pytest.mark.lab
@pytest.mark.parametrize(("hosts", "servers"), [([1, 1], 0), ([2, 1], 1), ([1, 1, 1], 2), ([2, 2], 0)], ids=str)
def test_every_kind_on_several_hosts(hosts: list[int], servers: int, lab: Lab) -> None:
    check(KINDS, hosts, "0", servers=servers, lab=lab)


@pytest.mark.lab
@pytest.mark.parametrize("hosts", [[1, 1, 1], [1, 2]], ids=str)
def test_every_kind_when_one_rank_of_several_hosts_comes_late(hosts: list[int], lab: Lab) -> None:
    check(KINDS, hosts, json.dumps(0.01), lab=lab)


@pytest.mark.parametrize("script", [MANY, UNNAMED, TOGETHER], ids=["many", "unnamed", "together"])
@pytest.mark.parametrize("size", [2, 3])
def test_one_host(script: str, size: int) -> None:
    check(script, [size])


@pytest.mark.lab
@pytest.mark.parametrize("script", [MANY, UNNAMED, TOGETHER], ids=["many", "unnamed", "together"])
@pytest.mark.parametrize(("hosts", "servers"), [([1, 1], 0), ([2, 1], 1), ([1, 1, 1], 2)], ids=str)
def test_several_hosts(script: str, hosts: list[int], servers: int, lab: Lab) -> None:
    check(script, hosts, servers=servers, lab=lab)
