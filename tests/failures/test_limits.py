# SPDX-License-Identifier: Apache-2.0
"""Too few descriptors, too little address space, a full arena: things still work, or an error says what is missing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.launch import Job, Outcome, run_job

# Sums before and after its limits have become narrow, with whatever is left for it.
LIMITED = """
    import os, resource, sys
    import numpy as np, commlib
    from tests.failures.losses import told
    from tests.launch import give

    def address_space():
        return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

    def limit_that_leaves(count):
        # What is listed was open a moment ago, among it the folder itself.
        listed = [int(name) for name in os.listdir("/proc/self/fd")]
        used = [number for number in listed if os.path.lexists(f"/proc/self/fd/{number}")]
        return [number for number in range(4096) if number not in used][count]

    what, amount = sys.argv[1], int(sys.argv[2])
    if sys.argv[3] in ("all", os.environ["COMMLIB_RANK"]):
        if what == "descriptors":
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_that_leaves(amount),) * 2)
        else:
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + (amount << 20),) * 2)

    def work():
        commlib.init()
        size = commlib.size()
        for count in (100, 100_003, 2_000_003):
            for tensor in (np.ones(count, np.float32), commlib.zeros(count, np.float32) + 1):
                assert (commlib.push_pull(tensor, op=commlib.Sum, timeout=20) == size).all()
        return commlib.api.session().wiring.arena_bytes[0]

    try:
        result = told(work)
    except MemoryError as error:  # the program itself has no memory: that is no fault of the library
        result = f"MemoryError: {error}"
    commlib.shutdown()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.close(sys.stdin.fileno())  # one descriptor to tell it with
    give(result)
    if isinstance(result, str):
        raise SystemExit(1)
"""


def limited(what: str, amount: int, who: str, hosts: Sequence[int]) -> list[Outcome]:
    with Job(LIMITED, hosts=hosts, args=[what, str(amount), who], env={"COMMLIB_CONNECT_TIMEOUT_S": "4"}) as job:
        outcomes = job.wait(30)
    for outcome in outcomes:
        assert outcome.status in (0, 1), outcome  # no signal
        assert outcome.value is not None, outcome
        assert "Traceback" not in outcome.stderr, outcome
    return outcomes


@pytest.mark.parametrize("amount", [0, 6, 12, 20, 30, 43, 44])
def test_few_descriptors(amount: int) -> None:
    outcomes = limited("descriptors", amount, "all", [2])
    for outcome in outcomes:
        if amount < 44:
            assert outcome.value == (
                f"CommlibError: this process can open only {amount} more descriptors, and needs about 44 to join a job "
                "(Too many open files); raise its limit (ulimit -n)"
            )
        else:
            assert outcome.status == 0, outcome


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
@pytest.mark.parametrize("who", [0, 1])
def test_one_has_few_descriptors(hosts: list[int], who: int) -> None:
    outcomes = limited("descriptors", 12, str(who), hosts)
    assert "descriptors" in outcomes[who].value
    assert "ulimit -n" in outcomes[who].value
    assert outcomes[1 - who].status == 1


def test_just_enough_descriptors_for_several_hosts() -> None:
    assert [outcome.status for outcome in limited("descriptors", 44, "all", [1, 1])] == [0, 0]


@pytest.mark.parametrize("amount", [1, 10, 40, 200, 500, 700])
def test_little_address_space(amount: int) -> None:
    for outcome in limited("memory", amount, "all", [2]):
        if outcome.status == 1:
            assert "address space" in outcome.value or "memory" in outcome.value.lower(), outcome


def test_a_limited_address_space_has_a_smaller_arena() -> None:
    unlimited = limited("memory", 1 << 30, "all", [2])
    outcomes = limited("memory", 2000, "all", [2])
    for outcome, other in zip(outcomes, unlimited, strict=True):
        assert outcome.status == other.status == 0, outcome
        assert 64 << 20 < outcome.value < other.value


def test_the_rank_with_the_least_decides_for_its_host() -> None:
    outcomes = limited("memory", 2000, "1", [2])
    assert [outcome.status for outcome in outcomes] == [0, 0]
    assert outcomes[0].value == outcomes[1].value < 1 << 30


FULL = """
    import numpy as np, commlib
    from tests.failures.losses import told
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) / 2
    report = []

    def sums(count, dtype, in_place):
        tensor = np.full(count, rank + 1, dtype)
        result = (commlib.push_pull_ if in_place else commlib.push_pull)(tensor, op=commlib.Sum, timeout=20)
        return bool((result == total).all())

    def many():
        tensors = [np.full(200_003, rank + 1, np.float32) for _ in range(20)]
        handles = [commlib.push_pull_async_(tensor, op=commlib.Sum) for tensor in tensors]
        told_texts = [told(lambda handle=handle: bool((handle.wait(20) == total).all())) for handle in handles]
        return next((text for text in told_texts if text is not True), True)

    def everything():
        for count, dtype in ((1000, "f4"), (1 << 20, "f4"), (2_500_001, "f4"), (2_500_001, "f2")):
            for in_place in (False, True):
                report.append(told(lambda: sums(count, dtype, in_place)))
        report.append(told(many))
        report.append(told(lambda: bool((commlib.broadcast(np.full(1_500_001, rank), 1) == 1).all())))
        report.append(told(lambda: commlib.broadcast_object(["x"] * 10, 0) == ["x"] * 10))

    everything()
    # Until nothing fits any more: what then comes lies elsewhere.
    kept = []
    for nbytes in (1 << 20, 1 << 14, 1 << 10):
        for _ in range(64):
            kept.append(commlib.empty(nbytes, np.uint8))
            kept[-1].fill(len(kept) % 251)
    everything()
    assert all((array == (number + 1) % 251).all() for number, array in enumerate(kept))
    give(report)
"""


@pytest.mark.parametrize("arena", ["1M", "8M"])
@pytest.mark.parametrize(
    ("hosts", "route"), [([2], "auto"), ([2], "staged"), ([2, 1], "auto"), ([2, 1], "staged"), ([1, 1], "auto")]
)
def test_a_full_arena(hosts: list[int], route: str, arena: str) -> None:
    reports = run_job(FULL, hosts=hosts, env={"COMMLIB_ARENA_BYTES": arena, "COMMLIB_LOCAL_ROUTE": route}, timeout=60)
    for what in zip(*reports, strict=True):
        assert len({one is True for one in what}) == 1, what  # all or nobody
        for one in what:
            assert one is True or "COMMLIB_ARENA_BYTES" in one or "is lost" in one, what
    if hosts == [1, 1]:  # nothing goes through an arena
        assert all(one is True for one in reports[0]), reports[0]
