# SPDX-License-Identifier: Apache-2.0
"""Finding the scheduler, and who is kept out."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from commlib.control import rendezvous
from commlib.control.client import ControlClient
from commlib.control.rendezvous import join, probe
from commlib.control.security import Keys, derive_keys
from commlib.errors import AuthenticationError, ConfigError, OperationTimeout
from tests.control.fakes import LIMIT_S, FakeJob, hello

pytestmark = pytest.mark.timeout(60)

KEYS = derive_keys(b"secret", "job")
WRONG = derive_keys(b"another secret", "job")
JOIN: dict[str, Any] = {"connect_timeout_s": LIMIT_S, "peer_timeout_s": 30.0}


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_another_secret_is_noticed_soon_and_the_error_says_how_to_share_it() -> None:
    with FakeJob() as job:
        started = time.monotonic()
        with pytest.raises(AuthenticationError, match="COMMLIB_SECRET") as caught:
            join((job.address,), WRONG, hello(0, 2), **JOIN)
        assert time.monotonic() - started < 5
        assert job.address in str(caught.value)
        assert "~/.commlib/secret" in str(caught.value)


def test_another_job_id_is_noticed_like_another_secret() -> None:
    with FakeJob() as job, pytest.raises(AuthenticationError, match="'other'"):
        join((job.address,), derive_keys(b"secret", "other"), hello(0, 2, job="other"), **JOIN)


def test_who_knows_the_schedulers_key_but_has_not_the_members_is_kept_out() -> None:
    impostor = dataclasses.replace(KEYS, client_public=WRONG.client_public, client_secret=WRONG.client_secret)
    with FakeJob() as job:
        with pytest.raises(AuthenticationError):
            join((job.address,), impostor, hello(0, 2), **JOIN)
        job.join_all(hello(0, 2), hello(1, 2))


def test_what_is_no_scheduler_is_called_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
                connection.recv(1000)

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="not a scheduler of commlib"):
            join((address,), KEYS, hello(0, 2), **JOIN)


def test_nobody_there_is_an_error_that_names_address_and_limit() -> None:
    address = closed_port()
    with pytest.raises(OperationTimeout) as caught:
        join((address,), KEYS, hello(0, 2), connect_timeout_s=0.4, peer_timeout_s=30.0)
    for words in (address, "0.4 s", "COMMLIB_CONNECT_TIMEOUT_S", "'job'"):
        assert words in str(caught.value)


def test_a_name_that_does_not_resolve_is_mentioned() -> None:
    with pytest.raises(OperationTimeout, match=r"'no-such-host.invalid'"):
        join(("no-such-host.invalid:5555",), KEYS, hello(0, 2), connect_timeout_s=0.4, peer_timeout_s=30.0)


def test_members_may_come_before_the_scheduler() -> None:
    address = closed_port()
    clients = []
    early = threading.Thread(target=lambda: clients.append(ControlClient(join((address,), KEYS, hello(0, 2), **JOIN))))
    early.start()
    early.join(0.5)
    assert early.is_alive()
    with FakeJob(address=address) as job:
        job.join(hello(1, 2))
        early.join(LIMIT_S)
        job.clients += clients
        assert len(clients) == 1


def test_members_outlive_a_scheduler_that_ends_before_the_welcome() -> None:
    """As when rank 0 was stopped and started again."""
    clients: list[ControlClient] = []
    with FakeJob() as first:
        waiting = threading.Thread(
            target=lambda: clients.append(ControlClient(join((first.address,), KEYS, hello(1, 2), **JOIN)))
        )
        waiting.start()
        while not len(first.scheduler._roster):
            waiting.join(0.01)
        first.leash.pull()
        first.ended.result(LIMIT_S)
    with FakeJob(address=first.address) as second:
        second.join(hello(0, 2))
        waiting.join(LIMIT_S)
        second.clients += clients
        assert len(clients) == 1


# --- Several addresses


@pytest.fixture
def silent() -> Iterator[str]:
    """Somebody listens, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_all_addresses_are_tried_until_one_answers(silent: str) -> None:
    with FakeJob() as job:
        addresses = (closed_port(), silent, job.address, closed_port())
        started = time.monotonic()
        joining = job.joining(hello(0, 2))
        joined = join(addresses, KEYS, hello(1, 2), **JOIN)
        job.clients.append(ControlClient(joined))
        assert joined.line.address == job.address
        assert time.monotonic() - started < 5
        joining.result(LIMIT_S)


def test_the_scheduler_of_another_job_at_one_of_the_addresses_is_no_reason_to_give_up() -> None:
    with FakeJob() as job, _Foreign(WRONG) as foreign:
        joining = job.joining(hello(0, 2))
        job.clients.append(ControlClient(join((foreign.address, job.address), KEYS, hello(1, 2), **JOIN)))
        joining.result(LIMIT_S)


def test_but_if_no_other_answers_it_is_mentioned() -> None:
    with _Foreign(WRONG) as foreign, pytest.raises(AuthenticationError) as caught:
        join((closed_port(), foreign.address), KEYS, hello(1, 2), connect_timeout_s=1.5, peer_timeout_s=30.0)
    assert foreign.address in str(caught.value)
    assert "another secret" in str(caught.value)


def test_a_job_that_is_still_ending_gives_way_to_its_successor_at_another_address() -> None:
    with FakeJob() as old:
        first, _ = old.join_all(hello(0, 2), hello(1, 2))
        first.bye()
        first.close()
        with FakeJob() as new:
            joining = new.joining(hello(1, 2))
            new.clients.append(ControlClient(join((old.address, new.address), KEYS, hello(0, 2), **JOIN)))
            joining.result(LIMIT_S)


class _Foreign:
    """A scheduler with other keys."""

    def __init__(self, keys: Keys) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        keys.secure_scheduler(self._socket)
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rstrip("\0")

    def __enter__(self) -> _Foreign:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()


def test_probing() -> None:
    with FakeJob() as job:
        assert probe(job.address, KEYS, "job", 5.0)
        assert not probe(job.address, WRONG, "job", 0.5)
    assert not probe(closed_port(), KEYS, "job", 0.3)


def test_while_nobody_answers_that_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.1)
    address = closed_port()
    with caplog.at_level(logging.WARNING, "commlib"), pytest.raises(OperationTimeout):
        join((address,), KEYS, hello(0, 2), connect_timeout_s=0.5, peer_timeout_s=30.0)
    assert caplog.text.count(f"has answered at {address}") >= 2
