# SPDX-License-Identifier: Apache-2.0
"""`commlib run` and the library together: workers meet, servers join and leave, and a lost rank ends the job."""

from __future__ import annotations

import sys

import pytest

from tests.cli.command import run

SUM = """
import numpy as np, commlib
commlib.init()
total = commlib.push_pull(np.full(1000, commlib.rank() + 1.0), op=commlib.Sum)
assert (total == sum(range(1, commlib.size() + 1))).all()
print("sum", total[0], "servers", commlib.num_servers())
"""
LOST = """
import os, signal, numpy as np, commlib
commlib.init()
try:
    # Through with it is who sees that all are there; who looks a moment later may see that one has been lost since.
    commlib.barrier()
    if commlib.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    commlib.push_pull(np.ones(10))
except commlib.errors.PeerLostError as error:
    print("lost:", error)
    raise SystemExit(0)
"""


def lines(output: bytes, contain: str) -> list[str]:
    return sorted(line for line in output.decode().splitlines() if contain in line)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_meet(workers: int) -> None:
    done = run("run", "-n", str(workers), "--", sys.executable, "-c", SUM)
    assert done.returncode == 0, done.stderr
    total = workers * (workers + 1) / 2
    assert lines(done.stdout, "sum") == [f"[{rank}] sum {total} servers 0" for rank in range(workers)]


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (1, 2)])
def test_servers_join_and_leave_by_themselves(workers: int, servers: int) -> None:
    done = run("run", "-n", str(workers), "--servers", str(servers), "--", sys.executable, "-c", SUM)
    assert done.returncode == 0, done.stderr
    total = workers * (workers + 1) / 2
    assert lines(done.stdout, "sum") == [f"[{rank}] sum {total} servers {servers}" for rank in range(workers)]
    assert b"stopping" not in done.stderr


def test_servers_of_a_job_that_never_asked_for_them_are_stopped() -> None:
    done = run("run", "-n", "1", "--servers", "1", "--", "true")
    assert done.returncode == 0
    assert b"stopping server 0" in done.stderr


@pytest.mark.parametrize("servers", [0, 1])
def test_a_lost_rank_is_told_and_its_status_is_the_job_s(servers: int) -> None:
    done = run("run", "-n", "3", "--servers", str(servers), "--", sys.executable, "-c", LOST)
    assert done.returncode == 128 + 9
    told = lines(done.stdout, "lost:")
    assert [line[:3] for line in told] == ["[0]", "[2]"]
    assert all("rank 1" in line for line in told)


@pytest.mark.parametrize("command", ["server", "scheduler"])
def test_roles_without_an_address_say_what_they_need(command: str) -> None:
    done = run(command)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"commlib {command}: COMMLIB_SCHEDULER is not set")
    assert b"Traceback" not in done.stderr


# Rank 1 takes its time to end, so that the others, which have lost it, end before it.
LEAVES = """
import atexit, os, sys, time
if os.environ["COMMLIB_RANK"] == "1":
    atexit.register(time.sleep, 1.5)  # comes after what commlib does at exit
import numpy as np, commlib
commlib.init()
commlib.push_pull(np.ones(10), name="first")
if commlib.rank() == 1:
    sys.exit(7)
commlib.push_pull(np.ones(10), name="second")
"""


def test_the_status_is_that_of_the_rank_that_the_others_lost() -> None:
    done = run("run", "-n", "3", "--", sys.executable, "-c", LEAVES)
    assert done.returncode == 7, done.stderr
    assert done.stderr.count(b"PeerLostError: rank 1") == 2
    assert b"commlib run: rank 1, which the others had lost, ended with status 7" in done.stderr
