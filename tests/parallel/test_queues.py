# SPDX-License-Identifier: Apache-2.0
"""What the kernel holds of a slow link is bounded: whatever is urgent waits behind it."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.lab import Lab
from tests.launch import Job

SCRIPT = """
    import numpy as np, commlib
    from tests.launch import announce, give, listen

    commlib.init()
    tensor = np.ones(1 << 20, np.float32)
    for _ in range(5):
        commlib.push_pull_(tensor, name="tensor", op=commlib.Max)
    announce("carried")
    listen()
    give(bool(np.all(tensor == 1)))
"""
MOST = 256 * 1024  # of what a stream may have that is bounded at all; see src/transport/send_bound.cpp
MUCH = 1 << 20  # has been sent on a connection that carries tensors


@pytest.mark.lab
def test_little_is_held_of_a_slow_link() -> None:
    with Lab(2, rate="200mbit") as lab, Job(SCRIPT, hosts=[1, 1], lab=lab) as job:
        job.await_event("carried", timeout=60)
        command = lab.command(0, ["ss", "-H", "-t", "-m", "-i", "-n", "-O", "state", "established"])
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        for rank in range(2):
            job.tell(rank, "go")
        assert [outcome.value for outcome in job.wait(30)] == [True, True]
    limits = [int(limit) for limit, sent in re.findall(r"\btb(\d+).*?\bbytes_acked:(\d+)", said) if int(sent) > MUCH]
    assert limits, said
    assert max(limits) <= MOST, said
