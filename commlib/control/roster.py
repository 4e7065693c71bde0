# SPDX-License-Identifier: Apache-2.0
"""Who has joined the job, whether they fit together, and what the job looks like when all are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from commlib.control.agreement import count_ranks
from commlib.control.messages import PROTOCOL, Hello, Member, Missing, UnnamedKeys, Welcome

__all__ = ["Peer", "Roster"]


@dataclass
class Peer:
    """A member, as the scheduler knows it. ``peer_id`` is set when the job is complete."""

    identity: bytes  # ZeroMQ's routing id: one connection
    hello: Hello
    peer_id: int | None = None  # of local roots and servers
    left: bool = False  # said Bye
    wired: bool = False
    endpoint: str = ""

    @property
    def is_worker(self) -> bool:
        """Not a server."""
        return self.hello.role == "worker"

    @property
    def rank(self) -> int | None:
        """None for a server."""
        return self.hello.rank if self.is_worker else None

    def __str__(self) -> str:
        who = f"rank {self.hello.rank}" if self.is_worker else "a server"
        return f"{who} on {self.hello.host} (process {self.hello.pid})"


def _spread(values: dict[int, Any]) -> str:
    """Values by rank in words: ``4 on ranks 0-2; 3 on rank 3``."""
    groups: dict[Any, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return "; ".join(f"{v} on {'rank' if len(r) == 1 else 'ranks'} {count_ranks(r)}" for v, r in groups.items())


_INSTALL = "install the same version everywhere"


class Roster:
    """The members of a job that is being gathered, and then of the job."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._peers: dict[bytes, Peer] = {}
        self._instances: dict[str, bytes] = {}
        self._gone: set[int] = set()  # ranks
        self._workers: list[Peer] | None = None  # by rank; None: to be sorted again

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, identity: bytes) -> Peer | None:
        """The member behind a connection."""
        return self._peers.get(identity)

    def add(self, identity: bytes, hello: Hello) -> Peer:
        """Take a member in; then ask `problem`. One that comes again on a new connection takes its own place."""
        old = self._instances.get(hello.instance)
        if old is not None:
            self.remove(old)
        peer = self._peers[identity] = Peer(identity, hello)
        self._instances[hello.instance] = identity
        self._workers = None
        return peer

    def remove(self, identity: bytes) -> Peer | None:
        """Forget a member."""
        peer = self._peers.pop(identity, None)
        self._workers = None
        if peer is not None:
            self._instances.pop(peer.hello.instance, None)
            if peer.rank is not None:
                self._gone.add(peer.rank)
        return peer

    @property
    def workers(self) -> list[Peer]:
        """By rank."""
        if self._workers is None:
            workers = (peer for peer in self._peers.values() if peer.is_worker)
            self._workers = sorted(workers, key=lambda peer: peer.hello.rank)
        return self._workers

    @property
    def servers(self) -> list[Peer]:
        """In the order in which they came."""
        return [peer for peer in self if not peer.is_worker]

    def _size(self) -> int | None:
        return next((worker.hello.size for worker in self.workers), None)

    def _num_servers(self) -> int | None:
        return next((worker.hello.num_servers for worker in self.workers), None)

    def surplus_server(self) -> Peer | None:
        """The last server, if there are more than the workers expect."""
        expected, servers = self._num_servers(), self.servers
        return servers[-1] if expected is not None and len(servers) > expected else None

    def problem(self) -> str | None:
        """Why these members cannot form a job; None if they can, or some are still to come."""
        for peer in self:
            if peer.hello.job != self._job:
                return f"{peer} belongs to the job {peer.hello.job!r}, not to {self._job!r}"
        return self._differing_versions() or self._differing_sizes() or self._double_ranks() or self._hosts_problem()

    def missing(self) -> Missing:
        """Whom the job waits for."""
        size = self._size()
        if size is None:
            return Missing("all", "", 0)
        absent = set(range(size)) - {worker.hello.rank for worker in self.workers}
        servers = max(0, (self._num_servers() or 0) - len(self.servers))
        return Missing(count_ranks(absent - self._gone), count_ranks(absent & self._gone), servers)

    def is_complete(self) -> bool:
        """All are here."""
        return self.missing() == Missing("", "", 0)

    def welcome(self, unnamed: dict[str, UnnamedKeys]) -> dict[bytes, Welcome]:
        """What to say to each when all are here. Gives local roots and servers their PeerIds."""
        workers, servers = self.workers, self.servers
        parameters = workers[0].hello.parameters
        assert parameters is not None  # _differing_versions refuses a worker without them
        labels = list(dict.fromkeys(worker.hello.node for worker in workers))  # by lowest rank
        members = tuple(
            Member(h.rank, labels.index(h.node), h.local_rank, h.host, h.pid) for h in (w.hello for w in workers)
        )
        arena_bytes = tuple(
            min(worker.hello.arena_bytes for worker in workers if worker.hello.node == label) for label in labels
        )
        for worker in workers:
            if worker.hello.local_rank == 0:
                worker.peer_id = labels.index(worker.hello.node)
        for index, server in enumerate(servers):
            server.peer_id = len(labels) + index
        hosts = tuple(server.hello.host for server in servers)
        return {
            peer.identity: Welcome(
                members=members,
                servers=hosts,
                arena_bytes=arena_bytes,
                parameters=parameters,
                unnamed=unnamed,
                server_index=None if peer.is_worker else servers.index(peer),
            )
            for peer in self
        }

    # --- Parts of `problem`

    def _differing_versions(self) -> str | None:
        first = next(iter(self), None)
        for peer in self:
            hello = peer.hello
            if hello.protocol != PROTOCOL:
                return f"{peer} speaks protocol {hello.protocol}, the scheduler {PROTOCOL}: {_INSTALL}"
            if first is not None and hello.version != first.hello.version:
                versions = f"{first} has {first.hello.version}, {peer} has {hello.version}"
                return f"members have different versions of commlib: {versions}. {_INSTALL.capitalize()}"
            if hello.role not in ("worker", "server") or (peer.is_worker and hello.parameters is None):
                return f"{peer} introduced itself as {hello.role!r}, which makes no sense"
        return None

    def _compare(self, what: str, variable: str, value: Callable[[Hello], Any]) -> str | None:
        values = {worker.hello.rank: value(worker.hello) for worker in self.workers}
        if len(set(values.values())) > 1:
            return f"the ranks disagree about {what} ({variable}): {_spread(values)}"
        return None

    def _differing_sizes(self) -> str | None:
        for worker in self.workers:
            if not worker.hello.rank < worker.hello.size:
                return f"{worker} says that the job has only {worker.hello.size} workers"
        return self._compare("the number of workers", "COMMLIB_SIZE", lambda h: h.size) or self._compare(
            "the number of servers", "COMMLIB_NUM_SERVERS", lambda h: h.num_servers
        )

    def _double_ranks(self) -> str | None:
        seen: dict[int, Peer] = {}
        for worker in self.workers:
            other = seen.setdefault(worker.hello.rank, worker)
            if other is not worker:
                return (
                    f"two workers have rank {worker.hello.rank}: {other} and {worker}. Each needs its own COMMLIB_RANK"
                )
        return None

    def _hosts_problem(self) -> str | None:
        nodes: dict[str, dict[int, Peer]] = {}
        for worker in self.workers:
            hello = worker.hello
            other = nodes.setdefault(hello.node, {}).setdefault(hello.local_rank, worker)
            if other is not worker:
                return (
                    f"two workers have local rank {hello.local_rank} on the host labelled {hello.node!r}: {other} and "
                    f"{worker}. Different hosts need different COMMLIB_NODE"
                )
            if hello.local_rank >= hello.local_size:
                return f"{worker} is local rank {hello.local_rank}, but says that its host has {hello.local_size}"
        for label, peers in nodes.items():
            sizes = {peer.hello.rank: peer.hello.local_size for peer in peers.values()}
            if len(set(sizes.values())) > 1:
                return f"the ranks on the host labelled {label!r} disagree about how many they are: {_spread(sizes)}"
        if len(self.workers) != self._size():
            return None
        for label, peers in nodes.items():
            expected = next(iter(peers.values())).hello.local_size
            if len(peers) < expected:
                elsewhere = count_ranks(set(range(expected)) - peers.keys())
                return (
                    f"the host labelled {label!r} has {len(peers)} workers, but they expect {expected}: none is local "
                    f"rank {elsewhere}. Workers of one host need the same COMMLIB_NODE"
                )
        return None
