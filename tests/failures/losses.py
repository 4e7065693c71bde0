# SPDX-License-Identifier: Apache-2.0
"""What workers of these tests tell about an end that came too early, and what a test expects to hear.

Times are of `time.monotonic()`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlib.control.addresses import local_name
from commlib.errors import CommlibError, PeerLostError
from tests.launch import Job, Outcome, give

NOTICED_S = 2.0  # a death is known everywhere
GONE_S = 5.0  # and nothing of the job is left


@dataclass(frozen=True)
class Loss:
    """A PeerLostError as a worker has caught it."""

    when: float
    rank: int | None
    host: str
    text: str


def give_loss(call: Callable[[], object]) -> None:
    """In a worker: `call` must raise PeerLostError, which is given to the test; anything else fails the worker."""
    try:
        value = call()
    except PeerLostError as error:
        give(Loss(time.monotonic(), error.rank, error.host, str(error)))
    else:
        raise AssertionError(f"nobody was lost: {value!r}")


def told(call: Callable[[], Any]) -> Any:
    """What a call returns, or its error of commlib as text."""
    try:
        return call()
    except CommlibError as error:
        return f"{type(error).__name__}: {error}"


def check_losses(
    outcomes: Iterable[Outcome], *, since: float, rank: int | None, word: str = "", within: float = NOTICED_S
) -> None:
    """Each of these workers has heard in time who is lost, by rank and host, and has then ended well."""
    who = f"rank {rank} on host {socket.gethostname()}" if rank is not None else "server"
    for outcome in outcomes:
        loss = outcome.value
        assert isinstance(loss, Loss), outcome
        assert loss.rank == rank, f"{loss.text}\n{outcome}"
        assert loss.host == socket.gethostname(), outcome
        assert who in loss.text, outcome
        assert word in loss.text, outcome
        assert loss.when - since < within, f"{loss.when - since:.2f} s\n{outcome}"
        check_quiet(outcome)


def check_quiet(outcome: Outcome) -> None:
    """It ended with status 0, and no thread has died of an exception."""
    assert outcome.status == 0, outcome
    assert "Traceback" not in outcome.stderr, outcome
    assert "Exception in thread" not in outcome.stderr, outcome


def check_end(job: Job, timeout: float = GONE_S) -> list[Outcome]:
    """Its workers have ended; the rest does so within a few seconds, and leaves nothing. Returns all outcomes."""
    outcomes = job.wait(timeout)  # and nothing that they have started lives on
    for server in outcomes[len(job.workers) :]:
        assert "Traceback" not in server.stderr, server
    if job.lab is None:
        names = [local_name("scheduler", job.name)]
        names += [local_name("root", job.name, f"host{host}") for host in range(len(job.hosts))]
        taken = Path("/proc/net/unix").read_text()
        assert not [name for name in names if name in taken]
    return outcomes


def scheduler_pid(job: Job) -> int:
    """Process id of the scheduler that rank 0 has started."""
    found = [line for line in job.leftovers() if "scheduler_main" in line]
    assert len(found) == 1, found
    return int(found[0].partition(":")[0])
