# SPDX-License-Identifier: Apache-2.0
"""Groups of processes: a function is called in each of them, and nothing of them outlives the call.

    seconds = call(work, size, layout=Layout(hosts=2, ranks_per_host=1), lab=lab, timeout_s=60)

A group has a time limit. Whatever it has started is found by an environment variable and ended, also what has left its
process group, as what `mpirun` starts does. Should the benchmark itself be killed, the kernel tells its processes to
end.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import BENCHMARKS, REPOSITORY
from harness.libraries import mpirun
from tests.lab import Lab
from tests.launch import environment, leftovers, unused_port

MARK = "BENCHMARK_GROUP"  # in the environment of every process of a group
# What may be tried out from outside; all else that a launcher or a shell has set must not reach the job.
TUNING = ("COMMLIB_CONGESTION", "COMMLIB_STREAMS", "COMMLIB_CREDIT_BYTES", "COMMLIB_PARTITION_BYTES")
HOST = "BENCHMARK_HOST"  # in that of one beside a server: the number of its host

_END_S = 5.0  # to end by themselves, when one has failed or all should be gone
_LAST_LINES = 15
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_numbers = itertools.count()

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class GroupError(RuntimeError):
    """A group did not do what it should; the text says who, and the last that was written."""


@dataclass(frozen=True)
class Layout:
    """Where the ranks of a job are: the same number on each of `hosts` hosts; dedicated servers have hosts of their
    own, those that follow.
    """

    hosts: int = 1
    ranks_per_host: int = 2
    servers: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host


def call(
    function: Callable[..., Any],
    *args: Any,
    layout: Layout,
    timeout_s: float,
    lab: Lab | None = None,
    with_mpi: bool = False,
    beside_servers: Callable[..., Any] | None = None,
) -> list[Any]:
    """Call `function(*args)` in a new process for each rank; what each returned, by rank.

    `function` is one of a module's, and joins whatever it measures itself. `with_mpi` starts the ranks by `mpirun`, on
    this host. `beside_servers(*args)` is called in one more process on each server's host. Blocks until all have ended,
    at most `timeout_s` seconds. Raises GroupError, with words, if one fails or time is up.
    """
    with _Group(lab) as group:
        ranks = (function, args)
        if with_mpi:
            options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            # Oversubscribed ranks give up the CPU when they have to wait; only those that are shall do so.
            is_crowded = layout.size > len(os.sched_getaffinity(0))
            options += ["--mca", "mpi_yield_when_idle", str(int(is_crowded)), "-n", str(layout.size)]
            group.start("mpirun", [str(mpirun()), *options, *group.worker(ranks, "rank{rank}")])
        else:
            job = _job(layout, lab)
            for rank in range(layout.size):
                host, local_rank = divmod(rank, layout.ranks_per_host)
                place = _place(layout, rank, host, local_rank)
                group.start(f"rank {rank}", group.worker(ranks, f"rank{rank}"), job | place, host)
            for server in range(layout.servers):
                host = layout.hosts + server
                group.start(f"server {server}", [sys.executable, "-m", "commlib.cli", "server"], job, host)
                if beside_servers is not None:
                    beside = group.worker((beside_servers, args), f"beside{server}")
                    group.start(f"process beside server {server}", beside, {HOST: str(host)}, host)
        group.wait(timeout_s)
        return [group.result(f"rank{rank}") for rank in range(layout.size)]


def _job(layout: Layout, lab: Lab | None) -> dict[str, str]:
    """What all members of a job are told."""
    job = {"COMMLIB_JOB": f"benchmark-{os.getpid()}-{next(_numbers)}", "COMMLIB_NUM_SERVERS": str(layout.servers)}
    if lab is not None:
        job["COMMLIB_SCHEDULER"] = f"{lab.address(0)}:5555"
    elif layout.hosts > 1 or layout.servers > 0:
        job["COMMLIB_SCHEDULER"] = f"127.0.0.1:{unused_port()}"
    return job


def _place(layout: Layout, rank: int, host: int, local_rank: int) -> dict[str, str]:
    return {
        "COMMLIB_RANK": str(rank),
        "COMMLIB_SIZE": str(layout.size),
        "COMMLIB_LOCAL_RANK": str(local_rank),
        "COMMLIB_LOCAL_SIZE": str(layout.ranks_per_host),
        "COMMLIB_NODE": f"host{host}",
    }


@dataclass
class _Process:
    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        """How it ended and the last that it wrote."""
        status = self.popen.poll()
        ended = "had to be stopped" if status is None else f"ended with status {status}"
        lines = self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n    ".join([f"{self.name} {ended}", *lines])


class _Group:
    def __init__(self, lab: Lab | None) -> None:
        self._lab = lab
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._processes: list[_Process] = []
        self._temporary = tempfile.TemporaryDirectory(prefix="commlib-benchmark-")
        self._folder = Path(self._temporary.name)
        self._env = {
            MARK: self._name,
            "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(REPOSITORY)]),
            "TMPDIR": str(self._folder),  # whatever is left there goes with the group
            "OMP_NUM_THREADS": "1",
            "COMMLIB_SECRET": secrets.token_hex(),
        }

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        finally:
            self._temporary.cleanup()

    def worker(self, what: Call, result: str) -> list[str]:
        """The command that makes a call and leaves its result under a name."""
        path = self._folder / f"call{len(self._processes)}"
        path.write_bytes(pickle.dumps(what))
        return [sys.executable, "-m", "harness.worker", str(path), str(self._folder / result)]

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, host: int = 0) -> None:
        """Start one process, on a host of the lab if there is one."""
        log = self._folder / f"log{len(self._processes)}"
        with open(log, "wb") as output:
            popen = subprocess.Popen(
                argv if self._lab is None else self._lab.command(host, argv),
                env=environment(
                    {name: os.environ[name] for name in TUNING if name in os.environ}, self._env, env or {}
                ),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._processes.append(_Process(name, popen, log))

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended, well. When one fails, the others have a few seconds left."""
        began = time.monotonic()
        deadline = began + timeout_s
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for process in self._processes:
                pidfd = os.pidfd_open(process.popen.pid)
                stack.callback(os.close, pidfd)
                selector.register(pidfd, selectors.EVENT_READ, process)
            while selector.get_map():
                ended = selector.select(max(0.0, deadline - time.monotonic()))
                if not ended:
                    break
                for key, _ in ended:
                    selector.unregister(key.fd)
                    if key.data.popen.wait() != 0:
                        deadline = min(deadline, time.monotonic() + _END_S)
        bad = [process for process in self._processes if process.popen.poll() != 0]
        if bad:
            failed = any(process.popen.poll() for process in bad)
            reason = "not all processes ended well" if failed else f"no end within {timeout_s:.0f} s"
            raise GroupError("\n  ".join([reason, *(process.said() for process in bad)]))
        if left := leftovers(MARK, self._name, _END_S):
            raise GroupError(f"processes were left behind: {', '.join(left)}")

    def result(self, name: str) -> Any:
        """What a call returned."""
        return pickle.loads((self._folder / name).read_bytes())

    def _end(self) -> None:
        running = [process.popen for process in self._processes if process.popen.poll() is None]
        for popen in running:  # asked first: Open MPI leaves files behind when it is killed
            _signal_group(popen, signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        for popen in running:
            try:
                popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_group(popen, signal.SIGKILL)
                popen.wait()
        while left := leftovers(MARK, self._name, 0):
            for line in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.partition(":")[0]), signal.SIGKILL)
            leftovers(MARK, self._name, _END_S)


def _signal_group(popen: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, number)


def _end_with_parent() -> None:
    """In a process that is about to be started: let the kernel tell it when the benchmark has been killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
