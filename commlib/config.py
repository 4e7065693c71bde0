# SPDX-License-Identifier: Apache-2.0
"""All settings of a process, read once: an explicit argument, then ``COMMLIB_*``, then what the launcher told."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from commlib.control.addresses import is_loopback, join_address, split_address
from commlib.control.congestion import AUTO
from commlib.control.launchers import Place, find_place
from commlib.control.values import byte_count, flag, log_level, seconds, whole_number
from commlib.errors import ConfigError

__all__ = ["Config"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GRANULE_BYTES = 64 * KIB  # the unit of placement: partitions are whole granules
DEFAULT_PARTITION_BYTES = MIB
DEFAULT_CREDIT_PARTITIONS = 8
SCHEDULER_PORT_OFFSET = 1000  # from MASTER_PORT, which the launcher itself may be using
SCHEDULER_PORTS = 16
LOCAL_ROUTES = ("auto", "arena", "cma", "staged")
ROLES = ("worker", "server", "scheduler")


# Field → (variable, how to read it).
_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "rank": ("COMMLIB_RANK", whole_number),
    "size": ("COMMLIB_SIZE", whole_number),
    "local_rank": ("COMMLIB_LOCAL_RANK", whole_number),
    "local_size": ("COMMLIB_LOCAL_SIZE", whole_number),
    "node": ("COMMLIB_NODE", str),
    "scheduler": ("COMMLIB_SCHEDULER", str),
    "scheduler_external": ("COMMLIB_SCHEDULER_EXTERNAL", flag),
    "job": ("COMMLIB_JOB", str),
    "num_servers": ("COMMLIB_NUM_SERVERS", whole_number),
    "interface": ("COMMLIB_INTERFACE", str),
    "secret": ("COMMLIB_SECRET", str),
    "partition_bytes": ("COMMLIB_PARTITION_BYTES", byte_count),
    "credit_bytes": ("COMMLIB_CREDIT_BYTES", byte_count),
    "streams": ("COMMLIB_STREAMS", whole_number),
    "congestion": ("COMMLIB_CONGESTION", lambda text: text.lower()),
    "arena_bytes": ("COMMLIB_ARENA_BYTES", byte_count),
    "local_route": ("COMMLIB_LOCAL_ROUTE", lambda text: text.lower()),
    "stall_warning_s": ("COMMLIB_STALL_WARNING_S", seconds),
    "operation_timeout_s": ("COMMLIB_OPERATION_TIMEOUT_S", seconds),
    "connect_timeout_s": ("COMMLIB_CONNECT_TIMEOUT_S", seconds),
    "peer_timeout_s": ("COMMLIB_PEER_TIMEOUT_S", seconds),
    "asynchronous": ("COMMLIB_ASYNC", flag),
    "log_level": ("COMMLIB_LOG_LEVEL", log_level),
}


def physical_memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parent_identity() -> str:
    """The parent process and its start time: the same for the siblings of one launch, and never used again."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat", encoding="ascii", errors="replace") as stat:
            start_time = stat.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # no /proc, or a parent in another PID namespace
        start_time = "0"
    return f"parent/{parent}/{start_time}"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one process. ``Config()`` is a job of one; ``Config.from_environment()`` is what ``init`` uses.

    Sizes are in bytes, times in seconds. The parameters that all members must share (``partition_bytes``,
    ``credit_bytes``, ``streams`` and the time limits of operations) are those of rank 0. A dedicated server learns
    ``rank`` and the sizes from the scheduler: they are 0 here.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: str = "0"  # label of the host this worker is on
    role: str = "worker"  # or "server", "scheduler"
    job: str = ""  # "": parent process and its start time
    scheduler: str | None = None  # host:port, where one was named
    scheduler_external: bool = False  # somebody else starts the scheduler
    master: str | None = None  # MASTER_ADDR:MASTER_PORT, near which a scheduler may be when `scheduler` is None
    num_servers: int = 0
    interface: str | None = None  # name or address to listen on; None: the one that reaches the scheduler
    secret: str | None = field(default=None, repr=False)  # None: ~/.commlib/secret
    partition_bytes: int = DEFAULT_PARTITION_BYTES
    credit_bytes: int = 0  # 0: eight partitions, at least 8 MiB
    streams: int = 1  # connections per pair of hosts; see commlib/control/bootstrap.py for those with servers
    congestion: str = AUTO  # TCP congestion control between hosts: a name of the kernel's, "system", or "auto"
    arena_bytes: int = field(default_factory=physical_memory_bytes)
    local_route: str = "auto"
    stall_warning_s: float = 60.0  # 0: never
    operation_timeout_s: float = 1800.0
    connect_timeout_s: float = 120.0
    peer_timeout_s: float = 30.0
    asynchronous: bool = False
    log_level: int = logging.WARNING

    def __post_init__(self) -> None:
        if self.credit_bytes == 0:
            partition_bytes = max(DEFAULT_PARTITION_BYTES, self.partition_bytes)
            object.__setattr__(self, "credit_bytes", DEFAULT_CREDIT_PARTITIONS * partition_bytes)
        values = dataclasses.asdict(self)
        _check(values, lambda name: f"{name} is {values[name]!r}", str)
        if not self.job:
            object.__setattr__(self, "job", parent_identity())

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **explicit: Any) -> Self:
        """Read the settings: `explicit` fields first, then ``COMMLIB_*``, then the launcher's variables.

        `environ` defaults to ``os.environ``; an empty variable counts as unset. Nothing set: a job of size 1.
        Raises ConfigError, naming the variable, its value and what was expected, for a malformed, inconsistent or
        incomplete set.
        """
        unknown = explicit.keys() - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"commlib has no setting called {', '.join(sorted(unknown))}")
        reading = _Reading(os.environ if environ is None else environ)
        reading.read_launcher()
        reading.read_variables()
        reading.take({name: value for name, value in explicit.items() if value is not None})
        reading.read_addresses()
        reading.complete()
        _check(reading.values, reading.said, reading.called)
        return cls(**reading.values)

    @property
    def is_solo(self) -> bool:
        """True for a job of one worker and no servers: there is nobody to meet."""
        return self.role == "worker" and self.size == 1 and self.num_servers == 0

    @property
    def is_one_host(self) -> bool:
        """True if the settings alone say that all members are on this machine, and nobody named an address."""
        return self.role == "worker" and self.local_size == self.size and not self.num_servers and not self.scheduler

    @property
    def is_one_machine(self) -> bool:
        """True if nobody outside this machine can be a member; its "hosts" may still be several, by their labels."""
        addresses = self.scheduler_addresses()
        return all(is_loopback(split_address(address)[0]) for address in addresses)

    def scheduler_addresses(self) -> tuple[str, ...]:
        """Every ``host:port`` where the scheduler may be, the likeliest first. Empty where the job needs no address."""
        if self.scheduler is not None:
            return (self.scheduler,)
        if self.is_one_host or self.master is None:
            return ()
        host, port = split_address(self.master)
        first = port + SCHEDULER_PORT_OFFSET
        return tuple(join_address(host, p) for p in range(first, first + SCHEDULER_PORTS) if p <= 65535)


class _Reading:
    """Settings while they are being read: what is known so far, and who said it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._place = find_place(environ) or Place("none")
        self._sources: dict[str, str] = {}
        self.values: dict[str, Any] = {}

    def called(self, name: str) -> str:
        """Where a setting was found: a variable's name."""
        return self._sources.get(name, name)

    def said(self, name: str) -> str:
        """Where a setting was found, and what was written there."""
        source = self.called(name)
        return f"{source} is {self._environ.get(source, self.values[name])!r}"

    def read_launcher(self) -> None:
        """What the launcher told."""
        for name in ("rank", "size", "local_rank", "local_size", "node", "num_servers", "interface", "role"):
            value = getattr(self._place, name)
            if value is not None:
                self.values[name] = value
                self._sources[name] = self._place.sources.get(name, self._place.launcher)

    def read_variables(self) -> None:
        """``COMMLIB_*``."""
        for name, (variable, read) in _VARIABLES.items():
            text = self._environ.get(variable, "").strip()
            if not text:
                continue
            try:
                self.values[name] = read(text)
            except ValueError as error:
                raise ConfigError(f"{variable} is {text!r}; expected {error}") from None
            self._sources[name] = variable

    def take(self, explicit: Mapping[str, Any]) -> None:
        """Arguments, which win."""
        self.values |= explicit
        self._sources |= {name: f"the argument {name}" for name in explicit}

    def read_addresses(self) -> None:
        """Where the launcher says that the scheduler is, or may be, unless that was settled."""
        values, place = self.values, self._place
        if "scheduler" not in values and place.scheduler is not None:  # BytePS starts its own
            values["scheduler"] = place.scheduler
            values.setdefault("scheduler_external", True)
            self._sources["scheduler"] = place.sources["scheduler"]
        host, port = (self._environ.get(variable, "").strip() for variable in ("MASTER_ADDR", "MASTER_PORT"))
        if "scheduler" in values or "master" in values or not host or not port:
            return
        if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) <= 65535:
            raise ConfigError(f"MASTER_PORT is {port!r}; expected a port, 1 to 65535")
        values["master"] = join_address(host.strip("[]"), int(port))

    def complete(self) -> None:
        """Fill in what follows from the rest; refuse what is incomplete."""
        values = self.values
        if values.setdefault("role", "worker") == "worker":
            self._complete_pairs()
            self._complete_place()
        else:
            values |= {"rank": 0, "size": 0, "local_rank": 0, "local_size": 0}
        if "job" not in values:
            values["job"] = self._default_job()
        if "scheduler" not in values and "master" not in values:
            reason = self._why_an_address_is_needed()
            if reason:
                of_byteps = any(name.startswith("DMLC_") for name in self._environ)
                hint = ", or BytePS's DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT" if of_byteps else ""
                expected = f"expected host:port of the scheduler{hint}"
                raise ConfigError(f"COMMLIB_SCHEDULER is not set, but {reason}; {expected}")

    def _complete_pairs(self) -> None:
        """Rank and size are both known or neither is, and so are the local ones; a size of 1 says it all."""
        pairs = (("rank", "size"), ("local_rank", "local_size"))
        for given, missing in (*pairs, *(pair[::-1] for pair in pairs)):
            if given not in self.values or missing in self.values:
                continue
            if given.endswith("size") and self.values[given] == 1:
                self.values[missing] = 0
                continue
            raise ConfigError(
                f"{self._variables_for(missing)} is not set, but {self.said(given)}; expected {_MEANINGS[missing]}"
            )

    def _complete_place(self) -> None:
        values = self.values
        size = values.setdefault("size", 1)
        values.setdefault("rank", 0)
        if "local_size" not in values:
            if size != 1:
                names = " and ".join(self._variables_for(name) for name in ("local_rank", "local_size"))
                raise ConfigError(
                    f"{names} are not set, but {self.said('size')}; expected {_MEANINGS['local_rank']}, and "
                    f"{_MEANINGS['local_size']}"
                )
            values |= {"local_rank": 0, "local_size": 1}
        values.setdefault("node", str(values["rank"] - values["local_rank"]))

    def _variables_for(self, name: str) -> str:
        """The variable to set for `name`: the launcher's and ours."""
        own = _VARIABLES[name][0]
        theirs = self._place.sources.get(name)
        return f"{theirs} (or {own})" if theirs else own

    def _default_job(self) -> str:
        if self._place.job is not None:
            return self._place.job
        if "scheduler" in self.values:
            return str(self.values["scheduler"])
        if "master" in self.values:
            host, port = split_address(self.values["master"])
            return join_address(host, port + SCHEDULER_PORT_OFFSET)
        return parent_identity()

    def _why_an_address_is_needed(self) -> str:
        values = self.values
        if values["role"] != "worker":
            return f"a {values['role']} needs it"
        if values["local_size"] < values["size"]:
            return f"the job has {values['size']} workers, of which only {values['local_size']} are on this host"
        if values.get("num_servers"):
            return self.said("num_servers")
        return self.said("scheduler_external") if values.get("scheduler_external") else ""


_MEANINGS = {
    "rank": "the number of this worker, counted from 0",
    "size": "the number of workers of the job",
    "local_rank": "the number of this worker among those of its host, counted from 0",
    "local_size": "the number of workers on this host",
}


# Field → (test, what is expected).
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "partition_bytes": (
        lambda v: GRANULE_BYTES <= v <= GIB and v % GRANULE_BYTES == 0,
        "a multiple of 64 KiB, 64 KiB to 1 GiB",
    ),
    "streams": (lambda v: 1 <= v <= 64, "1 to 64"),
    "congestion": (
        lambda v: re.fullmatch(r"[a-z0-9_-]{1,15}", v) is not None,
        'the name of a TCP congestion control, as "cubic", or "system", or "auto"',
    ),
    "arena_bytes": (lambda v: MIB <= v <= 1 << 46, "1 MiB to 64 TiB"),
    "local_route": (lambda v: v in LOCAL_ROUTES, "one of " + ", ".join(LOCAL_ROUTES)),
    "role": (lambda v: v in ROLES, "one of " + ", ".join(ROLES)),
    "num_servers": (lambda v: 0 <= v <= 4096, "0 to 4096"),
    "size": (lambda v: 0 <= v <= 1 << 20, "1 to 1048576"),
    "stall_warning_s": (lambda v: 0 <= v <= 1e9, "0 (never) to 1e9"),
    "operation_timeout_s": (lambda v: 0 < v <= 1e9, "more than 0, at most 1e9"),
    "connect_timeout_s": (lambda v: 0 < v <= 1e6, "more than 0, at most 1e6"),
    "peer_timeout_s": (lambda v: 0 < v <= 1e6, "more than 0, at most 1e6"),
}


def _check(values: Mapping[str, Any], said: Callable[[str], str], called: Callable[[str], str]) -> None:
    """Raise ConfigError for a value that is out of its range or contradicts another one."""
    for f in dataclasses.fields(Config):
        if f.name in values and not _has_type(values[f.name], str(f.type)):
            raise ConfigError(f"{said(f.name)}; expected {f.name} to be of type {f.type}")
    for name, (test, expected) in _LIMITS.items():
        if name in values and not test(values[name]):
            raise ConfigError(f"{said(name)}; expected {expected}")
    if values.get("scheduler") is not None:
        try:
            split_address(values["scheduler"])
        except ConfigError:
            raise ConfigError(f"{said('scheduler')}; expected host:port, for instance node0:5555") from None
    if "credit_bytes" in values and values["credit_bytes"] < values.get("partition_bytes", DEFAULT_PARTITION_BYTES):
        raise ConfigError(f"{said('credit_bytes')}; expected at least as much as {called('partition_bytes')}")
    if values.get("role", "worker") == "worker":
        _check_place(values, said)


def _check_place(values: Mapping[str, Any], said: Callable[[str], str]) -> None:
    rank, size = values["rank"], values["size"]
    local_rank, local_size = values["local_rank"], values["local_size"]
    if size < 1:
        raise ConfigError(f"{said('size')}; expected 1 or more")
    if not 0 <= rank < size:
        raise ConfigError(f"{said('rank')}; expected 0 to {size - 1}, because {said('size')}")
    if not 1 <= local_size <= size:
        raise ConfigError(f"{said('local_size')}; expected 1 to {size}, because {said('size')}")
    if not 0 <= local_rank < local_size:
        raise ConfigError(f"{said('local_rank')}; expected 0 to {local_size - 1}, because {said('local_size')}")
    if local_rank > rank:
        raise ConfigError(f"{said('local_rank')}; expected at most {rank}, because {said('rank')}")
    if local_size == size and local_rank != rank:
        raise ConfigError(f"{said('local_rank')}; expected {rank}, because {said('rank')} and all are on this host")


_TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "bool": bool}


def _has_type(value: Any, annotation: str) -> bool:
    if value is None:
        return annotation.endswith("| None")
    annotation = annotation.removesuffix(" | None")
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, _TYPES[annotation]) and (annotation == "bool" or not isinstance(value, bool))
