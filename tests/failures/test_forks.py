# SPDX-License-Identifier: Apache-2.0
"""Children forked after `init`, as data loaders are: they hide nobody's death, disturb nobody, and are told so."""

from __future__ import annotations

import time

import pytest

from tests.failures.losses import check_end, check_losses, check_quiet
from tests.launch import Job, run_job

CHILD = """
    import gc, os, sys
    import numpy as np, commlib
    from tests.failures.losses import told
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    kept = commlib.empty(1 << 16, np.float32)
    kept.fill(rank + 1)
    freed = commlib.empty(1 << 16, np.float32)
    commlib.push_pull(kept, name="known", op=commlib.Sum)
    flying = commlib.push_pull_async(kept, name="flying", op=commlib.Sum) if rank == 0 and size > 1 else None
    done = commlib.push_pull_async(kept, name="done", op=commlib.Sum)
    done.wait()

    def child():
        told_texts = {
            "new": told(lambda: commlib.push_pull(np.ones(3), name="new")),
            "known": told(lambda: commlib.push_pull_(kept, name="known")),
            "unnamed": told(lambda: commlib.push_pull_async(np.ones(3))),
            "pointer": told(lambda: commlib.push_pull_ptr(kept.ctypes.data, 3, "float32", name="known")),
            "broadcast": told(lambda: commlib.broadcast(np.ones(3), 0)),
            "barrier": told(lambda: commlib.barrier()),
            "empty": told(lambda: commlib.empty(1 << 16).fill(77)),
            "zeros": told(lambda: commlib.zeros(1 << 16)),
            "declare": told(lambda: commlib.declare([("d", 4)])),
            "rank": told(lambda: commlib.rank()),
            "init": told(lambda: commlib.init()),
            "speed": told(lambda: commlib.get_push_pull_speed()),
        }
        if flying is not None:
            told_texts["wait"] = told(lambda: flying.wait(5))
        for what, text in told_texts.items():
            assert str(text).startswith("NotInitializedError: this is a forked child"), (what, text)
        assert not commlib.is_initialized()
        assert done.done() and float(done.wait()[0]) == size * (size + 1) / 2  # what has been can be looked at
        assert (kept == rank + 1).all()
        commlib.shutdown()
        for name in ("kept", "flying", "done", "freed"):
            del globals()[name]
        gc.collect()

    children = []
    for way in ("exit", "_exit", "error"):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                child()
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(99)
            if way == "_exit":
                os._exit(0)
            if way == "error":
                sys.stderr = open(os.devnull, "w")
                raise ValueError("in the child")
            sys.exit(3)
        children.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    assert children == [3, 0, 1], children
    commlib.barrier()  # only now may what rank 0 has in flight be completed
    # Nothing of the parent's has been touched, or given to somebody else.
    assert (kept == rank + 1).all()
    others = [commlib.zeros(1 << 16, np.float32) for _ in range(4)]
    assert (kept == rank + 1).all() and not any(other.any() for other in others)
    flying = flying or commlib.push_pull_async(kept, name="flying", op=commlib.Sum)
    total = size * (size + 1) / 2
    assert (flying.wait(20) == total).all()
    for step in range(20):
        assert (commlib.push_pull(kept, name="known", op=commlib.Sum, timeout=20) == total).all()
    give("fine")
"""


@pytest.mark.parametrize("hosts", [[1], [2], [2, 1]])
def test_a_child_is_told_and_disturbs_nobody(hosts: list[int]) -> None:
    assert run_job(CHILD, hosts=hosts, timeout=60) == ["fine"] * sum(hosts)


# Children that live on and hold whatever they have inherited.
LIVING_ON = """
    import multiprocessing, os, signal, sys, time
    import numpy as np, commlib
    from tests.failures.losses import give_loss
    from tests.launch import announce, listen

    commlib.init()
    ones = np.ones(300_001, np.float32)
    commlib.push_pull(ones, name="sum")
    if commlib.rank() == int(sys.argv[1]):
        if os.fork() == 0:
            signal.pause()
        context = multiprocessing.get_context("fork")
        context.Process(target=signal.pause).start()
        commlib.push_pull(ones, name="sum")
        announce("ready")
        listen()
    else:
        commlib.push_pull(ones, name="sum")
        announce("ready")
        give_loss(lambda: commlib.push_pull(ones, name="sum", timeout=20))
"""


@pytest.mark.parametrize(
    ("hosts", "victim"), [([2], 0), ([3], 1), ([1, 1], 0), ([1, 1], 1), ([2, 2], 1), ([2, 2], 2), ([2, 2], 3)]
)
def test_a_death_is_seen_though_children_live_on(hosts: list[int], victim: int) -> None:
    with Job(LIVING_ON, hosts=hosts, args=[str(victim)]) as job:
        job.await_event("ready")
        assert len([line for line in job.leftovers() if "scheduler_main" not in line]) == 2
        since = time.monotonic()
        job.kill(victim)
        survivors = [rank for rank in range(sum(hosts)) if rank != victim]
        check_losses(job.await_end(survivors, timeout=20), since=since, rank=victim)
        assert len([line for line in job.leftovers() if "scheduler_main" not in line]) == 2  # they are none of ours


ENDING_FIRST = """
    import multiprocessing, os, sys
    import numpy as np, commlib
    from tests.launch import announce, give, listen

    commlib.init()
    ones = np.ones(300_001, np.float32)
    commlib.push_pull(ones, name="sum")
    read, write = os.pipe()
    if commlib.rank() == 0 and os.fork() == 0:
        os.close(write)
        os.read(read, 1)  # until its parent has gone in order
        os._exit(0)
    give(float(commlib.push_pull(ones, name="sum", op=commlib.Sum, timeout=20)[0]))
    commlib.shutdown()
"""


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_a_job_ends_well_though_children_live_on(hosts: list[int]) -> None:
    with Job(ENDING_FIRST, hosts=hosts) as job:
        for outcome in check_end(job, 20):
            check_quiet(outcome)
            assert outcome.value == 2


# Loaders come and go all the time, while every thread of the parent is busy with operations.
LOADERS = """
    import multiprocessing, os, sys, threading
    import numpy as np, commlib
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) / 2
    over = threading.Event()
    wrong = []

    def load(number, queue):
        try:
            commlib.push_pull(np.ones(3))
        except commlib.errors.NotInitializedError:
            queue.put(np.full(1000, number))

    def work(name, count):
        tensor = commlib.empty(count, np.float32) if count % 2 else np.empty(count, np.float32)
        ended = np.zeros(1, np.uint8)
        while not ended[0]:
            tensor.fill(rank + 1)
            commlib.push_pull_(tensor, name=name, op=commlib.Sum, timeout=30)
            if not (tensor == total).all():
                wrong.append(name)
            ended[0] = over.is_set()
            commlib.push_pull_(ended, name=f"{name} ended", op=commlib.Min, timeout=30)

    threads = [threading.Thread(target=work, args=(f"t{c}", c)) for c in (101, 40_000, 700_001, 3_000_000)]
    for thread in threads:
        thread.start()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    for number in range(12):
        child = context.Process(target=load, args=(number, queue))
        child.start()
        assert (queue.get() == number).all()
        child.join(20)
        assert child.exitcode == 0
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    give("fine")
"""


@pytest.mark.parametrize("hosts", [[2], [2, 1]])
def test_loaders_come_and_go_in_the_middle_of_operations(hosts: list[int]) -> None:
    assert run_job(LOADERS, hosts=hosts, timeout=90) == ["fine"] * sum(hosts)
