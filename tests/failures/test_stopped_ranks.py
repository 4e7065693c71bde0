# SPDX-License-Identifier: Apache-2.0
"""Processes that are stopped and go on, and links that are cut and mended: silence is death only if it is one-sided."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator

import pytest

from tests.failures.losses import Loss, check_end, check_losses, check_quiet, scheduler_pid
from tests.lab import Lab
from tests.launch import Job

TIMEOUT_S = 3
ENV = {"COMMLIB_PEER_TIMEOUT_S": str(TIMEOUT_S)}
SLACK_S = 2.0

# Sums without end, until rank 0 is told that it is enough. What it has heard by then is in the next sum.
WORKER = """
    import sys, threading
    import numpy as np, commlib
    from tests.failures.losses import give_loss
    from tests.launch import announce, give, listen

    commlib.init()
    tensor = np.ones(int(sys.argv[1]), np.float32)
    over = np.zeros(1, np.uint8)

    def hear():
        while True:
            word = listen()
            if word == "enough":
                over[0] = 1
            word == "where" and announce(f"round {steps}")

    def work():
        global steps
        while True:
            commlib.push_pull_(tensor, name="tensor", op=commlib.Max, timeout=60)
            ended = commlib.push_pull(over, name="over", op=commlib.Max, timeout=60)
            steps += 1
            if steps == 2:
                announce("working")
            if ended[0]:
                return "enough"

    steps = 0
    threading.Thread(target=hear, daemon=True).start()
    if sys.argv[2] == "lost":
        give_loss(work)
    else:
        give(work())
"""
FAST, LARGE = 1000, 8 << 20


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as made:
        yield made


def everything(job: Job) -> list[int]:
    """Ids of all processes of a job, its scheduler included."""
    others = [int(line.partition(":")[0]) for line in job.leftovers()]
    return [process.popen.pid for process in job.processes] + others


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def check_goes_on(job: Job) -> None:
    """It still works a peer timeout and more later, and ends well when told."""
    time.sleep(TIMEOUT_S + 1.5)  # whoever was wrongly taken for dead is so by then
    with contextlib.suppress(BrokenPipeError):  # it has ended; why, it says below
        job.tell(0, "enough")
    for outcome in check_end(job, 20):
        check_quiet(outcome)
        assert outcome.value in ("enough", None), outcome  # a server gives nothing


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_of_one_host_is_stopped(victim: int) -> None:
    with Job(WORKER, hosts=[3], args=[str(FAST), "lost"], env=ENV) as job:
        check_one_stopped(job, victim)


@pytest.mark.lab
@pytest.mark.parametrize(
    ("victim", "servers", "count"), [(0, 0, FAST), (1, 0, LARGE), (2, 0, LARGE), (1, 1, FAST), (2, 1, LARGE)]
)
def test_a_rank_of_two_hosts_is_stopped(lab: Lab, victim: int, servers: int, count: int) -> None:
    with Job(WORKER, hosts=[2, 1], servers=servers, lab=lab, args=[str(count), "lost"], env=ENV) as job:
        check_one_stopped(job, victim)


def check_one_stopped(job: Job, victim: int) -> None:
    job.await_event("working")
    since = time.monotonic()
    job.kill(victim, signal.SIGSTOP)
    survivors = [rank for rank in range(3) if rank != victim]
    outcomes = job.await_end(survivors, timeout=20)
    check_losses(outcomes, since=since, rank=victim, within=TIMEOUT_S + SLACK_S)
    assert all(outcome.value.when - since > TIMEOUT_S - 1.5 for outcome in outcomes)  # the last beat: 1 s ago or less
    job.kill(victim, signal.SIGCONT)
    woken = time.monotonic()
    (late,) = job.await_end([victim], timeout=20)
    assert isinstance(late.value, Loss), late
    assert late.value.when - woken < SLACK_S
    check_quiet(late)
    check_end(job)


@pytest.mark.lab
def test_a_server_is_stopped(lab: Lab) -> None:
    with Job(WORKER, hosts=[1, 1], servers=1, lab=lab, args=[str(LARGE), "lost"], env=ENV) as job:
        job.await_event("working")
        since = time.monotonic()
        job.servers[0].popen.send_signal(signal.SIGSTOP)
        check_losses(job.await_end([0, 1], timeout=20), since=since, rank=None, within=TIMEOUT_S + SLACK_S)
        job.servers[0].popen.send_signal(signal.SIGCONT)
        check_end(job)


# For longer than the timeout, but not so long that it could be nothing else.
@pytest.mark.parametrize("seconds", [TIMEOUT_S + 1, 2 * TIMEOUT_S + 1])
def test_all_of_one_host_are_stopped_for_a_while(seconds: int) -> None:
    with Job(WORKER, hosts=[4], args=[str(FAST), "fine"], env=ENV) as job:
        job.await_event("working")
        pids = everything(job)
        send(pids, signal.SIGSTOP)
        time.sleep(seconds)
        send(pids, signal.SIGCONT)
        check_goes_on(job)


@pytest.mark.lab
@pytest.mark.parametrize(("servers", "count", "seconds"), [(0, FAST, TIMEOUT_S + 1), (1, LARGE, 2 * TIMEOUT_S + 1)])
def test_all_hosts_are_stopped_for_a_while(lab: Lab, servers: int, count: int, seconds: int) -> None:
    with Job(WORKER, hosts=[2, 1], servers=servers, lab=lab, args=[str(count), "fine"], env=ENV) as job:
        job.await_event("working")
        pids = everything(job)
        send(pids, signal.SIGSTOP)
        time.sleep(seconds)
        send(pids, signal.SIGCONT)
        check_goes_on(job)


@pytest.mark.lab
@pytest.mark.parametrize("first", [0, 1])
def test_connections_survive_that_nobody_reads(lab: Lab, first: int) -> None:
    # The sender's kernel has bytes that the receiver's has no room for, and asks again and again.
    with Job(WORKER, hosts=[1, 1], lab=lab, args=[str(LARGE), "fine"], env=ENV) as job:
        job.await_event("working")
        # First, or else it asks one that is stopped for a sign of life, and counts the time of its own stop, too.
        send([scheduler_pid(job)], signal.SIGSTOP)
        job.kill(first, signal.SIGSTOP)
        deadline = time.monotonic() + 0.5
        command = lab.command(1 - first, ["ss", "-tno"])
        while b"timer:(persist" not in subprocess.run(command, capture_output=True, check=True, timeout=10).stdout:
            if time.monotonic() > deadline:
                break  # it was the stopped one's turn to send
            time.sleep(0.02)
        pids = everything(job)
        send(pids, signal.SIGSTOP)
        time.sleep(3 * TIMEOUT_S)
        send(pids, signal.SIGCONT)
        check_goes_on(job)


@pytest.mark.lab
@pytest.mark.parametrize(("servers", "cut"), [(0, 1), (1, 1), (1, 2)])
def test_a_cable_is_pulled(lab: Lab, servers: int, cut: int) -> None:
    with Job(WORKER, hosts=[1, 1], servers=servers, lab=lab, args=[str(LARGE), "lost"], env=ENV) as job:
        job.await_event("working")
        since = time.monotonic()
        lab.cut(cut)
        try:
            outcomes = job.await_end([0, 1], timeout=20)
        finally:
            lab.heal(cut)
        for outcome in outcomes:
            loss = outcome.value
            assert isinstance(loss, Loss), outcome
            assert loss.when - since < TIMEOUT_S + SLACK_S
            check_quiet(outcome)
        check_end(job, 10)


@pytest.mark.lab
def test_a_cable_is_put_back_in_time(lab: Lab) -> None:
    # TCP doubles its pause before it tries again, so one second without a link may cost two.
    env = {"COMMLIB_PEER_TIMEOUT_S": str(2 * TIMEOUT_S)}
    with Job(WORKER, hosts=[2, 1], servers=1, lab=lab, args=[str(LARGE), "fine"], env=env) as job:
        job.await_event("working")
        for host in (1, 2):
            lab.cut(host)
            time.sleep(1)
            lab.heal(host)
        check_goes_on(job)
