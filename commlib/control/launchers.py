# SPDX-License-Identifier: Apache-2.0
"""What launchers tell a process about its place in the job, each in its own environment variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from commlib.errors import ConfigError

__all__ = ["Place", "find_place"]

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """What one launcher told. None: it did not say. ``sources`` names the variable behind each field."""

    launcher: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node: str | None = None
    job: str | None = None
    scheduler: str | None = None
    interface: str | None = None
    num_servers: int | None = None
    role: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)


def _integer(environ: Environ, variable: str) -> int | None:
    text = environ.get(variable, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise ConfigError(f"{variable} is {text!r}; expected a whole number, 0 or more")
    return int(text)


def _first(environ: Environ, *variables: str) -> tuple[int | None, str]:
    """The first of `variables` that is set, and which one it was (the first one where none is set)."""
    for variable in variables:
        value = _integer(environ, variable)
        if value is not None:
            return value, variable
    return None, variables[0]


def _place(environ: Environ, launcher: str, fields: Mapping[str, tuple[str, ...]]) -> Place:
    """A place whose whole-number fields stand in the variables named in `fields`."""
    found = {name: _first(environ, *variables) for name, variables in fields.items()}
    values: dict[str, Any] = {name: value for name, (value, _) in found.items()}
    return Place(launcher, sources={name: variable for name, (_, variable) in found.items()}, **values)


def _torchrun(environ: Environ) -> Place | None:
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    place = _place(
        environ,
        "torchrun",
        {
            "rank": ("RANK",),
            "size": ("WORLD_SIZE",),
            "local_rank": ("LOCAL_RANK",),
            "local_size": ("LOCAL_WORLD_SIZE",),
        },
    )
    job = None
    if run_id := environ.get("TORCHELASTIC_RUN_ID"):
        # The run id is "none" unless the user chose one: the master makes it unique, the restart count makes it new.
        restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        job = f"torchrun/{run_id}/{restart}/{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    return replace(place, node=environ.get("GROUP_RANK") or None, job=job)


def _byteps(environ: Environ) -> Place | None:
    """BytePS counts machines, not processes: DMLC_NUM_WORKER of them, each with BYTEPS_LOCAL_SIZE processes."""
    role = environ.get("DMLC_ROLE", "").strip().lower() or None
    if role is None and "DMLC_NUM_WORKER" not in environ:
        return None
    if role == "joint":  # BytePS: a worker that also serves, which every worker of commlib does
        role = "worker"
    if role not in (None, "worker", "server", "scheduler"):
        raise ConfigError(f"DMLC_ROLE is {role!r}; expected worker, server or scheduler")
    machines = _integer(environ, "DMLC_NUM_WORKER")
    machine = _integer(environ, "DMLC_WORKER_ID")
    machine = 0 if machine is None and machines == 1 else machine
    local_rank = _integer(environ, "BYTEPS_LOCAL_RANK") or 0
    local_size = _integer(environ, "BYTEPS_LOCAL_SIZE")
    local_size = 1 if local_size is None else local_size
    # On one machine BytePS uses neither servers nor scheduler; what these variables say does not matter then.
    networked = machines != 1 or environ.get("BYTEPS_FORCE_DISTRIBUTED", "0").strip() not in ("", "0")
    uri, port = environ.get("DMLC_PS_ROOT_URI"), environ.get("DMLC_PS_ROOT_PORT")
    if networked and bool(uri) != bool(port):
        raise ConfigError(f"DMLC_PS_ROOT_URI is {uri!r} and DMLC_PS_ROOT_PORT is {port!r}; expected both")
    return Place(
        "BytePS",
        rank=None if machine is None else machine * local_size + local_rank,
        size=None if machines is None else machines * local_size,
        local_rank=local_rank,
        local_size=local_size,
        node=None if machine is None else str(machine),
        scheduler=f"{uri}:{port}" if networked and uri else None,
        interface=environ.get("DMLC_NODE_HOST") or environ.get("DMLC_INTERFACE") or None,
        num_servers=(_integer(environ, "DMLC_NUM_SERVER") or 0) if networked else 0,
        role=role,
        sources={
            "rank": "DMLC_WORKER_ID",
            "size": "DMLC_NUM_WORKER",
            "local_rank": "BYTEPS_LOCAL_RANK",
            "local_size": "BYTEPS_LOCAL_SIZE",
            "num_servers": "DMLC_NUM_SERVER",
            "scheduler": "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT",
            "interface": "DMLC_NODE_HOST",
        },
    )


def _open_mpi(environ: Environ) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environ and "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    place = _place(
        environ,
        "Open MPI",
        {
            "rank": ("OMPI_COMM_WORLD_RANK",),
            "size": ("OMPI_COMM_WORLD_SIZE",),
            "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
            "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        },
    )
    return replace(place, node=environ.get("PMIX_HOSTNAME") or None, job=environ.get("PMIX_NAMESPACE") or None)


def _mpich(environ: Environ) -> Place | None:
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        return None
    place = _place(
        environ,
        "MPICH",
        {
            "rank": ("PMI_RANK",),
            "size": ("PMI_SIZE",),
            "local_rank": ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
            "local_size": ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
        },
    )
    return replace(place, job=environ.get("PMIX_NAMESPACE") or None)


def _pmix(environ: Environ) -> Place | None:
    """A PMIx launcher that is not Open MPI's tells the rank; the counts are where MPI or Slurm leave them."""
    if "PMIX_RANK" not in environ:
        return None
    place = _place(
        environ,
        "PMIx",
        {
            "rank": ("PMIX_RANK",),
            "size": ("PMIX_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
            "local_rank": ("PMIX_LOCAL_RANK", "SLURM_LOCALID"),
            "local_size": ("PMIX_LOCAL_SIZE",),
        },
    )
    return replace(place, node=environ.get("PMIX_HOSTNAME") or None, job=environ.get("PMIX_NAMESPACE") or None)


def _slurm_local_size(environ: Environ, node: int | None) -> tuple[int | None, str]:
    """The tasks on this node, out of a list like ``4(x2),3``: one number a node, runs folded."""
    for variable in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        text = environ.get(variable, "").strip()
        if not text or node is None:
            continue
        if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text, re.ASCII):
            raise ConfigError(f"{variable} is {text!r}; expected a list like 4(x2),3")
        seen = 0
        for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
            seen += int(repeat or 1)
            if node < seen:
                return int(count), variable
        raise ConfigError(f"{variable} is {text!r}, for {seen} nodes; expected one for node {node} (SLURM_NODEID)")
    return _first(environ, "SLURM_NTASKS_PER_NODE")


def _slurm(environ: Environ) -> Place | None:
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    # The batch script of a job has SLURM_PROCID=0 and SLURM_NTASKS too, but only `srun` starts tasks, in a step.
    if "SLURM_PROCID" not in environ or (job and not step):
        return None
    place = _place(
        environ,
        "Slurm",
        {
            "rank": ("SLURM_PROCID",),
            "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
            "local_rank": ("SLURM_LOCALID",),
        },
    )
    node = _integer(environ, "SLURM_NODEID")
    local_size, variable = _slurm_local_size(environ, node)
    return replace(
        place,
        local_size=local_size,
        node=None if node is None else str(node),
        job=f"{job}.{step}" if job and step else None,
        sources={**place.sources, "local_size": variable},
    )


# Those that start each process themselves before those that a cluster's environment may merely contain.
_LAUNCHERS: tuple[Callable[[Environ], Place | None], ...] = (_torchrun, _byteps, _open_mpi, _mpich, _pmix, _slurm)


def find_place(environ: Environ) -> Place | None:
    """What the launcher of this process told, None if none did.

    Where several launchers have left their variables (torchrun under ``srun``, say), the one nearest to the process
    counts. What it did not say is taken from another that agrees about rank and size.
    """
    places = [place for launcher in _LAUNCHERS if (place := launcher(environ)) is not None]
    if not places:
        return None
    nearest = places[0]
    for other in places[1:]:
        if nearest.rank is None or (other.rank, other.size) != (nearest.rank, nearest.size):
            continue
        if nearest.local_rank is None and nearest.local_size is None:
            local = {name: other.sources.get(name, "") for name in ("local_rank", "local_size")}
            nearest = replace(
                nearest,
                local_rank=other.local_rank,
                local_size=other.local_size,
                node=nearest.node or other.node,
                sources={**nearest.sources, **local},
            )
        nearest = replace(nearest, job=nearest.job or other.job)
    return nearest
