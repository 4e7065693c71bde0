# SPDX-License-Identifier: Apache-2.0
"""Addresses, as users write them and as sockets want them."""

from __future__ import annotations

import ipaddress
import re

from commlib.errors import ConfigError

__all__ = ["is_loopback", "join_address", "split_address"]


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
