# SPDX-License-Identifier: Apache-2.0
"""How the members of a group meet, and a :class:`Session` among them.

Where the members are they tell each other through torch's store, each when its group is made; the first of them then
says under which job they meet, and, when they are on several hosts, where the scheduler may be. Everything else is as
in any other job of commlib: see `commlib.control.bootstrap`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlib.config import SCHEDULER_PORT_OFFSET, Config
from commlib.control.addresses import join_address, listening_address
from commlib.control.interrupt import Stop, Stopped
from commlib.errors import Code, CommlibError, NotInitializedError, OperationTimeout, PeerLostError
from commlib.losses import NOBODY
from commlib.session import Session
from commlib.torch.distributed.work import Work

__all__ = ["SLOTS", "Channel", "Directory", "Slot"]

SLOTS = 64  # operations of a group that may be in flight at once; the next one waits for the oldest
ARENA_BYTES = 1 << 30  # of addresses, not of memory; a process may have many sessions
LOOK_S = 0.1
NOWHERE = "192.0.2.1:9"  # reserved for documentation: packets to it leave as those to the rest of the world do
FIRST_PORT, LAST_PORT = 20000, 32000  # below those that the kernel gives out by itself


class Directory:
    """What the members of one group know of each other through torch's store."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        """Tell the others where this member is. Does not wait for them."""
        # One process may make a group under the same prefix again, and must not read what was left by the last one.
        generation = store.add(f"commlib/generation/{rank}", 1)
        self._store = store
        self._prefix = f"commlib/{generation}"
        self.rank, self.size = rank, size
        self.timeout_s = timeout_s
        place = {"host": os.environ.get("COMMLIB_NODE", "").strip() or _machine(), "machine": _machine()}
        store.set(f"{self._prefix}/place/{rank}", json.dumps(place))

    def meeting(self, members: Sequence[int], stop: Stop) -> Config:
        """The settings with which this member meets some of the group, `members` in order, itself among them.

        Blocks until it is known where all of them are. Raises OperationTimeout, or Stopped.
        """
        deadline = time.monotonic() + self.timeout_s
        places = [self._read(f"place/{member}", deadline, stop) for member in members]
        rank = members.index(self.rank)
        hosts = [place["host"] for place in places]
        base = _settings()
        key = f"meeting/{'-'.join(map(str, members))}"
        if rank == 0:
            has_other_machines = len({place["machine"] for place in places}) > 1
            master = _master(base, has_other_machines) if len(set(hosts)) > 1 else None
            self._store.set(
                f"{self._prefix}/{key}", json.dumps({"job": f"torch/{secrets.token_hex(8)}", "master": master})
            )
        meeting = self._read(key, deadline, stop)
        return dataclasses.replace(
            base,
            rank=rank,
            size=len(members),
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
            node=hosts[rank],
            job=meeting["job"],
            master=meeting["master"],
            arena_bytes=min(base.arena_bytes, ARENA_BYTES),
            operation_timeout_s=self.timeout_s,
            connect_timeout_s=min(base.connect_timeout_s, self.timeout_s),
        )

    def _read(self, key: str, deadline: float, stop: Stop) -> Any:
        # Not by the store's own wait: others of this process could not use the store meanwhile, and none can end it.
        pause_s = 0.002
        while not self._store.check([f"{self._prefix}/{key}"]):
            stop.check()
            if time.monotonic() > deadline:
                raise OperationTimeout(f"{key} has not been in torch's store within {self.timeout_s:g} s")
            select.select([stop], [], [], pause_s)
            pause_s = min(2 * pause_s, LOOK_S)
        return json.loads(self._store.get(f"{self._prefix}/{key}"))


def _settings() -> Config:
    """What the environment says of tuning; of the job and of this process's place in it, nothing."""
    nothing = Config.from_environment(
        role="worker",
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        node="0",
        job="torch",
        num_servers=0,
        scheduler_external=False,
    )
    return dataclasses.replace(nothing, scheduler=None, master=None)


def _machine() -> str:
    """Who has the same one can share memory and look at each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "/".join([boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))])


def _master(base: Config, has_other_machines: bool) -> str:
    """Near which port of this host the scheduler will be: it takes the first free one of several."""
    towards = f"{os.environ.get('MASTER_ADDR', '').strip()}:9"
    host = "127.0.0.1"
    if has_other_machines:
        with contextlib.suppress(CommlibError):  # no such variable
            return _near(listening_address(base.interface, towards, allow_loopback=False))
        host = listening_address(base.interface, NOWHERE, allow_loopback=False)
    return _near(host)


def _near(host: str) -> str:
    return join_address(host, random.randrange(FIRST_PORT, LAST_PORT) - SCHEDULER_PORT_OFFSET)


@dataclass(eq=False)
class Slot:
    """A name that operations use one after another."""

    name: str
    last: Work | None = None


class Channel:
    """A session among some members of a group, from when it is first needed. Works begin when there is one."""

    def __init__(
        self, directory: Directory, members: Sequence[int], ranks: Sequence[int], names: Sequence[str] = ()
    ) -> None:
        """`members` are ranks in the group, `ranks` the same in the whole job. `names` are declared together."""
        self._directory = directory
        self._names = names
        self.members = tuple(members)
        self.ranks = tuple(ranks)
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._failure: BaseException | None = None
        self._stop: Stop | None = None  # of the attempt to connect
        self._waiting: list[Work] = []

    @property
    def session(self) -> Session:
        """The session. Raises what has kept it from being made, or NotInitializedError when it has ended."""
        if self._failure is not None:
            raise self._failure
        if self._session is None:
            raise NotInitializedError("this process group has not been connected")
        return self._session

    def lost(self) -> CommlibError | None:
        """The error of a session that has failed."""
        session = self._session
        if session is None or session.worker.aborted() is None:
            return None
        return session.failure(Code.PEER_LOST, NOBODY, "", 0)

    def explained(self, error: CommlibError) -> CommlibError:
        """An error of the session, with the numbers of its members in the whole job."""
        if error is not self._failure and self.ranks != tuple(range(len(self.ranks))):
            error.add_note(f"The ranks of this group are numbered from 0; in the whole job they are {list(self.ranks)}")
            if isinstance(error, PeerLostError) and error.rank is not None:
                error.rank = self.ranks[error.rank]
        return error

    def submit(self, work: Work, slot: Slot, hopeless: Callable[[], CommlibError | None]) -> None:
        """Let it begin when the session is there and the slot free: at once, as a rule.

        `hopeless` is asked while the session is being made: the error that ends the attempt, if there is one.
        """
        with self._lock:
            previous, slot.last = slot.last, work
            is_ready = self._session is not None or self._failure is not None
        if previous is not None and not previous.is_completed():
            work.begin_after(previous)
            previous.then(lambda: self._begin(work, hopeless))
            previous.watch()
        elif is_ready:
            work.begin()
        else:
            work.begin_after(None)
            self._begin(work, hopeless)

        def release() -> None:
            if slot.last is work:
                slot.last = None  # or it would keep its tensors until the slot is used again

        work.then(release)

    def _begin(self, work: Work, hopeless: Callable[[], CommlibError | None]) -> None:
        with self._lock:
            if self._session is None and self._failure is None:
                self._waiting.append(work)
                if self._stop is None:
                    self._stop = Stop()
                    threading.Thread(target=self._connect_for, args=(hopeless,), name="cl-meet", daemon=True).start()
                return
        work.begin()

    def connect(self, stop: Stop) -> None:
        """Make the session, in this thread. Blocks until all members are there. Raises what keeps it from that."""
        config = self._directory.meeting(self.members, stop)
        session = Session(config, stop)
        session.declare_many([(name, 1) for name in self._names])
        with self._lock:
            if self._failure is None:
                self._session = session
                return
        session.shutdown()

    def _connect_for(self, hopeless: Callable[[], CommlibError | None]) -> None:
        """Make the session in a thread of its own, and let those begin that wait for it."""
        stop = self._stop
        assert stop is not None
        failures: list[BaseException] = []

        def attempt() -> None:
            try:
                self.connect(stop)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=attempt, name="cl-meet", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_S)
            error = hopeless()
            if error is not None and thread.is_alive():
                self._fail(error)
                stop.ask()
                thread.join()
        for failure in failures:
            self._fail(NotInitializedError("not connected") if isinstance(failure, Stopped) else failure)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for work in waiting:
            work.begin()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error

    def close(self, error: BaseException) -> None:
        """End the session in order, and whatever is in flight or waits for it with `error`. May be repeated."""
        self._fail(error)
        with self._lock:
            session, self._session = self._session, None
            stop = self._stop
        if stop is not None:
            stop.ask()
        if session is not None:
            session.shutdown()
