# SPDX-License-Identifier: Apache-2.0
"""A job on this one machine: the environment of its processes, and its scheduler where it needs one."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence

from commlib.launch.supervisor import Member

__all__ = ["local_job", "prefixes_of"]

# What describes another job, of several hosts, and must not reach this one.
_OF_ANOTHER_JOB = ("COMMLIB_SCHEDULER", "COMMLIB_SCHEDULER_EXTERNAL", "COMMLIB_NUM_SERVERS", "COMMLIB_NODE")


def local_job(
    command: Sequence[str], *, workers: int, servers: int = 0, environ: Mapping[str, str] | None = None
) -> list[Member]:
    """The members of a job of `workers` processes that run `command`, and `servers` dedicated servers, on this host.

    A job without servers needs no address and no scheduler of ours: rank 0 starts one. With servers a scheduler is
    started here, as a child of this process, at a port that the kernel chose while it was bound. Raises CommlibError if
    it does not start.
    """
    base = dict(os.environ if environ is None else environ)
    for name in _OF_ANOTHER_JOB:
        base.pop(name, None)
    base["COMMLIB_JOB"] = f"run-{secrets.token_hex(8)}"
    base.setdefault("COMMLIB_SECRET", secrets.token_hex(32))
    base.setdefault("PYTHONUNBUFFERED", "1")
    if servers:
        base["COMMLIB_NUM_SERVERS"] = str(servers)
        base["COMMLIB_SCHEDULER"] = _start_scheduler(base)
        base["COMMLIB_SCHEDULER_EXTERNAL"] = "1"
    # As torchrun does, but with this job's share of the CPUs: as many threads each as there are CPUs is never right.
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    members = []
    for rank in range(workers):
        place = {
            "COMMLIB_RANK": str(rank),
            "COMMLIB_SIZE": str(workers),
            "COMMLIB_LOCAL_RANK": str(rank),
            "COMMLIB_LOCAL_SIZE": str(workers),
        }
        env = {"OMP_NUM_THREADS": str(threads), **base, **place}
        members.append(Member(f"rank {rank}", command, env, reads_stdin=rank == 0))
    argv = [sys.executable, "-m", "commlib.cli", "server"]
    places = ("COMMLIB_RANK", "COMMLIB_SIZE", "COMMLIB_LOCAL_RANK", "COMMLIB_LOCAL_SIZE")
    env = {name: value for name, value in base.items() if name not in places}
    members += [Member(f"server {index}", argv, env, is_worker=False) for index in range(servers)]
    return members


def prefixes_of(members: Sequence[Member]) -> dict[str, str]:
    """What stands before each line of a member: its rank, or that it is a server."""
    return {member.name: f"[{member.name.removeprefix('rank ')}] " for member in members}


def _start_scheduler(environ: Mapping[str, str]) -> str:
    # Here and not above: a job without servers is started without ZeroMQ.
    from commlib.config import Config
    from commlib.control.scheduler_process import start_scheduler

    # Some address is expected; the one it then gets is another one.
    config = Config.from_environment(environ, role="scheduler", scheduler="127.0.0.1:1")
    return start_scheduler(config, address="127.0.0.1:0").address
