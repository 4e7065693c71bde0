# SPDX-License-Identifier: Apache-2.0
"""Many tensors as one operation: each gets what it would get alone, and nothing is written before somebody waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Lab
from tests.launch import run_job

# All dtypes and operations, with odd sizes and every kind of shape; the truth is what the same tensors get one by one,
# which is compared with NumPy elsewhere, and for whole numbers NumPy's.
SUMS = """
    import sys
    import numpy as np, commlib
    from tests.launch import give
    from tests.parallel.reference import DTYPES, OPS, check_value, contribution, is_supported

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    held = commlib.empty(int(sys.argv[1]), np.uint8)
    shapes = [(3,), (), (0,), (2, 5), (1,), (1021,), (0, 4), (7, 1, 3), (40_009,)]

    def contents(dtype, op, rank):
        return [contribution(dtype, op, int(np.prod(shape)), rank, seed).reshape(shape)
                for seed, shape in enumerate(shapes)]

    for dtype in DTYPES:
        for op in filter(lambda op: is_supported(dtype, op), OPS):
            mine = contents(dtype, op, rank)
            alone = [commlib.push_pull(tensor, op=op) for tensor in mine]
            name = f"{dtype} {op}" if op % 2 else None
            for again in range(2):
                given = [tensor.copy() for tensor in mine]
                returned = commlib.push_pull_group_(given, name=name, op=op)
                assert [id(a) for a in returned] == [id(a) for a in given]
                later = [tensor.copy() for tensor in mine]
                handle = commlib.push_pull_group_async_(iter(later), name=name, op=op)
                waited = handle.wait()
                assert [id(a) for a in waited] == [id(a) for a in later] and handle.wait() is waited
                for tensors in (given, later):
                    for tensor, single in zip(tensors, alone):
                        assert tensor.shape == single.shape and tensor.tobytes() == single.tobytes(), (dtype, op)
            everybody = [contents(dtype, op, other) for other in range(size)]
            for number, tensor in enumerate(given):
                check_value(tensor, [of_rank[number] for of_rank in everybody], op, commlib.num_nodes())
    give("right")
    commlib.shutdown()
"""

# What is given is untouched until `wait`, is held until then, and may be anything that an operation takes.
HELD = """
    import array, gc, threading, weakref
    import numpy as np, commlib
    from commlib import Sum
    from commlib.errors import DuplicateNameError, OperationTimeout, UnsupportedError
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) // 2

    def go():
        commlib.push_pull(np.zeros(1), name="go")

    def raises(expected, words, tensors, **options):
        for function in (commlib.push_pull_group_, commlib.push_pull_group_async_):
            try:
                function(tensors, **options)
            except expected as error:
                assert words in str(error), error
            else:
                raise AssertionError(words)

    for count in (3, 100_003):
        tensors = [np.full(count, rank + 1.0), bytearray(np.full(4, rank + 1.0)), commlib.zeros(5, np.float64)]
        tensors[1] = memoryview(tensors[1]).cast("d")
        tensors[2] += rank + 1
        if rank == 0:
            handle = commlib.push_pull_group_async_(tensors, name="held", op=Sum)
            try:
                handle.wait(0.05)
            except OperationTimeout as error:
                assert error.handle is handle
            else:
                raise AssertionError("no timeout")
            raises(DuplicateNameError, '"held"', tensors, name="held")
            assert all(np.all(np.asarray(tensor) == 1) for tensor in tensors)
        go()
        if rank == 0:
            results = []
            threads = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(results) == 4 and all(result is results[0] for result in results)
        else:
            handle = commlib.push_pull_group_async_(tensors, name="held", op=Sum)
            while not handle.done():
                pass
            assert all(np.all(np.asarray(tensor) == rank + 1) for tensor in tensors)
            handle.wait()
        assert all(np.all(np.asarray(tensor) == total) for tensor in tensors)
        for tensor in tensors:
            np.asarray(tensor)[...] = 0
        handle.wait()  # has given what it had
        assert all(np.all(np.asarray(tensor) == 0) for tensor in tensors)

    # A synchronous one that timed out: its error's handle writes the result.
    tensors = [np.full(7, rank + 1), np.full(2, rank + 1)]
    if rank == 0:
        try:
            commlib.push_pull_group_(tensors, name="late", op=Sum, timeout=0.05)
        except OperationTimeout as error:
            late = error.handle
        go()
        assert late.wait() is not tensors and all(np.all(tensor == total) for tensor in tensors)
    else:
        go()
        commlib.push_pull_group_(tensors, name="late", op=Sum)

    # Nobody waits: the operation ends all the same, its tensors keep what they hold, and nothing is kept.
    tensors = [np.full(1000, rank) for _ in range(10)]
    watched = weakref.ref(tensors[0])
    commlib.push_pull_group_async_(tensors, name="unwatched", op=Sum)
    commlib.barrier()
    assert all(np.all(tensor == rank) for tensor in tensors)
    del tensors
    gc.collect()
    assert watched() is None
    while True:
        try:
            commlib.push_pull_group_([np.zeros(10_000, np.int64)], name="unwatched", op=Sum)
            break
        except DuplicateNameError:  # not yet over
            pass

    raises(ValueError, "at least one", [])
    raises(ValueError, "no. 2 is float32", [np.zeros(2), np.zeros(2), np.zeros(2, np.float32)])
    raises(UnsupportedError, "read-only", [np.zeros(2), np.broadcast_to(np.zeros(1), 1)])
    raises(UnsupportedError, "contiguous", [np.zeros((4, 4))[:, 1]])
    raises(UnsupportedError, "bool has no average", [np.zeros(2, bool)])
    raises(TypeError, "op is", [np.zeros(2)], op="sum")
    raises(TypeError, "not iterable", 3)
    assert np.all(commlib.push_pull_group_([np.ones(2)], name="held", op=Sum)[0] == size)
    give("right")
    commlib.shutdown()
"""

# Groups that are not the same on all ranks, also where they have as many bytes.
MISMATCH = """
    import numpy as np, commlib
    from commlib.errors import MismatchError
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    usual = [(3,), (2, 2), (5,)]
    kinds = [
        ([(3,), (4,), (5,)], "about shape of no. 1: (2, 2) on"),
        ([(5,), (2, 2), (3,)], "about shape of no. 0: (3,) on"),
        ([(7,), (5,)], "about shape: a group of 3 on"),
        ([(12,)], "a group of 1 on rank 1"),
        ((12,), "(12,) on rank 1"),
        ((-3, 1, 2), "dtype: float32 on"),
    ]
    for number, (unusual, words) in enumerate(kinds):
        shapes = unusual if rank == 1 else usual
        name = f"kind {number}"
        for again in range(2):
            try:
                if number == 5:
                    dtype = np.float64 if rank == 1 else np.float32
                    commlib.push_pull_group_([np.zeros(shape, dtype) for shape in usual], name=name)
                elif isinstance(shapes, list):
                    commlib.push_pull_group_([np.zeros(shape, np.float32) for shape in shapes], name=name)
                else:
                    commlib.push_pull_(np.zeros(shapes, np.float32), name=name)
            except MismatchError as error:
                assert words in str(error), error
                if number < 5:
                    assert error.field == "shape" and error.values[0] == tuple(usual), error.values
                    assert error.values[1] == tuple(unusual), error.values
            else:
                raise AssertionError(words)
            together = commlib.push_pull_group_([np.ones(2), np.ones((3, 1))], name=name, op=commlib.Sum)
            assert all(np.all(tensor == size) for tensor in together)
    give("right")
    commlib.shutdown()
"""


def check(script: str, hosts: list[int], **settings: Any) -> None:
    assert run_job(script, hosts=hosts, timeout=60, **settings) == ["right"] * sum(hosts)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_tensor_gets_what_it_gets_alone(size: int) -> None:
    check(SUMS, [size], args=["0"])


def test_the_same_where_the_arena_is_full() -> None:
    check(SUMS, [2], args=["1000000"], env={"COMMLIB_ARENA_BYTES": "1M", "COMMLIB_LOCAL_ROUTE": "cma"})


@pytest.mark.parametrize("script", [HELD, MISMATCH], ids=["held", "mismatch"])
@pytest.mark.parametrize("size", [2, 3])
def test_one_host(script: str, size: int) -> None:
    check(script, [size])


@pytest.mark.lab
@pytest.mark.parametrize("script", [SUMS, HELD, MISMATCH], ids=["sums", "held", "mismatch"])
def test_several_hosts(script: str, lab: Lab) -> None:
    check(script, [2, 1], servers=1, lab=lab, args=["0"])
