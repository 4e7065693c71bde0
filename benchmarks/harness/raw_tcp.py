# SPDX-License-Identifier: Apache-2.0
"""What plain sockets can do: hosts, connected each with each, that send each other given numbers of bytes all at once.

No byte waits for another one. They come from memory and go to memory that is as large as what is exchanged: a small
buffer would stay in the caches, which no exchange of tensors does. It is no lower bound: connections that share a link
do not share it equally, so that the last one ends late.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence

PORT = 7077  # and those that follow, on hosts of a lab, where nobody else is
_CHUNK = 1 << 20  # bytes of one call, at most
_AT_ONCE = 64 << 10  # to each peer; that much fits into the buffers of the connections
_CONNECT_S = 60.0
_GO, _DONE = b"g", b"d"


def two_hop_traffic(hosts: int, servers: int, size: float) -> list[list[float]]:
    """Bytes that host i sends to host j, which are those that it gets from it, when `hosts` hosts sum `size` bytes.

    Each of the hosts owns a part, and so does each of the `servers` that follow: all send it to its owner, and get the
    sum back from there.
    """
    weights = hosts * hosts + servers * hosts - 2 * servers
    of_host, of_server = (hosts - servers) / weights * size, 2 * (hosts - 1) / weights * size
    everybody = hosts + servers

    def between(one: int, other: int) -> float:
        if one == other or min(one, other) >= hosts:
            return 0.0
        return 2 * of_host if max(one, other) < hosts else of_server

    return [[between(one, other) for other in range(everybody)] for one in range(everybody)]


def least_seconds(hosts: int, servers: int, size: int, bytes_per_s: float) -> float:
    """The least time in which `hosts` hosts and `servers` servers can sum, where a link carries that much each way."""
    n, k = hosts, servers
    return 2 * n * (n - 1) * size / ((n * n + k * n - 2 * k) * bytes_per_s)


class Mesh:
    """One host's connections to all others. Making one blocks until all others do the same; where there are several,
    each has a port of its own.
    """

    def __init__(self, index: int, addresses: Sequence[str], port: int = PORT) -> None:
        self.index = index
        self._peers: dict[int, socket.socket] = {}
        self._memory: dict[int, tuple[memoryview, memoryview]] = {}  # by peer: what goes there, what comes from there
        deadline = time.monotonic() + _CONNECT_S
        with socket.create_server((addresses[index], port), backlog=len(addresses)) as listener:
            for other in range(index):
                self._peers[other] = _connect((addresses[other], port), index, deadline)
            for _ in range(index + 1, len(addresses)):
                listener.settimeout(max(0.0, deadline - time.monotonic()))
                peer, _ = listener.accept()
                peer.settimeout(None)
                self._peers[_take(peer)] = peer
        for peer in self._peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, traffic: Sequence[float], told: Sequence[int] = ()) -> None:
        """Send `traffic[j]` bytes to host j and get as many from it, for all j. Blocks until all are there.

        The hosts in `told` are those that `serve`: they are told to do their part, and waited for.
        """
        for other in told:
            self._peers[other].sendall(_GO)
        amounts = {other: round(traffic[other]) for other in self._peers if round(traffic[other]) > 0}
        if max(amounts.values(), default=0) <= _AT_ONCE:
            self._at_once(amounts)
        else:
            self._as_they_can(amounts)
        for other in told:
            _take(self._peers[other])

    def serve(self, traffic: Sequence[float], teller: int) -> None:
        """Do this host's part of an exchange whenever host `teller` says so, until it closes the connection."""
        while self._peers[teller].recv(1) == _GO:
            self.exchange(traffic)
            self._peers[teller].sendall(_DONE)

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()

    def _at_once(self, amounts: dict[int, int]) -> None:
        for other, amount in amounts.items():
            self._peers[other].sendall(self._memory_of(other, amount)[0])
        for other, amount in amounts.items():
            incoming = self._memory_of(other, amount)[1]
            while incoming:
                incoming = incoming[_some(self._peers[other].recv_into(incoming)) :]

    def _as_they_can(self, amounts: dict[int, int]) -> None:
        to_send, to_get = ({other: self._memory_of(other, amounts[other])[way] for other in amounts} for way in (0, 1))
        with selectors.EpollSelector() as selector:
            for other in amounts:
                selector.register(self._peers[other], selectors.EVENT_READ | selectors.EVENT_WRITE, other)
            while selector.get_map():
                for key, events in selector.select():
                    other, peer = key.data, self._peers[key.data]
                    if events & selectors.EVENT_READ:
                        got = _some(peer.recv_into(to_get[other][:_CHUNK], 0, socket.MSG_DONTWAIT))
                        to_get[other] = to_get[other][got:]
                    if events & selectors.EVENT_WRITE:
                        sent = peer.send(to_send[other][:_CHUNK], socket.MSG_DONTWAIT)
                        to_send[other] = to_send[other][sent:]
                    left = bool(to_get[other]) * selectors.EVENT_READ | bool(to_send[other]) * selectors.EVENT_WRITE
                    if left == 0:
                        selector.unregister(peer)
                    elif left != key.events:
                        selector.modify(peer, left, other)

    def _memory_of(self, other: int, amount: int) -> tuple[memoryview, memoryview]:
        known = self._memory.get(other)
        if known is None or len(known[0]) < amount:
            # Written to, or else it would be one page of zeros.
            known = self._memory[other] = (memoryview(b"\1" * amount), memoryview(bytearray(b"\1" * amount)))
        return known[0][:amount], known[1][:amount]


def _connect(address: tuple[str, int], index: int, deadline: float) -> socket.socket:
    """A connection to a host that may not listen yet."""
    while True:
        try:
            peer = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        peer.settimeout(None)
        peer.sendall(bytes([index]))
        return peer


def _take(peer: socket.socket) -> int:
    """The next byte."""
    byte = peer.recv(1)
    _some(len(byte))
    return byte[0]


def _some(count: int) -> int:
    if count == 0:
        raise ConnectionError("a host has closed its connection")
    return count
