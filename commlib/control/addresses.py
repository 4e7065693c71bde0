# SPDX-License-Identifier: Apache-2.0
"""Addresses, as users write them and as sockets want them."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket

from commlib.errors import ConfigError

__all__ = ["bindable", "is_loopback", "join_address", "local_name", "split_address"]


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[ipv6]:port`` → (host, port). Raises ConfigError for anything else."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]]+)):(\d{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise ConfigError(f"{address!r} is not an address; expected host:port, for instance node0:5555")
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """The inverse of :func:`split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True for addresses that never leave the machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def bindable(address: str) -> list[str]:
    """Where a scheduler that members seek at `address` can listen, as ZeroMQ endpoints, the best first.

    Loopback only if the address says so. A name may stand for an address outside (NAT), or for 127.0.1.1 in this
    machine's own hosts file: then it listens everywhere, which only those who know the job's secret can make use of.
    """
    host, port = split_address(address)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"the scheduler's host {host!r} is unknown: {error.strerror}") from None
    found = list(dict.fromkeys(str(info[4][0]) for info in infos))
    if is_loopback(host):
        return [f"tcp://{join_address(ip, port)}" for ip in found]
    ipv6_only = all(":" in ip for ip in found)
    return [
        *(f"tcp://{join_address(ip, port)}" for ip in found if not is_loopback(ip)),
        f"tcp://{'[::]' if ipv6_only else '0.0.0.0'}:{port}",
    ]


def local_name(*parts: str) -> str:
    """The name of an abstract unix socket: this user's, and as good as unique for `parts`."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return f"commlib-{os.getuid()}-{digest}"
