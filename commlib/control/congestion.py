# SPDX-License-Identifier: Apache-2.0
"""Which congestion control the connections between hosts use.

An exchange is many flows that share every link, each of them idle whenever what it depends on has not come yet. BBR
(Cardwell et al. 2016) paces each flow at the rate it has seen that flow reach: what one flow leaves free the others do
not take, and every ten seconds it all but stops for 0.2 s. So it is replaced, unless it was asked for.
docs/performance.md says how to see the difference.
"""

from __future__ import annotations

import contextlib
import socket as sockets
from pathlib import Path

from commlib.errors import ConfigError

__all__ = ["AUTO", "SYSTEM", "congestion_control_of", "set_congestion_control"]

AUTO = "auto"  # the system's, but see above
SYSTEM = "system"

_PACED = frozenset({"bbr", "bbr2", "bbr3"})
_INSTEAD = ("cubic", "reno")  # the second one is permitted to everybody
_NAME_BYTES = 16  # TCP_CA_NAME_MAX
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def congestion_control_of(socket: sockets.socket) -> str:
    """The name of what a TCP socket uses."""
    return socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode()


def set_congestion_control(socket: sockets.socket, wanted: str) -> None:
    """Give a TCP socket what COMMLIB_CONGESTION says. Raises ConfigError for a name that the system does not permit."""
    if wanted == SYSTEM:
        return
    if wanted == AUTO:
        if congestion_control_of(socket) in _PACED:
            _set_first(socket, _INSTEAD)
        return
    if not _set_first(socket, [wanted]):
        there = _AVAILABLE.read_text().split() if _AVAILABLE.exists() else []
        known = f"this kernel has {', '.join(there)}" if there else "this kernel does not say what it has"
        permitted = "; others than the permitted ones need the capability CAP_NET_ADMIN" if wanted in there else ""
        raise ConfigError(f"COMMLIB_CONGESTION is {wanted!r}, which cannot be used: {known}{permitted}")


def _set_first(socket: sockets.socket, names: tuple[str, ...] | list[str]) -> bool:
    for name in names:
        with contextlib.suppress(OSError):
            socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_CONGESTION, name.encode())
            return True
    return False
