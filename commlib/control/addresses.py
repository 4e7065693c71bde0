# SPDX-License-Identifier: Apache-2.0
"""Addresses, as users write them and as sockets want them."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import re
import socket
import struct

from commlib.errors import ConfigError

__all__ = ["bindable", "is_loopback", "join_address", "listening_address", "local_name", "split_address"]

SIOCGIFADDR = 0x8915


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


def listening_address(interface: str | None, scheduler_address: str, *, allow_loopback: bool) -> str:
    """The IP address at which this host should listen for the others.

    `interface` is a name or an address (COMMLIB_INTERFACE). Without it: the address from which packets to the scheduler
    leave. Where that is a loopback address, because the scheduler is on this host and its hosts file says 127.0.1.1, it
    is no use to others unless `allow_loopback`: then the address from which packets to the world leave.
    """
    if interface:
        return _address_of(interface)
    address = _source_towards(*split_address(scheduler_address))
    if address is not None and (allow_loopback or not is_loopback(address)):
        return address
    for outside in ("192.0.2.1", "2001:db8::1"):  # reserved for documentation; nothing is sent there, or at all
        address = _source_towards(outside, 9)
        if address is not None and not is_loopback(address):
            return address
    raise ConfigError("no address of this host is of use to other hosts; expected COMMLIB_INTERFACE to name one")


def _source_towards(host: str, port: int) -> str | None:
    """The address of this host from which packets to another would leave."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return None


def _address_of(interface: str) -> str:
    """The address of a network interface, or the address that a name or a text stands for."""
    if interface in (name for _, name in socket.if_nameindex()):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
                return socket.inet_ntoa(answer[20:24])
            except OSError:
                return _ipv6_address_of(interface)
    try:
        return str(socket.getaddrinfo(interface, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"COMMLIB_INTERFACE is {interface!r}; expected the name of a network interface of this host, or one of its "
            f"addresses ({error.strerror})"
        ) from None


def _ipv6_address_of(interface: str) -> str:
    with open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope in ("00", "10"):  # global, or loopback
                return str(ipaddress.IPv6Address(int(digits, 16)))
    raise ConfigError(f"COMMLIB_INTERFACE is {interface!r}; expected an interface that has an IP address")
