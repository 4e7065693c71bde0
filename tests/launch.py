# SPDX-License-Identifier: Apache-2.0
"""Jobs of several real processes, for tests.

    values = run_job('''
        import numpy as np, commlib
        from tests.launch import give
        commlib.init()
        give(commlib.push_pull(np.full(3, commlib.rank() + 1.0), op=commlib.Sum))
    ''', hosts=[2, 1], servers=1, lab=lab, timeout=30)

A worker leaves its result by `give(value)`. For tests of failures there is `Job`: workers `announce` how far they have
come, the test waits for that (`await_event`), kills or stops what it wants, tells the others to go on (`tell`, which a
worker awaits with `listen`), and looks at every `Outcome`. Nothing is left behind, whatever happens, and a process that
outlives its job fails the test.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import zygote
from tests.lab import Lab

REPOSITORY = Path(__file__).resolve().parent.parent

_RESULT = "LAUNCH_RESULT"  # where a worker's result goes
_EVENTS = "LAUNCH_EVENTS"  # descriptor that a worker announces on
_JOB = "LAUNCH_JOB"  # marks every process of a job, also those it starts
_GRACE_S = 5.0  # how long a process may outlive its job
_numbers = itertools.count()

# Whatever a launcher around the tests has set must not reach the job.
_FOREIGN_PREFIXES = ("COMMLIB_", "LAUNCH_", "DMLC_", "BYTEPS_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MASTER_")
_FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}


# What a worker calls.


def give(value: Any) -> None:
    """Leave `value` (anything that can be pickled) as this worker's result. The last one counts."""
    path = Path(os.environ[_RESULT])
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    partial.rename(path)


def announce(event: str) -> None:
    """Tell the test that this worker has come to `event`."""
    os.write(int(os.environ[_EVENTS]), event.encode() + b"\n")


def listen() -> str:
    """Wait for the test's next word to this worker."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError("the test is gone")
    return line.rstrip("\n")


# What a test calls.


class JobError(AssertionError):
    """A job did not do what it should; the text has all its output."""


@dataclass
class Outcome:
    """How one process ended. `status` is negative for a signal; `value` is what a worker gave, else None."""

    name: str
    status: int | None
    stdout: str
    stderr: str
    value: Any = None

    def __str__(self) -> str:
        return f"--- {self.name}: status {self.status}\n{self.stdout}{self.stderr}"


@dataclass
class _Process:
    name: str
    popen: subprocess.Popen[bytes] | zygote.Forked
    folder: Path
    pidfd: int
    events_fd: int | None = None
    unread: bytes = b""
    events: list[str] = field(default_factory=list)

    def outcome(self) -> Outcome:
        result = self.folder / "result"
        return Outcome(
            name=self.name,
            status=self.popen.poll(),
            stdout=(self.folder / "stdout").read_text(errors="replace"),
            stderr=(self.folder / "stderr").read_text(errors="replace"),
            value=pickle.loads(result.read_bytes()) if result.exists() else None,
        )

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def read_events(self) -> None:
        assert self.events_fd is not None
        data = os.read(self.events_fd, 65536)
        if not data:
            os.close(self.events_fd)
            self.events_fd = None
            return
        *lines, self.unread = (self.unread + data).split(b"\n")
        self.events += [line.decode() for line in lines]


class Job:
    """The processes of one job: `hosts[h]` workers on host h, and `servers` dedicated servers.

    `script` is Python source (indented as it likes) or a path. With a `lab`, host h of the job is host h of the lab and
    the servers are on the hosts that follow. Without, everything is on this machine, and several `hosts` are told apart
    by their `COMMLIB_NODE` alone. Ranks are given host by host, or as `placement` says: the host of each rank.
    `env` is for all processes, `rank_env[r]` for one worker; None as a value takes a variable away.
    """

    def __init__(
        self,
        script: str | Path,
        *,
        hosts: Sequence[int] = (1,),
        servers: int = 0,
        lab: Lab | None = None,
        placement: Sequence[int] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        rank_env: Mapping[int, Mapping[str, str | None]] | None = None,
    ) -> None:
        self.hosts = list(hosts)
        self.lab = lab
        self.name = f"job-{os.getpid()}-{next(_numbers)}"
        self.workers: list[_Process] = []
        self.servers: list[_Process] = []
        self._placement = list(placement or [h for h, count in enumerate(self.hosts) for _ in range(count)])
        if sorted(self._placement) != [h for h, count in enumerate(self.hosts) for _ in range(count)]:
            raise ValueError(f"placement {self._placement} does not fit hosts {self.hosts}")
        self._temporary = tempfile.TemporaryDirectory(prefix="commlib-test-")
        self._folder = Path(self._temporary.name)
        self._selector = selectors.DefaultSelector()
        try:
            self._start(self._written(script), servers, list(args), env or {}, rank_env or {})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def processes(self) -> list[_Process]:
        """Workers by rank, then servers."""
        return self.workers + self.servers

    def pid(self, rank: int) -> int:
        """Process id of a worker."""
        return self.workers[rank].popen.pid

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one worker alone, not to what it has started."""
        self.workers[rank].popen.send_signal(number)

    def tell(self, rank: int, word: str) -> None:
        """Send a line to a worker, which gets it from `listen()`."""
        pipe = self.workers[rank].popen.stdin
        assert pipe is not None
        pipe.write(word.encode() + b"\n")
        pipe.flush()

    def await_event(self, event: str, *, ranks: Iterable[int] | None = None, timeout: float = 30) -> None:
        """Wait until all of `ranks` (default: all workers) have announced `event`; one that ends first is an error."""
        waiting = set(range(len(self.workers)) if ranks is None else ranks)

        def heard() -> bool:
            waiting.difference_update([rank for rank in waiting if event in self.workers[rank].events])
            return not waiting

        def over() -> bool:
            # A process that has ended may have announced before: what is in its pipe is read first.
            silent = [rank for rank in waiting if self.workers[rank].popen.poll() is not None]
            return heard() or any(self.workers[rank].events_fd is None for rank in silent)

        self._pump(time.monotonic() + timeout, over)
        if not heard():
            self._fail(f"rank(s) {sorted(waiting)} did not announce {event!r} within {timeout} s")

    def await_end(self, ranks: Iterable[int], *, timeout: float = 30) -> list[Outcome]:
        """Wait until these workers have ended; the others may go on."""
        chosen = [self.workers[rank] for rank in ranks]
        if not self._pump(time.monotonic() + timeout, lambda: all(p.popen.poll() is not None for p in chosen)):
            self._fail(f"{[p.name for p in chosen if p.popen.poll() is None]} still ran after {timeout} s")
        return [process.outcome() for process in chosen]

    def wait(self, timeout: float = 60) -> list[Outcome]:
        """Wait until all processes have ended, and all that they have started. Workers by rank, then servers."""
        if not self._pump(time.monotonic() + timeout, lambda: all(p.popen.poll() is not None for p in self.processes)):
            running = [process.name for process in self.processes if process.popen.poll() is None]
            self._show_where_they_are()
            self._fail(f"{', '.join(running)} still ran after {timeout} s")
        left = self.leftovers(_GRACE_S)
        if left:
            self._fail(f"the job left processes behind: {left}")
        return [process.outcome() for process in self.processes]

    def leftovers(self, grace_s: float = 0.0) -> list[str]:
        """Processes of this job, beyond those started here, that still live after `grace_s` seconds."""
        return leftovers(_JOB, self.name, grace_s, {process.popen.pid for process in self.processes})

    def close(self) -> None:
        """Kill whatever is left of the job and forget it. May be repeated."""
        for process in self.processes:
            process.signal_group(signal.SIGKILL)
        for pid in self._strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _await_end_of(pid, time.monotonic() + _GRACE_S)
        for process in self.processes:
            process.popen.wait(timeout=_GRACE_S)
            if process.popen.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.popen.stdin.close()
            if process.events_fd is not None:
                os.close(process.events_fd)
            os.close(process.pidfd)
        self.workers, self.servers = [], []
        self._selector.close()
        self._temporary.cleanup()

    # Starting.

    def _start(
        self,
        script: Path,
        servers: int,
        args: list[str],
        env: Mapping[str, str | None],
        rank_env: Mapping[int, Mapping[str, str | None]],
    ) -> None:
        common = {
            _JOB: self.name,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            "COMMLIB_JOB": self.name,
            "COMMLIB_SECRET": f"secret of {self.name}",
            "COMMLIB_NUM_SERVERS": str(servers),
            **self._scheduler(servers),
        }
        seen = [0] * len(self.hosts)
        for rank, host in enumerate(self._placement):
            place = {
                "COMMLIB_RANK": str(rank),
                "COMMLIB_SIZE": str(len(self._placement)),
                "COMMLIB_LOCAL_RANK": str(seen[host]),
                "COMMLIB_LOCAL_SIZE": str(self.hosts[host]),
                "COMMLIB_NODE": f"host{host}",
            }
            seen[host] += 1
            argv = [sys.executable, str(script), *args]
            settings = [common, place, env, rank_env.get(rank, {})]
            self.workers.append(self._spawn(f"rank {rank}", host, argv, settings, is_worker=True))
        for index in range(servers):
            argv = [sys.executable, "-m", "commlib.cli", "server"]
            host = len(self.hosts) + index
            self.servers.append(self._spawn(f"server {index}", host, argv, [common, env], is_worker=False))

    def _scheduler(self, servers: int) -> dict[str, str]:
        if self.lab is not None:
            return {"COMMLIB_SCHEDULER": f"{self.lab.address(self._placement[0])}:5555"}
        if len(self.hosts) > 1 or servers > 0:
            return {"COMMLIB_SCHEDULER": f"127.0.0.1:{unused_port()}"}
        return {}

    def _spawn(
        self, name: str, host: int, argv: list[str], settings: Iterable[Mapping[str, str | None]], *, is_worker: bool
    ) -> _Process:
        folder = self._folder / name.replace(" ", "")
        folder.mkdir()
        events_read, events_write = os.pipe()
        try:
            env = environment(*settings, {_RESULT: str(folder / "result"), _EVENTS: str(events_write)})
            popen: subprocess.Popen[bytes] | zygote.Forked
            with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
                preloaded = zygote.preloaded_for(argv[1], env) if is_worker else None
                if preloaded is not None:
                    popen = zygote.of(preloaded, len(self.workers)).fork(
                        argv[1:],
                        env=env,
                        cwd=str(self._folder),
                        network=self.lab.network(host) if self.lab is not None else "",
                        mark=str(folder / f"{_JOB}={self.name}"),
                        events=_EVENTS,
                        outputs=[stdout.fileno(), stderr.fileno(), events_write],
                    )
                else:
                    popen = subprocess.Popen(
                        argv if self.lab is None else self.lab.command(host, argv),
                        stdin=subprocess.PIPE if is_worker else subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        env=env,
                        cwd=self._folder,
                        pass_fds=[events_write],
                        start_new_session=True,
                    )
        except BaseException:
            os.close(events_read)
            raise
        finally:
            os.close(events_write)
        process = _Process(name, popen, folder, os.pidfd_open(popen.pid), events_read)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        self._selector.register(events_read, selectors.EVENT_READ, process)
        return process

    def _written(self, script: str | Path) -> Path:
        if isinstance(script, Path):
            return script.resolve()
        path = self._folder / "script.py"
        path.write_text(textwrap.dedent(script))
        return path

    # Waiting.

    def _pump(self, deadline: float, done: Callable[[], bool]) -> bool:
        """Take in events and ends of processes until `done()`; False if that has not come by the deadline."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self._selector.select(left):
                process: _Process = key.data
                if key.fd == process.pidfd:
                    process.popen.poll()
                    self._selector.unregister(key.fd)
                    continue
                process.read_events()
                if process.events_fd is None:
                    self._selector.unregister(key.fd)
        return True

    def _show_where_they_are(self) -> None:
        """Let the processes that hang write where each of their threads is, to their stderr; that ends them."""
        hanging = [process for process in self.processes if process.popen.poll() is None]
        for process in hanging:
            process.popen.send_signal(signal.SIGABRT)
        self._pump(time.monotonic() + 2, lambda: all(process.popen.poll() is not None for process in hanging))

    def _strays(self) -> dict[int, str]:
        return _marked(_JOB, self.name, {process.popen.pid for process in self.processes})

    def _fail(self, reason: str) -> None:
        for process in self.processes:
            process.signal_group(signal.SIGKILL)
        self._pump(time.monotonic() + _GRACE_S, lambda: all(p.popen.poll() is not None for p in self.processes))
        output = "\n".join(str(process.outcome()) for process in self.processes)
        raise JobError(f"{self.name}: {reason}\n{output}")


def run_job(
    script: str | Path,
    *,
    hosts: Sequence[int] = (1,),
    servers: int = 0,
    lab: Lab | None = None,
    placement: Sequence[int] | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    rank_env: Mapping[int, Mapping[str, str | None]] | None = None,
    timeout: float = 60,
) -> list[Any]:
    """Run a job (see `Job`) to its end and return what each worker gave, by rank.

    Raises JobError, with all output, if it takes longer than `timeout` seconds, if a process ends with another status
    than 0, or if one is left behind.
    """
    with Job(
        script, hosts=hosts, servers=servers, lab=lab, placement=placement, args=args, env=env, rank_env=rank_env
    ) as job:
        outcomes = job.wait(timeout)
        bad = [outcome.name for outcome in outcomes if outcome.status != 0]
        if bad:
            raise JobError(f"{job.name}: failed: {', '.join(bad)}\n" + "\n".join(map(str, outcomes)))
        return [outcome.value for outcome in outcomes[: len(job.workers)]]


def leftovers(variable: str, value: str, grace_s: float = _GRACE_S, but: Collection[int] = ()) -> list[str]:
    """Processes that were started with an environment variable of this value and still live after `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    for pid in _marked(variable, value, but):
        if not _await_end_of(pid, deadline):
            break
    return list(_marked(variable, value, but).values())


def _marked(variable: str, value: str, but: Collection[int]) -> dict[int, str]:
    """Living processes with this variable in the environment they were started with: id → id and command line.

    Forked ones have a file of that name open instead.
    """
    mark = f"{variable}={value}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) not in but:
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0") or _has_open(folder, mark):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(folder.name)] = f"{folder.name}: {command}"
    return found


def _has_open(process: Path, name: bytes) -> bool:
    """Whether a process has a file of this name open, somewhere."""
    for fd in os.scandir(process / "fd"):
        with contextlib.suppress(OSError):
            if os.readlink(os.fsencode(fd.path)).endswith(b"/" + name):
                return True
    return False


def environment(*settings: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of the tests without what a launcher around them has set, changed by `settings` in turn."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name not in _FOREIGN_NAMES
    }
    for setting in settings:
        for name, value in setting.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
    return env


def unused_port(but: Collection[int] = ()) -> int:
    """A port of loopback below those that the kernel gives out by itself, so that only the job will ask for it."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    start = 20000 + os.getpid() * 101 % 10000
    for candidate in itertools.chain(range(start, lowest), range(20000, start)):
        if candidate in but:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", candidate))
            return candidate
    raise JobError("no port is free")


def _await_end_of(pid: int, deadline: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            return bool(selector.select(max(0.0, deadline - time.monotonic())))
    finally:
        os.close(pidfd)
