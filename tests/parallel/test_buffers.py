# SPDX-License-Identifier: Apache-2.0
"""What a tensor may be: anything with the buffer protocol or DLPack, or a bare address; and who keeps it alive."""

from __future__ import annotations

import pytest

from tests.lab import Lab
from tests.launch import run_job

PROTOCOLS = """
    import array
    import numpy as np, commlib
    from commlib import Average, Max, Sum
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) // 2  # of rank + 1

    # bytearray, bytes
    mine = bytearray([rank + 1] * 5)
    assert commlib.push_pull(mine, op=Sum).tolist() == [total] * 5
    assert mine == bytes([rank + 1] * 5)
    assert commlib.push_pull_(mine, op=Sum) is mine and mine == bytes([total] * 5)
    assert commlib.push_pull(bytes([rank + 1] * 3), op=Sum).tolist() == [total] * 3
    out = bytearray(3)
    assert commlib.push_pull(bytes([rank + 1] * 3), op=Sum, out=out) is out and out == bytes([total] * 3)
    assert commlib.push_pull(bytearray(), op=Sum).shape == (0,)

    # array.array
    for code, dtype in [("b", "int8"), ("B", "uint8"), ("h", "int16"), ("i", "int32"), ("l", "int64"), ("q", "int64"),
                        ("f", "float32"), ("d", "float64")]:
        mine = array.array(code, [rank + 1, 2])
        result = commlib.push_pull(mine, op=Sum)
        assert result.dtype == dtype and result.tolist() == [total, 2 * size], code
        assert commlib.push_pull_(mine, op=Average) is mine
        assert mine.tolist() == ([(size + 1) / 2, 2] if code in "fd" else [total // size, 2]), code

    # memoryview: of a shape of its own, of a part, and read-only as an input
    whole = np.arange(24, dtype=np.int32).reshape(2, 3, 4) * (rank + 1)
    assert np.array_equal(commlib.push_pull(memoryview(whole), op=Sum), np.arange(24).reshape(2, 3, 4) * total)
    part = memoryview(whole)[1:]
    assert commlib.push_pull_(part, op=Sum) is part
    assert np.array_equal(whole[0], np.arange(12).reshape(3, 4) * (rank + 1))
    assert np.array_equal(whole[1], np.arange(12, 24).reshape(3, 4) * total)
    cast = memoryview(bytearray(16)).cast("f", [2, 2])
    assert commlib.push_pull(cast).shape == (2, 2)
    assert commlib.push_pull(memoryview(b"\\1\\2"), op=Sum).tolist() == [size, 2 * size]

    # An odd address: one byte into a bytearray
    for dtype in (np.int16, np.float16, np.float32, np.int64, np.float64):
        for count in (1, 1023, 70_001):
            memory = bytearray(count * np.dtype(dtype).itemsize + 2)
            memory[0] = memory[-1] = 77
            odd = np.ndarray(count, dtype, buffer=memory, offset=1)
            odd[...] = rank + 1
            assert commlib.push_pull_(odd, op=Sum) is odd
            assert np.all(odd == total) and memory[0] == memory[-1] == 77

    # NumPy: scalars, subclasses, other names of the same types, the machine's own byte order spelt out
    assert commlib.push_pull(np.float32(rank + 1), op=Sum) == total
    assert commlib.push_pull(np.float64(rank + 1), op=Sum).shape == ()
    assert commlib.push_pull(np.array([rank + 1], np.longlong), op=Sum).dtype == np.int64
    assert commlib.push_pull(np.array([rank + 1], np.intc), op=Sum) == total
    assert commlib.push_pull(np.array([rank + 1], "<f4"), op=Sum) == total
    assert commlib.push_pull(np.array([rank + 1.0]).view(np.recarray), op=Sum) == total
    # Of one element, or of none: any strides are contiguous
    assert commlib.push_pull(np.arange(10.0)[5:6:2] * 1, op=Max) == 5
    assert commlib.push_pull(np.arange(10.0)[7::7], op=Max) == 7
    assert commlib.push_pull(np.zeros((3, 0, 2))[::2], op=Max).shape == (2, 0, 2)
    give("right")
    commlib.shutdown()
"""

DLPACK = """
    import numpy as np, commlib
    from commlib import Average, Sum
    from tests.launch import give

    class Tensor:
        \"\"\"Somebody's tensor, with DLPack and nothing else.\"\"\"

        def __init__(self, array, device=(1, 0)):
            self.array, self.device = array, device

        def __dlpack__(self, *, stream=None, **_):
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return self.device

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) // 2
    for dtype in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"):
        for shape in ((), (0,), (3,), (2, 0, 2), (5, 7), (70_001,)):
            array = np.full(shape, rank + 1, dtype)
            result = commlib.push_pull(Tensor(array), op=Sum)
            assert result.dtype == dtype and result.shape == shape
            assert np.all(result == (total if dtype != "bool" else True))
            tensor = Tensor(array)
            assert commlib.push_pull_(tensor, op=Sum) is tensor
            assert np.array_equal(array, result)
            out = Tensor(np.zeros(shape, dtype))
            assert commlib.push_pull(np.full(shape, rank + 1, dtype), op=Sum, out=out) is out
            assert np.array_equal(out.array, result)
    tensor = Tensor(np.full(4, rank))
    assert commlib.broadcast_(tensor, size - 1) is tensor and np.all(tensor.array == size - 1)
    for wrong, text in [
        (Tensor(np.ones((4, 4))[:, ::2]), "not C-contiguous"),
        (Tensor(np.ones(2, np.uint16)), "is not supported"),
        (Tensor(np.ones(2, np.complex64)), "is not supported"),
        (Tensor(np.ones(2), device=(2, 0)), "not in CPU memory"),
        (object(), "neither the buffer protocol"),
    ]:
        try:
            commlib.push_pull(wrong)
        except commlib.errors.UnsupportedError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    give("right")
    commlib.shutdown()
"""

TORCH = """
    import torch
    import commlib
    from commlib import Sum
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) // 2
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                  torch.bfloat16, torch.float32, torch.float64):
        for shape in ((), (0,), (1023,), (3, 5)):
            tensor = torch.full(shape, rank + 1, dtype=dtype)
            expected = torch.full(shape, total, dtype=dtype)
            out = torch.zeros(shape, dtype=dtype)
            assert commlib.push_pull(tensor, op=Sum, out=out) is out and torch.equal(out, expected)
            assert commlib.push_pull(tensor, op=Sum).shape == shape
            assert commlib.push_pull_(tensor, op=Sum) is tensor and torch.equal(tensor, expected)
    try:
        commlib.push_pull(torch.ones(4, 4)[:, ::2])
    except commlib.errors.UnsupportedError as error:
        assert "not C-contiguous" in str(error)
    else:
        raise AssertionError
    try:
        commlib.push_pull(torch.ones(4, requires_grad=True))
    except commlib.errors.UnsupportedError as error:
        assert "require gradient" in str(error), error
    else:
        raise AssertionError
    give("right")
    commlib.shutdown()
"""

ADDRESSES = """
    import ctypes, gc, weakref
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    class Owner:
        pass

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) // 2
    for dtype, kind in [("float32", ctypes.c_float), ("int64", ctypes.c_int64), ("uint8", ctypes.c_uint8)]:
        for count in (0, 1, 1023, 40_001):
            mine, other = (kind * count)(*[rank + 1] * count), (kind * count)()
            owner = Owner()
            handle = commlib.push_pull_ptr(ctypes.addressof(mine), count, dtype, out_ptr=ctypes.addressof(other),
                                           name=f"{dtype} {count}", op=Sum, owner=owner)
            assert handle.wait() is owner
            assert all(x == rank + 1 for x in mine) and all(x == total for x in other)
            handle = commlib.push_pull_ptr(ctypes.addressof(mine), count, np.dtype(dtype), name=f"{dtype} {count}",
                                           op=Sum)
            assert handle.wait() is None
            assert all(x == total for x in mine)
    # bfloat16 by its name, which needs no package; an array of another rank of the same count and shape.
    halves = np.full(6, 0x3F80 if rank % 2 == 0 else 0x4000, np.uint16)
    commlib.push_pull_ptr(halves.ctypes.data, 6, "bfloat16", op=Sum, shape=(2, 3)).wait()
    assert np.all(halves.astype(np.uint32) << 16 == np.float32((size + 1) // 2 + size // 2 * 2).view(np.uint32))
    for wrong in [lambda: commlib.push_pull_ptr(0, 3, "float32"), lambda: commlib.push_pull_ptr(8, 3, "float32", op=9),
                  lambda: commlib.push_pull_ptr(halves.ctypes.data, 2, "uint8", out_ptr=halves.ctypes.data + 1)]:
        try:
            wrong()
        except ValueError:
            pass
        else:
            raise AssertionError
    try:
        commlib.push_pull_ptr(halves.ctypes.data, 6, "uint16")
    except commlib.errors.UnsupportedError as error:
        assert "uint16" in str(error)

    # The owner lives as long as the operation does, and no longer.
    memory = np.full(3, rank + 1.0)
    owner = Owner()
    gone = weakref.ref(owner)
    if rank == 0:
        handle = commlib.push_pull_ptr(memory.ctypes.data, 3, "float64", name="kept", op=Sum, owner=owner)
        del owner, handle
        gc.collect()
        assert gone() is not None
        commlib.push_pull(np.zeros(1), name="go")
    else:
        commlib.push_pull(np.zeros(1), name="go")
        commlib.push_pull_ptr(memory.ctypes.data, 3, "float64", name="kept", op=Sum, owner=owner).wait()
        del owner
    commlib.push_pull(np.zeros(1), name="kept too")
    while rank == 0 and memory[0] != total:  # nobody else tells: the handle is gone
        commlib.push_pull_(np.zeros(1), name="time passes") if size == 1 else commlib.get_push_pull_speed()
    commlib.barrier()
    gc.collect()
    assert gone() is None
    assert memory.tolist() == [total] * 3
    give("right")
    commlib.shutdown()
"""

CUSTODY = """
    import gc
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    total = size * (size + 1) // 2

    def go():
        commlib.push_pull(np.zeros(1), name="go")

    # In flight a buffer can be neither resized nor freed.
    kept = bytearray([rank + 1] * 100_000)
    if rank == 0:
        handle = commlib.push_pull_async_(kept, name="bytes", op=Sum)
        try:
            kept.append(1)
        except BufferError:
            pass
        else:
            raise AssertionError("resized in flight")
        go()
    else:
        go()
        handle = commlib.push_pull_async_(kept, name="bytes", op=Sum)
    assert handle.wait() is kept and kept == bytes([total % 256] * 100_000)
    kept.append(1)

    # Everything is dropped while it is in flight; the others get their sums, and nothing is overwritten.
    for make in (np.empty, commlib.empty):
        arrays = [make(20_001, np.float32) for _ in range(200)]
        for array in arrays:
            array.fill(rank + 1)
        if rank == 0:
            for t, array in enumerate(arrays):
                commlib.push_pull_async(array, name=f"dropped {t}", op=Sum)
                commlib.push_pull_async_(array, name=f"dropped in place {t}", op=Sum)
            del array, arrays
            gc.collect()
            others = [make(20_001, np.float32) for _ in range(400)]
            for other in others:
                other.fill(-1)
            go()
            commlib.barrier()
            assert all(np.all(other == -1) for other in others)
        else:
            go()
            for t, array in enumerate(arrays):
                assert np.all(commlib.push_pull(array, name=f"dropped {t}", op=Sum) == total)
                assert np.all(commlib.push_pull_(array, name=f"dropped in place {t}", op=Sum) == total)
            commlib.barrier()
    give("right")
    commlib.shutdown()
"""


@pytest.mark.parametrize(
    "script", [PROTOCOLS, DLPACK, ADDRESSES, CUSTODY], ids=["protocols", "dlpack", "addresses", "custody"]
)
@pytest.mark.parametrize("size", [2, 3])
def test_one_host(script: str, size: int) -> None:
    assert run_job(script, hosts=[size], timeout=60) == ["right"] * size


@pytest.mark.lab
@pytest.mark.parametrize(
    "script", [PROTOCOLS, DLPACK, ADDRESSES, CUSTODY], ids=["protocols", "dlpack", "addresses", "custody"]
)
@pytest.mark.parametrize(("hosts", "servers"), [([1, 1], 0), ([2, 1], 1)], ids=str)
def test_several_hosts(script: str, hosts: list[int], servers: int, lab: Lab) -> None:
    assert run_job(script, hosts=hosts, servers=servers, lab=lab, timeout=60) == ["right"] * sum(hosts)


@pytest.mark.parametrize("script", [PROTOCOLS, DLPACK], ids=["protocols", "dlpack"])
def test_one_rank(script: str) -> None:
    assert run_job(script, hosts=[1], timeout=60) == ["right"]


def test_tensors_of_torch() -> None:
    pytest.importorskip("torch")
    assert run_job(TORCH, hosts=[2], timeout=60) == ["right"] * 2
