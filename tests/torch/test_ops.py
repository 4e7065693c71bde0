# SPDX-License-Identifier: Apache-2.0
"""push_pull and broadcast on all kinds of tensors, against NumPy in float64."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import commlib.torch as bps
from tests.torch import message_of, results_of

SIZES = [1, 2, 3]
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
# 16-bit floats: one rounding of a result accumulated in float32. Others: what accumulating in the dtype can add.
TOLERANCE = {"float16": 1.001 * 2**-11, "bfloat16": 1.001 * 2**-8, "float32": 4 * 2**-24, "float64": 4 * 2**-53}
SUBNORMAL = 2**-25  # half the step between the smallest numbers of float16
OPS: dict[str, Callable[[Any], Any]] = {
    "Average": lambda x: x.mean(axis=0),
    "Sum": lambda x: x.sum(axis=0),
    "Min": lambda x: x.min(axis=0),
    "Max": lambda x: x.max(axis=0),
    "Product": lambda x: x.prod(axis=0),
}
COUNT = 1023  # odd, and not a multiple of any vector


def make(dtype: str, rank: int, shape: tuple[int, ...] = (COUNT,)) -> Any:
    """The tensor of a rank: small values, so that integers do not wrap and products stay finite."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.startswith(("int", "uint")):
        return torch.randint(0 if dtype == "uint8" else -4, 5, shape, generator=generator).to(getattr(torch, dtype))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))


def exact(tensor: Any) -> Any:
    """As NumPy float64, without loss."""
    return tensor.detach().to(torch.float64).numpy()


def stacked(dtype: str, size: int, shape: tuple[int, ...] = (COUNT,)) -> Any:
    return np.stack([exact(make(dtype, rank, shape)) for rank in range(size)])


# What the ranks do.


def reduce_all() -> dict[Any, Any]:
    """Every dtype with every operation, in place and not."""
    results: dict[Any, Any] = {}
    for dtype in DTYPES:
        for op in OPS:
            if (dtype, op) == ("bool", "Average"):
                continue
            source = make(dtype, bps.rank())
            reduced = bps.push_pull(source, name=f"{dtype}.{op}", op=getattr(bps, op))
            assert reduced.dtype == source.dtype
            assert torch.equal(source, make(dtype, bps.rank()))
            assert bps.push_pull_inplace(source, op=getattr(bps, op)) is source
            assert torch.equal(source, reduced)
            results[dtype, op] = exact(reduced)
    results["error"] = message_of(lambda: bps.push_pull(make("bool", 0), name="bool"))
    for op in ("Average", "Sum"):
        source = torch.complex(make("float64", bps.rank()), make("float64", 10 + bps.rank()))
        for tensor in (source, source.conj(), source.to(torch.complex64)):
            reduced = bps.push_pull(tensor, op=getattr(bps, op))
            clone = tensor.clone()
            assert torch.equal(bps.push_pull_inplace(clone, op=getattr(bps, op)), reduced)
            results[str(tensor.dtype), op, tensor.is_conj()] = reduced.resolve_conj().to(torch.complex128).numpy()
    return results


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda rank: make("float32", rank, (5, 7)).t(),
    "every other": lambda rank: make("float32", rank, (9, 11))[:, ::2],
    "channels last": lambda rank: make("float32", rank, (2, 3, 5, 7)).to(memory_format=torch.channels_last),
    "0-d": lambda rank: make("float32", rank, ()),
    "empty": lambda rank: make("float32", rank, (0, 3)),
    "unaligned": lambda rank: make("float32", rank, (17,))[1:],
    "bfloat16 transposed": lambda rank: make("bfloat16", rank, (5, 7)).t(),
    "parameter": lambda rank: torch.nn.Parameter(make("float32", rank, (3, 5))),
    "negated view": lambda rank: torch.view_as_complex(make("float32", rank, (7, 2))).conj().imag,
    "large": lambda rank: make("float32", rank, (1_500_001,)),
}


def reduce_layouts() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for layout, of_rank in LAYOUTS.items():
        reduced = bps.push_pull(of_rank(bps.rank()), average=False, name=layout)
        assert reduced.is_contiguous()
        tensor = of_rank(bps.rank())
        shape, strides, pointer = tensor.shape, tensor.stride(), tensor.data_ptr()
        bps.push_pull_inplace(tensor, average=False, name=layout)
        assert (tensor.shape, tensor.stride(), tensor.data_ptr()) == (shape, strides, pointer)
        assert torch.equal(tensor, reduced)
        # What lies between the elements of a strided view is not ours.
        base = torch.full((9, 11), 7.0)
        bps.push_pull_inplace(base[:, ::2], name="gaps")
        assert bool((base[:, 1::2] == 7).all())
        results[layout] = exact(reduced)
    results["expanded"] = exact(bps.push_pull(torch.ones(1).expand(5), average=False))
    results["expanded in place"] = message_of(lambda: bps.push_pull_inplace(torch.ones(1).expand(5)))
    return results


def use_handles() -> dict[str, Any]:
    rank, size = bps.rank(), bps.size()
    handles = [bps.push_pull_async(torch.full((1000 + i,), float(rank + i)), name=f"h{i}") for i in range(50)]
    mean = (size - 1) / 2
    good = all(bool((bps.synchronize(handle) == mean + i).all()) for i, handle in reversed(list(enumerate(handles))))
    tensor = torch.full((5,), float(rank))
    in_place = bps.push_pull_async_inplace(tensor, name="in place", average=False)
    first = in_place.wait()
    bps.byteps_torch_set_num_grads(2)
    group = [bps.push_pull_group_sync_inplace(torch.ones(3), name=f"group{i}") for i in range(3)]

    async def awaited() -> Any:
        return await bps.push_pull_async(torch.full((3,), float(rank)), op=bps.Max)

    return {
        "reversed": good,
        "poll": bps.poll(in_place),
        "again": first is tensor and in_place.wait() is tensor,
        "no error": in_place.exception() is None,
        "value": tensor.tolist() == [sum(range(size))] * 5,
        "group": [number for _, number in group] == [1, 2, 1],
        "group value": all(bool((bps.synchronize(handle) == 1).all()) for handle, _ in group),
        "awaited": asyncio.run(awaited()).tolist() == [size - 1] * 3,
        "alias": bps.byteps_push_pull(torch.ones(2), name="alias").wait().tolist() == [1, 1],
    }


def compress() -> dict[Any, Any]:
    results = {}
    for name in ("none", "fp16", "bf16"):
        for dtype in ("float32", "float64", "float16", "int32"):
            tensor = make(dtype, bps.rank())
            reduced = bps.push_pull(tensor, name="c", compression=getattr(bps.Compression, name))
            assert reduced.dtype == tensor.dtype
            assert torch.equal(tensor, make(dtype, bps.rank()))
            bps.push_pull_inplace(tensor, name="c", compression=getattr(bps.Compression, name))
            assert torch.equal(tensor, reduced)
            results[name, dtype] = exact(reduced)

    class Half:
        """Sends every other element, where it lies."""

        def compress(self, tensor: Any) -> tuple[Any, int]:
            return tensor[::2], len(tensor)

        def decompress(self, tensor: Any, ctx: int) -> Any:
            return tensor.repeat_interleave(2)[:ctx]

    tensor = make("float32", bps.rank())
    reduced = bps.push_pull(tensor, average=False, compression=Half())
    assert torch.equal(tensor, make("float32", bps.rank()))
    assert torch.equal(bps.push_pull_inplace(tensor, average=False, compression=Half()), reduced)
    assert torch.equal(reduced[::2], bps.push_pull(make("float32", bps.rank())[::2], average=False))
    return results


class Wrapped(torch.Tensor):
    """A tensor that is made of another one, as DTensor is, and has no memory itself."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __tensor_flatten__(self) -> Any:
        return [], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def refuse() -> dict[str, Any]:
    ones = torch.ones(3)
    warnings.simplefilter("ignore")  # torch's, about what it will take away and what is not ready
    quantized = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    with torch.inference_mode():
        inference = torch.ones(3)
    fake = torch._subclasses.FakeTensorMode().from_tensor(ones)
    every_form = {
        "meta": torch.ones(3, device="meta"),
        "sparse": ones.to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([ones]),
        "fake": fake,
        "wrapped": Wrapped(ones),
        "lazy": torch.nn.LazyLinear(3).weight,
        "quantized": quantized,
        "not a tensor": np.ones(3),
        "freed": ones.clone(),
    }
    every_form["freed"].untyped_storage().resize_(0)
    forms: list[Callable[[Any], Any]] = [
        bps.push_pull,
        bps.push_pull_async,
        bps.push_pull_inplace,
        bps.push_pull_async_inplace,
        lambda tensor: bps.broadcast(tensor, 0),
        lambda tensor: bps.broadcast_(tensor, 0),
    ]
    shared = torch.ones(1).expand(5)
    return {case: [message_of(partial(form, tensor)) for form in forms] for case, tensor in every_form.items()} | {
        "inference": [message_of(partial(form, inference)) for form in (forms[2], forms[3], forms[5])],
        "expanded": [message_of(partial(form, shared)) for form in (forms[2], forms[3], forms[5])],
        "complex": message_of(lambda: bps.push_pull(torch.ones(3, dtype=torch.complex64), op=bps.Max)),
        "float8": message_of(lambda: bps.push_pull(ones.to(torch.float8_e5m2))),
        "root": message_of(lambda: bps.broadcast(ones, bps.size())),
        "after all that": bps.push_pull(ones, name="last").tolist() == [1, 1, 1],
        "array": message_of(lambda: bps.push_pull_async(np.ones(3))),
        "contradiction": message_of(lambda: bps.push_pull(ones, average=False, op=bps.Average)),
        "other contradiction": message_of(lambda: bps.push_pull(ones, average=True, op=bps.Max)),
        "agreement": message_of(lambda: bps.push_pull(ones, average=False, op=bps.Sum)),
    }


def every_dtype() -> list[Any]:
    """All dtypes of this torch that a tensor of bytes can be seen as."""
    found = []
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        if str(dtype).startswith("torch.q"):
            continue  # quantized
        with contextlib.suppress(RuntimeError):  # a name without an implementation
            torch.zeros(24, dtype=torch.uint8).view(dtype).view(torch.uint8)
            found.append(dtype)
    return sorted(found, key=str)


def disagree() -> dict[str, Any]:
    """The ranks differ in one thing; all of them hear of it, and the next operation works."""
    first = bps.rank() == 0
    cases = {
        "reduced dtype": lambda: bps.push_pull(torch.ones(4, dtype=torch.float32 if first else torch.int32)),
        "reduced complex": lambda: bps.push_pull(torch.ones(3, dtype=torch.complex64) if first else torch.ones(3, 2)),
        "shape": lambda: bps.push_pull(torch.ones(2, 3) if first else torch.ones(3, 2), name="shape"),
        "op": lambda: bps.push_pull(torch.ones(3), average=first),
        "root": lambda: bps.broadcast(torch.ones(3), 0 if first else 1),
        "dtype": lambda: bps.broadcast(torch.ones(4, dtype=torch.float8_e5m2 if first else torch.float8_e4m3fn), 0),
        "dtype of a size": lambda: bps.broadcast_(torch.ones(4, dtype=torch.complex64 if first else torch.int64), 0),
    }
    results = {}
    for case, call in cases.items():
        results[case] = message_of(call)
        results[f"after {case}"] = bps.push_pull(torch.ones(2, 2), average=False).sum().item() == 4 * bps.size()
    return results


def subclass() -> dict[str, bool]:
    class Named(torch.Tensor):
        pass

    total = [float(sum(range(bps.size())))] * 3
    ours = [float(bps.rank())] * 3
    parameter, named = torch.nn.Parameter(torch.tensor(ours)), torch.tensor(ours).as_subclass(Named)
    frozen = torch.nn.Parameter(torch.tensor(ours), requires_grad=False)
    reduced = bps.push_pull(parameter, average=False)
    good = {
        "of a parameter": type(reduced) is torch.Tensor and reduced.tolist() == total and reduced.requires_grad,
        "untouched": parameter.tolist() == ours,
        "in place": bps.push_pull_inplace(parameter, average=False) is parameter and parameter.tolist() == total,
        "frozen": not bps.push_pull(frozen).requires_grad,
        "frozen in place": bps.push_pull_inplace(frozen, average=False) is frozen and frozen.tolist() == total,
        "class": bps.push_pull(named, average=False).tolist() == total,
    }
    bps.broadcast_(named, bps.size() - 1)
    good["class in place"] = type(named) is Named and named.tolist() == [float(bps.size() - 1)] * 3
    return good


def broadcast() -> dict[str, bool]:
    rank, root = bps.rank(), bps.size() - 1
    good: dict[str, bool] = {}
    for dtype in [*DTYPES, "complex64", "complex128"]:
        for shape in ((), (0,), (7,), (3, 5)):
            ours = torch.full(shape, rank + 1.0, dtype=torch.float64).to(getattr(torch, dtype))
            theirs = torch.full(shape, root + 1.0, dtype=torch.float64).to(getattr(torch, dtype))
            received = bps.broadcast(ours, root, name="b")
            good[f"{dtype} {shape}"] = torch.equal(received, theirs) and (rank == root or not torch.equal(ours, theirs))
            good[f"{dtype} {shape}"] |= ours.numel() == 0 or dtype == "bool"
            good[f"{dtype} {shape} in place"] = bps.broadcast_(ours, root) is ours and torch.equal(ours, theirs)
    for dtype in every_dtype():
        ours = torch.arange(rank, rank + 24, dtype=torch.uint8).view(dtype)
        wanted = torch.arange(root, root + 24, dtype=torch.uint8)
        received = bps.broadcast(ours, root)
        good[f"bits of {dtype}"] = received.dtype == dtype and torch.equal(received.view(torch.uint8), wanted)
        bps.broadcast_(ours, root, name="bits")
        good[f"bits of {dtype} in place"] = torch.equal(ours.view(torch.uint8), wanted)
    good["every dtype"] = len(every_dtype()) >= 17
    for layout, of_rank in LAYOUTS.items():
        good[layout] = torch.equal(bps.broadcast_(of_rank(rank), root, name=layout), of_rank(root))
    objects = [{"rank": rank}, "x" * (1 + 1000 * rank), None, list(range(10 * rank))]
    theirs = [{"rank": root}, "x" * (1 + 1000 * root), None, list(range(10 * root))]
    good["objects"] = [bps.broadcast_object(obj, root, name="object") for obj in objects] == theirs
    return good


def broadcast_models() -> dict[str, Any]:
    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(3, 2).bfloat16())
        net[1].running_mean.fill_(seed)
        net[1].num_batches_tracked.fill_(seed)
        return net

    def equal(a: Any, b: Any) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))

    rank, root = bps.rank(), bps.size() - 1
    by_state, by_names, by_list = model(rank), model(rank), model(rank)
    bps.broadcast_parameters(by_state.state_dict(), root)
    bps.broadcast_parameters(by_names.named_parameters(), root_rank=root, prefix="named.")
    bps.broadcast_parameters(by_list.parameters(), root, prefix="listed.")
    names, listed, wanted = (list(net.parameters()) for net in (by_names, by_list, model(root)))
    return {
        "state_dict": equal(by_state, model(root)),
        "names": all(map(torch.equal, names, wanted)),
        "list": all(map(torch.equal, listed, wanted)),
        "none": message_of(lambda: bps.broadcast_parameters({"a": None}, root)),
        "other": message_of(lambda: bps.broadcast_parameters({"extra": {"a": 1}}, root)),
    }


# What came of it.

WORKERS = [reduce_all, reduce_layouts, use_handles, compress, refuse, disagree, subclass, broadcast, broadcast_models]


@pytest.mark.parametrize("size", SIZES)
def test_every_dtype_and_operation(size: int) -> None:
    for results in results_of(reduce_all, size):
        assert results.pop("error")[0] == "UnsupportedError"
        parts = [stacked("float64", size), np.stack([exact(make("float64", 10 + rank)) for rank in range(size)])]
        for key in [key for key in results if key[0].startswith("torch.complex")]:
            truth = OPS[key[1]](parts[0]) + (-1j if key[2] else 1j) * OPS[key[1]](parts[1])
            np.testing.assert_allclose(results.pop(key), truth, rtol=1e-5 if key[0].endswith("64") else 1e-14)
        for (dtype, op), result in results.items():
            truth = OPS[op](stacked(dtype, size))
            if dtype in TOLERANCE:
                scale = OPS[op](np.abs(stacked(dtype, size)))
                assert np.all(np.abs(result - truth) <= TOLERANCE[dtype] * scale + SUBNORMAL), (dtype, op)
            elif dtype == "bool":
                either = stacked(dtype, size).max(axis=0), stacked(dtype, size).min(axis=0)
                np.testing.assert_array_equal(result, either[op in ("Min", "Product")], f"{dtype} {op}")
            else:
                np.testing.assert_array_equal(result, np.floor(truth), f"{dtype} {op}")


@pytest.mark.parametrize("size", SIZES)
def test_every_layout(size: int) -> None:
    for results in results_of(reduce_layouts, size):
        for layout, of_rank in LAYOUTS.items():
            truth = sum(exact(of_rank(rank)) for rank in range(size))
            rtol = TOLERANCE["bfloat16" if "bfloat16" in layout else "float32"]
            np.testing.assert_allclose(results[layout], truth, rtol=rtol, atol=rtol, err_msg=layout)
        np.testing.assert_array_equal(results["expanded"], np.full(5, size))
        assert results["expanded in place"][0] == "UnsupportedError"
        assert "clone" in results["expanded in place"][1]


@pytest.mark.parametrize("size", SIZES)
def test_handles(size: int) -> None:
    for results in results_of(use_handles, size):
        assert all(results.values()), results


@pytest.mark.parametrize("size", [2])
def test_compression(size: int) -> None:
    for results in results_of(compress, size):
        for (name, dtype), result in results.items():
            if dtype == "int32":
                np.testing.assert_array_equal(result, np.floor(stacked(dtype, size).mean(axis=0)))
                continue
            sent = "bfloat16" if name == "bf16" and dtype != "float16" else "float16" if name == "fp16" else dtype
            inputs = stacked(dtype, size)
            # One rounding of the input, one of the result.
            bound = 2 * TOLERANCE[sent] * np.abs(inputs).mean(axis=0)
            assert np.all(np.abs(result - inputs.mean(axis=0)) <= bound + 2 * SUBNORMAL), (name, dtype)
            if name != "none" and dtype.startswith("float") and dtype != "float16":
                assert not np.array_equal(result, inputs.mean(axis=0))


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_sent_is_refused_with_a_way_out(size: int) -> None:
    results = results_of(refuse, size)[0]
    for case, words in {
        "meta": "torch.empty_like",
        "sparse": "to_dense()",
        "csr": "to_dense()",
        "nested": "unbind()",
        "fake": "no data",
        "wrapped": "tensors inside",
        "lazy": "compute something",
        "quantized": "tensor.",
        "not a tensor": "ndarray",
        "freed": "no memory",
        "inference": "torch.inference_mode()",
        "expanded": "clone",
    }.items():
        for error, text in results[case]:
            assert error == "UnsupportedError", (case, error, text)
            assert words in text, (case, text)
    assert results["complex"][0] == results["float8"][0] == results["array"][0] == "UnsupportedError"
    assert "view_as_real" in results["complex"][1]
    assert "another dtype" in results["float8"][1]
    assert results["root"][0] == "ValueError"
    assert results["after all that"]
    assert results["contradiction"][0] == results["other contradiction"][0] == "ValueError"
    assert results["agreement"] == ("", "")


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_hear_of_a_disagreement(size: int) -> None:
    for results in results_of(disagree, size):
        for case, result in results.items():
            if case.startswith("after"):
                assert result, case
            else:
                assert result[0] == "MismatchError", (case, result)


@pytest.mark.parametrize("size", [1, 2])
def test_subclasses(size: int) -> None:
    for results in results_of(subclass, size):
        assert all(results.values()), results


@pytest.mark.parametrize("size", SIZES)
def test_broadcast(size: int) -> None:
    for results in results_of(broadcast, size):
        assert all(results.values()), [case for case, good in results.items() if not good]


@pytest.mark.parametrize("size", [1, 2])
def test_broadcast_parameters(size: int) -> None:
    for results in results_of(broadcast_models, size):
        assert results["state_dict"]
        assert results["names"]
        assert results["list"]
        assert results["none"] == ("", "")
        assert results["other"][0] == "UnsupportedError"
        assert "'extra'" in results["other"][1]
