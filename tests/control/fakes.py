# SPDX-License-Identifier: Apache-2.0
"""A scheduler in a thread of the test, and members in others."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from commlib.control import messages as m
from commlib.control.client import ControlClient
from commlib.control.interface import Hooks
from commlib.control.links import SchedulerOptions
from commlib.control.rendezvous import join
from commlib.control.scheduler import Scheduler
from commlib.control.security import derive_keys

LIMIT_S = 20.0
PARAMETERS = m.Parameters(
    partition_bytes=65536,
    credit_bytes=1 << 20,
    streams=1,
    stall_warning_s=60.0,
    operation_timeout_s=100.0,
    peer_timeout_s=30.0,
    asynchronous=False,
)


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call it on a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def hello(rank: int, size: int, **changes: Any) -> m.Hello:
    """What worker `rank` of `size` on one host says; ``role="server"`` makes it a server."""
    said: dict[str, Any] = {
        "protocol": m.PROTOCOL,
        "version": "1.0",
        "job": "job",
        "instance": uuid.uuid4().hex,
        "role": "worker",
        "host": f"host{rank}",
        "pid": 1000 + rank,
        "rank": rank,
        "size": size,
        "local_rank": rank,
        "local_size": size,
        "node": "0",
        "arena_bytes": 1 << 20,
        "parameters": PARAMETERS,
    }
    return m.Hello(**said | changes)


class Leash:
    """Ends a scheduler when the test says so."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)
        self._pulled = False

    def descriptors(self) -> Iterable[int]:
        return (self._fd,)

    def broken(self) -> bool:
        return self._pulled

    def release(self) -> None:
        raise AssertionError("no member has started it")

    def pull(self) -> None:
        self._pulled = True
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


class FakeJob:
    """A scheduler at `address`, and a way to join it. Used as a context; whatever was joined is closed at its end."""

    def __init__(self, connect_timeout_s: float = LIMIT_S, peer_timeout_s: float = 30.0, address: str = "127.0.0.1:0"):
        self.keys = derive_keys(b"secret", "job")
        self.leash = Leash()
        self.scheduler = Scheduler(
            SchedulerOptions(
                job="job",
                keys=self.keys,
                addresses=(address,),
                connect_timeout_s=connect_timeout_s,
                peer_timeout_s=peer_timeout_s,
            ),
            self.leash,
        )
        self.address = self.scheduler.bind()
        self.clients: list[ControlClient] = []
        self.ended = in_thread(self._serve)

    def _serve(self) -> int:
        try:
            return self.scheduler.run()
        finally:
            self.scheduler.close()

    def join(self, said: m.Hello, limit_s: float = LIMIT_S) -> ControlClient:
        """Blocks until the job is complete."""
        joined = join((self.address,), self.keys, said, connect_timeout_s=limit_s, peer_timeout_s=30.0)
        client = ControlClient(joined)
        self.clients.append(client)
        return client

    def joining(self, said: m.Hello, limit_s: float = LIMIT_S) -> Future[Any]:
        """The same on a thread."""
        return in_thread(lambda: self.join(said, limit_s))

    def join_all(self, *said: m.Hello) -> list[ControlClient]:
        """All of them at once."""
        futures = [self.joining(one) for one in said]
        return [future.result(LIMIT_S) for future in futures]

    def __enter__(self) -> FakeJob:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.bye()
            client.close()
        self.leash.pull()
        self.ended.exception(LIMIT_S)
        self.leash.close()


class Heard:
    """Hooks that keep what they are told."""

    def __init__(self, client: ControlClient, **others: Any) -> None:
        self._events: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()
        client.attach(
            Hooks(
                on_lost=lambda *what: self._add("lost", *what),
                on_scheduler_lost=lambda: self._add("scheduler lost"),
                on_over=lambda failed: self._add("over", failed),
                on_stall=lambda report: self._add("stall", report),
                **others,
            )
        )

    def _add(self, *what: Any) -> None:
        with self._changed:
            self._events.append(what)
            self._changed.notify_all()

    def wait(self, kind: str, limit_s: float = LIMIT_S) -> tuple[Any, ...]:
        """The first event of this kind."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(e[0] == kind for e in self._events), limit_s), f"no {kind}"
            return next(event for event in self._events if event[0] == kind)

    def kinds(self) -> list[str]:
        """What has happened so far."""
        with self._changed:
            return [event[0] for event in self._events]
