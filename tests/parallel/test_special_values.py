# SPDX-License-Identifier: Apache-2.0
"""Infinities, NaN, subnormal numbers, the largest and the smallest: nothing is lost or overflows on the way."""

from __future__ import annotations

import json

import pytest

from tests.lab import Lab
from tests.launch import run_job
from tests.parallel.test_sums import ranks_of

# Elements are drawn from the special values of the format, so that all of them meet each other.
FLOATS = """
    import hashlib, json, sys
    import ml_dtypes, numpy as np, commlib
    from commlib import Average, Max, Min, Product, Sum
    from tests.launch import give
    from tests.parallel import reference

    placement = json.loads(sys.argv[1])
    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    digest = hashlib.sha256()
    for dtype in reference.FORMATS:
        kind = reference.dtype_of(dtype)
        limits = ml_dtypes.finfo(kind)
        tiny, least, most, step = map(float, (limits.tiny, limits.smallest_subnormal, limits.max, limits.eps))
        special = np.array(
            [0.0, 1.0, 1 + step, np.inf, np.nan, most, most / 2, tiny, tiny / 2, least, 3 * least, 1 / most], kind)
        special = np.concatenate([special, -special]).astype(kind)
        for op in (Average, Sum, Min, Max, Product):
            inputs = [np.random.default_rng([1, r]).choice(special, 16411) for r in range(size)]
            result = commlib.push_pull(inputs[rank], name=f"{dtype} {op!r}", op=op)
            reference.check_bits(result, inputs, op, placement)
            digest.update(result.tobytes())
            if op in (Min, Max, Sum):
                wide = np.stack(inputs).astype(np.float64)
                infinities = np.isinf(wide)
                lost = np.isnan(wide).any(axis=0)
                if op is Sum:
                    lost |= (infinities & (wide > 0)).any(axis=0) & (infinities & (wide < 0)).any(axis=0)
                    assert np.isnan(result[lost]).all()
                else:
                    assert np.array_equal(np.isnan(result), lost)
                assert lost.any() and not lost.all()
            # Numbers without a normal one among them: the sum is exact, and no bit of it may be flushed to zero.
            if op is Sum:
                draws = [np.random.default_rng([2, r]).choice([least, -least, 2 * least], 1023) for r in range(size)]
                few = [draw.astype(kind) for draw in draws]
                result = commlib.push_pull(few[rank], name=f"{dtype} subnormal", op=Sum)
                assert np.array_equal(result.astype(np.float64), np.stack(few).astype(np.float64).sum(axis=0))
        # The sum of these may overflow; their average has no reason to. (bfloat16 has the range of its accumulator.)
        if dtype == "float16":
            full = np.full(1023, limits.max, kind)
            assert np.all(commlib.push_pull(full, name=f"{dtype} full", op=Average) == limits.max)
            assert np.all(commlib.push_pull(-full, name=f"{dtype} full", op=Average) == -limits.max)
            assert size == 1 or np.all(np.isinf(commlib.push_pull(full, name=f"{dtype} full", op=Sum)))
    give(digest.hexdigest())
    commlib.shutdown()
"""

# Small numbers whose results everybody can check in his head; ranks beyond the second put in the neutral element.
INTEGERS = """
    import numpy as np, commlib
    from commlib import Average, Max, Min, Product, Sum
    from tests.launch import give

    commlib.init()
    rank, size = commlib.rank(), commlib.size()

    def both(op, dtype, first, second, neutral):
        mine = np.array(first if rank == 0 else second if rank == 1 else [neutral] * len(first), dtype)
        return commlib.push_pull(mine, op=op).tolist()

    for dtype in (np.int8, np.int16, np.int32, np.int64):
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        assert both(Sum, dtype, [most, least, most], [1, -1, most], 0) == [least, most, -2]
        assert both(Product, dtype, [least, most, 3], [-1, 2, -5], 1) == [least, -2, -15]
        assert both(Min, dtype, [most, least, -3], [1, -1, -5], most) == [1, least, -5]
        assert both(Max, dtype, [most, least, -3], [1, -1, -5], least) == [most, -1, -3]
        # Towards minus infinity, as // does; and in 64 bits, so that nothing narrower overflows before it is divided.
        averages = [sum(pair) // size for pair in [(-1, 0), (-3, 0), (5, -6), (1, 0), (3, 0)]]
        assert both(Average, dtype, [-1, -3, 5, 1, 3], [0, 0, -6, 0, 0], 0) == averages
        if dtype is not np.int64:
            assert both(Average, dtype, [most, least], [most, least], 0) == [2 * most // size, 2 * least // size]
    assert both(Sum, np.uint8, [255, 200, 1], [1, 100, 2], 0) == [0, 44, 3]
    assert both(Product, np.uint8, [16, 255, 3], [16, 255, 5], 1) == [0, 1, 15]
    assert both(Average, np.uint8, [255, 255, 1], [255, 254, 0], 0) == [510 // size, 509 // size, 1 // size]
    for op, expected in [(Sum, [False, True, True]), (Max, [False, True, True])]:
        assert both(op, np.bool_, [False, True, True], [False, False, True], False) == expected
    for op, expected in [(Product, [False, False, True]), (Min, [False, False, True])]:
        assert both(op, np.bool_, [False, True, True], [False, False, True], True) == expected
    give("right")
    commlib.shutdown()
"""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_floats_on_one_host(size: int) -> None:
    results = run_job(FLOATS, hosts=[size], args=[json.dumps(ranks_of([size]))], timeout=60)
    assert len(set(results)) == 1


@pytest.mark.lab
@pytest.mark.parametrize("hosts", [[1, 1], [2, 1, 1]], ids=str)
def test_floats_on_several_hosts(hosts: list[int], lab: Lab) -> None:
    results = run_job(FLOATS, hosts=hosts, servers=1, lab=lab, args=[json.dumps(ranks_of(hosts))], timeout=60)
    assert len(set(results)) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_integers_on_one_host(size: int) -> None:
    assert run_job(INTEGERS, hosts=[size], timeout=60) == ["right"] * size


@pytest.mark.lab
@pytest.mark.parametrize("hosts", [[1, 1], [1, 2]], ids=str)
def test_integers_on_several_hosts(hosts: list[int], lab: Lab) -> None:
    assert run_job(INTEGERS, hosts=hosts, servers=1, lab=lab, timeout=60) == ["right"] * sum(hosts)
