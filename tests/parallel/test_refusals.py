# SPDX-License-Identifier: Apache-2.0
"""What cannot be done is refused at once, in words, on the rank that asked for it; and nothing is left of it."""

from __future__ import annotations

import pytest

from tests.lab import Lab
from tests.launch import run_job

# Rank 0 asks for what cannot be done, many times over. Nobody else takes part in that, so had one of these calls
# counted as an operation, the ones that follow would not meet.
SCRIPT = """
    import numpy as np, commlib
    from commlib import Average, Sum
    from commlib.errors import CommlibError, DuplicateNameError, NotInitializedError, UnsupportedError
    from tests.launch import give

    def refused(error, text, function, *arguments, **options):
        try:
            function(*arguments, **options)
        except error as found:
            assert text in str(found), f"{found!r} instead of {text!r}"
            assert type(found) is error, type(found)
        else:
            raise AssertionError(f"taken: {function.__name__} {arguments} {options}")

    ones = np.ones(6, np.float32)
    refused(NotInitializedError, "call commlib.init() first", commlib.push_pull, ones)
    refused(NotInitializedError, "call commlib.init() first", commlib.rank)
    refused(TypeError, "expected a commlib.Config", commlib.init, "environment")
    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    functions = [commlib.push_pull, commlib.push_pull_, commlib.push_pull_async, commlib.push_pull_async_]

    def refuse_all():
        for dtype in (np.uint16, np.uint32, np.uint64, np.longdouble, np.complex64, np.complex128, np.clongdouble,
                      ">f4", ">i8", "M8[s]", "m8[s]", "S3", "U3", object, [("a", "f4"), ("b", "f4")]):
            tensor = np.zeros(3, dtype)
            for function in functions:
                refused(UnsupportedError, "not supported", function, tensor)
            refused(UnsupportedError, "not supported", commlib.broadcast_, tensor, 0)
        for tensor in (3.0, [1.0, 2.0], "text", None):
            refused(UnsupportedError, "neither the buffer protocol nor DLPack", commlib.push_pull, tensor)
        for tensor in (np.ones((4, 4))[:, ::2], np.ones((4, 4))[::2], np.ones((3, 4)).T, np.ones(5)[::-1],
                       np.broadcast_to(np.ones(1), 5)):
            for function in functions:
                refused(UnsupportedError, "not C-contiguous", function, tensor)
            if tensor.flags.writeable:
                refused(UnsupportedError, "not C-contiguous", commlib.push_pull, np.ones(tensor.shape), out=tensor)
        read_only = np.ones(6, np.float32)
        read_only.flags.writeable = False
        refused(UnsupportedError, "read-only", commlib.push_pull_, read_only)
        refused(UnsupportedError, "read-only", commlib.push_pull_async_, read_only)
        refused(UnsupportedError, "read-only", commlib.push_pull, ones, out=read_only)
        refused(UnsupportedError, "read-only", commlib.push_pull_, b"bytes")
        if size > 1:
            refused(UnsupportedError, "read-only", commlib.broadcast_, read_only, 1)
        for function in functions:
            refused(UnsupportedError, "bool has no average", function, np.ones(3, bool))
        refused(UnsupportedError, "bool has no average", commlib.push_pull_ptr, ones.ctypes.data, 3, "bool")

        # Outputs that do not fit
        refused(ValueError, "out is float64", commlib.push_pull, ones, out=np.ones(6))
        refused(ValueError, "of shape (5,)", commlib.push_pull, ones, out=np.ones(5, np.float32))
        refused(ValueError, "of shape (7,)", commlib.push_pull, ones, out=np.ones(7, np.float32))
        memory = np.zeros(100, np.float32)
        for first, second, count in [(0, 49, 50), (1, 0, 50), (0, 1, 99)]:
            tensor, out = memory[first : first + count], memory[second : second + count]
            refused(ValueError, "overlaps", commlib.push_pull, tensor, out=out)

        # Arguments
        for root in (-1, size, 10**6):
            for function in (commlib.broadcast, commlib.broadcast_, commlib.broadcast_object):
                refused(ValueError, f"root_rank is {root}, but ranks go from 0 to {size - 1}", function, ones, root)
        for op in (-1, 5, 99):
            refused(ValueError, f"op is {op}; expected commlib.Average", commlib.push_pull, ones, op=op)
        for op in ("sum", None, 1.5):
            refused(TypeError, f"op is {op!r}; expected commlib.Average", commlib.push_pull, ones, op=op)
        refused(UnsupportedError, "dtype uint16 is not", commlib.push_pull, np.zeros(3, np.uint16))
        refused(UnsupportedError, "dtype >f8 is not", commlib.push_pull, np.zeros(3, ">f8"))
        refused(UnsupportedError, "newbyteorder", commlib.push_pull, np.zeros(3, ">f8"))
        refused(UnsupportedError, "real and imaginary parts", commlib.push_pull, np.zeros(3, np.complex64))

    for _ in range(2):
        if rank == 0:
            refuse_all()
        # The same memory under another name is in place; neighbours do not overlap.
        memory = np.full(100, rank + 1, np.float32)
        commlib.push_pull(memory[:50], op=Sum, out=memory[:50].view())
        commlib.push_pull(memory[50:75], op=Sum, out=memory[75:])
        total = size * (size + 1) // 2
        assert np.all(memory[:50] == total) and np.all(memory[50:75] == rank + 1) and np.all(memory[75:] == total)
        assert np.all(commlib.push_pull(ones, op=Sum) == size)
        assert np.all(commlib.broadcast(np.full(3, rank), size - 1) == size - 1)
        commlib.barrier()

    # In flight already
    if size > 1:
        if rank == 0:
            handle = commlib.push_pull_async(ones, name="once", op=Sum)
            for function in functions:
                refused(DuplicateNameError, '"once" is in flight already', function, ones.copy(), name="once")
            refused(DuplicateNameError, '"once" is in flight already', commlib.broadcast_, np.ones(6), 0, name="once")
            commlib.push_pull(ones, name="go")
            assert np.all(handle.wait() == size)
        else:
            commlib.push_pull(ones, name="go")
            assert np.all(commlib.push_pull(ones, name="once", op=Sum) == size)
        assert np.all(commlib.push_pull(ones, name="once", op=Sum) == size)
    commlib.shutdown()
    refused(NotInitializedError, "commlib.init()", commlib.push_pull, ones)
    refused(NotInitializedError, "commlib.init()", commlib.barrier)
    give("right")
"""

ARENA = """
    import numpy as np, commlib
    from commlib.errors import UnsupportedError
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    ordinary, arena = np.ones(5), commlib.zeros(5, np.float64)
    arena += 1
    for function, options in [(commlib.push_pull_, {}), (commlib.push_pull, {"out": arena}),
                              (commlib.push_pull_async_, {"name": "x"})]:
        if rank == 0:
            try:
                function(ordinary, **options)
            except UnsupportedError as error:
                assert "COMMLIB_LOCAL_ROUTE=arena" in str(error) and "commlib.empty()" in str(error), error
            else:
                raise AssertionError("taken")
    if rank == 0:
        try:
            commlib.push_pull(arena, out=ordinary)
        except UnsupportedError:
            pass
    # Neither has its name been used up, nor is anything in flight.
    assert np.all(commlib.push_pull_(arena, name="x", op=commlib.Sum) == size)
    assert np.all(commlib.push_pull(commlib.zeros(0), op=commlib.Sum) == size)
    give("right")
    commlib.shutdown()
"""


# An arena too small for what has to be staged there: the operation fails on all ranks, and others do not.
FULL_ARENA = """
    import numpy as np, commlib
    from commlib.errors import CommlibError, Code
    from tests.launch import give

    commlib.init()
    size = commlib.size()
    for _ in range(3):
        try:
            commlib.push_pull(np.ones(3_000_000), name="large")
        except CommlibError as error:
            assert error.code == Code.OUT_OF_MEMORY, error
            assert '"large" failed: the arena of rank ' in str(error) and "COMMLIB_ARENA_BYTES" in str(error), error
        else:
            raise AssertionError("no room was needed")
        assert np.all(commlib.push_pull(np.ones(1000), name="large", op=commlib.Sum) == size)
    give("right")
    commlib.shutdown()
"""


@pytest.mark.parametrize("size", [1, 2])
def test_one_host(size: int) -> None:
    assert run_job(SCRIPT, hosts=[size], timeout=60) == ["right"] * size


@pytest.mark.lab
@pytest.mark.parametrize("hosts", [[1, 1], [2, 1]], ids=str)
def test_several_hosts(hosts: list[int], lab: Lab) -> None:
    assert run_job(SCRIPT, hosts=hosts, lab=lab, timeout=60) == ["right"] * sum(hosts)


def test_ordinary_memory_where_only_the_arena_will_do() -> None:
    assert run_job(ARENA, hosts=[2], env={"COMMLIB_LOCAL_ROUTE": "arena"}, timeout=30) == ["right"] * 2


def test_an_arena_that_is_full() -> None:
    env = {"COMMLIB_LOCAL_ROUTE": "staged", "COMMLIB_ARENA_BYTES": "1MiB"}
    assert run_job(FULL_ARENA, hosts=[2], env=env, timeout=30) == ["right"] * 2
