# SPDX-License-Identifier: Apache-2.0
"""Partition, placement and admission of the core, against what ``docs/architecture.md`` says of them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.launch import REPOSITORY

GRANULE = 64 * 1024
ITEM_BYTES = (1, 1, 1, 2, 4, 8, 2, 2, 4, 8)  # by number of the dtype
CONFIG, UNSUPPORTED = -1 - 9, -1 - 8

MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", autouse=True)
def core(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The rules, compiled without Python."""
    library = tmp_path_factory.mktemp("rules") / "rules.so"
    sources = [REPOSITORY / "src" / name for name in ("base/errc.cpp", "sched/partition.cpp", "sched/placement.cpp")]
    here = Path(__file__).parent / "window.cpp"
    compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{REPOSITORY / 'src'}"]
    subprocess.run([*compiler, "-o", library, here, *sources], check=True, timeout=100)
    loaded = ctypes.CDLL(os.fspath(library))
    for name in ("part_count", "part_range", "sequence", "cut"):
        getattr(loaded, f"window_{name}").restype = ctypes.c_int64
    for name in ("admit", "taken", "waiting"):
        getattr(loaded, f"window_{name}").restype = ctypes.c_uint64
    loaded.window_admission.restype = ctypes.c_void_p
    Queue.core = loaded
    return loaded


def u64(number: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(number)


hosts_and_servers = st.tuples(st.integers(2, 24), st.integers(0, 30))
partitions = st.integers(1, 64).map(lambda granules: granules * GRANULE)


# --- Partition


@MANY
@given(st.integers(0, 1 << 45), st.sampled_from(sorted(set(ITEM_BYTES))), st.integers(0, 1 << 26))
def test_partitions_cover_a_tensor_exactly(core: ctypes.CDLL, count: int, item: int, partition: int) -> None:
    found = core.window_part_count(u64(count * item), u64(partition))
    if partition == 0 or partition % GRANULE:
        assert found == CONFIG
        return
    parts = max(-(-count * item // partition), 1)
    if parts > 1 << 16:
        assert found == UNSUPPORTED
        return
    assert found == parts
    covered = 0
    for part in {0, 1, parts // 2, parts - 2, parts - 1} & set(range(parts)):
        both = (ctypes.c_uint64 * 2)()
        assert core.window_part_range(ctypes.c_uint32(part), u64(count), u64(item), u64(partition), both) == 0
        first, elements = both
        assert first * item == part * partition or count == 0
        assert elements == min(count - first, partition // item)
        assert elements > 0 or count == 0
        covered = max(covered, first + elements)
    assert covered == count  # the last of them ends where the tensor does


# --- Placement


def turn_of(core: ctypes.CDLL, hosts: int, servers: int) -> list[int]:
    owners = (ctypes.c_uint32 * 100_000)()
    length = core.window_sequence(ctypes.c_uint32(hosts), ctypes.c_uint32(servers), owners, u64(len(owners)))
    assert 0 < length <= len(owners)
    return list(owners[:length])


def busiest_link(hosts: int, servers: int, colocated: Fraction, dedicated: Fraction) -> Fraction:
    """Tensors' worth of bytes that pass the busiest link in one direction, when each owner has these shares.

    A host sends what it does not own and, of what it owns, the result to each other host; a server gets all hosts'
    contributions and sends as many results. What is sent and received is the same for each of them.
    """
    host = (1 - colocated) + (hosts - 1) * colocated
    return max(host, hosts * dedicated if servers else host)


@MANY
@given(hosts_and_servers, st.fractions(0, 1))
def test_no_other_shares_take_less_time(core: ctypes.CDLL, job: tuple[int, int], other: Fraction) -> None:
    hosts, servers = job
    counted = Counter(turn := turn_of(core, hosts, servers))
    shares = [Fraction(counted[owner], len(turn)) for owner in range(hosts + servers)]
    assert len(set(shares[:hosts])) == 1
    assert len(set(shares[hosts:])) <= 1
    ours = busiest_link(hosts, servers, shares[0], shares[-1] if servers else Fraction(0))
    if servers == 0:
        assert shares == [Fraction(1, hosts)] * hosts
        return
    # All of the bytes are somebody's: the hosts share `other` of them, the servers the rest.
    assert ours <= busiest_link(hosts, servers, other / hosts, (1 - other) / servers)


@MANY
@given(hosts_and_servers, st.integers(0, 5000), st.integers(1, 5000))
def test_any_stretch_of_bytes_is_shared_out_evenly(
    core: ctypes.CDLL, job: tuple[int, int], first: int, length: int
) -> None:
    turn = turn_of(core, *job)
    counted = Counter(turn[(first + i) % len(turn)] for i in range(length))
    for owner in range(sum(job)):
        exact = Fraction(turn.count(owner) * length, len(turn))
        assert abs(counted[owner] - exact) < 2


@MANY
@given(hosts_and_servers, st.integers(0, 1 << 40), st.integers(0, 400_000), st.integers(0, 9), st.booleans())
def test_pieces_cover_a_partition_and_belong_to_their_owner(
    core: ctypes.CDLL, job: tuple[int, int], start: int, count: int, dtype: int, whole: bool
) -> None:
    hosts, servers = job
    turn = turn_of(core, hosts, servers)
    start, item = start // 64 * 64, ITEM_BYTES[dtype]
    if whole:
        count = min(count, GRANULE // item)
    triples = (ctypes.c_uint64 * 3000)()
    found = core.window_cut(
        ctypes.c_uint32(hosts), ctypes.c_uint32(servers), u64(start), u64(count), dtype, int(whole), triples, u64(1000)
    )
    assert 0 < found <= 1000
    pieces = [tuple(triples[3 * i : 3 * i + 3]) for i in range(found)]
    next_element = 0
    for first, elements, owner in pieces:
        assert first == next_element
        next_element += elements
        begin = start + first * item
        assert owner == turn[begin // GRANULE % len(turn)]
        assert elements > 0 or count == 0
        assert whole or elements == 0 or (begin + elements * item - 1) // GRANULE == begin // GRANULE
    assert next_element == count
    granules = (start + count * item - 1) // GRANULE - start // GRANULE + 1 if count else 1
    assert found == (1 if whole else granules)


# --- Admission


class Queue(RuleBasedStateMachine):
    """A budget and those who wait for it, beside a list that is sorted anew each time."""

    core: ctypes.CDLL

    @initialize(budget=st.integers(0, 100))
    def begin(self, budget: int) -> None:
        self.queue = ctypes.c_void_p(self.core.window_admission(u64(budget)))
        self.budget = budget
        self.waiting: list[tuple[int, int, int]] = []  # (−priority, number, bytes)
        self.admitted: list[int] = []  # bytes of each
        self.number = 0

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        # Nobody waits for ever, as long as what has been admitted ends.
        while self.waiting:
            if not self.admit():
                assert self.admitted
                self.give_back(0)
        self.core.window_admission_delete(self.queue)

    @rule(size=st.one_of(st.integers(0, 120), st.just((1 << 64) - 1)), priority=st.integers(-3, 3))
    def add(self, size: int, priority: int) -> None:
        self.number += 1
        self.waiting.append((-priority, self.number, size))
        self.core.window_add(self.queue, u64(self.number), u64(size), ctypes.c_int32(priority))

    @rule()
    def ask(self) -> None:
        self.admit()

    def admit(self) -> bool:
        first = min(self.waiting, default=None)
        taken = sum(self.admitted)
        if first is not None and taken != 0 and taken + first[2] > self.budget:
            first = None  # what does not fit is not overtaken, and what is larger than the budget goes alone
        assert self.core.window_admit(self.queue) == (first[1] if first else 0)
        if first is None:
            return False
        self.waiting.remove(first)
        self.admitted.append(first[2])
        return True

    @precondition(lambda self: self.admitted)
    @rule(which=st.integers(0, 1000))
    def give_back(self, which: int) -> None:
        self.core.window_release(self.queue, u64(self.admitted.pop(which % len(self.admitted))))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 1000))
    def forget(self, which: int) -> None:
        _, number, _ = self.waiting.pop(which % len(self.waiting))
        self.core.window_remove(self.queue, u64(number))

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "queue"):
            assert self.core.window_taken(self.queue) == sum(self.admitted)
            assert self.core.window_waiting(self.queue) == len(self.waiting)


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
