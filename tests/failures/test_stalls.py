# SPDX-License-Identifier: Apache-2.0
"""A tensor that some rank does not submit: the others' log says which and who, once, and nothing else happens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.launch import Job

# Rank 1 goes its own way until it is told that it is missed.
LATE = """
    import logging
    import numpy as np, commlib
    from tests.launch import announce, give, listen

    warnings = []

    class Warned(logging.Handler):
        def emit(self, record):
            warnings.append(record.getMessage())
            announce("warned")

    logging.getLogger("commlib").addHandler(Warned(logging.WARNING))
    commlib.init()
    ones = np.ones(100_000, np.float32)
    commlib.push_pull(ones, name="first")
    if commlib.rank() == 1:
        listen()
    total = commlib.push_pull(ones, name="second", op=commlib.Sum, timeout=60)
    give((float(total[-1]), warnings))
    commlib.shutdown()
"""


@pytest.mark.parametrize("hosts", [[3], [2, 1]])
def test_who_has_not_submitted_is_named(hosts: Sequence[int]) -> None:
    with Job(LATE, hosts=hosts, env={"COMMLIB_STALL_WARNING_S": "0.25"}) as job:
        job.await_event("warned", ranks=[0, 2], timeout=10)
        job.tell(1, "go on")
        outcomes = job.wait(20)
    for rank, outcome in enumerate(outcomes):
        total, warnings = outcome.value
        assert total == 3
        assert len(warnings) == (rank != 1)
        for warning in warnings:
            assert '"second"' in warning
            assert "not submitted by rank 1 on host" in warning


# The same, but the others do not want to wait so long; and wait again.
TIMED_OUT = """
    import numpy as np, commlib
    from tests.launch import announce, give, listen

    commlib.init()
    ones = np.ones(100_000, np.float32)
    if commlib.rank() == 1:
        listen()
    try:
        total = commlib.push_pull(ones, name="sum", op=commlib.Sum, timeout=30 if commlib.rank() == 1 else 1)
        text = ""
    except commlib.errors.OperationTimeout as error:
        announce("late")
        text = str(error)
        total = error.handle.wait(30)
    give((float(total[-1]), text))
    commlib.shutdown()
"""


@pytest.mark.parametrize("hosts", [[3], [2, 1]])
def test_a_time_limit_names_who_is_late(hosts: Sequence[int]) -> None:
    with Job(TIMED_OUT, hosts=hosts) as job:
        job.await_event("late", ranks=[0, 2], timeout=10)
        job.tell(1, "go on")
        outcomes = job.wait(20)
    assert [outcome.value[0] for outcome in outcomes] == [3.0] * 3
    for rank, outcome in enumerate(outcomes):
        late = 'tensor "sum" has not completed after 1 s: not submitted by rank 1 on host'
        assert (late in outcome.value[1]) == (rank != 1), outcome.value
        assert outcome.stderr == ""
