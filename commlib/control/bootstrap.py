# SPDX-License-Identifier: Apache-2.0
"""From settings to a connected member: everything that happens before the core starts.

    rank 0     starts the scheduler
    all        Hello → Welcome: who is where, and the parameters of the job
    one host   local ranks connect to their root; each makes an arena, the root makes the table; all get all descriptors
    hosts      local roots and servers listen, tell where, and connect to each other
    all        Wired → Go: nobody begins before everybody is connected

A local root listens for the others of its host before it says Hello, so they need not look for it: when they are
welcome, it is there. Between roots and servers the one with the higher PeerId connects.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket as sockets
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from commlib._version import __version__
from commlib.config import Config
from commlib.control import messages as m
from commlib.control.addresses import join_address, listening_address, local_name, split_address
from commlib.control.client import ControlClient
from commlib.control.congestion import set_congestion_control
from commlib.control.fdpass import peer_credentials, receive_descriptors, require_descriptors, send_descriptors
from commlib.control.handshake import Claim
from commlib.control.interrupt import Stop
from commlib.control.links import AddressTaken
from commlib.control.local import LocalControl
from commlib.control.memory import check_segment, make_segment, mappable_bytes
from commlib.control.rendezvous import join, probe
from commlib.control.scheduler_process import SchedulerProcess, scheduler_addresses, start_scheduler
from commlib.control.security import derive_keys, load_secret
from commlib.control.streams import Dial, connect_all
from commlib.control.wiring import Wiring
from commlib.errors import CommlibError, ConfigError

__all__ = ["connect_server", "connect_worker"]

TableBytes = Callable[[int], int]

SCHEDULER_GRACE_S = 2.0  # for a scheduler whose job cannot begin, to tell the others
PROBE_S = 2.0
BACKLOG = 1024
DESCRIPTORS = 40  # that a member needs in any case, and some for the program

_jobs: set[str] = set()  # those that this process has been in


def connect_worker(config: Config, table_bytes: TableBytes, stop: Stop | None = None) -> Wiring:
    """Connect this worker to all it must be connected to, and wait until all are.

    `table_bytes` tells the size of a host's ready table from the number of its ranks. Raises ConfigError,
    AuthenticationError, OperationTimeout (who is missing), PeerLostError, or Stopped when `stop` is asked for; then
    nothing is left open. To be called through `uninterrupted`.
    """
    if config.role != "worker":
        raise ConfigError(
            f"this process is a {config.role} (DMLC_ROLE), not a worker; expected `commlib {config.role}`"
        )
    if config.is_solo:
        return _connect_solo(config, table_bytes)
    hosts = -(-config.size // config.local_size)  # about: they may be unequal
    streams = (hosts - 1 + config.num_servers) * config.streams if config.local_rank == 0 else 0
    require_descriptors(DESCRIPTORS + 2 * config.local_size + streams)
    with contextlib.ExitStack() as undo:
        attempt = _Attempt(config, undo, stop or Stop())
        root_listener = attempt.listen_locally() if config.local_rank == 0 and config.local_size > 1 else None
        process = attempt.start_scheduler() if config.rank == 0 and not config.scheduler_external else None
        client = attempt.join(_worker_hello(attempt, table_bytes), process)
        if isinstance(root_listener, ConfigError):
            raise root_listener
        node = client.welcome.members[config.rank].node
        local = _connect_locally(attempt, client, root_listener)
        table_fd, arena_fds, local_pids = _share_memory(attempt, client, local, table_bytes)
        peers = _connect_hosts(attempt, client, node) if config.local_rank == 0 else {}
        client.wired(attempt.deadline)
        _jobs.add(config.job)
        undo.pop_all()
    if root_listener is not None:
        root_listener.close()
    return Wiring(
        rank=config.rank,
        local_rank=config.local_rank,
        local_size=config.local_size,
        node=node,
        peer_id=node,
        table_fd=table_fd,
        arena_fds=arena_fds,
        arena_bytes=(client.welcome.arena_bytes[node],) * config.local_size,
        local_pids=local_pids,
        local_socket_fds={local_rank: socket.detach() for local_rank, socket in local.items()},
        peers=_detached(peers),
        client=client,
        **_about_all(client.welcome),
    )


def connect_server(config: Config, stop: Stop | None = None) -> Wiring:
    """Connect this dedicated server to all local roots; the workers decide how many servers and what parameters.

    Raises as `connect_worker` does.
    """
    if config.role != "server":
        raise ConfigError(f"this process is a {config.role}; expected the settings of a server")
    require_descriptors(DESCRIPTORS)
    with contextlib.ExitStack() as undo:
        attempt = _Attempt(config, undo, stop or Stop())
        client = attempt.join(_hello(attempt), None)
        peer_id = len(client.welcome.arena_bytes) + (client.welcome.server_index or 0)
        peers = _connect_hosts(attempt, client, peer_id)
        client.wired(attempt.deadline)
        undo.pop_all()
    return Wiring(
        rank=-1,
        local_rank=-1,
        local_size=0,
        node=-1,
        peer_id=peer_id,
        table_fd=-1,
        arena_fds=(),
        arena_bytes=(),
        local_pids=(),
        local_socket_fds={},
        peers=_detached(peers),
        client=client,
        **_about_all(client.welcome),
    )


def _connect_solo(config: Config, table_bytes: TableBytes) -> Wiring:
    """A job of one: its memory, and nobody to meet."""
    arena_bytes = mappable_bytes(config.arena_bytes, 1, table_bytes(1))
    arena_fd = make_segment("arena", arena_bytes)
    try:
        table_fd = make_segment("table", table_bytes(1))
    except BaseException:
        os.close(arena_fd)
        raise
    client = LocalControl(config.partition_bytes)
    return Wiring(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        node=0,
        num_nodes=1,
        num_servers=0,
        peer_id=0,
        members=(m.Member(0, 0, 0, sockets.gethostname(), os.getpid()),),
        servers=(),
        ranks_per_node=(1,),
        parameters=_parameters(config),
        table_fd=table_fd,
        arena_fds=(arena_fd,),
        arena_bytes=(arena_bytes,),
        local_pids=(os.getpid(),),
        local_socket_fds={},
        peers={},
        client=client,
        unnamed=client.unnamed,
    )


def _detached(peers: Mapping[int, list[sockets.socket]]) -> dict[int, tuple[int, ...]]:
    return {peer: tuple(socket.detach() for socket in streams) for peer, streams in peers.items()}


def _about_all(welcome: m.Welcome) -> dict[str, Any]:
    """The part of a Wiring that is the same in the whole job."""
    ranks_per_node = [0] * len(welcome.arena_bytes)
    for member in welcome.members:
        ranks_per_node[member.node] += 1
    return {
        "size": len(welcome.members),
        "num_nodes": len(ranks_per_node),
        "num_servers": len(welcome.servers),
        "members": welcome.members,
        "servers": welcome.servers,
        "ranks_per_node": tuple(ranks_per_node),
        "parameters": welcome.parameters,
        "unnamed": welcome.unnamed,
    }


class _Attempt:
    """What all steps of one bootstrap need. What is entered into `undo` is undone when a later step fails."""

    def __init__(self, config: Config, undo: contextlib.ExitStack, stop: Stop) -> None:
        if not config.is_one_host and not config.scheduler_addresses():
            raise ConfigError("the job needs an address for its scheduler; expected COMMLIB_SCHEDULER=host:port")
        self.config = config
        self.undo = undo
        self.stop = stop
        self.deadline = time.monotonic() + config.connect_timeout_s
        self.instance = secrets.token_hex(16)
        self.addresses = scheduler_addresses(config)
        self.keys = derive_keys(load_secret(config), config.job)
        self._fds: set[int] = set()
        undo.callback(self._close_fds)

    def keep_fd(self, fd: int) -> int:
        """Close it if a later step fails."""
        self._fds.add(fd)
        return fd

    def drop_fd(self, fd: int) -> None:
        """Close it now."""
        self._fds.discard(fd)
        os.close(fd)

    def receive(self, socket: sockets.socket, count: int, client: ControlClient) -> tuple[bytes, list[int]]:
        """Words and exactly `count` descriptors from another process of this host."""
        words, fds = receive_descriptors(socket, self.deadline, client)
        for fd in fds:
            self.keep_fd(fd)
        if len(fds) != count:
            raise CommlibError(f"a process of this host sent {len(fds)} descriptors; expected {count}")
        return words, fds

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def keep_sockets(self, made: Mapping[Claim, sockets.socket]) -> Mapping[Claim, sockets.socket]:
        """Close them if a later step fails."""
        for socket in made.values():
            self.undo.callback(socket.close)
        return made

    def local_address(self) -> bytes:
        """Where the other ranks of this host find their root: an abstract unix socket."""
        return b"\0" + local_name("root", self.config.job, self.config.node).encode()

    def listen_locally(self) -> sockets.socket | ConfigError:
        """Be there for the other ranks of this host.

        Returns the problem if somebody else is: then most likely two workers have the same rank, about which the
        scheduler says more, to both.
        """
        socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self.undo.callback(socket.close)
        try:
            socket.bind(self.local_address())
        except OSError as error:
            socket.close()
            return ConfigError(
                f"another process is local rank 0 of the host labelled {self.config.node!r} in the job "
                f"{self.config.job!r} already ({error.strerror}); expected another COMMLIB_NODE or COMMLIB_JOB"
            )
        socket.listen(BACKLOG)
        return socket

    def start_scheduler(self) -> SchedulerProcess | None:
        """Start it. None: one of this job runs already, whoever has started it."""
        try:
            process = start_scheduler(self.config, starter=self.instance)
        except AddressTaken:
            if any(probe(address, self.keys, self.config.job, PROBE_S) for address in self.addresses[:1]):
                return None
            raise

        def end(kind: type[BaseException] | None, *_: object) -> None:
            patient = kind is not None and issubclass(kind, Exception)
            if process.wait(SCHEDULER_GRACE_S if patient else 0.0) is None:
                process.stop()

        self.undo.push(end)
        return process

    def join(self, hello: m.Hello, process: SchedulerProcess | None) -> ControlClient:
        """From Hello to Welcome."""
        joined = join(
            self.addresses if process is None else (process.address,),
            self.keys,
            hello,
            connect_timeout_s=max(0.0, self.deadline - time.monotonic()),
            peer_timeout_s=self.config.peer_timeout_s,
            stop=self.stop,
        )
        client = ControlClient(joined, process)
        self.undo.callback(client.close)
        self.stop.then(client.give_up)
        self.deadline = time.monotonic() + self.config.connect_timeout_s  # however long the last one was waited for
        return client


def _parameters(config: Config) -> m.Parameters:
    return m.Parameters(
        partition_bytes=config.partition_bytes,
        credit_bytes=config.credit_bytes,
        streams=config.streams,
        stall_warning_s=config.stall_warning_s,
        operation_timeout_s=config.operation_timeout_s,
        peer_timeout_s=config.peer_timeout_s,
        asynchronous=config.asynchronous,
    )


def _hello(attempt: _Attempt) -> m.Hello:
    return m.Hello(
        protocol=m.PROTOCOL,
        version=__version__,
        job=attempt.config.job,
        instance=attempt.instance,
        role=attempt.config.role,
        host=sockets.gethostname(),
        pid=os.getpid(),
    )


def _worker_hello(attempt: _Attempt, table_bytes: TableBytes) -> m.Hello:
    config = attempt.config
    return msgspec.structs.replace(
        _hello(attempt),
        rank=config.rank,
        size=config.size,
        local_rank=config.local_rank,
        local_size=config.local_size,
        node=config.node,
        num_servers=config.num_servers,
        was_here=config.job in _jobs,
        arena_bytes=mappable_bytes(config.arena_bytes, config.local_size, table_bytes(config.local_size)),
        parameters=_parameters(config),
    )


# --- On one host


def _connect_locally(
    attempt: _Attempt, client: ControlClient, listener: sockets.socket | None
) -> dict[int, sockets.socket]:
    """The star of a host: local rank → socket, the root's to all others, theirs to it."""
    config = attempt.config
    if config.local_size == 1:
        return {}
    claims = {rank: Claim(config.job, "local", config.node, rank, 0) for rank in range(1, config.local_size)}
    if config.local_rank == 0:
        expected, dials = list(claims.values()), []
    else:
        expected, dials = [], [Dial(sockets.AF_UNIX, attempt.local_address(), claims[config.local_rank])]
    made = connect_all(
        attempt.keys.hello,
        listener=listener,
        expected=expected,
        dials=dials,
        deadline=attempt.deadline,
        alarm=client,
    )
    attempt.keep_sockets(made)
    if config.local_rank != 0:
        return {0: made[claims[config.local_rank]]}
    return {rank: made[claim] for rank, claim in claims.items()}


def _share_memory(
    attempt: _Attempt, client: ControlClient, local: Mapping[int, sockets.socket], table_bytes: TableBytes
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """(table, arenas, pids) of this host, the latter two by local rank."""
    config = attempt.config
    arena_bytes = client.welcome.arena_bytes[client.welcome.members[config.rank].node]
    wanted_table_bytes = table_bytes(config.local_size)
    arena = attempt.keep_fd(make_segment(f"arena-{config.rank}", arena_bytes))
    if config.local_rank == 0:
        table = attempt.keep_fd(make_segment("table", wanted_table_bytes))
        arenas, pids = [arena], [os.getpid()]
        for local_rank in range(1, config.local_size):
            _, received = attempt.receive(local[local_rank], 1, client)
            arenas += received
            pids.append(peer_credentials(local[local_rank])[0])
        for socket in local.values():
            send_descriptors(socket, msgspec.msgpack.encode(pids), [table, *arenas], attempt.deadline, client)
    else:
        send_descriptors(local[0], b"", [arena], attempt.deadline, client)
        words, (table, *arenas) = attempt.receive(local[0], 1 + config.local_size, client)
        pids = msgspec.msgpack.decode(words, type=list[int])
        pids[0] = peer_credentials(local[0])[0]
        os.dup2(arena, arenas[config.local_rank], inheritable=False)  # what it made, not what came back
        attempt.drop_fd(arena)
    check_segment(table, wanted_table_bytes)
    for fd in arenas:
        check_segment(fd, arena_bytes)
    return table, tuple(arenas), tuple(pids)


# --- Between hosts


def _connect_hosts(attempt: _Attempt, client: ControlClient, peer_id: int) -> dict[int, list[sockets.socket]]:
    """PeerId → sockets, one a stream: every local root to every other and to every dedicated server."""
    welcome, config = client.welcome, attempt.config
    hosts, peers = len(welcome.arena_bytes), len(welcome.arena_bytes) + len(welcome.servers)
    if peers == 1:
        return {}
    host = listening_address(config.interface, client.address, allow_loopback=config.is_one_machine)
    try:
        family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
        listener = sockets.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}: {error.strerror}; expected another COMMLIB_INTERFACE") from None
    with listener:
        mine = join_address(host, listener.getsockname()[1])
        addresses = client.exchange_endpoints(mine, attempt.deadline)
        claims: dict[int, list[Claim]] = {}
        for other in range(peers):
            if other == peer_id or (other >= hosts and peer_id >= hosts):
                continue
            ends = max(peer_id, other), min(peer_id, other)
            claims[other] = [
                Claim(config.job, "stream", "", *ends, stream) for stream in range(welcome.parameters.streams)
            ]
        made = connect_all(
            attempt.keys.hello,
            listener=listener,
            expected=[claim for other, some in claims.items() if other > peer_id for claim in some],
            dials=[
                Dial(*_destination(addresses[other]), claim)
                for other, some in claims.items()
                if other < peer_id
                for claim in some
            ],
            deadline=attempt.deadline,
            alarm=client,
        )
    attempt.keep_sockets(made)
    for socket in made.values():
        set_congestion_control(socket, config.congestion)
    return {other: [made[claim] for claim in some] for other, some in claims.items()}


def _destination(address: str) -> tuple[int, tuple[str, int]]:
    host, port = split_address(address)
    return (sockets.AF_INET6 if ":" in host else sockets.AF_INET), (host, port)
