# SPDX-License-Identifier: Apache-2.0
"""A job that has nothing to do takes no CPU: nobody polls, and those who say that they are alive say it rarely."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launch import Job

pytestmark = pytest.mark.timeout(240)

IDLE_S = 10.0
MOST_S = 0.1
TIMEOUT_S = 90.0

# It has worked before it rests: whatever runs only while there is work has been started.
SCRIPT = """
    import numpy as np, commlib
    from tests.launch import announce, listen
    commlib.init()
    for step in range(10):
        commlib.push_pull(np.ones(100_003), name="x")
    commlib.barrier()
    announce("idle")
    assert listen() == "end"
    commlib.shutdown()
"""


def processes_of(job: Job) -> dict[int, str]:
    """All processes of a job, the scheduler among them: id → what it is."""
    own = {process.popen.pid: process.name for process in job.processes}
    return own | {int(line.partition(":")[0]): line for line in job.leftovers()}


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have used so far, in user mode and in the kernel."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def used_while_idle(job: Job) -> dict[str, float]:
    """The CPU time of each process of a resting job over `IDLE_S`, begun when all have come to rest."""
    processes = processes_of(job)
    deadline = time.monotonic() + TIMEOUT_S
    before = {pid: cpu_seconds(pid) for pid in processes}
    while True:
        time.sleep(0.5)
        now = {pid: cpu_seconds(pid) for pid in processes}
        if now == before:
            break
        assert time.monotonic() < deadline, f"they do not come to rest: {processes}"
        before = now
    time.sleep(IDLE_S)
    assert processes_of(job).keys() == processes.keys()
    return {name: cpu_seconds(pid) - before[pid] for pid, name in processes.items()}


def finish(job: Job) -> None:
    for rank in range(len(job.workers)):
        job.tell(rank, "end")
    outcomes = job.wait(TIMEOUT_S)
    assert [outcome.status for outcome in outcomes] == [0] * len(outcomes), "\n".join(map(str, outcomes))


def test_a_job_on_one_host() -> None:
    with Job(SCRIPT, hosts=[2]) as job:
        job.await_event("idle", timeout=TIMEOUT_S)
        used = used_while_idle(job)
        assert any("scheduler_main.py" in name for name in used)
        assert len(used) == 3, used
        assert sum(used.values()) < MOST_S, used
        finish(job)


@pytest.mark.lab
def test_a_job_on_two_hosts_with_a_server() -> None:
    with Lab(3) as lab, Job(SCRIPT, hosts=[1, 1], servers=1, lab=lab) as job:
        job.await_event("idle", timeout=TIMEOUT_S)
        used = used_while_idle(job)
        assert any("scheduler_main.py" in name for name in used)
        assert len(used) == 4, used
        assert "server 0" in used
        assert sum(used.values()) < MOST_S, used
        finish(job)
