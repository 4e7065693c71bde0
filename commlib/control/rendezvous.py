# SPDX-License-Identifier: Apache-2.0
"""Finding the scheduler and joining the job: from the first knock to Welcome."""

from __future__ import annotations

import contextlib
import logging
import socket as sockets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from commlib.control import messages as m
from commlib.control.addresses import split_address
from commlib.control.interrupt import Stop
from commlib.control.links import FLUSH_S, HANDSHAKE_S, MAX_MESSAGE_BYTES, set_heartbeats
from commlib.control.monitor import take_events
from commlib.control.scheduler import describe_missing
from commlib.control.security import HOW_TO_SHARE, Keys
from commlib.errors import AuthenticationError, ConfigError, OperationTimeout, from_code

__all__ = ["Joined", "Line", "join", "probe"]

log = logging.getLogger("commlib")

PATIENCE_S = 10.0  # between two lines about who is missing
LAST_WORD_S = 1.0
RETRY_S = 0.2
PREFERENCE_S = 1.0
FAILED_HANDSHAKES = 3  # one may be a scheduler that ended at that moment


class Line:
    """One connection to where a scheduler may be."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys, peer_timeout_s: float
    ) -> None:
        self.address = address
        self.connected_fd = -1  # of the connection that stands, −1 if none does
        self.failed_handshakes = 0
        self.speaks_otherwise = False  # what answers is no scheduler of commlib
        self.is_up = False
        self.went_down = False
        self._was_explained = False  # why the handshake failed
        self.socket = context.socket(zmq.DEALER)
        keys.secure_member(self.socket)
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.handshake_ivl = int(HANDSHAKE_S * 1000)
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = 50, 200
        set_heartbeats(self.socket, peer_timeout_s)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ALL)
        endpoint = address if address.startswith("ipc://") else f"tcp://{address}"
        self.socket.ipv6 = "[" in endpoint or _has_only_ipv6(address)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"nothing can be connected to {address!r}: {error.strerror}") from None

    def watch(self) -> None:
        """Take note of what has happened to the connection. Call it when `monitor` is readable."""
        for event, value in take_events(self.monitor):
            if event == zmq.EVENT_CONNECTED:
                self.connected_fd = value
                self._was_explained = False
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up = True
                self.failed_handshakes = 0
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # the scheduler has looked at our key, and says no
                self.failed_handshakes = FAILED_HANDSHAKES
                self._was_explained = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.failed_handshakes += 1
                self._was_explained = True
            elif event == zmq.EVENT_DISCONNECTED:
                if self.is_up:
                    self.went_down = True
                elif not self._was_explained:
                    self.speaks_otherwise = True  # and ZeroMQ does not try again
                self.is_up = False
                self.connected_fd = -1

    def send(self, message: m.FromMember) -> None:
        """Queue a message; it leaves when the connection stands."""
        self.send_encoded(m.encode(message))

    def send_encoded(self, message: bytes) -> None:
        """The same, for what `encode` made."""
        with contextlib.suppress(zmq.Again):  # there is no connection, and there will be none: `watch` tells
            self.socket.send(message, zmq.NOBLOCK)

    def receive(self) -> m.FromScheduler | None:
        """The next message, None if there is none. Raises MalformedMessage."""
        try:
            return m.decode_from_scheduler(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self, flush: bool = False) -> None:
        """Hang up; with `flush`, let what was said go out first, for FLUSH_S at most."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(FLUSH_S * 1000) if flush and self.is_up else 0)


def _has_only_ipv6(address: str) -> bool:
    if address.startswith("ipc://"):
        return False
    try:
        infos = sockets.getaddrinfo(*split_address(address), type=sockets.SOCK_STREAM)
    except OSError:
        return False
    return all(info[0] == sockets.AF_INET6 for info in infos)


@dataclass
class Joined:
    """A member of a complete job."""

    context: zmq.Context[zmq.Socket[bytes]]
    line: Line
    welcome: m.Welcome


@dataclass
class _Search:
    """One member's way into the job."""

    context: zmq.Context[zmq.Socket[bytes]]
    addresses: Sequence[str]
    keys: Keys
    hello: m.Hello
    connect_timeout_s: float
    peer_timeout_s: float
    stop: Stop
    started: float = field(default_factory=time.monotonic)
    missing: m.Missing | None = None  # as last told
    foreign: set[str] = field(default_factory=set)  # what answered there does not know the secret
    closed: str = ""  # where the previous job of this id has not ended yet
    why_closed: str = ""

    def __post_init__(self) -> None:
        self.deadline = self.started + self.connect_timeout_s
        self.next_line = self.started + PATIENCE_S

    def run(self) -> Joined:
        """Until the job is complete."""
        while True:
            line = self._find()
            try:
                welcome = self._introduce(line)
            except BaseException:
                line.close()
                raise
            if welcome is not None:
                return Joined(self.context, line, welcome)
            line.close()
            time.sleep(RETRY_S)  # nothing tells when the previous job has gone; the deadline is looked at in _wait

    # --- Finding it

    def _find(self) -> Line:
        """The line on which the scheduler of this job answers; the others are closed.

        Where the previous job of the same id is still ending, a scheduler at another address comes first.
        """
        lines = [Line(self.context, address, self.keys, self.peer_timeout_s) for address in self.addresses]
        second_best: Line | None = None
        found: Line | None = None
        patience = time.monotonic() + (PREFERENCE_S if len(lines) > 1 else 0.0)
        try:
            for line in lines:
                line.send(m.Probe(self.hello.job))
            while found is None:
                self._wait(lines, joined=False, until=None if second_best is None else patience)
                for line in lines:
                    if self._answers(line) and line.address != self.closed:
                        found = line
                    elif line.address == self.closed and line.is_up:
                        second_best = line
                if found is None and second_best is not None and time.monotonic() >= patience:
                    found = second_best
            return found
        finally:
            for line in lines:
                if line is not found:
                    line.close()

    def _answers(self, line: Line) -> bool:
        message = line.receive()
        while message is not None:
            if isinstance(message, m.Here) and message.job == self.hello.job:
                return True
            message = line.receive()
        if line.went_down:  # it was on its way out; ask what comes next at this address
            line.went_down = False
            line.send(m.Probe(self.hello.job))
        if line.failed_handshakes >= FAILED_HANDSHAKES or line.speaks_otherwise:
            self.foreign.add(line.address)
            if len(self.addresses) == 1:
                raise self._foreign_error(line)
        return False

    def _foreign_error(self, line: Line) -> Exception:
        if line.speaks_otherwise:
            return ConfigError(f"what listens at {line.address} is not a scheduler of commlib")
        return AuthenticationError(
            f"the scheduler at {line.address} does not accept this process: the job secret or the job id (here "
            f"{self.hello.job!r}) is another there. {HOW_TO_SHARE}"
        )

    # --- Joining

    def _introduce(self, line: Line) -> m.Welcome | None:
        """Say Hello and wait for Welcome. None: try again."""
        line.send(self.hello)
        while True:
            message = line.receive()
            match message:
                case m.Welcome():
                    return message
                case m.Missing():
                    self.missing = message
                case m.Refused(retry=True):
                    self.closed, self.why_closed = line.address, message.reason
                    return None
                case m.Refused():
                    raise from_code(message.code, f"cannot join the job: {message.reason}")
                case m.Error():
                    raise ConfigError(f"the scheduler at {line.address} does not understand: {message.reason}")
                case None if line.went_down:
                    return None
                case None:
                    self._wait([line], joined=True)
                case _:
                    log.debug("unexpected before Welcome: %r", message)

    def _wait(self, lines: Sequence[Line], *, joined: bool, until: float | None = None) -> None:
        """Sleep until something may have happened on `lines`. Raises OperationTimeout when the time is up."""
        self.stop.check()
        now = time.monotonic()
        if now >= self.deadline:
            raise self._timeout(lines[0] if joined else None)
        if now >= self.next_line:
            self.next_line = now + PATIENCE_S
            if joined:
                lines[0].send(m.WhoIsMissing())
            log.warning("after %.0f s %s", now - self.started, self._state(joined))
        poller = zmq.Poller()
        poller.register(self.stop.fileno(), zmq.POLLIN)
        for line in lines:
            poller.register(line.socket, zmq.POLLIN)
            poller.register(line.monitor, zmq.POLLIN)
        end = min(self.deadline, self.next_line, self.deadline if until is None else until)
        poller.poll(max(0, int((end - now) * 1000) + 1))
        for line in lines:
            line.watch()

    def _timeout(self, line: Line | None) -> Exception:
        if line is not None:  # the last news: whoever came meanwhile is not missing
            line.send(m.WhoIsMissing())
            end = time.monotonic() + LAST_WORD_S
            while line.socket.poll(max(0, int((end - time.monotonic()) * 1000))):
                if isinstance(message := line.receive(), m.Missing):
                    self.missing = message
                    break
        limit = f"{self.connect_timeout_s:.0f}" if self.connect_timeout_s >= 1 else f"{self.connect_timeout_s:.2g}"
        text = f"after {limit} s (COMMLIB_CONNECT_TIMEOUT_S) {self._state(line is not None)}"
        kind = AuthenticationError if line is None and self.foreign else OperationTimeout
        return kind(text)

    def _state(self, joined: bool) -> str:
        where = self.addresses[0] if len(self.addresses) == 1 else f"{self.addresses[0]} … {self.addresses[-1]}"
        if joined and self.missing is not None:
            return f"the job still waits for {describe_missing(self.missing)} (scheduler at {where})"
        if self.closed:
            return f"the job {self.hello.job!r} cannot be joined yet: {self.why_closed} (scheduler at {self.closed})"
        if self.foreign:
            return (
                f"no scheduler of this job has answered; what listens at {', '.join(sorted(self.foreign))} does not "
                f"accept this process: it serves another job, or has another secret. {HOW_TO_SHARE}"
            )
        text = f"no scheduler of the job {self.hello.job!r} has answered at {where}{_unknown_host(self.addresses[0])}"
        if self.missing is not None:
            text += f"; an earlier one is gone that was waiting for {describe_missing(self.missing)}"
        return text


def _unknown_host(address: str) -> str:
    if address.startswith("ipc://"):
        return ""
    host = split_address(address)[0]
    try:
        sockets.getaddrinfo(host, None)
    except OSError as error:
        return f" ({host!r}: {error.strerror})"
    return ""


def join(
    addresses: Sequence[str],
    keys: Keys,
    hello: m.Hello,
    *,
    connect_timeout_s: float,
    peer_timeout_s: float,
    stop: Stop | None = None,
) -> Joined:
    """Find the scheduler at one of `addresses` and wait until the job is complete.

    Logs every 10 s who is missing. Raises OperationTimeout with that after `connect_timeout_s` seconds, ConfigError
    when the members do not fit together, AuthenticationError when the secrets differ, Stopped when `stop` is asked for.
    Not where signal handlers run: a socket that one of them keeps ZeroMQ from knowing could never be closed.
    """
    stop = Stop() if stop is None else stop
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        return _Search(context, addresses, keys, hello, connect_timeout_s, peer_timeout_s, stop).run()
    except BaseException:
        context.destroy(linger=0)
        raise


def probe(address: str, keys: Keys, job: str, timeout_s: float) -> bool:
    """Does a scheduler of `job` answer at `address` within `timeout_s` seconds?"""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with contextlib.closing(Line(context, address, keys, timeout_s)) as line:
            line.send(m.Probe(job))
            end = time.monotonic() + timeout_s
            while line.socket.poll(max(0, int((end - time.monotonic()) * 1000))):
                if isinstance(message := line.receive(), m.Here):
                    return message.job == job
            return False
    finally:
        context.destroy(linger=0)
