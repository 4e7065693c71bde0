# SPDX-License-Identifier: Apache-2.0
"""More bytes than 32 bits can count."""

from __future__ import annotations

import pytest

from tests.lab import Lab
from tests.launch import run_job

# In place in the arena; compared piece by piece, so that there is no second buffer of that size.
SCRIPT = """
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give
    from tests.parallel import reference

    commlib.init()
    rank, size = commlib.rank(), commlib.size()
    count = (4 << 30) + 12_345
    array = commlib.empty(count, np.uint8)
    period = [reference.contribution("uint8", Sum, reference.PERIOD, r, 1) for r in range(size)]
    step = 1000 * reference.PERIOD
    mine = np.tile(period[rank], 1000)
    for begin in range(0, count, step):
        array[begin : begin + step] = mine[: count - begin]
    assert commlib.push_pull_(array, name="huge", op=Sum) is array
    expected = np.tile(sum(period), 1000)
    for begin in range(0, count, step):
        assert np.array_equal(array[begin : begin + step], expected[: count - begin]), begin
    assert commlib.broadcast_(array, 1, name="huge") is array
    assert np.array_equal(array[-step:], np.roll(expected, -((count - step) % reference.PERIOD)))
    give("right")
    commlib.shutdown()
"""

# A new name, and one that grows. Nothing of the tensor is ever touched.
TOO_MANY_PARTS = """
    import numpy as np, commlib
    from tests.launch import give

    commlib.init()
    tensor, small = np.empty((4 << 30) + 1, np.uint8), np.ones(100_000)
    assert np.all(commlib.push_pull(small, name="grows", op=commlib.Sum) == commlib.size())
    for name in ("huge", "grows"):
        try:
            commlib.push_pull_(tensor, name=name)
        except commlib.errors.ConfigError as error:
            assert "COMMLIB_PARTITION_BYTES" in str(error), error
        else:
            raise AssertionError("taken")
        assert np.all(commlib.push_pull(small, name=name, op=commlib.Sum) == commlib.size())
    give("right")
    commlib.shutdown()
"""


@pytest.mark.soak
def test_more_than_4_gib_on_one_host() -> None:
    assert run_job(SCRIPT, hosts=[2], timeout=600) == ["right"] * 2


@pytest.mark.soak
@pytest.mark.lab
def test_more_than_4_gib_on_several_hosts(lab: Lab) -> None:
    assert run_job(SCRIPT, hosts=[1, 1], lab=lab, timeout=1200) == ["right"] * 2


def test_more_parts_than_a_name_can_have() -> None:
    env = {"COMMLIB_PARTITION_BYTES": "64KiB"}
    assert run_job(TOO_MANY_PARTS, hosts=[2], env=env, timeout=60) == ["right"] * 2
