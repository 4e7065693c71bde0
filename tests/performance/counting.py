# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions and the system calls of operations, in programs that say where those begin and end.

Such a program calls `getsid` before and after the operations of each case, and prints each case's name and how many
operations that were. There are two: the core alone (tests/native/operations.cpp), and calls from Python (`calls.py`).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from commlib import _core
from tests.launch import REPOSITORY, environment

MARK = "getsid"
TOOLS = ("valgrind", "strace")
BUILD_S = 200  # of time, at most
RUN_S = 120

# Of one operation: instructions, or how often each system call. By case.
Count = float | dict[str, float]
Counts = dict[str, Count]

_OPERATIONS = REPOSITORY / "build" / "native" / "counted" / "operations"
_CALLS = Path(__file__).with_name("calls.py")
# Where a call from Python enters and leaves the binding.
_BINDING = re.compile(r"__pyx_pw_\w*(Worker_\d+push_pull(_now)?|Handle_\d+wait)\b")
# Whether these are system calls depends on the machine.
_CLOCKS = {"clock_gettime", "gettimeofday", "time"}
# The C library copies and compares with the best instructions that a processor has; here with those that all have. What
# `rep movsb` copies would count byte by byte.
_PLAIN_LIBC = "glibc.cpu.hwcaps=-AVX_Fast_Unaligned_Load,-AVX2,-AVX512F,-SSSE3,-ERMS"


class CountingError(RuntimeError):
    """A program could not be built or run, or has not counted as it should; the text has what it said."""


def what_is_missing() -> str | None:
    """Why nothing can be counted here; None if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}; `make test` installs them, or says how" if missing else None


def core_instructions(folder: Path) -> Counts:
    """Of all ranks and servers of a job together. `folder` is for what Callgrind writes."""
    return _instructions([_operations()], folder)


def core_system_calls(folder: Path) -> Counts:
    """The same for system calls."""
    return _system_calls([_operations()], folder)


def python_instructions(folder: Path) -> Counts:
    """Of the calling thread: of whole calls, and of what of them is in the binding and below."""
    return _instructions([sys.executable, str(_CALLS)], folder, inside={"in the binding": _BINDING})


def python_system_calls(folder: Path) -> Counts:
    """Of the calling thread. Any other thread of the core sleeps until it is woken, which takes a system call."""
    return _system_calls([sys.executable, str(_CALLS)], folder)


MEASUREMENTS: dict[str, dict[str, Callable[[Path], Counts]]] = {
    "core": {"instructions": core_instructions, "system calls": core_system_calls},
    "python": {"instructions": python_instructions, "system calls": python_system_calls},
}


def made_with(program: str) -> dict[str, str]:
    """What numbers depend on besides our own code, as exactly as it matters."""
    of_both = {"machine": platform.machine(), "libc": _short(" ".join(platform.libc_ver()), 2)}
    if program == "core":
        sending, receiving = socket.socketpair()
        with sending, receiving:
            buffer = sending.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        return of_both | {"compiler": _compiler_of(_operations()), "socket buffer": str(buffer)}
    return of_both | {
        "compiler": _compiler_of(_core.__file__),
        "flags": str(sysconfig.get_config_var("CFLAGS")),  # Python's own, which its extensions are compiled with, too
        "python": _short(platform.python_version(), 2),
        "numpy": _short(np.__version__, 2),
    }


def _short(version: str, parts: int) -> str:
    return ".".join(version.split(".")[:parts])


def _compiler_of(binary: str | Path) -> str:
    """What a compiler writes into what it makes. The C library's part is in there, too, often made by an older one."""
    found = re.findall(rb"(GCC: \([^)]*\)|clang version) (\d+)\.", Path(binary).read_bytes())
    if not found:
        return "unknown"
    kind, major = max(found, key=lambda one: int(one[1]))
    return f"{'gcc' if kind.startswith(b'GCC') else 'clang'} {int(major)}"


def _operations() -> str:
    """The path of the program without Python, which is built first where that is needed."""
    _OPERATIONS.parent.mkdir(parents=True, exist_ok=True)
    # Two test processes may want it at once. We are not part of a `make` that may have started us.
    make = ["make", "--silent", "-C", str(REPOSITORY / "tests" / "native"), "counted"]
    lock = str(_OPERATIONS.with_name("building"))
    _execute(["flock", lock, *make], BUILD_S, {"MAKEFLAGS": None, "MAKELEVEL": None, "MFLAGS": None})
    return str(_OPERATIONS)


def _execute(argv: list[str], timeout_s: float, env: Mapping[str, str | None]) -> str:
    try:
        done = subprocess.run(
            argv, env=environment(env), capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CountingError(f"{' '.join(argv)}: not over after {timeout_s} s") from error
    if done.returncode != 0:
        raise CountingError(f"{' '.join(argv)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _run(tool: list[str], program: list[str]) -> list[tuple[str, int]]:
    """Run it under a tool: the names of its cases, and how many operations each had."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    env = {"GLIBC_TUNABLES": _PLAIN_LIBC, "PYTHONHASHSEED": "0", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    said = _execute([*tool, *program], RUN_S, env)
    return [(name, int(count)) for name, _, count in (line.partition("\t") for line in said.splitlines())]


def _instructions(program: list[str], folder: Path, inside: Mapping[str, re.Pattern[str]] | None = None) -> Counts:
    """By Callgrind, which writes a file at each mark: the one at an even mark is of the operations since the last."""
    out = folder / "callgrind"
    callgrind = ["valgrind", "-q", "--tool=callgrind", "--separate-threads=yes"]
    cases = _run([*callgrind, f"--dump-before={MARK}", f"--callgrind-out-file={out}"], program)
    marks = len(list(folder.glob("callgrind.*-01")))
    if marks != 2 * len(cases) or not cases:
        raise CountingError(f"{len(cases)} cases, but {marks} marks: {MARK} is called elsewhere, or not at all")
    counts: Counts = {}
    for number, (name, operations) in enumerate(cases):
        profile = Path(f"{out}.{2 * number + 2}-01").read_text(errors="replace")
        total = re.search(r"^summary: (\d+)$", profile, re.MULTILINE)
        if total is None:
            raise CountingError(f"Callgrind has counted nothing for {name}")
        counts[name] = int(total[1]) / operations
        for part, functions in (inside or {}).items():
            counts[f"{name}, {part}"] = sum(_calls_of(profile, functions)) / operations
    return counts


def _calls_of(profile: str, functions: re.Pattern[str]) -> Iterator[int]:
    """The cost of each kind of call of such functions, with all that they call in turn.

    https://valgrind.org/docs/manual/cl-format.html: the name of a function stands beside its number once, and the line
    after "calls=" ends with the cost.
    """
    names: dict[str, str] = {}
    callee = ""
    is_cost = False
    for line in profile.splitlines():
        key, _, value = line.partition("=")
        if key in ("fn", "cfn"):
            number, _, name = value.partition(" ")
            callee = names.setdefault(number, name)
        elif is_cost and functions.search(callee):
            yield int(line.split()[1])
        is_cost = key == "calls"


def _system_calls(program: list[str], folder: Path) -> Counts:
    """By strace, of the first thread alone: what it writes between an odd mark and the next."""
    log = folder / "strace"
    cases = _run(["strace", "-qq", "-o", str(log)], program)
    calls = re.findall(r"^(\w+)\(", log.read_text(errors="replace"), re.MULTILINE)
    marks = [index for index, call in enumerate(calls) if call == MARK]
    if len(marks) != 2 * len(cases) or not cases:
        raise CountingError(f"{len(cases)} cases, but {len(marks)} marks: {MARK} is called elsewhere, or not at all")
    counts: Counts = {}
    for (name, operations), begin, end in zip(cases, marks[::2], marks[1::2], strict=True):
        found = Counter(call for call in calls[begin + 1 : end] if call not in _CLOCKS)
        counts[name] = {call: count / operations for call, count in sorted(found.items())}
    return counts
