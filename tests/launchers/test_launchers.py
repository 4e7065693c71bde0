# SPDX-License-Identifier: Apache-2.0
"""Other launchers' jobs: every process finds its place, the sums are right, and nothing is left behind."""

from __future__ import annotations

import importlib.util

import pytest

import commlib
from tests.lab import Lab
from tests.launch import unused_port
from tests.launchers import COMMLIB, MPIRUN, TORCHRUN, Place, Programs, on_one_host

pytestmark = pytest.mark.timeout(240)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

SECRET = {"COMMLIB_SECRET": "of these hosts"}


@needs_torch
@pytest.mark.parametrize("options", [["--standalone"], ["--master-port"]], ids=lambda options: options[0])
def test_torchrun(options: list[str]) -> None:
    port = [] if "--standalone" in options else [str(unused_port())]
    with Programs() as programs:
        programs.start([*TORCHRUN, *options, *port, "--nproc-per-node", "2", *programs.script(1)])
        assert programs.meet(2) == ["1 0", "1 1"]
        programs.wait()
        assert programs.places(1) == on_one_host(2)


def test_mpirun() -> None:
    with Programs() as programs:
        programs.start([*MPIRUN, "-n", "2", *programs.worker(1)])
        assert programs.meet(2) == ["1 0", "1 1"]
        programs.wait()
        assert programs.places(1) == on_one_host(2)


def byteps(port: int, *, machines: int, servers: int = 1) -> dict[str, str]:
    """What all processes of a BytePS job are told."""
    return {
        "DMLC_NUM_WORKER": str(machines),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
    }


def test_byteps_on_two_machines() -> None:
    job = byteps(unused_port(), machines=2)
    with Programs() as programs:
        programs.start([*COMMLIB, "scheduler"], {**job, "DMLC_ROLE": "scheduler"})
        programs.start([*COMMLIB, "server"], {**job, "DMLC_ROLE": "server"})
        for machine in range(2):
            programs.start(programs.worker(1), {**job, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(machine)})
        assert programs.meet(2) == ["1 0", "1 1"]
        programs.wait()
        assert programs.places(1) == [Place(rank, 2, 0, 1, 1) for rank in range(2)]


@pytest.mark.parametrize("distributed", [False, True])
def test_byteps_on_one_machine(distributed: bool) -> None:
    """It uses neither scheduler nor servers, whatever is said about them, unless it is forced to."""
    job = byteps(unused_port(), machines=1) | ({"BYTEPS_FORCE_DISTRIBUTED": "1"} if distributed else {})
    with Programs() as programs:
        if distributed:
            programs.start([*COMMLIB, "scheduler"], {**job, "DMLC_ROLE": "scheduler"})
            programs.start([*COMMLIB, "server"], {**job, "DMLC_ROLE": "server"})
        for local_rank in range(2):
            place = {"DMLC_WORKER_ID": "0", "BYTEPS_LOCAL_RANK": str(local_rank), "BYTEPS_LOCAL_SIZE": "2"}
            programs.start(programs.worker(1), {**job, "DMLC_ROLE": "worker", **place})
        assert programs.meet(2) == ["1 0", "1 1"]
        programs.wait()
        assert programs.places(1) == on_one_host(2, num_servers=int(distributed))


@pytest.mark.lab
def test_several_hosts_by_hand() -> None:
    """Two processes on one host and one on another, near the master that they are told."""
    hosts = [2, 1]
    with Lab(len(hosts)) as lab, Programs() as programs:
        job = {"MASTER_ADDR": lab.address(0), "MASTER_PORT": "29500", "WORLD_SIZE": "3", **SECRET}
        for host, count in enumerate(hosts):
            for local_rank in range(count):
                rank = sum(hosts[:host]) + local_rank
                place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(count)}
                programs.start(lab.command(host, programs.worker(1)), {**job, **place})
        assert programs.meet(3) == ["1 0", "1 1", "1 2"]
        programs.wait()
        assert programs.places(1) == [Place(0, 3, 0, 2, 0), Place(1, 3, 1, 2, 0), Place(2, 3, 0, 1, 0)]


@pytest.mark.lab
def test_several_hosts_and_a_server_by_hand() -> None:
    with Lab(3) as lab, Programs() as programs:
        job = {"COMMLIB_SCHEDULER": f"{lab.address(0)}:5555", "COMMLIB_NUM_SERVERS": "1", **SECRET}
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            programs.start(lab.command(rank, programs.worker(1)), {**job, **place})
        programs.start(lab.command(2, [*COMMLIB, "server"]), job)
        assert programs.meet(2) == ["1 0", "1 1"]
        programs.wait()
        assert programs.places(1) == [Place(rank, 2, 0, 1, 1) for rank in range(2)]


@needs_torch
@pytest.mark.lab
def test_torchrun_on_several_hosts() -> None:
    with Lab(2) as lab, Programs() as programs:
        for host in range(2):
            master = [
                "--nnodes",
                "2",
                "--node-rank",
                str(host),
                "--master-addr",
                lab.address(0),
                "--master-port",
                "29500",
            ]
            argv = [*TORCHRUN, *master, "--nproc-per-node", "2", *programs.script(1)]
            programs.start(lab.command(host, argv), SECRET)
        assert programs.meet(4) == [f"1 {rank}" for rank in range(4)]
        programs.wait()
        assert programs.places(1) == [Place(rank, 4, rank % 2, 2, 0) for rank in range(4)]


def test_a_script_alone() -> None:
    with Programs() as programs:
        programs.start(programs.worker(1))
        assert programs.meet(1) == ["1 0"]
        programs.wait()
        assert programs.places(1) == on_one_host(1)


def summed(mine: float) -> tuple[int, int, list[float]]:
    """What each process of `commlib.run` calls."""
    import numpy as np

    commlib.init()
    total = commlib.push_pull(np.full(3, mine * (commlib.rank() + 1)), op=commlib.Sum)
    return commlib.rank(), commlib.size(), total.tolist()


@pytest.mark.parametrize("np", [1, 3])
def test_a_function(np: int) -> None:
    total = 2.5 * np * (np + 1) / 2
    assert commlib.run(summed, (2.5,), np=np) == [(rank, np, [total] * 3) for rank in range(np)]


@pytest.mark.parametrize("servers", [0, 1])
def test_two_jobs_of_commlib_run_at_once(servers: int) -> None:
    with Programs() as programs:
        for job in (1, 2):
            programs.start([*COMMLIB, "run", "-n", "2", "--servers", str(servers), "--", *programs.worker(job)])
        assert programs.meet(4) == ["1 0", "1 1", "2 0", "2 1"]
        programs.wait()
        assert programs.places(1) == programs.places(2) == on_one_host(2, num_servers=servers)


@needs_torch
def test_two_jobs_of_torchrun_at_once() -> None:
    first = unused_port()
    with Programs() as programs:
        for job, port in ((1, first), (2, unused_port(but=[first]))):
            programs.start([*TORCHRUN, "--master-port", str(port), "--nproc-per-node", "2", *programs.script(job)])
        assert programs.meet(4) == ["1 0", "1 1", "2 0", "2 1"]
        programs.wait()
        assert programs.places(1) == programs.places(2) == on_one_host(2)


def test_two_jobs_of_mpirun_at_once() -> None:
    with Programs() as programs:
        for job in (1, 2):
            programs.start([*MPIRUN, "-n", "2", *programs.worker(job)])
        assert programs.meet(4) == ["1 0", "1 1", "2 0", "2 1"]
        programs.wait()
        assert programs.places(1) == programs.places(2) == on_one_host(2)


def test_two_programs_of_one_parent_at_once() -> None:
    """Alone they are jobs of one, although what tells jobs apart where nobody does, the parent, is the same."""
    with Programs() as programs:
        for job in (1, 2):
            programs.start(programs.worker(job))
        assert programs.meet(2) == ["1 0", "2 0"]
        programs.wait()
        assert programs.places(1) == programs.places(2) == on_one_host(1)
