# SPDX-License-Identifier: Apache-2.0
"""What the ranks put in, and what has to come out: by NumPy alone, in two ways that know nothing of each other.

`check_value` compares with the sum (or other combination) in a wider format, in no particular order, and allows what
the number format of the result can cost. `documented_bits` follows the promised order and roundings step by step, in
the format itself, and the result must be these bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import commlib

Array = npt.NDArray[Any]
# Global ranks by host, hosts in node order, each host's ranks in local order.
Placement = Sequence[Sequence[int]]

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OPS = tuple(commlib.ReduceOp)
Average, Sum, Min, Max, Product = OPS

# Period of what large buffers hold: a prime, so that no partition, granule or slice is like another one.
PERIOD = 65521


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    digits: int  # of the significand, the hidden one included
    smallest: float  # positive number

    @property
    def rounding(self) -> float:
        """Largest relative error of a rounding to nearest."""
        return 2.0**-self.digits


FORMATS = {
    "float16": Format(11, 2.0**-24),
    "bfloat16": Format(8, 2.0**-133),
    "float32": Format(24, 2.0**-149),
    "float64": Format(53, 2.0**-1074),
}


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of one of the ten names."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_half(dtype: np.dtype[Any]) -> bool:
    return dtype.name in ("float16", "bfloat16")


def contribution(dtype: str, op: int, count: int, rank: int, seed: int) -> Array:
    """`count` elements that `rank` puts in: other ones for every rank and seed, repeated after PERIOD elements.

    Integers are from their whole range, so that sums and products wrap. Products of floats neither overflow nor vanish.
    """
    wanted = dtype_of(dtype)
    rng = np.random.default_rng([seed, rank, DTYPES.index(dtype), int(op)])
    some = min(count, PERIOD)
    if dtype == "bool":
        block: Array = rng.integers(0, 2, some).astype(np.bool_)
    elif dtype not in FORMATS:
        limits = np.iinfo(wanted)
        block = rng.integers(limits.min, limits.max, some, dtype=wanted, endpoint=True)
    elif op == Product:
        block = (rng.uniform(0.5, 2, some) * rng.choice([-1.0, 1.0], some)).astype(wanted)
    else:
        block = (rng.standard_normal(some) * 2.0 ** rng.integers(-8, 8, some)).astype(wanted)
    return np.resize(block, count)


def is_supported(dtype: str, op: int) -> bool:
    return not (dtype == "bool" and op == Average)


# One way: independent of order and of how it is done.


def check_value(result: Array, inputs: Sequence[Array], op: int, hosts: int) -> None:
    """Compare a result over all ranks with NumPy's, within what the format of the result can cost."""
    dtype = inputs[0].dtype
    if dtype.name not in FORMATS:
        np.testing.assert_array_equal(result, _whole_number_truth(inputs, op), strict=True)
        return
    # float64 is compared with the longer format of x86, where there is one.
    wide = np.stack([x.astype(np.longdouble if dtype.name == "float64" else np.float64) for x in inputs])
    if op in (Min, Max):
        truth = (np.minimum if op == Min else np.maximum).reduce(wide)
        np.testing.assert_array_equal(result.astype(wide.dtype), truth, strict=True)
        return
    size = len(inputs)
    truth = wide.prod(axis=0) if op == Product else wide.sum(axis=0) / (size if op == Average else 1)
    error = np.abs(result.astype(wide.dtype) - truth)
    allowed = _allowed(dtype.name, wide, op, size, hosts)
    assert np.all(error <= allowed), (
        f"{dtype} {op!r}: off by up to {np.max(error / np.maximum(allowed, 1e-300))} x allowed"
    )


def _allowed(name: str, wide: Array, op: int, size: int, hosts: int) -> Array:
    """How far the result may be from the truth, in the usual first order, and a hundredth more for the second.

    Each of n − 1 additions rounds something no larger than the sum of all magnitudes, and the division once more.
    A 16-bit float accumulates in float32 so; on top of that each level rounds to 16 bits: the hosts' partials, whose
    magnitudes add up to the same sum, and the result. Errors of factors add up relatively: there the partials count one
    by one. Near zero a rounding costs up to half the smallest number instead, on every host and for the result.
    """
    form = FORMATS[name]
    magnitude = (
        np.abs(wide).prod(axis=0) if op == Product else np.abs(wide).sum(axis=0) / (size if op == Average else 1)
    )
    accumulator = FORMATS["float32"] if name in ("float16", "bfloat16") else form
    relative = size * accumulator.rounding
    if accumulator is not form:
        roundings = 1 if hosts == 1 else hosts + 1 if op == Product else 2
        relative += roundings * form.rounding
    allowed: Array = 1.01 * relative * magnitude + (hosts + 1) * form.smallest / 2
    return allowed


def _whole_number_truth(inputs: Sequence[Array], op: int) -> Array:
    dtype = inputs[0].dtype
    stacked = np.stack(inputs)
    if op == Average:
        return (stacked.sum(axis=0, dtype=np.int64) // len(inputs)).astype(dtype)
    if op == Min:
        return np.asarray(stacked.min(axis=0))
    if op == Max:
        return np.asarray(stacked.max(axis=0))
    if dtype == np.bool_:
        return np.asarray(stacked.any(axis=0) if op == Sum else stacked.all(axis=0))
    return np.asarray(stacked.sum(axis=0, dtype=dtype) if op == Sum else stacked.prod(axis=0, dtype=dtype))


# The other way: the promised order, step by step.


def documented_bits(inputs: Sequence[Array], op: int, placement: Placement) -> Array:
    """The result as it is promised.

    Each host's ranks are combined in local order, then hosts in node order; 16-bit floats are rounded once per level.
    """
    dtype = inputs[0].dtype
    size = len(inputs)
    counts = [len(ranks) for ranks in placement]
    by_host = [[inputs[rank] for rank in ranks] for ranks in placement]
    if dtype.name not in FORMATS:
        return _whole_number_truth(inputs, op)  # no order changes it
    with np.errstate(all="ignore"):
        if not is_half(dtype):
            total = _in_order([_in_order(x, op) for x in by_host], op)
            return total / dtype.type(size) if op == Average else total
        numbers = [[x.astype(np.float32) for x in host] for host in by_host]
        if len(placement) == 1:
            total = _in_order(numbers[0], op)
            return (total / np.float32(size) if op == Average else total).astype(dtype)
        partials = [_in_order(host, op) for host in numbers]
        if op == Average:
            means = [(p / np.float32(c)).astype(dtype) for p, c in zip(partials, counts, strict=True)]
            weighted = [m.astype(np.float32) * np.float32(c) for m, c in zip(means, counts, strict=True)]
            return (_in_order(weighted, op) / np.float32(size)).astype(dtype)
        return _in_order([p.astype(dtype).astype(np.float32) for p in partials], op).astype(dtype)


def _in_order(arrays: Sequence[Array], op: int) -> Array:
    combine: Any = {Average: np.add, Sum: np.add, Min: np.minimum, Max: np.maximum, Product: np.multiply}[
        commlib.ReduceOp(op)
    ]
    result = arrays[0]
    for array in arrays[1:]:
        result = combine(result, array)
    return result


def check_bits(result: Array, inputs: Sequence[Array], op: int, placement: Placement) -> None:
    """The result is what the documents promise, bit for bit (zeros of either sign and all NaNs are the same)."""
    expected = documented_bits(inputs, op, placement)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    if result.dtype.name == "bfloat16":  # exact, and assert_array_equal knows NaN there
        result, expected = result.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(result, expected)
