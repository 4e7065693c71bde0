# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from commlib.control import streams
from commlib.control.handshake import PREFIX, Claim
from commlib.control.streams import Dial, connect_all
from commlib.errors import AuthenticationError, CommlibError, ConfigError, OperationTimeout

pytestmark = pytest.mark.timeout(60)

KEY = b"k" * 32


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as made:
        yield made


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def claims(count: int = 1, initiator: int = 1) -> list[Claim]:
    return [Claim("job", "stream", "", initiator, 0, stream) for stream in range(count)]


def expect(listener: socket.socket | None, expected: list[Claim], key: bytes = KEY, limit_s: float = 20.0) -> Any:
    deadline = time.monotonic() + limit_s
    return connect_all(key, listener=listener, expected=expected, dials=[], deadline=deadline)


def dial(listener: socket.socket, wanted: list[Claim], key: bytes = KEY, limit_s: float = 20.0) -> Any:
    dials = [Dial(socket.AF_INET, listener.getsockname(), claim) for claim in wanted]
    return connect_all(key, listener=None, expected=[], dials=dials, deadline=time.monotonic() + limit_s)


def close(*made: dict[Claim, socket.socket]) -> None:
    for some in made:
        for one in some.values():
            one.close()


def test_streams_are_connected_claim_by_claim(listener: socket.socket) -> None:
    accepted = in_thread(lambda: expect(listener, claims(5)))
    dialled = dial(listener, claims(5))
    taken = accepted.result(20)
    for claim in claims(5):
        assert not dialled[claim].getblocking()
        assert not dialled[claim].get_inheritable()
        assert not taken[claim].getblocking()
        dialled[claim].send(f"stream {claim.stream}".encode())
        taken[claim].setblocking(True)
        assert taken[claim].recv(100) == f"stream {claim.stream}".encode()
    close(dialled, taken)


def test_all_meet_all_at_once() -> None:
    """Five peers, each listening, accepting from those above and dialling those below, two streams a pair."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]

    def peer(me: int) -> dict[Claim, socket.socket]:
        def between(a: int, b: int) -> list[Claim]:
            return [Claim("job", "stream", "", a, b, stream) for stream in range(2)]

        return connect_all(
            KEY,
            listener=listeners[me],
            expected=[claim for other in range(me + 1, 5) for claim in between(other, me)],
            dials=[
                Dial(socket.AF_INET, listeners[other].getsockname(), claim)
                for other in range(me)
                for claim in between(me, other)
            ],
            deadline=time.monotonic() + 30,
        )

    peers = [in_thread(lambda me=me: peer(me)) for me in range(5)]  # type: ignore[misc]
    made = [future.result(30) for future in peers]
    assert all(len(some) == 8 for some in made)
    close(*made)
    for one in listeners:
        one.close()


def strangers(listener: socket.socket, *first_words: bytes) -> list[socket.socket]:
    made = []
    for words in first_words:
        made.append(socket.create_connection(listener.getsockname()))
        made[-1].sendall(words)
    return made


def test_silence_and_garbage_do_not_keep_a_member_waiting(listener: socket.socket) -> None:
    noise = [b"", b"", b"C", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), PREFIX.pack(b"CLh1", 16384) + b"x" * 99]
    around = strangers(listener, *noise, *[b""] * 20)
    accepted = in_thread(lambda: expect(listener, claims(3)))
    started = time.monotonic()
    dialled = dial(listener, claims(3))
    taken = accepted.result(20)
    assert time.monotonic() - started < streams.HELLO_S / 2
    close(dialled, taken)
    for stranger in around:
        stranger.close()


def test_a_hello_of_one_byte_at_a_time_is_cut_off(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HELLO_S", 0.5)
    accepted = in_thread(lambda: expect(listener, claims()))
    stop = threading.Event()

    def drip() -> float:
        with socket.create_connection(listener.getsockname()) as slow:
            started = time.monotonic()
            while not stop.wait(0.05):
                try:
                    slow.send(b"C")
                except OSError:
                    return time.monotonic() - started
        raise AssertionError("it was never cut off")

    cut_off_after = in_thread(drip).result(20)
    assert 0.3 < cut_off_after < 5
    stop.set()
    close(dial(listener, claims()), accepted.result(20))


def test_more_strangers_than_anybody_expects_lose_their_places(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STRANGERS", 5)
    around = strangers(listener, *[b""] * 30)
    accepted = in_thread(lambda: expect(listener, claims(2)))
    close(dial(listener, claims(2)), accepted.result(20))
    for stranger in around:
        stranger.close()


def test_another_secret_is_an_authentication_error(listener: socket.socket) -> None:
    accepted = in_thread(lambda: expect(listener, claims(), limit_s=1.0))
    with pytest.raises(AuthenticationError, match="secret"):
        dial(listener, claims(), key=b"o" * 32)
    with pytest.raises(OperationTimeout, match="stream 0 from 1 to 0"):
        accepted.result(20)


def test_who_is_not_expected_is_told(listener: socket.socket) -> None:
    accepted = in_thread(lambda: expect(listener, claims(), limit_s=1.0))
    with pytest.raises(ConfigError, match="expects"):
        dial(listener, claims(initiator=7))
    with pytest.raises(OperationTimeout):
        accepted.result(20)


def test_a_peer_that_listens_only_later_is_found() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        dialled = in_thread(lambda: dial(reserved, claims()))
        with pytest.raises(TimeoutError):
            dialled.result(0.3)
        reserved.listen()
        taken = expect(reserved, claims())
    close(dialled.result(20), taken)


def test_a_connection_to_oneself_is_not_taken_for_a_peer() -> None:
    """TCP connects a socket to itself when the port that it is given happens to be the one that it looks for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    loop = socket.socket()
    loop.bind(address)
    loop.connect(address)
    assert loop.getsockname() == loop.getpeername()
    call = streams._Call(loop, iter(()), 0.0, is_connecting=True)  # type: ignore[arg-type]
    with pytest.raises(ConnectionRefusedError, match="itself"):
        call.advance()
    loop.close()


def test_an_initiator_that_breaks_off_may_come_again(listener: socket.socket) -> None:
    accepted = in_thread(lambda: expect(listener, claims()))
    for words in (b"", b"CLh1"):
        strangers(listener, words)[0].close()
    close(dial(listener, claims()), accepted.result(20))


class Bell:
    """An alarm."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)
        self.error: CommlibError | None = None

    def fileno(self) -> int:
        return self._fd

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def ring(self, error: CommlibError) -> None:
        self.error = error
        os.eventfd_write(self._fd, 1)


def test_an_alarm_ends_the_waiting(listener: socket.socket) -> None:
    bell = Bell()
    waiting = in_thread(
        lambda: connect_all(
            KEY, listener=listener, expected=claims(), dials=[], deadline=time.monotonic() + 30, alarm=bell
        )
    )
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    started = time.monotonic()
    bell.ring(CommlibError("rank 7 is lost"))
    with pytest.raises(CommlibError, match="rank 7"):
        waiting.result(20)
    assert time.monotonic() - started < 5


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_nothing_stays_open_when_it_fails(listener: socket.socket) -> None:
    before = descriptors()
    around = strangers(listener, b"", b"GET", b"")
    with pytest.raises(OperationTimeout):
        expect(listener, claims(3), limit_s=0.3)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(OperationTimeout, match="the last thing that went wrong"):
            dial(deaf, claims(3), limit_s=0.3)
    for stranger in around:
        stranger.close()
    assert descriptors() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_process_of_another_user_is_turned_away_from_local_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    address = b"\0commlib-test-" + os.urandom(8).hex().encode()
    refused: list[str] = []
    monkeypatch.setattr(streams.log, "info", lambda text, *args: refused.append(text % args))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(address)
            os._exit(0 if stranger.recv(1) == b"" else 1)
        accepted = in_thread(lambda: expect(listener, claims()))
        assert os.waitpid(child, 0)[1] == 0
        dials = [Dial(socket.AF_UNIX, address, claims()[0])]
        made = connect_all(KEY, listener=None, expected=[], dials=dials, deadline=time.monotonic() + 20)
        close(made, accepted.result(20))
    assert any("another user (uid 65534)" in text for text in refused)


def test_a_local_root_whose_queue_is_full_is_tried_again() -> None:
    address = b"\0commlib-test-" + os.urandom(8).hex().encode()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(0)
        waiting = []
        while True:
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            waiting.append(one)
            if one.connect_ex(address) == errno.EAGAIN:
                break
        dials = [Dial(socket.AF_UNIX, address, claims()[0])]
        dialled = in_thread(
            lambda: connect_all(KEY, listener=None, expected=[], dials=dials, deadline=time.monotonic() + 20)
        )
        with pytest.raises(TimeoutError):
            dialled.result(0.2)
        taken = expect(listener, claims())
        close(dialled.result(20), taken)
        for one in waiting:
            one.close()
