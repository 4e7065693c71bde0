# SPDX-License-Identifier: Apache-2.0
"""A process is killed: wherever it was, the others know within 2 s who it was, and the job leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.failures.losses import NOTICED_S, check_end, check_losses, scheduler_pid
from tests.lab import Lab
from tests.launch import Job

# One waits for ever for a sum that will never be complete, the other way round, or everybody minds his own business.
SCENES = """
    import sys
    import numpy as np, commlib
    from tests.failures.losses import give_loss
    from tests.launch import announce, listen

    scene, victim = sys.argv[1], int(sys.argv[2])
    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    ones = np.ones(300_001, np.float32)
    assert (commlib.push_pull(ones, name="first", op=commlib.Sum) == size).all()

    late = (victim - 1) % size if scene == "waiting" else victim
    if scene == "idle" or rank == late:
        announce("ready")
        if scene == "computing":
            while True:
                pass
        listen()
        handle = None
    else:
        handle = commlib.push_pull_async(ones, name="second") if rank % 2 else None
        announce("ready")

    def go_on():
        if handle is not None:
            handle.wait(20)
        for _ in range(2):  # a sum for which the victim was still there may be complete before its death is known
            commlib.push_pull(ones, name="second", timeout=20)

    give_loss(go_on)
"""
# As many bytes as will go, in both directions, all the time.
FLOOD = """
    import numpy as np, commlib
    from tests.failures.losses import give_loss
    from tests.launch import announce

    commlib.init()
    tensors = [np.ones(1 << 24, np.float32) for _ in range(2)]

    def flood():
        for step in range(1_000_000):
            handles = [commlib.push_pull_async_(t, name=f"t{i}", op=commlib.Max) for i, t in enumerate(tensors)]
            if step == 1:
                announce("flooding")
            for handle in handles:
                handle.wait(20)

    give_loss(flood)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(4) as made:
        yield made


def kill(job: Job, victim: int, event: str) -> float:
    """When it happened."""
    job.await_event(event)
    since = time.monotonic()
    job.kill(victim)
    return since


def check_survivors(job: Job, victim: int, since: float) -> None:
    survivors = [rank for rank in range(len(job.workers)) if rank != victim]
    check_losses(job.await_end(survivors, timeout=20), since=since, rank=victim)
    outcomes = check_end(job)
    assert outcomes[victim].status == -signal.SIGKILL
    assert [server.status for server in outcomes[len(job.workers) :]] == [1] * len(job.servers)


def play(scene: str, victim: int, hosts: Sequence[int], servers: int = 0, lab: Lab | None = None) -> None:
    with Job(SCENES, hosts=hosts, servers=servers, lab=lab, args=[scene, str(victim)]) as job:
        since = kill(job, victim, "ready")
        for rank in range(sum(hosts)):
            if rank != victim and (scene == "idle" or (scene == "waiting" and rank == (victim - 1) % sum(hosts))):
                job.tell(rank, "go on")
        check_survivors(job, victim, since)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("scene", ["waiting", "computing", "idle"])
def test_a_rank_of_one_host(scene: str, victim: int) -> None:
    play(scene, victim, [3])


@pytest.mark.lab
@pytest.mark.parametrize(
    ("scene", "victim", "hosts", "servers"),
    [
        ("waiting", 0, [2, 2], 0),
        ("waiting", 3, [2, 2], 0),
        ("computing", 0, [2, 2], 0),
        ("computing", 1, [2, 2], 0),
        ("computing", 2, [2, 2], 0),
        ("computing", 3, [2, 2], 0),
        ("idle", 1, [2, 2], 0),
        ("idle", 2, [2, 2], 0),
        ("waiting", 1, [2, 1], 1),
        ("computing", 0, [2, 1], 1),
        ("computing", 1, [2, 1], 1),
        ("idle", 2, [2, 1], 1),
        ("waiting", 2, [1, 1, 1], 0),
        ("computing", 1, [1, 1, 1], 0),
        ("idle", 0, [1, 1, 1], 0),
        ("waiting", 0, [1, 2, 1], 1),
        ("computing", 2, [1, 2, 1], 1),
        ("computing", 3, [1, 2, 1], 1),
        ("idle", 1, [1, 2, 1], 1),
    ],
)
def test_a_rank_of_several_hosts(lab: Lab, scene: str, victim: int, hosts: list[int], servers: int) -> None:
    play(scene, victim, hosts, servers, lab)


@pytest.mark.parametrize("victim", [0, 1])
def test_in_a_flood_on_one_host(victim: int) -> None:
    with Job(FLOOD, hosts=[2]) as job:
        check_survivors(job, victim, kill(job, victim, "flooding"))


@pytest.mark.lab
@pytest.mark.parametrize(
    ("victim", "hosts", "servers"), [(0, [1, 1], 0), (1, [1, 1], 1), (1, [2, 1], 0), (0, [2, 1], 1), (2, [2, 1], 0)]
)
def test_in_a_flood_between_hosts(lab: Lab, victim: int, hosts: list[int], servers: int) -> None:
    with Job(FLOOD, hosts=hosts, servers=servers, lab=lab) as job:
        check_survivors(job, victim, kill(job, victim, "flooding"))


@pytest.mark.lab
@pytest.mark.parametrize("hosts", [[1, 1], [2, 1]])
def test_a_dedicated_server(lab: Lab, hosts: list[int]) -> None:
    with Job(FLOOD, hosts=hosts, servers=1, lab=lab) as job:
        job.await_event("flooding")
        since = time.monotonic()
        job.servers[0].popen.kill()
        check_losses(job.await_end(range(sum(hosts)), timeout=20), since=since, rank=None)
        check_end(job)


# Ranks that are told late: what an earlier one has put into shared memory has no words.
TOLD_LATE = """
    import time
    import numpy as np, commlib
    from commlib.session import Session
    from tests.failures.losses import give_loss
    from tests.launch import announce

    on_lost = Session._on_lost
    def late(self, *what):
        time.sleep(0.2 * self.rank)
        on_lost(self, *what)
    Session._on_lost = late

    commlib.init()
    ones = np.ones(1000, np.float32)

    def work():
        for step in range(10_000_000):
            commlib.push_pull_(ones, name="sum", op=commlib.Max, timeout=20)
            if step == 1:
                announce("working")

    give_loss(work)
"""


def test_who_is_told_late_has_the_words_too() -> None:
    """On one host a server has nothing to do, so that only the scheduler sees its end."""
    with Job(TOLD_LATE, hosts=[3], servers=1) as job:
        job.await_event("working")
        since = time.monotonic()
        job.servers[0].popen.kill()
        check_losses(job.await_end(range(3), timeout=20), since=since, rank=None)
        check_end(job)


LOST_WHILE_JOINING = """
    import os, signal
    import commlib
    from commlib.control.client import ControlClient
    from tests.launch import announce, give

    # Dies after all have met, before the first step that follows.
    if os.environ["COMMLIB_RANK"] == os.environ["VICTIM"]:
        ControlClient.wired = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        commlib.init()
    except commlib.errors.PeerLostError as error:
        give((error.rank, str(error)))
"""


@pytest.mark.parametrize("hosts", [[3], [2, 1]])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_before_the_job_has_begun(hosts: list[int], victim: int) -> None:
    with Job(LOST_WHILE_JOINING, hosts=hosts, env={"VICTIM": str(victim), "COMMLIB_CONNECT_TIMEOUT_S": "30"}) as job:
        began = time.monotonic()
        outcomes = job.wait(15)
        assert time.monotonic() - began < 10
        for rank, outcome in enumerate(outcomes):
            if rank == victim:
                assert outcome.status == -signal.SIGKILL
                continue
            # Rank 0 takes the scheduler with it, which may be the first to be missed.
            assert outcome.value is not None, outcome
            lost, text = outcome.value
            assert lost == victim or (victim == 0 and "scheduler" in text), outcome
            assert outcome.status == 0


SCHEDULER = """
    import time
    import numpy as np, commlib
    from tests.failures.losses import told
    from tests.launch import announce, give, listen

    commlib.init()
    ones = np.ones(1000)
    commlib.push_pull(ones, name="known", op=commlib.Sum)
    announce("ready")
    listen()
    began = time.monotonic()
    new = told(lambda: commlib.push_pull(ones, name="new", timeout=20))
    waited = time.monotonic() - began
    known = told(lambda: commlib.push_pull(ones, name="known", op=commlib.Sum, timeout=10)[0])
    unnamed = told(lambda: commlib.push_pull(ones, op=commlib.Sum, timeout=10)[0])
    give((new, waited, known, unnamed))
"""


@pytest.mark.parametrize(("hosts", "servers"), [([2], 0), ([2, 1], 0), ([1, 1], 1)])
def test_the_scheduler_is_killed(hosts: list[int], servers: int) -> None:
    with Job(SCHEDULER, hosts=hosts, servers=servers) as job:
        job.await_event("ready")
        os.kill(scheduler_pid(job), signal.SIGKILL)
        for rank in range(sum(hosts)):
            job.tell(rank, "go on")
        outcomes = job.wait(30)
    for outcome in outcomes[: sum(hosts)]:
        assert outcome.status == 0, outcome
        assert "Traceback" not in outcome.stderr
        new, waited, known, unnamed = outcome.value
        assert new.startswith("PeerLostError: the scheduler on ")
        assert waited < NOTICED_S
        if not servers:  # nothing of the data depends on it
            assert known == unnamed == sum(hosts)
        else:  # a server ends when nobody can tell it any more that the job is over
            for what in (known, unnamed):
                assert what == sum(hosts) or what.startswith("PeerLostError: server 0 on host "), what


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_the_scheduler_is_stopped(hosts: list[int]) -> None:
    with Job(SCHEDULER, hosts=hosts, env={"COMMLIB_PEER_TIMEOUT_S": "2"}) as job:
        job.await_event("ready")
        os.kill(scheduler_pid(job), signal.SIGSTOP)
        for rank in range(2):
            job.tell(rank, "go on")
        outcomes = job.await_end([0, 1], timeout=30)
        os.kill(scheduler_pid(job), signal.SIGCONT)
        job.wait(5)
    for outcome in outcomes:
        assert outcome.status == 0, outcome
        new, waited, known, unnamed = outcome.value
        assert new.startswith("PeerLostError: the scheduler on ")
        assert waited < 2 + 2 + NOTICED_S  # at most a heartbeat after it was last heard of, and the timeout
        assert known == unnamed == 2
