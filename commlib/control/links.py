# SPDX-License-Identifier: Apache-2.0
"""The scheduler's socket: who may connect, who says what, and who hangs up."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import zmq

from commlib.control import messages as m
from commlib.control.addresses import bindable, join_address, split_address
from commlib.control.monitor import take_events
from commlib.control.security import Keys, Zap
from commlib.errors import ConfigError

__all__ = ["AddressTaken", "Links", "SchedulerOptions"]

log = logging.getLogger("commlib")

HEARTBEAT_S = 2.0
HANDSHAKE_S = 10.0
FLUSH_S = 1.0
MAX_MESSAGE_BYTES = 64 << 20
MAX_QUEUED_MESSAGES = 100_000
BATCH = 256  # messages between two looks at everything else


class AddressTaken(ConfigError):  # noqa: N818 - says what it is
    """Somebody listens there already."""


@dataclass(frozen=True)
class SchedulerOptions:
    """What a scheduler has to know; the rest it learns from the workers' Hellos."""

    job: str
    keys: Keys = field(repr=False)
    addresses: tuple[str, ...]  # the first free of these: host:port (port 0: any) or ipc://@name
    connect_timeout_s: float = 120.0
    peer_timeout_s: float = 30.0
    starter: str = ""  # the `instance` of the member whose child the scheduler is


class Links:
    """A ROUTER and its connections.

    ZeroMQ's monitor names descriptors, and its messages say from which descriptor they came; events and messages come
    through different queues, and a descriptor's number is used again soon after it is closed. But ZeroMQ reports a
    hang-up after the last message of that connection and before it closes the descriptor, and a new connection says
    nothing before this thread has answered for its key. So before it answers, the hang-ups are noted that came before
    the question, and all messages are read that are there; then those hang-ups are passed on.
    """

    def __init__(self, options: SchedulerOptions) -> None:
        self._addresses = options.addresses
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = Zap(self._context, options.keys)
        self._router = self._context.socket(zmq.ROUTER)
        _configure(self._router, options)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._identities: dict[int, bytes] = {}
        self._closed: list[int] = []  # descriptors of those who have hung up, and may have said something before

    def bind(self) -> str:
        """Listen at the first free address; returns it, with the port that was chosen where any would do.

        Raises AddressTaken if none is free, ConfigError if none can be listened at.
        """
        for address in self._addresses:
            try:
                return self._bind(address)
            except AddressTaken:
                if len(self._addresses) == 1:
                    raise
        if not self._addresses:
            raise ConfigError("there is no address for the scheduler; expected COMMLIB_SCHEDULER=host:port")
        first, last = self._addresses[0], self._addresses[-1]
        raise AddressTaken(f"the scheduler cannot listen at any of {first} … {last}: all are taken")

    def _bind(self, address: str) -> str:
        is_local = address.startswith("ipc://")
        endpoints = [address] if is_local else bindable(address)
        for endpoint in endpoints:
            self._router.ipv6 = "[" in endpoint
            try:
                self._router.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE:
                    way_out = (
                        "give this one another COMMLIB_JOB" if is_local else "set COMMLIB_SCHEDULER to another port"
                    )
                    raise AddressTaken(
                        f"the scheduler cannot listen at {address}: the address is taken. Another job is using it, or "
                        f"an earlier one has not ended; {way_out}"
                    ) from None
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV) or endpoint is endpoints[-1]:
                    raise ConfigError(f"the scheduler cannot listen at {address}: {error.strerror}") from None
        if is_local:
            return address
        port = int(self._router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2].rstrip("\0"))
        return join_address(split_address(address)[0], port)

    def sockets(self) -> Iterable[zmq.Socket[bytes]]:
        """Readable when `events` has something."""
        return (self._router, self._monitor, self._zap.socket)

    def events(self) -> Iterator[tuple[bytes, m.FromMember | None]]:
        """What has happened, a bounded batch: (member, what it says), or (member, None) when it has hung up."""
        left = BATCH
        while left > 0:
            is_asked = self._zap.is_asked()
            self._closed += [descriptor for _, descriptor in take_events(self._monitor)]
            while left > 0 and (frames := self._receive()) is not None:
                left -= 1
                identity = frames[0].bytes
                self._identities[int(frames[-1].get(zmq.SRCFD))] = identity
                try:
                    yield identity, m.decode_from_member(frames[1].buffer if len(frames) == 2 else b"")
                except m.MalformedMessage as error:
                    log.warning("a malformed message from a member of the job: %s", error)
                    self.send(identity, m.Error(f"malformed message: {error}"))
            if left == 0:
                return
            closed, self._closed = self._closed, []
            for descriptor in closed:
                if (gone := self._identities.pop(descriptor, None)) is not None:
                    yield gone, None
            if not is_asked:
                return
            self._zap.answer()

    def _receive(self) -> list[zmq.Frame] | None:
        try:
            return self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def has_more(self) -> bool:
        """Whether `events` has something that makes no socket readable."""
        return bool(self._closed) or self._zap.is_asked()

    def send(self, identity: bytes, message: m.FromScheduler) -> None:
        """Say something to one member."""
        self.send_each((identity,), message)

    def send_each(self, identities: Iterable[bytes], message: m.FromScheduler) -> None:
        """Say the same to several members. Never blocks; who is gone does not hear it."""
        data = m.encode(message)
        for identity in identities:
            try:
                self._router.send_multipart([identity, data], zmq.NOBLOCK)
            except zmq.ZMQError as error:  # gone, as its link will tell, or it has let MAX_QUEUED_MESSAGES pile up
                log.debug("%s was not delivered: %s", type(message).__name__, error)

    def close(self) -> None:
        """Send what is still to be sent, for FLUSH_S at most, and free everything."""
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close()
        self._zap.close()
        self._context.destroy()


def _configure(router: zmq.Socket[bytes], options: SchedulerOptions) -> None:
    options.keys.secure_scheduler(router)
    router.router_mandatory = True  # a message to somebody who is gone is an error, not silence
    router.sndhwm = router.rcvhwm = MAX_QUEUED_MESSAGES
    router.maxmsgsize = MAX_MESSAGE_BYTES
    router.handshake_ivl = int(HANDSHAKE_S * 1000)
    router.linger = int(FLUSH_S * 1000)
    set_heartbeats(router, options.peer_timeout_s)


def set_heartbeats(socket: zmq.Socket[bytes], peer_timeout_s: float) -> None:
    """Have ZeroMQ's own thread, which no GIL can stop, notice a silent peer after `peer_timeout_s` seconds.

    Each side asks for itself. To tell the other how long it should wait for the next question (ZMQ_HEARTBEAT_TTL) would
    add nothing, and would lose members that are stopped for a while together with the scheduler: that time counts.
    """
    timeout_ms = max(100, int(peer_timeout_s * 1000))
    socket.heartbeat_ivl = min(int(HEARTBEAT_S * 1000), timeout_ms // 3)  # one or two may come late
    socket.heartbeat_timeout = timeout_ms
