# SPDX-License-Identifier: Apache-2.0
"""A member's line to the scheduler, in one background thread."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import Any, TypeVar

import zmq

from commlib.control import messages as m
from commlib.control.addresses import split_address
from commlib.control.interface import Control, Hooks
from commlib.control.interrupt import wait_for
from commlib.control.loop import ControlLoop
from commlib.control.registry import describe_name
from commlib.control.rendezvous import Joined
from commlib.control.scheduler_process import SchedulerProcess
from commlib.errors import CommlibError, ConfigError, NotInitializedError, OperationTimeout, PeerLostError, from_code

__all__ = ["ControlClient", "lost_error"]

log = logging.getLogger("commlib")

T = TypeVar("T")

MAX_NAMES_PER_MESSAGE = 1024
SCHEDULER_ENDS_S = 2.0
_HERE = "this host"


def lost_error(rank: int | None, host: str, cause: str) -> PeerLostError:
    """The error for a lost member, in words."""
    who = "a server" if rank is None else f"rank {rank}"
    return PeerLostError(f"{who} on {host} is lost: {cause}", rank=rank, host=host, cause=cause)


class ControlClient(Control):
    """The :class:`Control` of a member of a job with a scheduler.

    While members connect to each other it is also their alarm: ``fileno`` is readable once the job has failed, and
    ``check`` then raises why.
    """

    def __init__(self, joined: Joined, scheduler_process: SchedulerProcess | None = None) -> None:
        self.welcome = joined.welcome
        self.address = joined.line.address  # of the scheduler
        self._context = joined.context
        self._line = joined.line
        self._process = scheduler_process
        self._pid = os.getpid()
        self._alarm_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._failure: CommlibError | None = None  # the job has failed
        self._gone: CommlibError | None = None  # nothing can be asked any more, and why
        self._events: list[Callable[[Hooks], None]] = []  # for hooks that are attached later
        self._requests = itertools.count()
        self._lock = threading.Lock()  # guards _gone and the waiting futures below; held for moments, nothing is called
        # Names are declared in the main thread, where a signal handler may break a Future, but no single step of C.
        self._declared: dict[int, SimpleQueue[m.Declared | CommlibError]] = {}
        self._verdicts: dict[tuple[str, int], list[Future[m.Verdict]]] = {}
        self._endpoints: Future[tuple[str, ...]] = Future()
        self._go: Future[None] = Future()
        self._farewell: Future[int] = Future()
        self._over: Future[bool] = Future()
        self._said_bye = False
        self._leaving = False  # that the scheduler goes is no loss any more
        self._closing = False
        self._loop = ControlLoop(zmq.Poller())
        self._loop.watch(self._line.socket, self._receive)
        self._loop.watch(self._line.monitor, self._watch_line)
        _clients.add(self)
        self._loop.start()

    # --- Control

    def attach(self, hooks: Hooks) -> None:
        """See :meth:`Control.attach`."""
        self._check_process()

        def use() -> None:
            self._loop.use(hooks)
            for event in self._events:
                self._loop.guarded(event, hooks)

        self._loop.call(use)

    def declare(self, names: Sequence[tuple[str, int]]) -> list[m.Declaration]:
        """See :meth:`Control.declare`. More than 1024 names are declared in several steps."""
        answers: list[m.Declaration] = []
        for start in range(0, len(names), MAX_NAMES_PER_MESSAGE):
            batch = [(name, int(total_bytes)) for name, total_bytes in names[start : start + MAX_NAMES_PER_MESSAGE]]
            request = next(self._requests)
            message = _checked(m.Declare(request, tuple(batch)))
            answer: SimpleQueue[m.Declared | CommlibError] = SimpleQueue()
            with self._usable():
                self._declared[request] = answer
            self._say(message)
            said = wait_for(answer)
            if isinstance(said, CommlibError):
                raise said
            if said.error:
                raise from_code(said.code, said.error)
            answers += said.declarations
        return answers

    def report_mismatch(
        self, name: str, round_number: int, signature: m.Signature, timeout_s: float = 10.0
    ) -> m.Verdict:
        """See :meth:`Control.report_mismatch`."""
        message = _checked(m.Report(name, round_number, signature))
        future: Future[m.Verdict] = Future()
        with self._usable():
            self._verdicts.setdefault((name, round_number), []).append(future)
        self._say(message)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise OperationTimeout(
                f"{describe_name(name, round_number)}: the ranks disagree, but the scheduler has not said about what "
                f"within {timeout_s:g} s"
            ) from None

    def stalled(self, name: str, round_number: int, waiting_s: float) -> None:
        """See :meth:`Control.stalled`."""
        self._check_process()
        self._say(_checked(m.Stalled(name, round_number, waiting_s)))

    def lost(self, rank: int | None, host: str, cause: str) -> None:
        """See :meth:`Control.lost`."""
        self._check_process()
        self._say(_checked(m.Gone(rank, host, cause)))

    def bye(self, timeout_s: float = 5.0) -> None:
        """See :meth:`Control.bye`."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._gone is not None or self._said_bye:
                return
            self._said_bye = self._leaving = True
        self._say(_checked(m.Bye()))
        with contextlib.suppress(FutureTimeout, CommlibError):
            self._farewell.result(timeout_s)

    def close(self) -> None:
        """See :meth:`Control.close`. The process that started the scheduler also sees it end, if nobody needs it."""
        if self._pid != os.getpid() or self._closing:
            return
        self._closing = True
        _clients.discard(self)
        self._loop.stop()
        self._loop.use(Hooks())
        self._fail_all(NotInitializedError("commlib has been shut down"))
        self._hang_up(flush=True)
        self._context.destroy()
        os.close(self._alarm_fd)
        if self._process is not None:
            is_last = self._farewell.done() and not self._farewell.exception() and self._farewell.result() == 0
            self._process.wait(SCHEDULER_ENDS_S if is_last else 0.0)

    # --- For bootstrap

    def fileno(self) -> int:
        """Readable when `check` raises."""
        return self._alarm_fd

    def check(self) -> None:
        """Raise if the job has failed, or nothing can be asked any more."""
        error = self._failure or self._gone
        if error is not None:
            raise copy.copy(error)

    def give_up(self) -> None:
        """From any thread: whoever waits here for others does so no longer."""
        self._fail_job(CommlibError("given up"))

    def exchange_endpoints(self, address: str, deadline: float) -> tuple[str, ...]:
        """Say where this local root or server listens; returns where all of them do, by PeerId."""
        self._say(_checked(m.Endpoint(address)))
        return self._wait(self._endpoints, deadline, "where all hosts listen")

    def wired(self, deadline: float) -> None:
        """Say that this member is connected to all it must be connected to, and wait until all are."""
        self._say(_checked(m.Wired()))
        self._wait(self._go, deadline, "that all members are connected")

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """For servers: wait until no worker needs this one any more. Returns whether the job has failed.

        Raises OperationTimeout after `timeout_s` seconds, PeerLostError when the scheduler is lost.
        """
        try:
            return self._over.result(timeout_s)
        except FutureTimeout:
            raise OperationTimeout(f"the job is not over after {timeout_s} s") from None

    def _wait(self, future: Future[T], deadline: float, what: str) -> T:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeout:
            raise OperationTimeout(f"the scheduler has not said in time {what} (COMMLIB_CONNECT_TIMEOUT_S)") from None

    # --- Asking, on any thread

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise NotInitializedError(
                "this process was forked from one that uses commlib; its connections are the parent's, and commlib "
                "cannot be used here"
            )

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Around keeping a future: either this raises, or the future will be settled whatever happens."""
        self._check_process()
        with self._lock:
            if self._gone is not None:
                raise copy.copy(self._gone)  # its own, as each raise writes a traceback into it
            yield

    def _say(self, message: bytes) -> None:
        self._loop.post(lambda: self._line.send_encoded(message) if self._gone is None else None)

    # --- Hearing, on the control thread

    def _receive(self) -> None:
        while self._gone is None:
            try:
                message = self._line.receive()
            except m.MalformedMessage as error:
                log.error("the scheduler sent what is no message: %s", error)
                continue
            if message is None:
                return
            self._hear(message)

    def _hear(self, message: m.FromScheduler) -> None:
        match message:
            case m.Declared():
                self._hear_declared(message)
            case m.Verdict():
                with self._lock:
                    waiting = self._verdicts.pop((message.name, message.round), [])
                for future in waiting:
                    _settle(future, message)
            case m.Query():
                self._answer(message)
            case m.StallReport():
                self._loop.guarded(self._loop.hooks.on_stall, message)
            case m.Lost(rank, host, cause):
                self._fail_job(lost_error(rank, host, cause))
                self._happened(lambda hooks: hooks.on_lost(rank, host, cause))
            case m.Over(failed):
                self._leaving = True  # the scheduler, too, may go now
                _settle(self._over, failed)
                self._happened(lambda hooks: hooks.on_over(failed))
            case m.Endpoints(addresses):
                _settle(self._endpoints, addresses)
            case m.Go():
                _settle(self._go, None)
            case m.Farewell(remaining):
                _settle(self._farewell, remaining)
            case m.Refused():
                self._fail_job(from_code(message.code, message.reason))
            case m.Error(reason):
                log.error("the scheduler does not understand this process: %s", reason)
            case _:
                log.debug("unexpected from the scheduler: %r", message)

    def _hear_declared(self, message: m.Declared) -> None:
        with self._lock:
            answer = self._declared.pop(message.request, None)
        if answer is not None:
            answer.put(message)

    def _answer(self, query: m.Query) -> None:
        try:
            submitted = int(self._loop.hooks.submitted_round(query.name))
        except Exception as error:
            log.error("cannot tell which round of %s was submitted: %s", describe_name(query.name), error)
            return
        self._line.send(m.Submitted(query.query, submitted))

    def _happened(self, event: Callable[[Hooks], None]) -> None:
        """Tell the hooks, and those that are attached later."""
        self._events.append(event)
        self._loop.guarded(event, self._loop.hooks)

    def _watch_line(self) -> None:
        self._line.watch()
        if not self._line.went_down:
            return
        self._receive()  # its last words
        where = self._line.address
        host = _HERE if where.startswith("ipc://") else split_address(where)[0]
        cause = "its connection has ended"
        text = f"the scheduler on {host} is lost ({where}): {cause}"
        self._hang_up()
        self._fail_all(PeerLostError(text, host=host, cause=cause))
        os.eventfd_write(self._alarm_fd, 1)
        if not self._leaving:
            log.info("%s", text)
            self._happened(lambda hooks: hooks.on_scheduler_lost())

    def _hang_up(self, flush: bool = False) -> None:
        """ZeroMQ would connect again, as a stranger."""
        if self._line.socket.closed:
            return
        self._loop.unwatch(self._line.socket)
        self._loop.unwatch(self._line.monitor)
        self._line.close(flush)

    def _fail_job(self, error: CommlibError) -> None:
        if self._failure is None:
            self._failure = error
            os.eventfd_write(self._alarm_fd, 1)
            _break(self._endpoints, error)
            _break(self._go, error)

    def _fail_all(self, error: CommlibError) -> None:
        with self._lock:
            if self._gone is None or self._closing:
                self._gone = error
            declaring = list(self._declared.values())
            waiting: list[Future[Any]] = [*itertools.chain(*self._verdicts.values())]
            self._declared.clear()
            self._verdicts.clear()
        for answer in declaring:
            answer.put(copy.copy(error))
        for future in waiting:
            _break(future, error)
        waiting = [self._endpoints, self._go, self._farewell, self._over]
        for future in waiting:
            _break(future, self._failure or error)

    def _forget_in_child(self) -> None:
        """After a fork, in the child: let go of the connection, so that the parent's death is seen."""
        if self._line.connected_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._line.connected_fd)
            self._line.connected_fd = -1


def _checked(message: m.FromMember) -> bytes:
    """The message as bytes, if the scheduler will understand it: else somebody would wait for an answer in vain."""
    try:
        data = m.encode(message)
        m.decode_from_member(data)
    except ValueError as error:  # text that is no text, too, is one
        raise ConfigError(f"this cannot be said to the scheduler: {error}") from None
    return data


def _settle(future: Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _break(future: Future[Any], error: CommlibError) -> None:
    if not future.done():
        future.set_exception(copy.copy(error))


_clients: weakref.WeakSet[ControlClient] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for client in list(_clients):
        client._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
