# SPDX-License-Identifier: Apache-2.0
"""Keeps a set of processes together: all run, or none does.

A supervisor is a process of its own (`commlib run`), with nothing else to do. Each member runs in a session of its own.
When one fails, or the supervisor is told to end, the others have a few seconds to end by themselves (with commlib they
do: they get PeerLostError), then they are asked to (SIGTERM), then they are killed. What they have started goes the
same way: the supervisor is made the parent of all orphans below it, so nobody escapes by leaving the process group.

If the supervisor itself is killed outright, the kernel kills the members, and a shell that waits for the end of a pipe
kills their process groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from commlib.launch.blame import VARIABLE, Blame
from commlib.launch.output import Outlet, pumps_for

__all__ = ["Ending", "Member", "described", "supervise", "tie_to"]

# What a job that must end is given, step by step: seconds to wait, then the signal. Below five seconds in all.
_ENDING = ((3.0, signal.SIGTERM), (1.0, signal.SIGKILL))
_KILL_AGAIN_S = 0.2  # a process may have been forked while the others were killed
_GIVE_UP_S = 5.0  # after the first SIGKILL: a process stuck in the kernel does not end
_DRAIN_S = 1.0  # for output, once the job has been told to end or something outside it holds a pipe

_ASKS_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ASKS_TO_END, signal.SIGUSR1, signal.SIGUSR2)

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_OUTPUT_ENDED = 0  # not the number of any signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Reads process groups, one a line, and kills them at the end of file unless told that all went well.
_GUARD = """trap '' INT TERM HUP QUIT
while read -r line; do [ "$line" = done ] && exit; groups="$groups -$line"; done
[ -z "$groups" ] || kill -s KILL -- $groups"""


@dataclass(frozen=True)
class Member:
    """One process of a job. A job is over when its workers have ended; others, servers, then have to end as well."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    is_worker: bool = True
    reads_stdin: bool = False


@dataclass(frozen=True)
class Ending:
    """How a job ended: the exit status of the first member that failed, or 0, as a shell would say it (128 + signal).

    Workers that use commlib say whom they have lost; that rank has failed first, even if it has ended later.

    `returncodes` has the members in the order in which they ended, a signal as its negative number.
    """

    status: int
    returncodes: list[tuple[str, int]]


def supervise(
    members: Sequence[Member],
    *,
    prefixes: Mapping[str, str] | None = None,
    command: str = "commlib run",
    quiet: bool = False,
) -> Ending:
    """Run `members` to their end.

    With `prefixes`, by member name, output goes through the supervisor, line by line; with None the members write to
    the supervisor's own standard output and error. `command` stands before what the supervisor itself has to say, which
    is nothing if `quiet`.

    Only for the main thread of a process that is made for this: it takes over signals and adopts orphans. A member that
    cannot be started (OSError) ends the ones before it and counts as failed with status 127, or 126 if it exists.
    """
    _open_missing_descriptors()
    return _Supervisor(prefixes, command, quiet).run(members)


def tie_to(parent: int) -> None:
    """Let this process, in its main thread, be told to end (SIGTERM) when `parent`, which started it, has ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(_exit_status(-signal.SIGTERM))


@dataclass
class _Child:
    member: Member
    popen: subprocess.Popen[bytes]
    pidfd: int | None  # some containers forbid it; then only SIGCHLD tells, and two that end at once have no order


class _Supervisor:
    def __init__(self, prefixes: Mapping[str, str] | None, command: str, quiet: bool) -> None:
        self._prefixes = prefixes
        self._command = command
        self._quiet = quiet
        self._returncodes: list[tuple[str, int]] = []  # of those who have ended, in that order
        self._children: dict[int, _Child] = {}  # that live or are not buried yet
        self._outlets: dict[int, Outlet] = {}
        self._voice = _STDERR  # where the supervisor says something
        self._status: int | None = None
        self._failed = ""  # the member with this status
        self._blame = Blame()
        self._steps: deque[tuple[float, signal.Signals]] | None = None  # of the ending, once it has begun
        self._deadline = 0.0  # of its next step
        self._signalled = False  # the ending has come to its first signal
        self._killing_since: float | None = None
        self._told_to_end = False
        self._selector = selectors.EpollSelector()  # reports in the order of events: who ended first is first
        self._guard: subprocess.Popen[bytes] | None = None
        self._pumps_running = 0

    def run(self, members: Sequence[Member]) -> Ending:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with self._signals() as (wakeup, wake), self._selector, self._guarded():
            self._selector.register(wakeup, selectors.EVENT_READ)
            self._start(members)
            pumps = pumps_for(self._outlets, lambda: os.write(wake, bytes([_OUTPUT_ENDED])))
            self._pumps_running = len(pumps)
            for pump in pumps:
                pump.start()
            self._watch(wakeup)
            self._find_culprit()
            self._blame.close()
            if pumps:
                os.close(self._voice)
                self._drain(wakeup)
        return Ending(self._status or 0, self._returncodes)

    # Starting.

    def _start(self, members: Sequence[Member]) -> None:
        if self._prefixes is not None:
            reading, self._voice = os.pipe()
            os.set_blocking(self._voice, False)
            self._outlets[reading] = Outlet(b"", _STDERR)
        for member in members:
            try:
                self._spawn(member)
            except OSError as error:
                self._say(f"cannot start {member.name}: {member.argv[0]}: {error.strerror}")
                self._status = 127 if isinstance(error, FileNotFoundError) else 126
                self._returncodes.append((member.name, self._status))
                self._begin_ending()
                break

    def _spawn(self, member: Member) -> None:
        pipes: list[int] = []  # writing ends of the member's outputs
        if self._prefixes is not None:
            prefix = self._prefixes[member.name].encode()
            for destination in (_STDOUT, _STDERR):
                reading, writing = os.pipe()
                self._outlets[reading] = Outlet(prefix, destination)
                pipes.append(writing)
        supervisor = os.getpid()

        def tie_to_supervisor() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:  # it was killed before it could be tied to
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            popen = subprocess.Popen(
                list(member.argv),
                env={**member.env, VARIABLE: self._blame.name},
                stdin=None if member.reads_stdin else subprocess.DEVNULL,
                stdout=pipes[0] if pipes else None,
                stderr=pipes[1] if pipes else None,
                start_new_session=True,
                preexec_fn=tie_to_supervisor,
            )
        finally:
            for writing in pipes:
                os.close(writing)
        self._tell_guard(str(popen.pid))
        child = self._children[popen.pid] = _Child(member, popen, None)
        with contextlib.suppress(OSError):
            child.pidfd = os.pidfd_open(popen.pid)
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    # Watching.

    def _watch(self, wakeup: int) -> None:
        """Until nothing of the job is left."""
        while True:
            workers = [child for child in self._children.values() if child.member.is_worker]
            left = self._children or _descendants(self._known())
            if not left:
                return
            if not workers:
                self._begin_ending()
            if self._steps is not None and time.monotonic() >= self._deadline and not self._next_step():
                return
            for key, _ in self._selector.select(self._patience()):
                if key.fd == wakeup:
                    self._listen(wakeup)
                else:
                    self._ended(key.data)
            self._bury()

    def _patience(self) -> float | None:
        return None if self._steps is None else max(0.0, self._deadline - time.monotonic())

    def _drain(self, wakeup: int) -> None:
        """Let the last output out, however slowly it is read; unless the job is told to end."""
        deadline = time.monotonic() + _DRAIN_S
        while self._pumps_running:
            patience = deadline - time.monotonic() if self._told_to_end else None
            if patience is not None and patience <= 0:
                return
            if self._selector.select(patience):
                self._listen(wakeup)

    def _listen(self, wakeup: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(wakeup, 4096):
                if number == _OUTPUT_ENDED:
                    self._pumps_running -= 1
                elif number in _PASSED_ON:  # else it is SIGCHLD: somebody has to be buried
                    self._pass_on(signal.Signals(number))

    def _pass_on(self, number: signal.Signals) -> None:
        if number not in _ASKS_TO_END:
            self._signal_all(number)
        elif self._told_to_end:  # again: now
            self._begin_ending()
            self._steps = deque([(0.0, signal.SIGKILL)])
            self._deadline = time.monotonic()
        else:
            self._told_to_end = True
            self._signal_all(number)
            self._begin_ending()

    def _ended(self, child: _Child) -> None:
        if self._children.pop(child.popen.pid, None) is None:
            return
        if child.pidfd is not None:
            self._selector.unregister(child.pidfd)
            os.close(child.pidfd)
        status = _exit_status(child.popen.wait())
        self._returncodes.append((child.member.name, child.popen.returncode))
        # A server that has to be stopped because the workers have ended is not a failure of the job.
        stopped = self._signalled and not child.member.is_worker
        if status == 0 or self._status is not None or stopped:
            return
        self._status = status
        self._failed = child.member.name
        others = len(self._children)
        if not self._told_to_end:
            rest = f"; {others} more now have {_ENDING[0][0]:g} s to end" if others else ""
            self._say(f"{child.member.name} {described(child.popen.returncode)}{rest}")
        self._begin_ending()

    def _find_culprit(self) -> None:
        """Of those that have failed, who was lost first by the others?"""
        name = f"rank {self._blame.first()}"
        returncode = dict(self._returncodes).get(name, 0)
        if self._failed and returncode != 0 and name != self._failed and not self._told_to_end:
            self._status = _exit_status(returncode)
            self._say(f"{name}, which the others had lost, {described(returncode)}")

    def _bury(self) -> None:
        """Take the status of every child that has ended; adopted ones are unknown to everybody else."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self._children:
                self._ended(self._children[ended.si_pid])
            elif self._guard is not None and ended.si_pid == self._guard.pid:
                self._guard.poll()
            else:
                os.waitpid(ended.si_pid, 0)

    # Ending.

    def _begin_ending(self) -> None:
        if self._steps is None:
            self._steps = deque(_ENDING)
            self._deadline = time.monotonic() + _ENDING[0][0]

    def _next_step(self) -> bool:
        """Send the signal whose time has come; False if even the last one does not help."""
        assert self._steps is not None
        now = time.monotonic()
        self._signalled = True
        if self._steps:
            _, number = self._steps.popleft()
            if number == signal.SIGTERM and self._children and not self._told_to_end:
                self._say(f"stopping {', '.join(child.member.name for child in self._children.values())}")
            if number == signal.SIGKILL:
                self._killing_since = now
        elif self._killing_since is not None and now - self._killing_since > _GIVE_UP_S:
            names = [child.member.name for child in self._children.values()]
            self._say(f"{', '.join(names) or 'a process they have started'} cannot be killed")
            self._status = self._status or 1
            return False
        else:
            number = signal.SIGKILL
        self._signal_all(number)
        self._deadline = now + (self._steps[0][0] if self._steps else _KILL_AGAIN_S)
        return True

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.popen.pid, number)
        for pid, group in _descendants(self._known()).items():
            if group not in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _known(self) -> set[int]:
        return set() if self._guard is None else {self._guard.pid}

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        quiet = subprocess.DEVNULL
        argv = ["/bin/sh", "-c", _GUARD]
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        ) as self._guard:
            yield
            self._tell_guard("done")

    def _tell_guard(self, line: str) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        with contextlib.suppress(OSError):
            os.write(self._voice, f"{self._command}: {text}\n".encode())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[tuple[int, int]]:
        """A pipe from which the numbers of signals can be read, in place of what they would do."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        # What was ignored from outside (nohup) stays ignored; but not the ends of children, whose status would be lost.
        numbers = [signal.SIGCHLD, *(n for n in _PASSED_ON if signal.getsignal(n) != signal.SIG_IGN)]
        before = {number: signal.signal(number, _take_note) for number in numbers}
        woken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        try:
            yield reading, writing
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reading)
            os.close(writing)


def _take_note(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the number to come out of the wake-up descriptor."""


def described(returncode: int) -> str:
    """How a process ended, as the rest of a sentence about it."""
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was ended by {name}"


def _exit_status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _descendants(known: set[int]) -> dict[int, int]:
    """Living processes below this one, but for `known`: process id → process group."""
    below: dict[int, list[tuple[int, int]]] = {}  # by parent
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()  # state, parent, group, …
                if fields[0] not in (b"Z", b"X"):
                    below.setdefault(int(fields[1]), []).append((int(folder.name), int(fields[2])))
    found: dict[int, int] = {}
    unseen = deque(below.get(os.getpid(), []))
    while unseen:
        pid, group = unseen.popleft()
        if pid not in known:
            found[pid] = group
            unseen += below.get(pid, [])
    return found


def _open_missing_descriptors() -> None:
    """Whoever closed one of the first three meant that nobody reads or writes there; a pipe must not take its place."""
    for descriptor in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one


_libc_prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl


def _prctl(option: int, value: int) -> None:
    if _libc_prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
