# SPDX-License-Identifier: Apache-2.0
"""Jobs started by launchers that are not ours, and several at once, all of processes that run `sums.py`."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.launch import REPOSITORY, environment, leftovers
from tests.launchers.sums import COUNTS, ROUNDS, contribution

COMMLIB = [sys.executable, "-m", "commlib.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# As root, and on fewer CPUs than processes, Open MPI wants to be told that this is meant.
MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe"]
TIMEOUT_S = 90.0  # for a machine that has much else to do

_MARK = "LAUNCHERS_TEST"  # in the environment of every process that a test starts, and of those that they start
_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """What a process said about itself."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    num_servers: int


class Programs:
    """Programs that run side by side. When the `with` ends nothing of them is left, whatever has happened."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="commlib-test-")
        self.folder = Path(self._temporary.name)
        self._mark = f"{os.getpid()}-{next(_numbers)}"
        self._started: list[subprocess.Popen[bytes]] = []
        self._meeting = socket.socket(socket.AF_UNIX)
        self._meeting.bind(str(self.folder / "meeting"))
        self._meeting.listen(64)

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait(TIMEOUT_S)
        while left := leftovers(_MARK, self._mark, 0):
            for line in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        self._meeting.close()
        self._temporary.cleanup()

    def script(self, job: int) -> list[str]:
        """What each process of a job runs, with its arguments; a job's number is in what it sums."""
        return [str(Path(__file__).with_name("sums.py")), str(job), str(self.folder)]

    def worker(self, job: int) -> list[str]:
        """The same as a command."""
        return [sys.executable, *self.script(job)]

    def start(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start a program, in the environment of somebody who has never heard of commlib, but for `env`."""
        own = {"PYTHONPATH": str(REPOSITORY), "HOME": str(self.folder), _MARK: self._mark, **(env or {})}
        with open(self._output(len(self._started)), "wb") as output:
            self._started.append(
                subprocess.Popen(
                    argv,
                    env=environment(own),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def meet(self, count: int) -> list[str]:
        """Wait until `count` processes are members of their jobs, let them go on; their jobs and ranks, sorted."""
        deadline = time.monotonic() + TIMEOUT_S
        with contextlib.ExitStack() as stack:
            met: dict[socket.socket, str] = {}
            while len(met) < count:
                self._meeting.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    one = stack.enter_context(self._meeting.accept()[0])
                except TimeoutError:
                    raise AssertionError(f"{sorted(met.values())} alone have come\n{self.output()}") from None
                one.settimeout(TIMEOUT_S)
                met[one] = one.recv(64).decode()
            for one in met:
                one.sendall(b"!")
            return sorted(met.values())

    def wait(self) -> None:
        """Wait until all programs have ended, well, and all that they have started."""
        deadline = time.monotonic() + TIMEOUT_S
        for process in self._started:
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{process.args!r} does not end\n{self.output()}") from None
            assert status == 0, f"{process.args!r}: status {status}\n{self.output()}"
        left = leftovers(_MARK, self._mark)
        assert left == [], f"left behind: {left}\n{self.output()}"

    def places(self, job: int) -> list[Place]:
        """Where the processes of a job were, by rank, after their sums have been found right.

        The sums are looked at as those of the ranks 0, 1, …, as many as have reported.
        """
        results = sorted(
            (pickle.loads(path.read_bytes()) for path in self.folder.glob(f"{job}-*.result")), key=lambda one: one[0]
        )
        for place, sums in results:
            assert len(sums) == ROUNDS
            for count, total in itertools.chain.from_iterable(zip(COUNTS, one, strict=True) for one in sums):
                expected = sum(contribution(job, rank, count) for rank in range(len(results)))
                np.testing.assert_array_equal(total, expected, err_msg=f"job {job}, {place}")
        return [Place(*place) for place, _ in results]

    def output(self) -> str:
        """What all programs have written."""
        return "\n".join(
            f"--- {process.args!r}: status {process.poll()}\n{self._output(index).read_text(errors='replace')}"
            for index, process in enumerate(self._started)
        )

    def _output(self, index: int) -> Path:
        return self.folder / f"output{index}"


def on_one_host(size: int, num_servers: int = 0) -> list[Place]:
    """The places of a job whose processes are all on one host."""
    return [Place(rank, size, rank, size, num_servers) for rank in range(size)]
