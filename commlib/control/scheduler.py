# SPDX-License-Identifier: Apache-2.0
"""The scheduler: who is in the job, what names mean, who disagrees, who is late, who is lost.

Design notes. One thread, one poll loop, no timers but the deadlines of what is open: an idle scheduler sleeps. It
decides nothing about the data: members keep on without it, they only cannot declare new names.

    GATHERING   takes Hellos until all are there; Welcome to all, or Refused to all
    REFUSED     the members cannot form a job: says so to those that come later
    WIRING      members connect to each other; Endpoints, then Go when all are Wired
    RUNNING     names, disagreements, stalls, losses
    ending      no worker is left: servers are told, and when they are gone, or after a while, it is over

Losses: the first one is announced, with its cause; what follows is members ending because of it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Iterable
from typing import Protocol, assert_never

import zmq

from commlib.control import messages as m
from commlib.control.agreement import StallBook, VerdictBook
from commlib.control.links import Links, SchedulerOptions
from commlib.control.registry import Registry
from commlib.control.roster import Peer, Roster
from commlib.errors import Code, CommlibError

__all__ = ["Scheduler", "Tether", "describe_missing"]

log = logging.getLogger("commlib")

# Between the two the scheduler cannot tell.
CONNECTION_ENDED = "its connection to the scheduler has ended: it died, or gave no sign of life for the peer timeout"
SERVERS_LEAVE_S = 30.0  # after Over, at most


class Tether(Protocol):
    """What ties a scheduler to the process that started it."""

    def descriptors(self) -> Iterable[int]:
        """Readable when `broken` should be asked."""

    def broken(self) -> bool:
        """The parent is gone."""

    def release(self) -> None:
        """Live on without the parent."""


class _Phase(enum.Enum):
    GATHERING = enum.auto()
    REFUSED = enum.auto()
    WIRING = enum.auto()
    RUNNING = enum.auto()


class Scheduler:
    """One job's scheduler. ``bind``, then ``run`` until the job is over; ``close`` in any case."""

    def __init__(self, options: SchedulerOptions, tether: Tether | None = None) -> None:
        self._options = options
        self._tether = tether
        self._phase = _Phase.GATHERING
        self._roster = Roster(options.job)
        self._registry: Registry | None = None  # made with the parameters of rank 0
        self._verdicts = VerdictBook(0)
        self._stalls = StallBook()
        self._hosts: dict[int, str] = {}  # by rank
        self._identities: dict[int, bytes] = {}  # by rank
        self._newcomers: list[bytes] = []
        self._anyone_has_come = False
        self._refusal: m.Refused | None = None
        self._refused: set[str] = set()  # instances that have heard it
        self._expected = 0  # how many will come to hear it
        self._lost: m.Lost | None = None
        self._end: float | None = time.monotonic() + options.connect_timeout_s  # at the latest; None: open
        self._is_over = False  # servers have been told
        self._stopping = False
        self._links = Links(options)

    def bind(self) -> str:
        """Listen; see :meth:`Links.bind`."""
        return self._links.bind()

    def run(self) -> int:
        """Serve until the job is over. Returns an exit status: 0 if all members left in order."""
        poller = zmq.Poller()
        for socket in self._links.sockets():
            poller.register(socket, zmq.POLLIN)
        tether_fds = list(self._tether.descriptors()) if self._tether else []
        for descriptor in tether_fds:
            poller.register(descriptor, zmq.POLLIN)
        while not self._stopping:
            poller.poll(self._timeout_ms())
            for identity, message in self._links.events():
                if message is None:
                    self._drop(identity)
                else:
                    self._handle(identity, message)
            self._review()
            if self._tether is not None and self._tether.broken():
                self._parent_gone()
            if self._tether is None:
                for descriptor in tether_fds:
                    poller.unregister(descriptor)
                tether_fds.clear()
            self._pass_time()
        return 1 if self._lost or self._refusal else 0

    def close(self) -> None:
        """Send what is still to be sent, for a second at most, and free everything."""
        self._links.close()

    # --- Time

    def _timeout_ms(self) -> int | None:
        if self._links.has_more():
            return 0
        deadlines = (self._end, self._verdicts.next_deadline(), self._stalls.next_deadline())
        soonest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if soonest is None else max(0, int((soonest - time.monotonic()) * 1000) + 1)

    def _pass_time(self) -> None:
        now = time.monotonic()
        for rank, verdict in self._verdicts.expire(now):
            self._send_to_rank(rank, verdict)
        for rank, report in self._stalls.expire(now, self._hosts):
            self._send_to_rank(rank, report)
        if self._end is not None and now >= self._end:
            self._end = None
            if self._phase is _Phase.GATHERING:
                self._give_up()
            self._stopping = True

    def _give_up(self) -> None:
        limit = f"{self._options.connect_timeout_s:g} s (COMMLIB_CONNECT_TIMEOUT_S)"
        if not len(self._roster):
            # Those who have come and gone have said themselves what was wrong.
            if not self._anyone_has_come:
                log.error("no member of the job %s has come within %s: the scheduler ends", self._options.job, limit)
            self._refusal = m.Refused("nobody came", Code.TIMEOUT)
            return
        self._refuse(f"after {limit} the job still waits for {describe_missing(self._roster.missing())}", Code.TIMEOUT)

    # --- Messages

    def _handle(self, identity: bytes, message: m.FromMember) -> None:
        peer = self._roster.get(identity)
        if isinstance(message, m.Probe):
            if message.job == self._options.job:
                self._send(identity, m.Here(message.job))
            else:
                self._send(identity, m.Error(f"this is the scheduler of the job {self._options.job!r}"))
        elif isinstance(message, m.Hello):
            self._on_hello(identity, message)
        elif peer is None:
            self._send(identity, m.Error(f"{type(message).__name__} before Hello"))
        else:
            self._handle_member(peer, message)

    def _handle_member(self, peer: Peer, message: m.MemberSays) -> None:
        match message:
            case m.WhoIsMissing():
                self._send(peer.identity, self._roster.missing())
            case m.Endpoint():
                self._on_endpoint(peer, message)
            case m.Wired():
                peer.wired = True
                if self._phase is _Phase.WIRING and not self._lost and all(other.wired for other in self._roster):
                    self._phase = _Phase.RUNNING
                    self._send_to_all(m.Go())
            case m.Declare():
                self._on_declare(peer, message)
            case m.Report():
                self._on_report(peer, message)
            case m.Stalled():
                self._on_stalled(peer, message)
            case m.Submitted():
                if peer.rank is not None:
                    self._stalls.answer(peer.rank, message.query, message.round)
            case m.Gone():
                self._announce(m.Lost(message.rank, message.host, message.cause))
            case m.Bye():
                self._on_bye(peer)
            case _:
                assert_never(message)

    # --- Gathering

    def _on_hello(self, identity: bytes, hello: m.Hello) -> None:
        if self._refusal is not None:
            self._refused.add(hello.instance)
            self._send(identity, self._refusal)
            self._stop_when_all_are_refused()
            return
        if self._phase is not _Phase.GATHERING:
            self._refuse_latecomer(identity, hello)
            return
        log.info("%s has come", self._roster.add(identity, hello))
        self._anyone_has_come = True
        self._newcomers.append(identity)

    def _review(self) -> None:
        """Look at the members once for all who have just come: for thousands of them this takes a while."""
        newcomers, self._newcomers = self._newcomers, []
        if not newcomers or self._phase is not _Phase.GATHERING:
            return
        problem = self._roster.problem()
        if problem is not None:
            self._refuse(problem, Code.CONFIG)
            return
        while (surplus := self._roster.surplus_server()) is not None:
            self._roster.remove(surplus.identity)
            reason = "the workers expect fewer dedicated servers (COMMLIB_NUM_SERVERS)"
            self._send(surplus.identity, m.Refused(reason, Code.CONFIG))
        if self._roster.is_complete():
            self._welcome()
        else:
            self._links.send_each(newcomers, self._roster.missing())

    def _refuse_latecomer(self, identity: bytes, hello: m.Hello) -> None:
        here = [p for p in self._roster if p.is_worker and not p.left and p.hello.rank == hello.rank]
        fits = hello.role == "worker" and hello.size == len(self._hosts) and hello.rank in self._hosts
        if hello.was_here or (fits and not here):
            # It comes again, for the next job of this id, which begins when all have left this one.
            reason = "the previous job of this id has not ended yet"
            if self._lost is not None:
                reason += f", though it has lost a member on {self._lost.host}: {self._lost.cause}"
            self._send(identity, m.Refused(reason, Code.CONFIG, retry=True))
            return
        reason = "the job is complete and running" + (f": its rank {hello.rank} is {here[0]}" if here else "")
        log.warning("refused %s on %s, process %d: %s", hello.role, hello.host, hello.pid, reason)
        self._send(identity, m.Refused(reason, Code.CONFIG))

    def _refuse(self, reason: str, code: Code) -> None:
        log.error("the job %s cannot begin: %s", self._options.job, reason)
        self._phase = _Phase.REFUSED
        self._refusal = m.Refused(reason, code)
        self._refused |= {peer.hello.instance for peer in self._roster}
        self._expected = max(peer.hello.size + peer.hello.num_servers for peer in self._roster)
        self._send_to_all(self._refusal)

    def _stop_when_all_are_refused(self) -> None:
        if not len(self._roster) and len(self._refused) >= self._expected:
            self._stopping = True

    def _welcome(self) -> None:
        workers = self._roster.workers
        parameters = workers[0].hello.parameters
        assert parameters is not None
        self._registry = Registry(parameters.partition_bytes)
        self._verdicts = VerdictBook(len(workers))
        self._hosts = {worker.hello.rank: worker.hello.host for worker in workers}
        self._identities = {worker.hello.rank: worker.identity for worker in workers}
        self._phase, self._end = _Phase.WIRING, None
        for identity, welcome in self._roster.welcome(self._registry.unnamed).items():
            self._send(identity, welcome)

    def _on_endpoint(self, peer: Peer, message: m.Endpoint) -> None:
        peer.endpoint = message.address
        listeners = [other for other in self._roster if other.peer_id is not None]
        if peer in listeners and all(other.endpoint for other in listeners):
            listeners.sort(key=lambda other: other.peer_id or 0)
            self._send_each(listeners, m.Endpoints(tuple(other.endpoint for other in listeners)))

    # --- Running

    def _on_declare(self, peer: Peer, message: m.Declare) -> None:
        if self._registry is None:
            answer = m.Declared(message.request, error="the job has not begun", code=Code.CONFIG)
        else:
            try:
                answer = m.Declared(message.request, tuple(self._registry.declare(message.names)))
            except CommlibError as error:
                answer = m.Declared(message.request, error=str(error), code=error.code)
        self._send(peer.identity, answer)

    def _on_report(self, peer: Peer, message: m.Report) -> None:
        if peer.rank is None or self._registry is None:
            self._send(peer.identity, m.Error("only workers of a running job can disagree"))
            return
        now = time.monotonic()
        for rank, verdict in self._verdicts.report(peer.rank, message.name, message.round, message.signature, now):
            self._send_to_rank(rank, verdict)

    def _on_stalled(self, peer: Peer, message: m.Stalled) -> None:
        if peer.rank is None:
            self._send(peer.identity, m.Error("only workers can wait for others"))
            return
        workers = [worker for worker in self._roster.workers if not worker.left]
        present = [worker.hello.rank for worker in workers]
        absent = self._hosts.keys() - present
        query = self._stalls.ask(peer.rank, message, present, absent, time.monotonic())
        if query is not None:
            self._send_each(workers, m.Query(query, message.name))

    # --- Leaving

    def _on_bye(self, peer: Peer) -> None:
        if self._phase in (_Phase.GATHERING, _Phase.REFUSED):
            self._roster.remove(peer.identity)
            self._send(peer.identity, m.Farewell(len(self._roster)))
            return
        peer.left = True
        remaining = [other for other in self._roster if other.is_worker and not other.left]
        self._send(peer.identity, m.Farewell(len(remaining)))
        if self._tether is not None and peer.hello.instance == self._options.starter:
            # The process that started the scheduler has left in order, and may end before the others do.
            self._tether.release()
            self._tether = None
        self._note_absence(peer)

    def _drop(self, identity: bytes) -> None:
        """A member's connection has ended."""
        peer = self._roster.remove(identity)
        if peer is None:
            return
        if self._phase is _Phase.GATHERING:
            log.info("%s has gone away again", peer)
        elif self._phase is _Phase.REFUSED:
            self._stop_when_all_are_refused()
        else:
            if not peer.left:
                self._announce(m.Lost(peer.rank, peer.hello.host, CONNECTION_ENDED))
            self._note_absence(peer)

    def _note_absence(self, peer: Peer) -> None:
        """A member of the job is gone or about to go, one way or the other."""
        if peer.rank is not None:
            for rank, verdict in self._verdicts.leave(peer.rank, time.monotonic()):
                self._send_to_rank(rank, verdict)
            self._stalls.leave(peer.rank)
        if any(other.is_worker and not other.left for other in self._roster):
            return
        self._tell_servers()
        if self._end is None:
            self._end = time.monotonic() + SERVERS_LEAVE_S
        if all(other.left for other in self._roster):
            self._stopping = True

    def _tell_servers(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._send_each(self._roster.servers, m.Over(failed=self._lost is not None))

    def _announce(self, lost: m.Lost) -> None:
        who = f"a server on {lost.host}" if lost.rank is None else f"rank {lost.rank} on {lost.host}"
        if self._lost is not None:
            log.info("%s is gone too (%s)", who, lost.cause)
            return
        log.info("%s is lost: %s", who, lost.cause)
        self._lost = lost
        self._send_to_all(lost)
        self._tell_servers()

    def _parent_gone(self) -> None:
        """The process that started this one has ended without a word: this one goes too, and says why."""
        starter = next((peer for peer in self._roster if peer.hello.instance == self._options.starter), None)
        if starter is not None and self._phase in (_Phase.WIRING, _Phase.RUNNING):
            self._announce(m.Lost(starter.rank, starter.hello.host, "its process has ended"))
        self._stopping = True

    # --- Sending

    def _send_to_all(self, message: m.FromScheduler) -> None:
        self._send_each(self._roster, message)

    def _send_each(self, peers: Iterable[Peer], message: m.FromScheduler) -> None:
        self._links.send_each([peer.identity for peer in peers if not peer.left], message)

    def _send_to_rank(self, rank: int, message: m.FromScheduler) -> None:
        self._send(self._identities[rank], message)

    def _send(self, identity: bytes, message: m.FromScheduler) -> None:
        self._links.send(identity, message)


def describe_missing(missing: m.Missing) -> str:
    """Who is missing, in words."""
    parts = []
    if missing.ranks:
        parts.append("all workers" if missing.ranks == "all" else f"rank {missing.ranks}")
    if missing.gone:
        parts.append(f"rank {missing.gone} (which was here and has left again)")
    if missing.servers:
        parts.append(f"{missing.servers} dedicated server{'s' if missing.servers > 1 else ''}")
    return " and ".join(parts)
