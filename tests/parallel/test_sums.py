# SPDX-License-Identifier: Apache-2.0
"""Sums, averages, minima, maxima and products are right: for every dtype, size, buffer, route and topology."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from commlib.config import DEFAULT_PARTITION_BYTES
from tests.lab import Lab
from tests.launch import run_job
from tests.parallel import matrix, reference
from tests.parallel.matrix import Plan

KIB, MIB = 1 << 10, 1 << 20
TIMEOUT_S = 100


def ranks_of(hosts: Sequence[int]) -> list[list[int]]:
    """Ranks by host, given host by host."""
    starts = [sum(hosts[:h]) for h in range(len(hosts))]
    return [list(range(start, start + count)) for start, count in zip(starts, hosts, strict=True)]


def check(
    plan: Plan,
    *,
    route: str | Sequence[str] = "auto",
    servers: int = 0,
    lab: Lab | None = None,
    interleaved: Sequence[int] | None = None,
) -> None:
    """Run it; all ranks must have the same bits of the same many results. `route` is that of all, or one for each."""
    routes = [route] * sum(map(len, plan.placement)) if isinstance(route, str) else route
    results = run_job(
        matrix.SCRIPT,
        hosts=[len(ranks) for ranks in plan.placement],
        servers=servers,
        lab=lab,
        placement=interleaved,
        args=[plan.to_argument()],
        env={"COMMLIB_PARTITION_BYTES": str(plan.partition_bytes)},
        rank_env={rank: {"COMMLIB_LOCAL_ROUTE": own} for rank, own in enumerate(routes)},
        timeout=TIMEOUT_S,
    )
    assert len(results[0]) == len(list(plan.cases()))
    for result in results[1:]:
        assert result == results[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_host(size: int) -> None:
    check(Plan(ranks_of([size]), partition_bytes=64 * KIB, seed=size))


@pytest.mark.parametrize("servers", [1, 2])
def test_one_host_has_no_use_for_servers_that_have_joined(servers: int) -> None:
    check(Plan(ranks_of([2]), partition_bytes=64 * KIB, partitions=(1,), seed=10 + servers), servers=servers)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("route", ["cma", "staged"])
def test_one_host_by_each_route(size: int, route: str) -> None:
    check(Plan(ranks_of([size]), partition_bytes=128 * KIB, seed=20 + size), route=route)


@pytest.mark.parametrize("size", [2, 3])
def test_one_host_in_the_arena_alone(size: int) -> None:
    check(Plan(ranks_of([size]), partition_bytes=192 * KIB, buffers=("arena",), seed=30 + size), route="arena")


@pytest.mark.lab
@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("hosts", [[2, 2], [1, 1, 1], [1, 2, 1]], ids=str)
def test_several_hosts(hosts: list[int], servers: int, lab: Lab) -> None:
    partition_bytes = [64, 128, 192][servers] * KIB
    check(Plan(ranks_of(hosts), partition_bytes=partition_bytes, seed=40 + servers), servers=servers, lab=lab)


@pytest.mark.lab
@pytest.mark.parametrize("route", ["cma", "staged"])
def test_several_hosts_by_each_route(route: str, lab: Lab) -> None:
    check(Plan(ranks_of([2, 3]), partition_bytes=128 * KIB, seed=50), route=route, servers=1, lab=lab)


@pytest.mark.lab
def test_several_hosts_in_the_arena_alone(lab: Lab) -> None:
    plan = Plan(ranks_of([2, 2]), partition_bytes=128 * KIB, buffers=("arena",), seed=51)
    check(plan, route="arena", lab=lab)


@pytest.mark.lab
def test_ranks_dealt_to_hosts_in_turn(lab: Lab) -> None:
    """Then a host's ranks are not neighbours, and the order of summing is not that of the ranks."""
    plan = Plan([[0, 2], [1, 3]], partition_bytes=64 * KIB, partitions=(1,), seed=52)
    check(plan, interleaved=[0, 1, 0, 1], servers=1, lab=lab)


# Ranks of one host need not choose the same route. Each route is at each place once.
ROUTES = ("auto", "cma", "staged", "arena")
TURNED = [ROUTES[n:] + ROUTES[:n] for n in range(len(ROUTES))]


@pytest.mark.parametrize("routes", [routes[:3] for routes in TURNED], ids="-".join)
def test_one_host_with_a_route_for_each_rank(routes: Sequence[str]) -> None:
    check(Plan(ranks_of([3]), partition_bytes=64 * KIB, seed=70), route=routes)


@pytest.mark.lab
@pytest.mark.parametrize(("routes", "servers"), [(routes, n % 2) for n, routes in enumerate(TURNED)], ids=str)
def test_several_hosts_with_a_route_for_each_rank(routes: Sequence[str], servers: int, lab: Lab) -> None:
    check(Plan(ranks_of([2, 2]), partition_bytes=128 * KIB, seed=71), route=routes, servers=servers, lab=lab)


# Larger than what is staged when it is submitted.
LARGER: dict[str, Any] = {
    "partition_bytes": 4 * MIB,
    "counts": (1023,),
    "partitions": (2.1,),
    "dtypes": ("int8", "float16", "float32"),
    "ops": (reference.Average,),
    "seed": 72,
}


@pytest.mark.parametrize("routes", [routes[:3] for routes in TURNED], ids="-".join)
def test_larger_buffers_on_one_host_with_a_route_for_each_rank(routes: Sequence[str]) -> None:
    check(Plan(ranks_of([3]), **LARGER), route=routes)


@pytest.mark.lab
def test_larger_buffers_on_several_hosts_with_a_route_for_each_rank(lab: Lab) -> None:
    check(Plan(ranks_of([2, 2]), **LARGER), route=("cma", "staged", "arena", "auto"), lab=lab)


# Partitions as they are by default.
DEFAULT: dict[str, Any] = {
    "partition_bytes": DEFAULT_PARTITION_BYTES,
    "counts": (1023,),
    "partitions": (1, 4.25),
    "dtypes": ("bool", "int8", "float16", "float32", "int64"),
    "ops": (reference.Sum,),
    "seed": 60,
}


@pytest.mark.parametrize("route", ["auto", "cma", "staged"])
def test_default_partitions_on_one_host(route: str) -> None:
    check(Plan(ranks_of([3]), **DEFAULT), route=route)


@pytest.mark.lab
@pytest.mark.parametrize("hosts", [[2, 2], [1, 1, 1], [1, 2, 1]], ids=str)
def test_default_partitions_on_several_hosts(hosts: list[int], lab: Lab) -> None:
    check(Plan(ranks_of(hosts), **DEFAULT), servers=1, lab=lab)


# 64 MiB and one element, the rank's own buffer in another place on each.
LARGE = """
    import json, sys
    import numpy as np, commlib
    from commlib import Average, Sum
    from tests.launch import give
    from tests.parallel import matrix, reference

    placement, everything = json.loads(sys.argv[1])
    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    cases = [("float32", Sum), ("float16", Average), ("uint8", Average)]
    if everything:
        cases = [(d, op) for d in reference.DTYPES for op in reference.OPS if reference.is_supported(d, op)]
    for number, (dtype, op) in enumerate(cases):
        count = (64 << 20) // reference.dtype_of(dtype).itemsize + 1
        mine = reference.contribution(dtype, op, count, rank, number)
        array = matrix.place(mine, ["ordinary", "arena", "unaligned"][(rank + number) % 3])
        if number == 0:
            result = commlib.push_pull(array, name=dtype, op=op)
            assert array.tobytes() == mine.tobytes()
        else:
            result = commlib.push_pull_(array, name=dtype, op=op)
        period = [reference.contribution(dtype, op, reference.PERIOD, r, number) for r in range(size)]
        expected = np.resize(reference.documented_bits(period, op, placement), count)
        assert np.array_equal(result, expected), dtype
    give("right")
    commlib.shutdown()
"""


@pytest.mark.parametrize("route", ["auto", "staged"])
def test_large_buffers_on_one_host(route: str) -> None:
    args = [json.dumps([ranks_of([2]), False])]
    results = run_job(LARGE, hosts=[2], args=args, env={"COMMLIB_LOCAL_ROUTE": route}, timeout=TIMEOUT_S)
    assert results == ["right"] * 2


@pytest.mark.lab
@pytest.mark.parametrize(("hosts", "servers"), [([2, 1], 1), ([1, 1], 0)], ids=str)
def test_large_buffers_on_several_hosts(hosts: list[int], servers: int, lab: Lab) -> None:
    args = [json.dumps([ranks_of(hosts), False])]
    results = run_job(LARGE, hosts=hosts, servers=servers, lab=lab, args=args, timeout=TIMEOUT_S)
    assert results == ["right"] * sum(hosts)


@pytest.mark.soak
@pytest.mark.lab
@pytest.mark.parametrize(("hosts", "servers"), [([3], 0), ([2, 1], 0), ([1, 1], 2)], ids=str)
def test_large_buffers_of_every_dtype_and_operation(hosts: list[int], servers: int, lab: Lab) -> None:
    args = [json.dumps([ranks_of(hosts), True])]
    results = run_job(LARGE, hosts=hosts, servers=servers, lab=lab, args=args, timeout=1200)
    assert results == ["right"] * sum(hosts)
