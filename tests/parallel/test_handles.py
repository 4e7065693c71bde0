# SPDX-License-Identifier: Apache-2.0
"""Operations in flight: many of them, waited for in every way there is, and given up waiting for."""

from __future__ import annotations

import pytest

from tests.lab import Lab
from tests.launch import run_job

# Unnamed operations recycle 1,024 keys: more than that may be in flight all the same.
UNNAMED = """
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    for number in (3, 2050, 3001):
        arrays = [np.full(1 + n % 5, n + rank, np.int64) for n in range(number)]
        handles = [commlib.push_pull_async_(array, op=Sum) for array in arrays]
        tail = commlib.push_pull(np.full(2, rank), op=Sum)
        commlib.broadcast_(np.zeros(1), 0)
        for n in np.random.default_rng(rank).permutation(number):
            assert handles[n].wait() is arrays[n]
            assert np.all(arrays[n] == size * n + size * (size - 1) // 2)
        assert np.all(tail == size * (size - 1) // 2)
    give("right")
    commlib.shutdown()
"""

WAYS_TO_WAIT = """
    import threading
    import numpy as np, commlib
    from commlib import Sum
    from commlib.errors import CommlibError, DuplicateNameError, OperationTimeout
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()

    def go(name):
        commlib.push_pull(np.zeros(1), name=name)

    def times_out(function, *arguments, **options):
        try:
            function(*arguments, **options)
        except OperationTimeout as error:
            assert isinstance(error, TimeoutError) and "stays in flight" in str(error), error
        else:
            raise AssertionError("no timeout")

    for count in (3, 2_000_001):
        mine = np.full(count, rank + 1, np.int32)
        total = size * (size + 1) // 2

        # The handle of an asynchronous operation: waited for in vain, and again.
        if rank == 0:
            handle = commlib.push_pull_async(mine, name="a", op=Sum)
            assert not handle.done() and not commlib.poll(handle)
            times_out(handle.wait, 0)
            times_out(handle.wait, 0.15)
            times_out(handle.exception)
            try:
                commlib.push_pull_async(mine, name="a", op=Sum)
            except DuplicateNameError as error:
                assert '"a"' in str(error)
            else:
                raise AssertionError("in flight twice")
        go("a may go on")
        if rank != 0:
            handle = commlib.push_pull_async(mine, name="a", op=Sum)
        result = handle.wait()
        assert np.all(result == total)
        assert handle.wait() is result and handle.wait(0) is result and commlib.synchronize(handle) is result
        assert handle.done() and commlib.poll(handle) and handle.exception() is None

        # A synchronous one that timed out has no handle: it ends by itself, and its name can then be used again.
        if rank == 0:
            times_out(commlib.push_pull_, mine, name="b", op=Sum, timeout=0.1)
        go("b may go on")
        if rank != 0:
            commlib.push_pull_(mine, name="b", op=Sum)
        while True:
            try:
                result = commlib.push_pull(mine, name="b", op=Sum, timeout=20)
                break
            except DuplicateNameError:
                assert rank == 0
        assert np.all(mine == total) and np.all(result == size * total)

        # From several threads at once, of which some give up.
        mine.fill(rank + 1)
        found, gave_up = [], []

        def wait_long():
            found.append(handle.wait(30))

        def wait_short():
            try:
                handle.wait(0.05)
            except OperationTimeout:
                gave_up.append(True)

        if rank == 0:
            handle = commlib.push_pull_async_(mine, name="c", op=Sum)
            threads = [threading.Thread(target=t) for t in [wait_long, wait_short] * 4]
            for thread in threads:
                thread.start()
            for thread in threads[1::2]:
                thread.join()
            assert len(gave_up) == 4 and not found
        go("c may go on")
        if rank == 0:
            for thread in threads[::2]:
                thread.join()
            assert len(found) == 4 and all(result is mine for result in found)
        else:
            commlib.push_pull_(mine, name="c", op=Sum)
        assert np.all(mine == total)
    give("right")
    commlib.shutdown()
"""

# Ctrl-C in wait, in a synchronous call and in a barrier: seen at once, and the operation goes on.
INTERRUPTED = """
    import os, signal, threading, time
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) // 2

    def go():
        commlib.push_pull(np.zeros(1), name="go")

    def interrupted(function):
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        began = time.monotonic()
        try:
            function()
        except KeyboardInterrupt:
            return time.monotonic() - began
        raise AssertionError("not interrupted")

    took = []
    for count in (5, 1_000_001):
        mine = np.full(count, rank + 1.0, np.float32)
        if rank == 0:
            handle = commlib.push_pull_async_(mine, name="async", op=Sum)
            took.append(interrupted(handle.wait))
            assert not handle.done()
            go()
            assert handle.wait() is mine
        else:
            go()
            commlib.push_pull_(mine, name="async", op=Sum)
        assert np.all(mine == total)

        mine.fill(rank + 1)
        result = mine
        if rank == 0:
            took.append(interrupted(lambda: commlib.push_pull_(mine, name="sync", op=Sum)))
            took.append(interrupted(lambda: commlib.broadcast_(np.zeros(count), 1, name="cast")))
            took.append(interrupted(commlib.barrier))
            go()
        else:
            go()
            commlib.push_pull_(mine, name="sync", op=Sum)
            commlib.broadcast_(np.zeros(count), 1, name="cast")
            commlib.barrier()
        commlib.barrier()  # behind the interrupted one, which has ended when this one has at all ranks
        while True:
            try:
                commlib.push_pull(np.zeros(1), name="sync", timeout=20)
                break
            except commlib.errors.DuplicateNameError:
                assert rank == 0
        assert np.all(mine == total)
    give(took)
    commlib.shutdown()
"""

AWAITED = """
    import asyncio, threading
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) // 2

    async def one(name, count):
        array = np.full(count, rank + 1, np.int64)
        handle = commlib.push_pull_async_(array, name=name, op=Sum)
        result = await handle
        assert result is array and np.all(array == total)
        assert await handle is result  # again, when it is done

    async def several(label):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        for _ in range(5):
            await asyncio.gather(*(one(f"{label} {n}", 1 + 20_000 * (n % 3)) for n in range(20)))
        # A task that is cancelled takes nothing with it.
        array = np.full(3, rank + 1)
        handle = commlib.push_pull_async_(array, name=f"{label} cancelled", op=Sum)
        task = asyncio.ensure_future(wait_for(handle))
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        assert np.all(await handle == total)
        # A failure is raised where it is awaited.
        handle = commlib.push_pull_async(np.zeros(1 + rank), name=f"{label} mismatch")
        try:
            await handle
        except commlib.errors.MismatchError as error:
            assert error.field == "shape"
        else:
            raise AssertionError("no mismatch")
        ticking.cancel()
        assert ticks > 0

    async def wait_for(handle):
        return await handle

    failures = []

    def run(label):
        try:
            for n in range(3):  # each in an event loop of its own
                asyncio.run(several(f"{label}.{n}"))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=[t]) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    asyncio.run(several("main"))
    give("right")
    commlib.shutdown()
"""

# More threads than synchronous callers may sleep at once in the ready table.
THREADS = """
    import threading
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    right = []

    def run(t):
        for n in range(30):
            count = [1, 1023, 30_001][(n + t) % 3]
            result = commlib.push_pull(np.full(count, t + n + rank, np.float32), name=f"thread {t}", op=Sum)
            assert np.all(result == size * (t + n) + size * (size - 1) // 2)
        right.append(t)

    threads = [threading.Thread(target=run, args=[t]) for t in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(right) == list(range(40))
    give("right")
    commlib.shutdown()
"""

SCRIPTS = {"unnamed": UNNAMED, "ways to wait": WAYS_TO_WAIT, "awaited": AWAITED, "threads": THREADS}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("size", [2, 3])
def test_one_host(script: str, size: int) -> None:
    assert run_job(script, hosts=[size], timeout=60) == ["right"] * size


@pytest.mark.lab
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize(("hosts", "servers"), [([1, 1], 0), ([2, 1], 1)], ids=str)
def test_several_hosts(script: str, hosts: list[int], servers: int, lab: Lab) -> None:
    assert run_job(script, hosts=hosts, servers=servers, lab=lab, timeout=60) == ["right"] * sum(hosts)


def test_one_rank_has_as_many_in_flight_as_it_likes() -> None:
    assert run_job(UNNAMED, hosts=[1], timeout=60) == ["right"]


def check_interrupted(took: list[list[float]]) -> None:
    assert len(took[0]) == 8
    assert max(took[0]) < 1.2  # the signal comes after 0.2 s and is seen 0.1 s later; the rest is for a busy machine


@pytest.mark.parametrize("size", [2, 3])
def test_interrupted_on_one_host(size: int) -> None:
    check_interrupted(run_job(INTERRUPTED, hosts=[size], timeout=60))


@pytest.mark.lab
@pytest.mark.parametrize(("hosts", "servers"), [([1, 1], 0), ([2, 1], 1), ([1, 2], 0)], ids=str)
def test_interrupted_on_several_hosts(hosts: list[int], servers: int, lab: Lab) -> None:
    check_interrupted(run_job(INTERRUPTED, hosts=hosts, servers=servers, lab=lab, timeout=60))
