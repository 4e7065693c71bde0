# SPDX-License-Identifier: Apache-2.0
"""Connecting sockets to many peers at once, each proved by the hello of commlib/control/handshake.py.

Everybody may connect to a listening socket, so a stranger who says nothing, says nonsense, or says it one byte a second
costs a descriptor for a while and nothing else: connections are served side by side, each within a time limit.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket as sockets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from commlib.control.fdpass import peer_credentials
from commlib.control.handshake import Claim, Conversation, HandshakeFailed, accept, initiate
from commlib.errors import CommlibError, OperationTimeout

__all__ = ["Alarm", "Dial", "connect_all"]

log = logging.getLogger("commlib")

HELLO_S = 10.0  # for one whole conversation
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 0.5  # the pause before a connection that was refused is tried again
STRANGERS = 64  # connections that have not proved themselves yet, besides those that are expected


class Alarm(Protocol):
    """What may end the waiting early: ``fileno`` is readable when ``check`` raises."""

    def fileno(self) -> int:
        """A descriptor."""

    def check(self) -> None:
        """Raise what has happened, if anything has."""


@dataclass(frozen=True)
class Dial:
    """A connection to be made: where to, and what to say there."""

    family: int
    address: Any  # of that family
    claim: Claim


@dataclass(eq=False)
class _Call:
    """One connection while it proves itself."""

    socket: sockets.socket
    conversation: Conversation
    deadline: float
    dial: Dial | None = None  # None: the other side connected
    pause: float = 0.0  # before it is dialled again, should it fail
    is_connecting: bool = False
    unsent: bytes = b""
    wanted_bytes: int = 0
    got: bytearray = field(default_factory=bytearray)

    def advance(self) -> Claim | int:
        """Go on as far as the socket lets it: the proved claim, or what to wait for. Raises what goes wrong."""
        if self.is_connecting:
            self._check_connection()
            self._ask(next(self.conversation))
        try:
            while True:
                if self.unsent:
                    self.unsent = self.unsent[self.socket.send(self.unsent) :]
                    if self.unsent:
                        continue
                    self._ask(self.conversation.send(b""))
                    continue
                part = self.socket.recv(self.wanted_bytes - len(self.got))
                if not part:
                    raise HandshakeFailed("a peer broke off during its hello")
                self.got += part
                if len(self.got) == self.wanted_bytes:
                    self._ask(self.conversation.send(bytes(self.got)))
        except BlockingIOError:
            return selectors.EVENT_WRITE if self.unsent else selectors.EVENT_READ
        except StopIteration as end:
            claim: Claim = end.value
            return claim

    def _ask(self, request: bytes | int) -> None:
        self.got.clear()
        if isinstance(request, bytes):
            self.unsent = request
        else:
            self.wanted_bytes = request

    def _check_connection(self) -> None:
        error = self.socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        if self.socket.getsockname() == self.socket.getpeername() and self.socket.family != sockets.AF_UNIX:
            # Nobody listens there yet, and the kernel happened to choose that very port for this end.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the socket was connected to itself")
        self.is_connecting = False


class _Switchboard:
    def __init__(self, key: bytes, expected: Iterable[Claim], deadline: float, alarm: Alarm | None) -> None:
        self._key = key
        self._expected = frozenset(expected)  # from others
        self._undone: set[Claim] = set(self._expected)
        self._done: dict[Claim, sockets.socket] = {}
        self._deadline = deadline
        self._calls: set[_Call] = set()
        self._redials: list[tuple[float, float, Dial]] = []  # when, the pause after that, what
        self._last_error = ""
        self._max_strangers = STRANGERS + 2 * len(self._expected)
        self._selector = selectors.DefaultSelector()
        if alarm is not None:
            self._selector.register(alarm.fileno(), selectors.EVENT_READ, alarm.check)

    def run(self, listener: sockets.socket | None, dials: Iterable[Dial]) -> dict[Claim, sockets.socket]:
        """Until every connection stands, in and out."""
        try:
            if listener is not None:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
            for dial in dials:
                self._undone.add(dial.claim)
                self._redials.append((0.0, FIRST_RETRY_S, dial))
            while self._undone:
                self._dial_due()
                for key, _ in self._selector.select(self._pause()):
                    key.data()
                self._hang_up_late()
            done, self._done = self._done, {}
            return done
        finally:
            for call in self._calls:
                call.socket.close()
            for socket in self._done.values():
                socket.close()
            self._selector.close()

    # --- Time

    def _pause(self) -> float:
        now = time.monotonic()
        if now >= self._deadline:
            said = [
                f"{c.purpose} {c.stream} from {c.initiator} to {c.acceptor}" for c in sorted(self._undone, key=repr)
            ]
            more = f" and {len(said) - 8} more" if len(said) > 8 else ""
            last = f"; the last thing that went wrong: {self._last_error}" if self._last_error else ""
            raise OperationTimeout(
                f"connections could not be made in time (COMMLIB_CONNECT_TIMEOUT_S): {', '.join(said[:8])}{more}{last}"
            )
        times = (*(call.deadline for call in self._calls), *(when for when, *_ in self._redials), self._deadline)
        return max(0.0, min(times) - now)

    def _hang_up_late(self) -> None:
        now = time.monotonic()
        for call in [call for call in self._calls if now >= call.deadline]:
            self._fail(call, HandshakeFailed("a peer did not finish its hello in time"))

    # --- Out

    def _dial_due(self) -> None:
        now = time.monotonic()
        due = [redial for redial in self._redials if redial[0] <= now]
        self._redials = [redial for redial in self._redials if redial[0] > now]
        for _, pause, dial in due:
            self._dial(dial, pause)

    def _dial(self, dial: Dial, pause: float) -> None:
        socket = sockets.socket(dial.family, sockets.SOCK_STREAM)
        socket.setblocking(False)
        conversation = initiate(self._key, dial.claim)
        call = _Call(socket, conversation, time.monotonic() + HELLO_S, dial, pause, is_connecting=True)
        self._calls.add(call)
        try:
            _no_delay(socket)
            error = socket.connect_ex(dial.address)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except OSError as error_:
            self._fail(call, error_)
            return
        self._selector.register(socket, selectors.EVENT_WRITE, lambda: self._serve(call))

    # --- In

    def _accept(self, listener: sockets.socket) -> None:
        try:
            socket, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor is left: then a stranger has to go
            if not self._drop_oldest_stranger():
                raise
            return
        socket.setblocking(False)
        call = _Call(socket, accept(self._key, self._check), time.monotonic() + HELLO_S)
        self._calls.add(call)
        if sum(call.dial is None for call in self._calls) > self._max_strangers:
            self._drop_oldest_stranger()
        self._selector.register(socket, selectors.EVENT_READ, lambda: self._serve(call))
        try:
            _check_user(socket)
            _no_delay(socket)
            call._ask(next(call.conversation))
        except (OSError, HandshakeFailed) as error:
            self._fail(call, error)

    def _check(self, claim: Claim) -> str:
        return "" if claim in self._expected else f"nobody here expects {claim}"

    def _drop_oldest_stranger(self) -> bool:
        strangers = [call for call in self._calls if call.dial is None]
        if strangers:
            self._fail(min(strangers, key=lambda call: call.deadline), HandshakeFailed("too many strangers at once"))
        return bool(strangers)

    # --- Both

    def _serve(self, call: _Call) -> None:
        try:
            if call.is_connecting:
                _check_user(call.socket)
            outcome = call.advance()
        except (OSError, CommlibError) as error:
            self._fail(call, error)
            return
        if isinstance(outcome, int):
            self._selector.modify(call.socket, outcome, lambda: self._serve(call))
            return
        self._forget(call)
        earlier = self._done.pop(outcome, None)
        if earlier is not None:  # its initiator did not hear that it had been accepted
            earlier.close()
        self._done[outcome] = call.socket
        self._undone.discard(outcome)

    def _fail(self, call: _Call, error: Exception) -> None:
        self._forget(call)
        call.socket.close()
        if call.dial is None:
            log.info("a connection was refused: %s", error)
            return
        if isinstance(error, CommlibError) and not isinstance(error, HandshakeFailed):
            raise error  # it will not be better next time
        self._last_error = str(error)
        self._redials.append((time.monotonic() + call.pause, min(2 * call.pause, LAST_RETRY_S), call.dial))

    def _forget(self, call: _Call) -> None:
        self._calls.discard(call)
        if call.socket in self._selector.get_map():
            self._selector.unregister(call.socket)


def _no_delay(socket: sockets.socket) -> None:
    if socket.family != sockets.AF_UNIX:
        socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)


def _check_user(socket: sockets.socket) -> None:
    """The other end of a unix socket must be a process of the same user."""
    if socket.family == sockets.AF_UNIX:
        _, uid = peer_credentials(socket)
        if uid != os.geteuid():
            raise HandshakeFailed(f"a process of another user (uid {uid}) is at the other end of a local connection")


def connect_all(
    key: bytes,
    *,
    listener: sockets.socket | None,
    expected: Iterable[Claim],
    dials: Iterable[Dial],
    deadline: float,
    alarm: Alarm | None = None,
) -> dict[Claim, sockets.socket]:
    """Make all of `dials` and wait for all of `expected`; returns the proved sockets, non-blocking, by claim.

    `deadline` is of the clock ``time.monotonic``. Raises OperationTimeout, AuthenticationError, ConfigError, or what
    the alarm raises; then everything is closed, except `listener`, which stays the caller's.
    """
    return _Switchboard(key, expected, deadline, alarm).run(listener, dials)
