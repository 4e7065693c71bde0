# SPDX-License-Identifier: Apache-2.0
"""Passing descriptors between the processes of a host, with a few words about them."""

from __future__ import annotations

import array
import os
import select
import socket as sockets
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from commlib.errors import CommlibError, OperationTimeout, PeerLostError

if TYPE_CHECKING:
    from commlib.control.streams import Alarm

__all__ = ["peer_credentials", "receive_descriptors", "require_descriptors", "send_descriptors"]

HEADER = struct.Struct("<II")  # bytes of the words, descriptors that follow them
FDS_PER_MESSAGE = 200  # the kernel takes 253
MAX_WORDS_BYTES = 1 << 20
MAX_FDS = 1 << 16
CREDENTIALS = struct.Struct("iII")


def require_descriptors(count: int) -> None:
    """Raise CommlibError unless this process can open `count` descriptors more.

    To be asked before anything is begun: where ZeroMQ cannot have one it ends the process.
    """
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
    except OSError as error:
        raise CommlibError(
            f"this process can open only {len(opened)} more descriptors, and needs about {count} to join a job "
            f"({error.strerror}); raise its limit (ulimit -n)"
        ) from None
    finally:
        for fd in opened:
            os.close(fd)


def peer_credentials(socket: sockets.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a unix socket, from the kernel; pid 0 if it is out of sight."""
    pid, uid, _ = CREDENTIALS.unpack(socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid


def send_descriptors(
    socket: sockets.socket, words: bytes, fds: Sequence[int], deadline: float, alarm: Alarm | None = None
) -> None:
    """Send `words` and copies of `fds` over a connected, non-blocking unix socket. They stay open here."""
    _send_all(socket, HEADER.pack(len(words), len(fds)) + words, deadline, alarm)
    for start in range(0, len(fds), FDS_PER_MESSAGE):
        rights = array.array("i", fds[start : start + FDS_PER_MESSAGE])
        while True:
            try:
                socket.sendmsg([b"F"], [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, rights)])
                break
            except BlockingIOError:
                _wait(socket, select.POLLOUT, deadline, alarm)
            except OSError as error:
                raise _broken(error) from None


def receive_descriptors(socket: sockets.socket, deadline: float, alarm: Alarm | None = None) -> tuple[bytes, list[int]]:
    """What `send_descriptors` sent: the words and the descriptors, which are close-on-exec and the caller's."""
    words_bytes, count = HEADER.unpack(_receive_all(socket, HEADER.size, deadline, alarm))
    if words_bytes > MAX_WORDS_BYTES or count > MAX_FDS:
        raise CommlibError("a process of this host sent what is no list of descriptors")
    words = _receive_all(socket, words_bytes, deadline, alarm)
    fds: list[int] = []
    try:
        while len(fds) < count:
            fds += _receive_some(socket, min(FDS_PER_MESSAGE, count - len(fds)), deadline, alarm)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return words, fds


def _receive_some(socket: sockets.socket, count: int, deadline: float, alarm: Alarm | None) -> list[int]:
    """One message's descriptors, `count` of them."""
    fds = array.array("i")
    while True:
        try:
            data, ancillary, flags, _ = socket.recvmsg(
                1, sockets.CMSG_SPACE(FDS_PER_MESSAGE * fds.itemsize), sockets.MSG_CMSG_CLOEXEC
            )
            break
        except BlockingIOError:
            _wait(socket, select.POLLIN, deadline, alarm)
        except OSError as error:
            raise _broken(error) from None
    for level, kind, payload in ancillary:
        if (level, kind) == (sockets.SOL_SOCKET, sockets.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if len(fds) == count:
        return fds.tolist()
    for fd in fds:
        os.close(fd)
    if not data:
        raise _broken(None)
    if flags & sockets.MSG_CTRUNC:
        raise CommlibError("this process may not open enough descriptors; raise its limit (ulimit -n)")
    raise CommlibError(f"a process of this host sent {len(fds)} descriptors instead of {count}")


def _send_all(socket: sockets.socket, data: bytes, deadline: float, alarm: Alarm | None) -> None:
    while data:
        try:
            data = data[socket.send(data) :]
        except BlockingIOError:
            _wait(socket, select.POLLOUT, deadline, alarm)
        except OSError as error:
            raise _broken(error) from None


def _receive_all(socket: sockets.socket, wanted_bytes: int, deadline: float, alarm: Alarm | None) -> bytes:
    data = b""
    while len(data) < wanted_bytes:
        try:
            part = socket.recv(wanted_bytes - len(data))
        except BlockingIOError:
            _wait(socket, select.POLLIN, deadline, alarm)
            continue
        except OSError as error:
            raise _broken(error) from None
        if not part:
            raise _broken(None)
        data += part
    return data


def _wait(socket: sockets.socket, event: int, deadline: float, alarm: Alarm | None) -> None:
    poll = select.poll()
    poll.register(socket, event)
    if alarm is not None:
        poll.register(alarm.fileno(), select.POLLIN)
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not poll.poll(int(remaining * 1000) + 1):
        raise OperationTimeout("the processes of this host did not meet in time (COMMLIB_CONNECT_TIMEOUT_S)")
    if alarm is not None:
        alarm.check()


def _broken(error: OSError | None) -> PeerLostError:
    cause = "its local connection has ended" if error is None else f"its local connection failed: {error.strerror}"
    return PeerLostError(f"a process of this host is lost: {cause}", host="this host", cause=cause)
