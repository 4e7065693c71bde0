# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice

import pytest

from commlib.control.fdpass import peer_credentials, receive_descriptors, send_descriptors
from commlib.control.memory import MIN_ARENA_BYTES, check_segment, make_segment, mappable_bytes
from commlib.errors import CommlibError, OperationTimeout, PeerLostError
from tests.control.bare import REPOSITORY

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    a.setblocking(False)
    b.setblocking(False)
    with a, b:
        yield a, b


def soon() -> float:
    return time.monotonic() + 20


def test_what_is_sent_is_the_same_memory(pair: tuple[socket.socket, socket.socket]) -> None:
    segment = make_segment("test", 8192)
    send_descriptors(pair[0], b"words", [segment], soon())
    words, (received,) = receive_descriptors(pair[1], soon())
    assert words == b"words"
    assert not os.get_inheritable(received)
    with mmap.mmap(segment, 8192) as mine, mmap.mmap(received, 8192) as theirs:
        mine[5000:5003] = b"abc"
        assert theirs[5000:5003] == b"abc"
    os.close(segment)
    os.close(received)


def test_many_descriptors_cross_in_their_order(pair: tuple[socket.socket, socket.socket]) -> None:
    sent = [os.memfd_create(str(i)) for i in range(450)]
    sender = threading.Thread(target=send_descriptors, args=(pair[0], b"x" * 100_000, sent, soon()))
    sender.start()
    words, received = receive_descriptors(pair[1], soon())
    sender.join()
    assert len(words) == 100_000
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in sent]
    for fd in (*sent, *received):
        os.close(fd)


def test_nothing_of_what_follows_is_read(pair: tuple[socket.socket, socket.socket]) -> None:
    send_descriptors(pair[0], b"", [1], soon())
    pair[0].send(b"frames of the core")
    _, (fd,) = receive_descriptors(pair[1], soon())
    os.close(fd)
    assert pair[1].recv(100) == b"frames of the core"


@pytest.mark.parametrize("sent", [b"", b"\1\0\0\0\1", b"\0\0\0\0\2\0\0\0FF"], ids=["nothing", "half", "no rights"])
def test_a_peer_that_dies_or_cheats_is_an_error(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    pair[0].send(sent) if sent else None
    pair[0].close()
    with pytest.raises(CommlibError):
        receive_descriptors(pair[1], soon())


def test_a_peer_that_is_gone_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(PeerLostError):
        send_descriptors(pair[0], b"x", [1], soon())


def test_absurd_counts_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].send(b"\xff" * 8)
    with pytest.raises(CommlibError, match="no list"):
        receive_descriptors(pair[1], soon())


def test_waiting_has_an_end(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(OperationTimeout):
        receive_descriptors(pair[1], time.monotonic() + 0.1)


def test_too_few_descriptors_left_is_an_error_that_says_so(pair: tuple[socket.socket, socket.socket]) -> None:
    sent = [os.memfd_create("x") for _ in range(20)]
    send_descriptors(pair[0], b"", sent, soon())
    before = set(os.listdir("/proc/self/fd"))
    free = (number for number in range(1 << 16) if str(number) not in before)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (list(islice(free, 5))[-1] + 1, limits[1]))
    try:
        with pytest.raises(CommlibError, match="ulimit -n"):
            receive_descriptors(pair[1], soon())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert set(os.listdir("/proc/self/fd")) == before
    for fd in sent:
        os.close(fd)


def test_the_kernel_tells_who_is_there(pair: tuple[socket.socket, socket.socket]) -> None:
    assert peer_credentials(pair[0]) == (os.getpid(), os.getuid())


# --- Segments


def test_segments_are_sparse_close_on_exec_and_of_a_size_that_stays() -> None:
    fd = make_segment("test", 1 << 40)
    assert os.fstat(fd).st_size == 1 << 40
    assert os.fstat(fd).st_blocks == 0
    assert not os.get_inheritable(fd)
    for size in (0, 1 << 41):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    check_segment(fd, 1 << 40)
    os.close(fd)


def test_freed_ranges_can_be_given_back() -> None:
    fd = make_segment("test", 1 << 20)
    os.pwrite(fd, b"x" * 65536, 0)
    assert os.fstat(fd).st_blocks > 0
    punch = "import ctypes, sys; sys.exit(ctypes.CDLL(None, use_errno=True).fallocate(int(sys.argv[1]), 3, "
    punch += "ctypes.c_long(0), ctypes.c_long(65536)))"
    subprocess.run([sys.executable, "-c", punch, str(fd)], pass_fds=[fd], check=True)
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_what_is_not_the_segment_that_was_promised_is_refused() -> None:
    fd = make_segment("test", 4096)
    with pytest.raises(CommlibError, match="another size"):
        check_segment(fd, 4097)
    os.close(fd)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(CommlibError):
        check_segment(unsealed, 4096)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    check_segment(unsealed, 4096)
    os.close(unsealed)
    with pytest.raises(CommlibError, match="no shared memory"):
        check_segment(0, 1)


def test_the_size_asked_for_is_the_size_where_there_is_room() -> None:
    assert mappable_bytes((1 << 30) + 5, 4) == 1 << 30


@pytest.mark.parametrize("limit", ["4 << 30", "700 << 20"])
def test_a_limited_address_space_makes_arenas_smaller(limit: str) -> None:
    code = (
        "import sys, resource; sys.path.insert(0, sys.argv[1])\n"
        "from tests.control.bare import use_bare_package; use_bare_package()\n"
        "from commlib.control.memory import mappable_bytes\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
        "print(mappable_bytes(1 << 40, 4))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(REPOSITORY)], capture_output=True, text=True, check=True)
    arena_bytes = int(ran.stdout)
    assert MIN_ARENA_BYTES <= arena_bytes <= eval(limit) // 8
    assert arena_bytes % mmap.PAGESIZE == 0


def test_no_room_at_all_is_an_error() -> None:
    with pytest.raises(CommlibError, match="ulimit -v"):
        mappable_bytes(1 << 40, 1 << 40)
