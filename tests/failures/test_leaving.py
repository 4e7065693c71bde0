# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves, in whichever way: the others learn who, nobody sums what was given back, nothing crashes."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tests.failures.losses import check_end, check_losses, check_quiet
from tests.launch import Job, run_job

LEFT = "it shut down while others still needed it"

EARLY = """
    import sys
    import numpy as np, commlib
    from tests.failures.losses import give_loss
    from tests.launch import announce, listen

    commlib.init()
    ones = np.ones(100_003, np.float32)
    commlib.push_pull(ones, name="sum")
    if commlib.rank() == int(sys.argv[1]):
        announce("ready")
        listen()
        commlib.shutdown()
        announce("left")
        listen()
    else:
        handles = [commlib.push_pull_async(ones, name=f"sum{i}") for i in range(3)]
        announce("ready")
        give_loss(lambda: [handle.wait(20) for handle in handles])
        # So says every later operation, and whoever has not waited yet.
        give_loss(lambda: commlib.push_pull(ones, name="sum", timeout=20))
        announce("known")
        listen()
"""


@pytest.mark.parametrize(("hosts", "leaver"), [([3], 0), ([3], 2), ([2, 1], 0), ([2, 1], 1), ([2, 1], 2)])
def test_a_rank_that_leaves_while_others_wait(hosts: list[int], leaver: int) -> None:
    others = [rank for rank in range(3) if rank != leaver]
    with Job(EARLY, hosts=hosts, args=[str(leaver)]) as job:
        job.await_event("ready")
        since = time.monotonic()
        job.tell(leaver, "leave")
        job.await_event("left", ranks=[leaver])
        job.await_event("known", ranks=others)
        for rank in range(3):
            job.tell(rank, "end")
        outcomes = check_end(job)
    check_losses([outcomes[rank] for rank in others], since=since, rank=leaver, word=LEFT)
    check_quiet(outcomes[leaver])


# One breaks off what it has submitted, at any moment, and writes to its buffer at once.
BROKEN_OFF = """
    import sys, time
    import numpy as np, commlib
    from tests.failures.losses import told
    from tests.launch import announce, give, listen

    where, leaver, delay = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    tensor = commlib.empty(1 << 21, np.float32) if where == "arena" else np.empty(1 << 21, np.float32)
    tensor.fill(rank + 1)
    # The end of the job may overtake the last word of the barrier: that is no fault of either.
    early = told(commlib.barrier)
    if rank == leaver:
        handle = commlib.push_pull_async(tensor, name="tensor", op=commlib.Sum)
        until = time.perf_counter() + delay
        while time.perf_counter() < until:
            pass
        commlib.api.session().worker.shutdown(0.5)
        tensor.fill(1e9)
        give(told(lambda: handle.wait(0) is tensor))
        commlib.shutdown()
    else:
        result = early or told(lambda: commlib.push_pull(tensor, name="tensor", op=commlib.Sum, timeout=20))
        give(result if isinstance(result, str) else bool((result == size * (size + 1) // 2).all()))
    announce("done")
    listen()
"""


@pytest.mark.parametrize("where", ["arena", "own"])
@pytest.mark.parametrize("hosts", [[2], [3], [2, 1], [1, 1]])
def test_a_sum_that_one_rank_breaks_off_is_right_or_fails(hosts: list[int], where: str) -> None:
    random.seed(where + str(hosts))
    for leaver in range(sum(hosts)):
        with Job(BROKEN_OFF, hosts=hosts, args=[where, str(leaver), str(random.uniform(0, 0.004))]) as job:
            job.await_event("done")
            for rank in range(sum(hosts)):
                job.tell(rank, "end")
            for rank, outcome in enumerate(check_end(job)):
                check_quiet(outcome)
                if rank == leaver:
                    assert outcome.value == "NotInitializedError: commlib has been shut down" or outcome.value is False
                else:
                    assert outcome.value is True or (LEFT in outcome.value and f"rank {leaver} on" in outcome.value)


UNWAITED = """
    import sys, time
    import numpy as np, commlib
    from tests.launch import give

    commlib.init()
    handle = commlib.push_pull_async(np.ones(300_000, np.float32), name="last", op=commlib.Sum)
    if commlib.rank() == 1:
        time.sleep(0.05)
    commlib.shutdown()
    give(handle.wait(0)[0])
"""


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_what_is_about_to_end_is_waited_for(hosts: list[int]) -> None:
    assert run_job(UNWAITED, hosts=hosts, timeout=30) == [2, 2]


LIFECYCLE = """
    import gc
    import numpy as np, commlib
    from tests.failures.losses import told
    from tests.launch import give

    CALLS = [
        lambda: commlib.push_pull(np.ones(3)),
        lambda: commlib.push_pull_(np.ones(3), name="x"),
        lambda: commlib.push_pull_async(np.ones(3)),
        lambda: commlib.push_pull_async_(np.ones(3)),
        lambda: commlib.push_pull_ptr(np.ones(3).ctypes.data, 3, "float64", name="p"),
        lambda: commlib.broadcast(np.ones(3), 0),
        lambda: commlib.broadcast_(np.ones(3), 0),
        lambda: commlib.broadcast_object("x"),
        lambda: commlib.barrier(),
        lambda: commlib.empty(3),
        lambda: commlib.zeros(3),
        lambda: commlib.declare([("d", 4)]),
        lambda: commlib.get_push_pull_speed(),
        lambda: commlib.rank(),
        lambda: commlib.size(),
        lambda: commlib.local_rank(),
        lambda: commlib.local_size(),
        lambda: commlib.node_rank(),
        lambda: commlib.num_nodes(),
        lambda: commlib.num_servers(),
    ]

    def refused():
        assert not commlib.is_initialized()
        texts = [told(call) for call in CALLS]
        assert all(str(text).startswith("NotInitializedError: call commlib.init() first") for text in texts), texts

    commlib.shutdown()  # before there was anything to shut down
    refused()
    sums = []
    for job in range(3):
        commlib.init()
        first = commlib.api.session()
        commlib.init()  # again: nothing happens
        assert commlib.api.session() is first and commlib.is_initialized()
        rank, size = commlib.rank(), commlib.size()
        kept = commlib.empty(100_000, np.float32)
        kept.fill(rank + job)
        done = commlib.push_pull_async(kept, name="kept", op=commlib.Sum)
        sums.append(float(done.wait()[-1]))
        never = commlib.push_pull_async(kept, name="never") if size > 1 and rank == 0 else None
        commlib.barrier()
        commlib.shutdown()
        commlib.shutdown()
        refused()
        # What was made before lives on.
        assert (kept == rank + job).all() and (kept * 2).sum() == 200_000 * (rank + job)
        assert done.done() and float(done.wait()[-1]) == sums[-1] and done.exception() is None
        if never is not None:
            error = told(never.wait)  # unless the others have been faster
            assert error == "NotInitializedError: commlib has been shut down" or "has left the job" in error, error
            assert never.done() and str(never.exception()) in error
        view = kept[5:10]
        del kept, done, never
        gc.collect()
        assert (view == rank + job).all()
        del view
    give(sums)
"""


@pytest.mark.parametrize("hosts", [[1], [2], [2, 1]])
def test_each_process_has_one_job_after_the_other(hosts: list[int]) -> None:
    size = sum(hosts)
    expected = [size * (size - 1) / 2 + size * job for job in range(3)]
    assert run_job(LIFECYCLE, hosts=hosts, timeout=60) == [expected] * size


# How rank 1 ends, with operations in flight, handles and arrays alive; and with which status.
ENDINGS = {
    "nothing": ("pass", 0),
    "exit": ("sys.exit(3)", 3),
    "error": ("raise ValueError('of the program')", 1),
    "hard exit": ("os._exit(5)", 5),
    "error at exit": ("atexit.register(lambda: 1 / 0)", 0),
    "cycle": ("loop = [handle, array]; loop.append(loop); builtins.loop = loop; del loop, handle, array", 0),
    "waiting threads": (
        "[threading.Thread(target=wait, args=(w,), daemon=True).start() for w in (0, 1)]; time.sleep(0.3)",
        0,
    ),
    "working threads": ("threading.Thread(target=work, daemon=True).start(); time.sleep(0.2)", 0),
    "a thread that joins": ("threading.Thread(target=lambda: told(lambda: handle.wait(2))).start()", 0),
    "interrupt": ("threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start(); handle.wait()", -2),
}
ENDING = """
    import atexit, builtins, os, signal, sys, threading, time
    import numpy as np, commlib
    from tests.failures.losses import give_loss, told
    from tests.launch import announce, listen

    count = int(sys.argv[1])
    commlib.init()
    commlib.push_pull(np.ones(1000), name="first")
    if commlib.rank() == 1:
        ones = np.ones(count)
        handle = commlib.push_pull_async(ones, name="never")
        array = commlib.empty(count)

        def wait(synchronously):
            told(lambda: commlib.push_pull(ones, name="wait") if synchronously else handle.wait())

        def work():
            while True:
                told(lambda: commlib.push_pull(ones, name="work", timeout=0.01))

        announce("ready")
        listen()
        HOW
    else:
        handle = commlib.push_pull_async(np.ones(count), name="other")
        announce("ready")
        give_loss(lambda: handle.wait(20))
"""


@pytest.mark.parametrize(("hosts", "count"), [([2], 100), ([1, 1], 2_000_000)])
@pytest.mark.parametrize("how", ENDINGS)
def test_a_program_may_end_as_it_likes(how: str, hosts: list[int], count: int) -> None:
    statement, status = ENDINGS[how]
    with Job(ENDING.replace("HOW", statement), hosts=hosts, args=[str(count)]) as job:
        job.await_event("ready")
        since = time.monotonic()
        job.tell(1, "end")
        survivor, ended = job.await_end([0, 1], timeout=20)
        check_end(job)
    assert ended.status == status, ended
    assert ("Traceback" in ended.stderr) == (how in ("error", "error at exit", "interrupt")), ended
    within = 4.5 if how == "a thread that joins" else 2.0  # Python waits for it before it shuts anything down
    check_losses([survivor], since=since, rank=1, within=within)


def test_programs_end_well_again_and_again() -> None:
    # What crashes at exit does so now and then.
    for how, _ in itertools.product(("waiting threads", "working threads", "cycle"), range(4)):
        with Job(ENDING.replace("HOW", ENDINGS[how][0]), hosts=[2], args=["100"]) as job:
            job.await_event("ready")
            job.tell(1, "end")
            for outcome in job.await_end([0, 1], timeout=20):
                check_quiet(outcome)
