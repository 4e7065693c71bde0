# SPDX-License-Identifier: Apache-2.0
"""Ranks submit in any order, at any speed, and wait for what they like: the sums are right, and it ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab import Lab
from tests.launch import run_job

KIB, MIB = 1 << 10, 1 << 20

# Every round of a tensor has a value of its own, so that no round can be taken for another. A tensor is submitted again
# as soon as its last round has been waited for: ranks may be up to a round apart, everywhere else, and never meet.
MANY = """
    import json, random, sys, time
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    tensors, rounds, slow_s = json.loads(sys.argv[1])
    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    order = random.Random(rank)
    counts = [random.Random(t).choice([1, 7, 100, 1023, 3001]) for t in range(tensors)]
    names = [f"layer {t}.weight" for t in range(tensors)]
    make = [commlib.empty, np.empty][rank % 2]
    arrays = [make(count, np.float32) for count in counts]
    if rank == 0:
        commlib.declare([(name, 4 * count) for name, count in zip(names, counts)])
    handles = [None] * tensors

    def finish(t, round_number):
        handles[t].wait()
        expected = size * (t + round_number) + size * (size - 1) / 2
        assert np.all(arrays[t] == expected), (names[t], round_number, arrays[t][:3], expected)

    for round_number in range(rounds):
        for t in order.sample(range(tensors), tensors):
            if round_number > 0:
                finish(t, round_number - 1)
            arrays[t].fill(t + round_number + rank)
            handles[t] = commlib.push_pull_async_(arrays[t], name=names[t], op=Sum, priority=t % 3)
            if slow_s and rank == size - 1:
                time.sleep(slow_s)
    for t in order.sample(range(tensors), tensors):
        finish(t, rounds - 1)
    give("right")
    commlib.shutdown()
"""


def check_many(hosts: list[int], tensors: int, rounds: int, slow_s: float = 0, **settings: Any) -> None:
    args = [json.dumps([tensors, rounds, slow_s])]
    assert run_job(MANY, hosts=hosts, args=args, timeout=100, **settings) == ["right"] * sum(hosts)


@pytest.mark.parametrize("size", [2, 3])
def test_many_tensors_in_another_order_on_each_rank_of_a_host(size: int) -> None:
    check_many([size], 1000, 50)


@pytest.mark.lab
def test_many_tensors_in_another_order_on_several_hosts(lab: Lab) -> None:
    check_many([2, 2], 1000, 50, servers=1, lab=lab)


def test_one_rank_of_a_host_is_slow() -> None:
    check_many([3], 50, 10, slow_s=0.01)


@pytest.mark.lab
def test_one_rank_of_several_hosts_is_slow(lab: Lab) -> None:
    check_many([2, 2], 50, 10, slow_s=0.01, lab=lab)


# Rank 0 submits `many` tensors and waits for another one; all others wait for that one before they submit the many.
CROSSED = """
    import json, sys
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    many, count, first_priority, in_arena = json.loads(sys.argv[1])
    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    expected = size * (size + 1) / 2
    make = commlib.empty if in_arena else np.empty
    arrays = [make(count, np.float32) for _ in range(many + 1)]
    for round_number in range(2):
        for t, array in enumerate(arrays):
            array.fill((rank + 1) * (t + 1))

        def submit(t):
            return commlib.push_pull_async_(arrays[t], name=f"t{t}", op=Sum, priority=first_priority if t < many else 0)

        if rank == round_number:
            handles = [submit(t) for t in range(many)]
            submit(many).wait()
        else:
            submit(many).wait()
            handles = [submit(t) for t in reversed(range(many))]
        for handle in handles:
            handle.wait()
        for t, array in enumerate(arrays):
            assert np.all(array == expected * (t + 1)), t
    give("right")
    commlib.shutdown()
"""


def check_crossed(
    hosts: list[int], many: int, count: int, *, priority: int = 0, arena: bool = False, **settings: Any
) -> None:
    args = [json.dumps([many, count, priority, arena])]
    assert run_job(CROSSED, hosts=hosts, args=args, timeout=60, **settings) == ["right"] * sum(hosts)


@pytest.mark.lab
@pytest.mark.parametrize("priority", [0, 5])
@pytest.mark.parametrize(("hosts", "servers"), [([1, 1], 0), ([2, 2], 1), ([1, 2, 1], 2)], ids=str)
def test_waiting_crosswise_for_more_than_all_credits(hosts: list[int], servers: int, priority: int, lab: Lab) -> None:
    env = {"COMMLIB_PARTITION_BYTES": "128KiB", "COMMLIB_CREDIT_BYTES": "128KiB"}
    check_crossed(hosts, 5, 300_001, priority=priority, servers=servers, lab=lab, env=env)


@pytest.mark.lab
def test_waiting_crosswise_for_more_small_tensors_than_go_unasked(lab: Lab) -> None:
    check_crossed([1, 1], 200, 15_000, lab=lab)  # 60 KB each; 4 MiB may be on the way to an owner


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("priority", [0, 5])
def test_waiting_crosswise_on_one_host(priority: int, arena: bool) -> None:
    check_crossed([3], 5, 2_000_001, priority=priority, arena=arena)


@pytest.mark.parametrize(("many", "count"), [(5, 10_000_001), (150, 250_000)])
def test_waiting_crosswise_for_more_than_may_be_staged(many: int, count: int) -> None:
    """200 MB in large tensors, and 150 MB in ones that are staged when submitted: 64 MiB a rank is what may be."""
    check_crossed([2], many, count, priority=1, env={"COMMLIB_LOCAL_ROUTE": "staged"})
