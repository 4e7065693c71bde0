# SPDX-License-Identifier: Apache-2.0
"""What a worker tells its supervisor: which rank it has lost, so that the job's status is that rank's.

Whoever notices that a rank is leaving may well have ended before that rank has. It is told in a datagram to an abstract
unix socket, which needs no folder, and no descriptor that a script between the two might close.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct

__all__ = ["VARIABLE", "Blame", "tell_supervisor"]

VARIABLE = "COMMLIB_SUPERVISOR"  # for commlib itself: name of the supervisor's socket
_CREDENTIALS = struct.Struct("iII")


def tell_supervisor(lost_rank: int) -> None:
    """In a worker of `commlib run`: it will fail because of this rank. Elsewhere nothing happens. Does not block."""
    name = os.environ.get(VARIABLE)
    if name:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(str(lost_rank).encode(), f"\0{name}")


class Blame:
    """The supervisor's end. What nobody takes in time is dropped by the kernel: the first word counts."""

    def __init__(self) -> None:
        self.name = f"commlib-run-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{self.name}")

    def first(self) -> int | None:
        """The rank that was lost first, as the workers see it. To be asked once, when they have ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                text, ancillary, _, _ = self._socket.recvmsg(16, socket.CMSG_SPACE(_CREDENTIALS.size))
                users = [_CREDENTIALS.unpack(data)[1] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS]
                if users == [os.geteuid()] and text.isdigit():
                    return int(text)
        return None

    def close(self) -> None:
        """Hear nothing more."""
        self._socket.close()
