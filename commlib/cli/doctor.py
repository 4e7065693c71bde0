# SPDX-License-Identifier: Apache-2.0
"""`commlib doctor`: what works on this machine, in words. No framework is imported for it, and nothing is changed."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from commlib._version import __version__
from commlib.cli import probes

__all__ = ["Finding", "examine", "show"]

Verdict = Literal["good", "limited", "absent", "missing"]
_MARKS = {"good": "[green]✓[/]", "limited": "[yellow]![/]", "absent": "[dim]–[/]", "missing": "[red]✗[/]"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    `verdict`: "good"; "limited": commlib works, but slower or not everywhere; "absent": an optional thing that is not
    here; "missing": commlib does not work without it.
    """

    area: str
    name: str
    verdict: Verdict
    words: str


def examine() -> list[Finding]:
    """Look at everything; takes a second or two. Nothing that is found is an exception."""
    findings: list[Finding] = []
    for area, checks in _AREAS.items():
        for name, check in checks.items():
            try:
                results = list(check())
            except Exception as error:  # a doctor who faints helps nobody
                results = [("limited", f"could not be looked at: {type(error).__name__}: {error}")]
            findings += [Finding(area, name, verdict, words) for verdict, words in results]
    return findings


def show(findings: list[Finding], *, as_json: bool = False) -> None:
    """Print the findings to standard output: for people, or as a JSON list of objects."""
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # a file has lines as long as they need to be
    for area in dict.fromkeys(finding.area for finding in findings):
        table = Table(box=None, show_header=False, pad_edge=False, title=area, title_justify="left", title_style="bold")
        for finding in findings:
            if finding.area == area:
                table.add_row(_MARKS[finding.verdict], escape(finding.name), escape(finding.words))
        console.print(table)
        console.print()
    missing = [finding.name for finding in findings if finding.verdict == "missing"]
    if missing:
        console.print(f"commlib cannot work here: {escape(', '.join(missing))}", style="bold red")
    else:
        console.print("commlib works here.", style="bold green")


_Results = Iterator[tuple[Verdict, str]]


# This installation.


def _commlib() -> _Results:
    from commlib import _core

    yield "good", f"{__version__}, core in {_core.__file__}"


def _python() -> _Results:
    build = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield "good", f"{build}; {platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}"


def _secret() -> _Results:
    from commlib.control.security import secret_path

    if os.environ.get("COMMLIB_SECRET"):
        yield "good", "taken from COMMLIB_SECRET"
        return
    path = secret_path()
    try:
        status = path.stat()
    except FileNotFoundError:
        yield "good", f"{path} will be made by the first job; several hosts have to share it, or COMMLIB_SECRET"
        return
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        yield (
            "missing",
            f"{path} has mode {mode:o}, others can read it; expected 600. chmod 600 {path}, or make a new one",
        )
    elif not os.access(path, os.R_OK) or status.st_size == 0:
        yield "missing", f"{path} is empty or cannot be read; delete it, or set COMMLIB_SECRET"
    else:
        yield "good", f"{path}; several hosts have to share it, or COMMLIB_SECRET"


# The machine.


def _cpus() -> _Results:
    mask = len(os.sched_getaffinity(0))
    words = f"{mask} of {os.cpu_count()} in this process's affinity mask"
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        words += f", of which the container may use {int(quota[0]) / int(quota[1]):g}"
    yield "good", f"{words}. Jobs with more local ranks than CPUs sleep instead of spinning"


def _simd() -> _Results:
    if platform.machine() != "x86_64":
        yield "good", f"{platform.machine()}: sums are compiled for the baseline of the architecture"
        return
    flags = re.search(r"^flags\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    have = set(flags[1].split()) if flags else set()
    levels = [
        name for name in ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16") if name in have
    ]
    if "avx2" in have:
        yield "good", f"sums use the widest of: {', '.join(levels)}"
    else:
        yield "limited", "this CPU has no AVX2: sums use SSE2 and are slower"


def _numa() -> _Results:
    nodes = {path.name: _read(path / "cpulist") for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))}
    if len(nodes) < 2:
        yield "good", "one node: there is nothing to place"
    else:
        yield "good", "; ".join(f"{name} has CPUs {cpus}" for name, cpus in nodes.items())


def _huge_pages() -> _Results:
    text = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        yield "limited", "this kernel does not tell (shmem_enabled): shared memory uses small pages"
    elif chosen[1] in ("always", "within_size", "advise", "force"):
        yield "good", f"shared memory may have them (shmem_enabled is {chosen[1]})"
    else:
        path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
        yield "limited", f"shared memory has small pages; as root: echo advise > {path}"


def _limits() -> _Results:
    from commlib.config import Config
    from commlib.control.memory import mappable_bytes

    wanted = Config().arena_bytes
    ranks = max(1, len(os.sched_getaffinity(0)))
    arena = mappable_bytes(wanted, ranks)
    space = _limit(resource.RLIMIT_AS)
    if arena < wanted:
        yield (
            "limited",
            f"address space {space} (ulimit -v): with {ranks} local ranks an arena has {arena >> 20} MiB instead of "
            f"{wanted >> 20} MiB; larger buffers then take a slower route",
        )
    else:
        yield (
            "good",
            f"address space {space} (ulimit -v): room for arenas of {wanted >> 20} MiB for {ranks} local ranks",
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    verdict: Verdict = "good" if files == resource.RLIM_INFINITY or files >= 1024 else "limited"
    yield verdict, f"open files {_limit(resource.RLIMIT_NOFILE)} (ulimit -n); one is used per other host and stream"
    yield "good", f"locked memory {_limit(resource.RLIMIT_MEMLOCK)} (ulimit -l); only buffers for GPUs are locked"


def _limit(which: int) -> str:
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"limited to {soft}"


# Between processes of one host.


def _essential(probe: Callable[[], str | None], good: str) -> Callable[[], _Results]:
    def check() -> _Results:
        problem = probe()
        yield ("good", good) if problem is None else ("missing", f"does not work: {problem}")

    return check


def _pidfd() -> _Results:
    problem = probes.pidfd()
    if problem is None:
        yield "good", "the end of a process is seen at once"
    else:
        yield "limited", f"{problem}: the end of a process is seen by its sockets alone"


def _other_memory() -> _Results:
    problem = probes.other_memory()
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    setting = f"kernel.yama.ptrace_scope is {scope}" if scope else "no Yama restriction"
    if problem is None:
        yield "good", f"tried between two processes, {setting}: large ordinary buffers are read where they are"
    else:
        hint = "sysctl kernel.yama.ptrace_scope=0" if scope not in ("", "0") else "in a container: --cap-add SYS_PTRACE"
        yield "limited", f"{problem}, {setting}: ordinary buffers are copied through shared memory ({hint})"


# Several hosts.


def _scheduler() -> _Results:
    from commlib.config import Config
    from commlib.control.addresses import split_address
    from commlib.errors import ConfigError

    try:
        addresses = Config.from_environment().scheduler_addresses()
    except ConfigError as error:
        yield "limited", f"the settings in this environment are not complete: {error}"
        return
    if not addresses:
        yield (
            "good",
            "no address is set, and none is needed on one host; several hosts need COMMLIB_SCHEDULER=host:port",
        )
        return
    states = {address: _port_state(*split_address(address)) for address in addresses}
    verdict: Verdict = "good" if "free" in states.values() or "elsewhere" in states.values() else "limited"
    words = {
        "free": "is free",
        "elsewhere": "is on another host",
        "taken": "is taken by another program, or by the job",
    }
    yield verdict, "; ".join(f"{address} {words.get(state, state)}" for address, state in states.items())


def _congestion() -> _Results:
    from commlib.control.congestion import AUTO, congestion_control_of, set_congestion_control
    from commlib.errors import ConfigError

    wanted = os.environ.get("COMMLIB_CONGESTION", "").lower() or AUTO
    with socket.socket() as probe:
        system = congestion_control_of(probe)
        try:
            set_congestion_control(probe, wanted)
        except ConfigError as error:
            yield "missing", str(error)
            return
        used = congestion_control_of(probe)
    if used == system:
        yield "good", f"{used}, which is the system's"
    elif wanted == AUTO:
        yield "good", f"{used}; the system's is {system}, with which many connections share a link badly"
    else:
        yield "good", f"{used}, as COMMLIB_CONGESTION says; the system's is {system}"


def _port_state(host: str, port: int) -> str:
    import errno

    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(where)
    except socket.gaierror as error:
        return f"is unknown: {error.strerror}"
    except OSError as error:
        return {errno.EADDRINUSE: "taken", errno.EADDRNOTAVAIL: "elsewhere"}.get(error.errno or 0, str(error.strerror))
    return "free"


# Frameworks and devices.


def _package(module: str, *distributions: str, why: str = "") -> Callable[[], _Results]:
    def check() -> _Results:
        if importlib.util.find_spec(module) is None:
            yield "absent", f"not installed{why}"
            return
        for name in distributions or (module,):
            try:
                yield "good", importlib.metadata.version(name)
                return
            except importlib.metadata.PackageNotFoundError:
                continue
        yield "good", "installed, of a version that is not told"

    return check


def _cuda() -> _Results:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield "absent", "no driver (libcuda.so.1): buffers are in ordinary memory"
        return
    version, devices = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(devices))
    known = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if status != 0:
        yield "absent", f"{known}, which does not start (status {status})"
    else:
        yield "good", f"{known}, {devices.value} device{'' if devices.value == 1 else 's'}"


def _nccl() -> _Results:
    candidates = ["libnccl.so.2"]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidates += map(str, Path(folder).glob("nccl/lib/libnccl.so.2"))
    for candidate in candidates:
        try:
            library = ctypes.CDLL(candidate)
        except OSError:
            continue
        code = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(code))
        base = 10000 if code.value >= 10000 else 1000
        yield "good", f"{code.value // base}.{code.value % base // 100}.{code.value % 100}, {candidate}"
        return
    yield "absent", "no library (libnccl.so.2)"


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


_AREAS: dict[str, dict[str, Callable[[], _Results]]] = {
    "This installation": {"commlib": _commlib, "Python": _python, "job secret": _secret},
    "This machine": {
        "CPUs": _cpus,
        "SIMD": _simd,
        "NUMA": _numa,
        "huge pages": _huge_pages,
        "limits": _limits,
    },
    "Between processes of one host": {
        "memfd": _essential(probes.memfd, "memory is shared without names, so that nothing is left behind"),
        "abstract unix sockets": _essential(probes.abstract_sockets, "descriptors are passed through them"),
        "futex": _essential(probes.shared_futex, "one process wakes another"),
        "pidfd": _pidfd,
        "process_vm_readv": _other_memory,
    },
    "Between hosts": {"scheduler": _scheduler, "congestion control": _congestion},
    "Frameworks": {
        "NumPy": _package("numpy"),
        "PyTorch": _package("torch"),
        "TensorFlow": _package("tensorflow", "tensorflow", "tensorflow-cpu", "tf-nightly"),
        "Keras": _package("keras"),
        "ml_dtypes": _package("ml_dtypes", why="; needed for bfloat16 in NumPy"),
        "cloudpickle": _package("cloudpickle", why="; with it, commlib.run takes local functions"),
    },
    "GPUs": {"CUDA": _cuda, "NCCL": _nccl},
}
