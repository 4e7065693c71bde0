# SPDX-License-Identifier: Apache-2.0
"""Small asynchronous sums on one host: nobody is told that they are done, or that they can be: every rank looks.

Whatever they do instead of waiting, or do not do, nothing may depend on it: not the other ranks, not the name, not the
end of the job, and not the memory.
"""

from __future__ import annotations

import pytest

from tests.launch import Job, run_job

HEAD = """
    import asyncio, gc, threading, time
    import numpy as np, commlib
    from commlib import Sum
    from commlib.errors import CommlibError, MismatchError, PeerLostError
    from tests.launch import announce, give, listen

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) // 2

    def filled(count=1001):
        return np.full(count, rank + 1, np.int32)

    def meet(name):
        commlib.push_pull(np.zeros(1), name=name)

    def first_rank_0(submit, name):
        # What `submit` gives: on rank 0 before, on the others after it.
        handle = submit() if rank == 0 else None
        meet(name)
        return submit() if rank else handle
"""

POLLED = (
    HEAD
    + """
    mine = filled()
    handle = first_rank_0(lambda: commlib.push_pull_async_(mine, name="a", op=Sum), "polled")
    deadline = time.monotonic() + 30
    while not handle.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert np.all(mine == total) and handle.wait(0) is mine and handle.exception() is None

    # In an event loop, which wants to be told.
    mine = filled()
    handle = first_rank_0(lambda: commlib.push_pull_async_(mine, name="b", op=Sum), "awaited")
    async def result():
        return await handle
    assert asyncio.run(asyncio.wait_for(result(), 30)) is mine and np.all(mine == total)
    give("right")
    commlib.shutdown()
"""
)

# Many threads wait for and look at the same handle.
THREADS = (
    HEAD
    + """
    for turn in range(200):
        mine = filled(17)
        handle = commlib.push_pull_async_(mine, name="a", op=Sum)
        seen = []
        def look():
            while not handle.done():
                time.sleep(0)
            seen.append(mine[0])
        def wait():
            seen.append(handle.wait(30)[0])
        threads = [threading.Thread(target=target) for target in (look, wait, wait)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [total] * 3, seen
    give("right")
    commlib.shutdown()
"""
)

# The handle is dropped at once: the name is free again, and the memory given back, without anybody looking.
DROPPED = (
    HEAD
    + """
    for turn in range(50):
        mine = filled()
        first_rank_0(lambda: commlib.push_pull_async_(mine, name="a", op=Sum), f"dropped {turn % 7}") and None
        gc.collect()
        deadline = time.monotonic() + 30
        while mine[0] != total:
            assert time.monotonic() < deadline, turn
            time.sleep(0.001)
        meet("all have seen it")
    commlib.push_pull_(filled(), name="a", op=Sum)
    give("right")
    commlib.shutdown()
"""
)

# The name is used again while the last handle, done, has never been looked at. The same without a name, 1,024 later.
AGAIN = (
    HEAD
    + """
    kept = []
    for turn in range(5):
        mine = filled()
        kept.append((mine, first_rank_0(lambda: commlib.push_pull_async_(mine, name="a", op=Sum), f"a {turn}")))
        meet(f"all have submitted {turn}")
    for turn in range(3000):
        mine = filled(5)
        kept.append((mine, commlib.push_pull_async_(mine, op=Sum)))
    for mine, handle in reversed(kept):
        assert handle.wait() is mine and np.all(mine == total)
    give("right")
    commlib.shutdown()
"""
)

# A rank that never looks holds nobody up: not those who wait, nor the end of the job.
NEVER = (
    HEAD
    + """
    kept = [commlib.push_pull_async_(filled(), name=f"{n}", op=Sum) for n in range(100) if rank == 0]
    meet("rank 0 has submitted")
    if rank:
        for n in range(100):
            mine = filled()
            commlib.push_pull_(mine, name=f"{n}", op=Sum)
            assert np.all(mine == total)
    meet("all are done")
    commlib.shutdown()
    if kept:
        assert all(handle.done() and np.all(handle.wait() == total) for handle in kept)
    give("right")
"""
)

# One rank's buffers cannot be staged, so that it needs the others' help; they have submitted and are busy.
HELP = (
    HEAD
    + """
    some_kib = 5003  # and so not for everybody to do by himself
    handles = [commlib.push_pull_async_(filled(some_kib), name=f"{n}", op=Sum) for n in range(20)] if rank == 0 else []
    announce("submitted")
    assert listen() == "go on"
    if rank:
        for n in range(20):
            assert np.all(commlib.push_pull_(filled(some_kib), name=f"{n}", op=Sum, timeout=30) == total)
        announce("done")
    else:
        assert listen() == "look"
    assert all(np.all(handle.wait(30) == total) for handle in handles)
    give("right")
    commlib.shutdown()
"""
)

# A rank is in the next round of a name before the other has looked at this one: what each finds is of its own round,
# whatever the sizes of the two.
AHEAD = (
    HEAD
    + """
    sizes = [1, 3, 2000, 7, 600, 5003, 0, 100_003, 11, 70_001, 2, 4]
    for collective in ("push_pull", "broadcast"):
        for here, after in zip(sizes, sizes[1:] + sizes[:1]):
            root = here % size
            def submit(count, salt):
                mine = np.arange(count, dtype=np.float64) * (rank + 1) + salt
                if collective == "push_pull":
                    return mine, commlib.push_pull_async_(mine, name="a", op=Sum)
                return commlib.broadcast(mine, root, name="b"), None
            def truth(count, salt):
                if collective == "push_pull":
                    return np.arange(count) * float(total) + salt * size
                return np.arange(count) * float(root + 1) + salt
            first, waits = submit(here, 1)
            if collective == "push_pull":
                meet("all are in this round")
                if rank:
                    waits.wait(30)
                    second, then = submit(after, 2)
                    meet("this rank is in the next one")
                else:
                    meet("this rank is in the next one")
                    waits.wait(30)
                    second, then = submit(after, 2)
                then.wait(30)
            else:
                second, _ = submit(after, 2)
            assert np.array_equal(first, truth(here, 1)), (collective, here, after)
            assert np.array_equal(second, truth(after, 2)), (collective, here, after)
    give("right")
    commlib.shutdown()
"""
)

# The same at whatever pace, without ever meeting.
PACED = (
    HEAD
    + """
    import random
    pace, sizes = random.Random(rank), random.Random(5)
    for turn in range(3000):
        count = sizes.choice([1, 2, 100, 1023, 1024, 1025, 2049])
        mine = np.arange(count, dtype=np.float32) + (rank + 1) * turn
        handle = commlib.push_pull_async(mine, name=f"{turn % 3}", op=Sum)
        if pace.random() < 0.02:
            time.sleep(pace.random() / 100)
        if pace.random() < 0.5:
            while pace.random() < 0.9 and not handle.done():
                time.sleep(0)
        assert np.array_equal(handle.wait(30), np.arange(count) * np.float32(size) + total * turn), turn
    give("right")
    commlib.shutdown()
"""
)

MISMATCH = (
    HEAD
    + """
    if rank == 0:
        handle = commlib.push_pull_async_(filled(7), name="a", op=Sum)
    announce("submitted")
    assert listen() == "go on"
    if rank:
        began = time.monotonic()
        try:
            commlib.push_pull_(filled(8), name="a", op=Sum)
        except MismatchError as error:
            assert error.field == "shape" and set(error.values) == {0, 1}, vars(error)
        else:
            raise AssertionError("no mismatch")
        announce("told")
    else:
        assert listen() == "look"
        assert isinstance(handle.exception(), MismatchError)
    assert np.all(commlib.push_pull_(filled(), name="a", op=Sum) == total)
    give("right")
    commlib.shutdown()
"""
)

LOST = (
    HEAD
    + """
    kept = [commlib.push_pull_async_(filled(), name=f"{n}", op=Sum) for n in range(3)] if rank < 2 else []
    meet("submitted")
    announce("submitted")
    if rank == 2:
        listen()
    for handle in kept:
        try:
            handle.wait(30)
        except PeerLostError as error:
            assert error.rank == 2
        else:
            raise AssertionError("not told")
    give("told")
"""
)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "script",
    [POLLED, THREADS, DROPPED, AGAIN, NEVER, AHEAD, PACED],
    ids=["polled", "threads", "dropped", "again", "never", "ahead", "paced"],
)
def test_whatever_is_done_instead_of_waiting(script: str, size: int) -> None:
    assert run_job(script, hosts=[size], timeout=60) == ["right"] * size


@pytest.mark.parametrize("script", [POLLED, DROPPED, AGAIN, NEVER], ids=["polled", "dropped", "again", "never"])
def test_the_same_on_several_hosts(script: str) -> None:
    assert run_job(script, hosts=[2, 1], timeout=60) == ["right"] * 3


@pytest.mark.parametrize("route", ["cma", "staged", "auto"])
def test_a_busy_rank_helps_one_whose_buffers_go_another_way(route: str) -> None:
    with Job(HELP, hosts=[2], rank_env={1: {"COMMLIB_LOCAL_ROUTE": route}}) as job:
        job.await_event("submitted")
        job.tell(0, "go on")
        job.tell(1, "go on")
        job.await_event("done", ranks=[1])  # rank 0 does nothing meanwhile
        job.tell(0, "look")
        assert [outcome.value for outcome in job.wait(timeout=30)] == ["right"] * 2


def test_a_mismatch_is_explained_though_one_rank_does_not_look() -> None:
    with Job(MISMATCH, hosts=[2]) as job:
        job.await_event("submitted")
        job.tell(0, "go on")
        job.tell(1, "go on")
        job.await_event("told", ranks=[1])
        job.tell(0, "look")
        assert [outcome.value for outcome in job.wait(timeout=30)] == ["right"] * 2


def test_a_loss_is_told_to_who_looks_later() -> None:
    with Job(LOST, hosts=[3]) as job:
        job.await_event("submitted")
        job.kill(2)
        assert [outcome.value for outcome in job.wait(timeout=30)[:2]] == ["told"] * 2
