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
from commlib.control.launchers import Place, find_place
from commlib.errors import ConfigError

__all__ = ["Config"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GRANULE_BYTES = 64 * KIB  # the unit of placement: partitions are whole granules
DEFAULT_CREDIT_BYTES = 16 * MIB
SCHEDULER_PORT_OFFSET = 1000  # from MASTER_PORT, which the launcher itself may be using
SCHEDULER_PORTS = 16
LOCAL_ROUTES = ("auto", "arena", "cma", "staged")
ROLES = ("worker", "server", "scheduler")


# --- How the text of a variable becomes a value. Each raises ValueError(what was expected).


def _text(text: str) -> str:
    return text


def _integer(text: str) -> int:
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise ValueError("a whole number, 0 or more")
    return int(text)


def _byte_count(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(?:([kmgt])(?:ib)?|b)?", text, re.ASCII | re.IGNORECASE)
    if match is None:
        raise ValueError("a number of bytes, as 4194304, 4096K, 4MiB or 1G (powers of 1024)")
    return int(match[1]) << (10 * (" kmgt".index((match[2] or " ").lower())))


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text, re.ASCII):
        raise ValueError("a number of seconds, 0 or more")
    return float(text)


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("0 or 1")


def _log_level(text: str) -> int:
    level = logging.getLevelNamesMapping().get(text.upper())
    if level is not None:
        return level
    if re.fullmatch(r"\d+", text, re.ASCII):
        return int(text)
    raise ValueError("DEBUG, INFO, WARNING, ERROR, CRITICAL or a number")


# Field → (variable, how to read it).
_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "rank": ("COMMLIB_RANK", _integer),
    "size": ("COMMLIB_SIZE", _integer),
    "local_rank": ("COMMLIB_LOCAL_RANK", _integer),
    "local_size": ("COMMLIB_LOCAL_SIZE", _integer),
    "node": ("COMMLIB_NODE", _text),
    "scheduler": ("COMMLIB_SCHEDULER", _text),
    "scheduler_external": ("COMMLIB_SCHEDULER_EXTERNAL", _flag),
    "job": ("COMMLIB_JOB", _text),
    "num_servers": ("COMMLIB_NUM_SERVERS", _integer),
    "interface": ("COMMLIB_INTERFACE", _text),
    "secret": ("COMMLIB_SECRET", _text),
    "partition_bytes": ("COMMLIB_PARTITION_BYTES", _byte_count),
    "credit_bytes": ("COMMLIB_CREDIT_BYTES", _byte_count),
    "streams": ("COMMLIB_STREAMS", _integer),
    "server_threads": ("COMMLIB_SERVER_THREADS", _integer),
    "arena_bytes": ("COMMLIB_ARENA_BYTES", _byte_count),
    "local_route": ("COMMLIB_LOCAL_ROUTE", lambda text: text.lower()),
    "stall_warning_s": ("COMMLIB_STALL_WARNING_S", _seconds),
    "operation_timeout_s": ("COMMLIB_OPERATION_TIMEOUT_S", _seconds),
    "connect_timeout_s": ("COMMLIB_CONNECT_TIMEOUT_S", _seconds),
    "peer_timeout_s": ("COMMLIB_PEER_TIMEOUT_S", _seconds),
    "asynchronous": ("COMMLIB_ASYNC", _flag),
    "log_level": ("COMMLIB_LOG_LEVEL", _log_level),
}


def physical_memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_server_threads() -> int:
    """A quarter of the CPUs that this process may use, 1 to 4: summing is bound by memory, not by arithmetic."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


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
    partition_bytes: int = 4 * MIB
    credit_bytes: int = DEFAULT_CREDIT_BYTES
    streams: int = 1  # connections per pair of hosts
    server_threads: int = field(default_factory=default_server_threads)
    arena_bytes: int = field(default_factory=physical_memory_bytes)
    local_route: str = "auto"
    stall_warning_s: float = 60.0  # 0: never
    operation_timeout_s: float = 1800.0
    connect_timeout_s: float = 120.0
    peer_timeout_s: float = 30.0
    asynchronous: bool = False
    log_level: int = logging.WARNING

    def __post_init__(self) -> None:
        _check(dataclasses.asdict(self), {})
        if not self.job:
            object.__setattr__(self, "job", parent_identity())

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **explicit: Any) -> Self:
        """Read the settings: `explicit` fields first, then ``COMMLIB_*``, then the launcher's variables.

        `environ` defaults to ``os.environ``; an empty variable counts as unset. Nothing set: a job of size 1.
        Raises ConfigError, naming the variable, its value and what was expected, for a malformed, inconsistent or
        incomplete set.
        """
        environ = os.environ if environ is None else environ
        unknown = explicit.keys() - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"commlib has no setting called {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        place = find_place(environ) or Place("none")
        _read_place(place, values, sources)
        _read_variables(environ, values, sources)
        for name, value in explicit.items():
            if value is not None:
                values[name] = value
                sources[name] = f"the argument {name}"
        _read_addresses(environ, place, values, sources)
        if values.get("role", "worker") == "worker":
            _complete_place(place, values, sources)
        else:
            values |= {"rank": 0, "size": 0, "local_rank": 0, "local_size": 0}
        _complete_rest(place, values, sources)
        _check(values, sources)
        return cls(**values)

    @property
    def is_local_root(self) -> bool:
        """True for local rank 0, the only worker of its host that talks to other hosts."""
        return self.role == "worker" and self.local_rank == 0

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


def _read_place(place: Place, values: dict[str, Any], sources: dict[str, str]) -> None:
    for name in ("rank", "size", "local_rank", "local_size", "node", "num_servers", "interface", "role"):
        value = getattr(place, name)
        if value is not None:
            values[name] = value
            sources[name] = place.sources.get(name, place.launcher)


def _read_variables(environ: Mapping[str, str], values: dict[str, Any], sources: dict[str, str]) -> None:
    for name, (variable, read) in _VARIABLES.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        try:
            values[name] = read(text)
        except ValueError as error:
            raise ConfigError(f"{variable} is {text!r}; expected {error}") from None
        sources[name] = variable


def _read_addresses(environ: Mapping[str, str], place: Place, values: dict[str, Any], sources: dict[str, str]) -> None:
    if values.get("scheduler") is None and place.scheduler is not None:  # BytePS starts its own
        values["scheduler"] = place.scheduler
        values.setdefault("scheduler_external", True)
        sources["scheduler"] = place.sources["scheduler"]
    address, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    if values.get("scheduler") is not None or values.get("master") is not None or not address or not port:
        return
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) <= 65535:
        raise ConfigError(f"MASTER_PORT is {port!r}; expected a port, 1 to 65535")
    values["master"] = join_address(address.strip("[]"), int(port))
    sources["master"] = "MASTER_ADDR and MASTER_PORT"


def _complete_place(place: Place, values: dict[str, Any], sources: dict[str, str]) -> None:
    """Rank and size must both be known or neither; the local ones too, unless the job has one worker."""
    pairs = (("rank", "size"), ("local_rank", "local_size"))
    for given, missing in (*pairs, *(pair[::-1] for pair in pairs)):
        if given not in values or missing in values:
            continue
        if given == "size" and values["size"] == 1:
            values["rank"] = 0
        elif given == "local_size" and values["local_size"] == 1:
            values["local_rank"] = 0
        elif given.startswith("local") and values.get("size", 1) == 1:
            values[missing] = 1 if missing == "local_size" else 0
        else:
            raise ConfigError(
                f"{_variables_for(missing, place)} is not set, but {sources[given]} is {values[given]}; expected "
                f"{_MEANINGS[missing]}"
            )
    size = values.setdefault("size", 1)
    values.setdefault("rank", 0)
    if "local_size" not in values:
        if size != 1:
            names = " and ".join(_variables_for(name, place) for name in ("local_rank", "local_size"))
            raise ConfigError(
                f"{names} are not set, but {sources['size']} is {size}; expected which of the workers of its host this "
                "one is, counted from 0, and how many there are"
            )
        values |= {"local_rank": 0, "local_size": 1}
    if "node" not in values:
        values["node"] = str(values["rank"] - values["local_rank"])


_MEANINGS = {
    "rank": "the number of this worker, counted from 0",
    "size": "the number of workers of the job",
    "local_rank": "the number of this worker among those of its host, counted from 0",
    "local_size": "the number of workers on this host",
}


def _variables_for(name: str, place: Place) -> str:
    """The variable to set for `name`: the launcher's and ours."""
    own = _VARIABLES[name][0]
    theirs = place.sources.get(name)
    return f"{theirs} (or {own})" if theirs else own


def _complete_rest(place: Place, values: dict[str, Any], sources: dict[str, str]) -> None:
    worker = values.get("role", "worker") == "worker"
    if "job" not in values:
        job = place.job or values.get("scheduler")
        if job is None and values.get("master") is not None:
            host, port = split_address(values["master"])
            job = join_address(host, port + SCHEDULER_PORT_OFFSET)
        values["job"] = job or parent_identity()
    if "credit_bytes" not in values:
        values["credit_bytes"] = max(DEFAULT_CREDIT_BYTES, 2 * values.get("partition_bytes", 0))
    has_address = values.get("scheduler") is not None or values.get("master") is not None
    if has_address:
        return
    reason = ""
    if not worker:
        reason = f"a {values['role']} needs it"
    elif values["local_size"] < values["size"]:
        reason = f"the job has {values['size']} workers and only {values['local_size']} of them are on this host"
    elif values.get("num_servers", 0):
        reason = f"{sources['num_servers']} is {values['num_servers']}"
    elif values.get("scheduler_external"):
        reason = f"{sources['scheduler_external']} is set"
    if reason:
        raise ConfigError(f"COMMLIB_SCHEDULER is not set, but {reason}; expected host:port of the scheduler")


# Field → (test, what is expected).
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "partition_bytes": (
        lambda v: GRANULE_BYTES <= v <= GIB and v % GRANULE_BYTES == 0,
        "a multiple of 64 KiB, 64 KiB to 1 GiB",
    ),
    "streams": (lambda v: 1 <= v <= 64, "1 to 64"),
    "server_threads": (lambda v: 1 <= v <= 256, "1 to 256"),
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


def _check(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raise ConfigError for a value that is out of its range or contradicts another one."""

    def called(name: str) -> str:
        return sources.get(name, name)

    def refuse(name: str, expected: str) -> None:
        raise ConfigError(f"{called(name)} is {values[name]!r}; expected {expected}")

    for f in dataclasses.fields(Config):
        if f.name in values:
            _check_type(f.name, str(f.type), values[f.name], called(f.name))
    for name, (test, expected) in _LIMITS.items():
        if name in values and not test(values[name]):
            refuse(name, expected)
    if values.get("scheduler") is not None:
        try:
            split_address(values["scheduler"])
        except ConfigError:
            refuse("scheduler", "host:port of the scheduler, for instance node0:5555")
    if "credit_bytes" in values and values["credit_bytes"] < values.get("partition_bytes", 0):
        refuse("credit_bytes", f"at least {called('partition_bytes')}, which is {values['partition_bytes']}")
    if values.get("role", "worker") == "worker":
        _check_place(values, called, refuse)


def _check_place(values: Mapping[str, Any], called: Callable[[str], str], refuse: Callable[[str, str], None]) -> None:
    rank, size = values["rank"], values["size"]
    local_rank, local_size = values["local_rank"], values["local_size"]
    if size < 1:
        refuse("size", "1 or more")
    if not 0 <= rank < size:
        refuse("rank", f"0 to {size - 1}, because {called('size')} is {size}")
    if not 1 <= local_size <= size:
        refuse("local_size", f"1 to {size}, because {called('size')} is {size}")
    if not 0 <= local_rank < local_size:
        refuse("local_rank", f"0 to {local_size - 1}, because {called('local_size')} is {local_size}")
    if local_rank > rank:
        refuse("local_rank", f"at most {called('rank')}, which is {rank}")
    if local_size == size and local_rank != rank:
        refuse("local_rank", f"{rank}, as {called('rank')}, because all {size} workers are on this host")


_TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "bool": bool}


def _check_type(name: str, annotation: str, value: Any, called: str) -> None:
    if value is None and annotation.endswith("| None"):
        return
    annotation = annotation.removesuffix(" | None")
    fits = isinstance(value, _TYPES[annotation]) and (annotation == "bool" or not isinstance(value, bool))
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{called} is {value!r}; expected {name} to be of type {annotation}")
