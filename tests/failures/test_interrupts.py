# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, or a signal handler that raises, at any moment: it comes through soon, and nothing is half done."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from tests.launch import Job, run_job

# `interrupted(call, after)` calls it, with a KeyboardInterrupt after that many seconds; says whether it came.
TOOLS = """
    import gc, os, signal, threading, time
    import numpy as np, commlib
    from tests.launch import announce, give, listen

    def interrupted(call, after):
        came = threading.Event()
        def handler(number, frame):
            came.set()
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, handler)
        began = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, after)
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
            return False
        except KeyboardInterrupt:
            assert time.monotonic() - began < after + 4
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def check_held(first, after):
        gc.collect()
        deadline = time.monotonic() + 5  # what ends in the background has a moment for it
        fds, tasks = held()
        while (fds > first[0] or tasks > first[1]) and time.monotonic() < deadline:
            time.sleep(0.02)
            fds, tasks = held()
        assert fds <= first[0] and tasks <= first[1], (after, (fds, tasks), first)
"""

JOIN = (
    TOOLS
    + """
    rank = int(os.environ["COMMLIB_RANK"])
    if rank == 0:
        interrupted(commlib.init, 0.3)  # what the first attempt leaves in the process, modules and the like
        time.sleep(1)
        first = held()
        for after in np.linspace(0.001, 0.12, 30):
            assert interrupted(commlib.init, after)
            assert not commlib.is_initialized()
            check_held(first, after)
        announce("alone no more")
    else:
        listen()
    commlib.init()
    give(float(commlib.push_pull(np.ones(1000), op=commlib.Sum)[-1]))
    commlib.shutdown()
"""
)


def test_joining_can_be_interrupted_at_any_moment() -> None:
    with Job(JOIN, hosts=[2], env={"COMMLIB_CONNECT_TIMEOUT_S": "60"}) as job:
        job.await_event("alone no more", ranks=[0], timeout=60)
        job.tell(1, "go on")
        assert [outcome.value for outcome in job.wait(30)] == [2.0, 2.0]


ALONE = (
    TOOLS
    + """
    commlib.init()
    commlib.shutdown()
    first = held()
    joined = 0
    for after in np.linspace(0.0002, 0.02, 60):
        if not interrupted(commlib.init, after):
            joined += 1
        assert not interrupted(commlib.shutdown, 5)
        check_held(first, after)
    commlib.init()
    assert (commlib.push_pull(np.ones(1000), op=commlib.Sum) == 1).all()
    for after in np.linspace(0.0002, 0.02, 60):
        interrupted(commlib.shutdown, after)
        commlib.shutdown()
        check_held(first, after)
        commlib.init()
    assert (commlib.push_pull(np.ones(1000), op=commlib.Sum) == 1).all()
    give("right")
"""
)


def test_a_job_of_one_can_be_interrupted_at_any_moment() -> None:
    assert run_job(ALONE, hosts=[1], timeout=60) == ["right"]


# A handler that leaves the job, as those of batch systems do, while the main thread is joining it.
HANDLER = """
    import os, signal, sys
    import commlib
    from tests.launch import announce

    def end(number, frame):
        commlib.shutdown()
        sys.exit(3)

    signal.signal(signal.SIGTERM, end)
    announce("about to join")
    commlib.init()
"""


def test_a_handler_may_leave_while_the_main_thread_joins() -> None:
    env = {"COMMLIB_SIZE": "2", "COMMLIB_LOCAL_SIZE": "2", "COMMLIB_CONNECT_TIMEOUT_S": "60"}
    with Job(HANDLER, hosts=[1], env=env) as job:
        job.await_event("about to join")
        job.kill(0, signal.SIGTERM)
        (outcome,) = job.wait(20)
    assert outcome.status == 3, outcome
    assert outcome.stderr == ""


# Interrupted just when a name gets another signature: the core must not be told the old one.
SIGNATURE = """
    import numpy as np, commlib
    from commlib.session import Session
    from tests.failures.losses import told
    from tests.launch import give

    @staticmethod
    def interrupted(signature):
        raise KeyboardInterrupt

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    results = []
    for many, few in ((2000, 1000), (900_000, 1000), (1000, 900_000)):
        commlib.push_pull(np.ones(few), name="sum", op=commlib.Sum)
        if rank == 0:
            hash_of, Session.hash_of = vars(Session)["hash_of"], interrupted
            try:
                commlib.push_pull(np.ones(many), name="sum", op=commlib.Sum)
            except KeyboardInterrupt:
                results.append("interrupted")
            Session.hash_of = hash_of
        mine = np.full(many if rank == 0 else few, 1.0)
        results.append(told(lambda: commlib.push_pull(mine, name="sum", op=commlib.Sum, timeout=20)))
        total = commlib.push_pull(np.ones(many), name="sum", op=commlib.Sum, timeout=20)
        assert total.size == many and (total == size).all()
    give(results)
    commlib.shutdown()
"""


@pytest.mark.parametrize("hosts", [[2], [1, 1], [2, 1]])
def test_an_interrupted_submission_leaves_no_half_signature(hosts: Sequence[int]) -> None:
    for rank, results in enumerate(run_job(SIGNATURE, hosts=hosts, timeout=60)):
        if rank == 0:
            assert results[0::2] == ["interrupted"] * 3
            results = results[1::2]
        assert len(results) == 3
        for result in results:
            assert isinstance(result, str), result
            assert result.startswith("MismatchError"), result
            assert "about shape" in result


# Who joins and leaves again and again holds no more than at first.
AGAIN = """
    import gc, os
    import numpy as np, commlib
    from tests.launch import give

    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    kept = []
    for round in range(12):
        os.environ["COMMLIB_JOB"] = f"{os.environ['COMMLIB_JOB']}x"
        commlib.init()
        commlib.push_pull(np.ones(1000))
        commlib.shutdown()
        kept.append(held())
    give(kept)
"""


@pytest.mark.parametrize("hosts", [[1], [2]])
def test_nothing_of_one_job_is_left_in_the_next(hosts: Sequence[int]) -> None:
    for kept in run_job(AGAIN, hosts=hosts, timeout=60):
        assert max(kept[2:]) <= max(kept[:2]), kept
