# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import pytest

from commlib.config import Config
from commlib.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node0-77@1",
    "PMIX_RANK": "5",
    "PMIX_HOSTNAME": "node1",
    "COMMLIB_SCHEDULER": "node0:5555",
}
MPICH = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "COMMLIB_SCHEDULER": "node0:5555",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "COMMLIB_SCHEDULER": "node0:5555",
}
BYTEPS = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "2",
    "DMLC_WORKER_ID": "1",
    "DMLC_NUM_SERVER": "3",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "1234",
    "DMLC_NODE_HOST": "10.0.0.2",
    "BYTEPS_LOCAL_RANK": "1",
    "BYTEPS_LOCAL_SIZE": "4",
}
OWN = {
    "COMMLIB_RANK": "5",
    "COMMLIB_SIZE": "8",
    "COMMLIB_LOCAL_RANK": "1",
    "COMMLIB_LOCAL_SIZE": "4",
    "COMMLIB_SCHEDULER": "node0:5555",
}


def read(environ: dict[str, str], **explicit: Any) -> Config:
    return Config.from_environment(environ, **explicit)


def place(config: Config) -> tuple[int, int, int, int, str]:
    return config.rank, config.size, config.local_rank, config.local_size, config.node


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# --- Nothing set


def test_nothing_set_is_a_job_of_one() -> None:
    config = read({})
    assert place(config) == (0, 1, 0, 1, "0")
    assert config.is_solo
    assert config.scheduler_addresses() == ()


def test_the_defaults_are_those_of_the_manual() -> None:
    config = read({})
    assert config.partition_bytes == 1 << 20
    assert config.credit_bytes == 8 << 20
    assert config.streams == 1
    assert config.num_servers == 0
    assert config.arena_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert config.local_route == "auto"
    limits = (config.stall_warning_s, config.operation_timeout_s, config.connect_timeout_s, config.peer_timeout_s)
    assert limits == (60.0, 1800.0, 120.0, 30.0)
    assert not config.asynchronous
    assert config.log_level == logging.WARNING
    assert config == Config()


def test_the_default_job_is_the_same_for_siblings_and_another_for_other_parents() -> None:
    assert read({}).job == read({}).job
    assert str(os.getppid()) in read({}).job


def test_it_is_frozen_and_shows_no_secret() -> None:
    config = read({"COMMLIB_SECRET": "hush hush"})
    assert config.secret == "hush hush"
    assert "hush" not in repr(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 1  # type: ignore[misc, unused-ignore]


# --- Launchers


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, (5, 8, 1, 4, "1")),
        (OPEN_MPI, (5, 8, 1, 4, "node1")),
        (MPICH, (5, 8, 1, 4, "4")),
        (SLURM, (5, 7, 1, 3, "1")),
        (BYTEPS, (5, 8, 1, 4, "1")),
        (OWN, (5, 8, 1, 4, "4")),
    ],
    ids=["torchrun", "Open MPI", "MPICH", "Slurm", "BytePS", "own"],
)
def test_each_launcher_tells_the_place(environ: dict[str, str], expected: tuple[int, int, int, int, str]) -> None:
    assert place(read(environ)) == expected


def test_torchrun_tells_job_and_address() -> None:
    config = read(TORCHRUN)
    assert config.job == "torchrun/none/2/node0:29500"
    assert config.scheduler is None
    assert config.scheduler_addresses() == tuple(f"node0:{port}" for port in range(30500, 30516))
    assert not config.scheduler_external


def test_torchrun_on_one_host_needs_no_address() -> None:
    config = read(TORCHRUN | {"RANK": "1", "WORLD_SIZE": "4"})
    assert config.is_one_host
    assert config.scheduler_addresses() == ()


def test_a_restart_is_another_job() -> None:
    assert read(TORCHRUN).job != read(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}).job


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (OPEN_MPI, "prterun-node0-77@1"),
        (SLURM, "1234.0"),
        (BYTEPS, "10.0.0.1:1234"),
        (MPICH, "node0:5555"),
        (without(TORCHRUN, "TORCHELASTIC_RUN_ID"), "node0:30500"),
        (TORCHRUN | {"COMMLIB_JOB": "mine"}, "mine"),
    ],
)
def test_job_ids(environ: dict[str, str], job: str) -> None:
    assert read(environ).job == job


def test_byteps_counts_machines_and_starts_its_own_scheduler() -> None:
    config = read(BYTEPS)
    assert config.scheduler == "10.0.0.1:1234"
    assert config.scheduler_external
    assert config.num_servers == 3
    assert config.interface == "10.0.0.2"


def test_byteps_local_size_is_one_unless_it_says_otherwise() -> None:
    assert place(read(without(BYTEPS, "BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE"))) == (1, 2, 0, 1, "1")


def test_byteps_on_one_machine_uses_no_servers() -> None:
    config = read(BYTEPS | {"DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0"})
    assert place(config) == (1, 4, 1, 4, "0")
    assert (config.num_servers, config.scheduler) == (0, None)
    forced = read(BYTEPS | {"DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0", "BYTEPS_FORCE_DISTRIBUTED": "1"})
    assert (forced.num_servers, forced.scheduler) == (3, "10.0.0.1:1234")


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_other_roles_need_no_place(role: str) -> None:
    for config in (read(BYTEPS | {"DMLC_ROLE": role}), read({"COMMLIB_SCHEDULER": "a:5555"}, role=role)):
        assert config.role == role
        assert config.size == 0
    assert config.job == "a:5555"


def test_slurm_folds_its_lists() -> None:
    environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NTASKS": "7", "SLURM_PROCID": "6"}
    assert place(read(environ | {"SLURM_LOCALID": "0", "SLURM_NODEID": "3"})) == (6, 7, 0, 1, "3")


def test_a_slurm_batch_script_is_not_a_task() -> None:
    assert read(without(SLURM, "SLURM_STEP_ID", "COMMLIB_SCHEDULER")).is_solo


def test_a_pmix_launcher_under_slurm() -> None:
    environ = without(SLURM, "SLURM_STEP_TASKS_PER_NODE") | {
        "PMIX_RANK": "5",
        "PMIX_NAMESPACE": "slurm.pmix.1234.0",
        "SLURM_STEP_TASKS_PER_NODE": "4,3",
        "PMIX_LOCAL_SIZE": "3",
    }
    config = read(environ)
    assert place(config)[:4] == (5, 7, 1, 3)
    assert config.job == "slurm.pmix.1234.0"


def test_the_launcher_nearest_to_the_process_counts() -> None:
    inner = TORCHRUN | {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert place(read(SLURM | inner))[:4] == (2, 4, 0, 2)


def test_what_a_script_does_not_pass_on_is_taken_from_the_launcher_that_agrees() -> None:
    handmade = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert place(read(OPEN_MPI | handmade)) == (5, 8, 1, 4, "node1")


# --- Who wins


def test_explicit_before_own_variables_before_the_launcher() -> None:
    environ = TORCHRUN | {"COMMLIB_NODE": "rack7", "COMMLIB_STREAMS": "3"}
    assert read(environ).node == "rack7"
    config = read(environ, node="here", streams=5)
    assert (config.node, config.streams, config.rank) == ("here", 5, 5)


def test_a_named_scheduler_replaces_the_search() -> None:
    config = read(TORCHRUN | {"COMMLIB_SCHEDULER": "[fe80::1]:77", "COMMLIB_SCHEDULER_EXTERNAL": "1"})
    assert config.scheduler_addresses() == ("[fe80::1]:77",)
    assert config.scheduler_external


def test_one_machine_is_told_from_several() -> None:
    assert read({}).is_one_machine
    assert read(OWN | {"COMMLIB_SCHEDULER": "127.0.0.1:5555"}).is_one_machine
    assert read(OWN | {"COMMLIB_SCHEDULER": "localhost:5555"}).is_one_machine
    assert not read(OWN).is_one_machine
    assert not read(TORCHRUN).is_one_machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [("65536", 65536), ("64K", 65536), ("64KiB", 65536), ("1M", 1 << 20), ("2 MiB", 2 << 20), ("1g", 1 << 30)],
)
def test_byte_sizes(text: str, expected: int) -> None:
    assert read({"COMMLIB_PARTITION_BYTES": text}).partition_bytes == expected


def test_large_partitions_raise_the_default_credit() -> None:
    for config in (read({"COMMLIB_PARTITION_BYTES": "32M"}), Config(partition_bytes=32 << 20)):
        assert config.credit_bytes == 8 * config.partition_bytes
    assert Config(partition_bytes=64 << 10).credit_bytes == 8 << 20


@pytest.mark.parametrize(("text", "level"), [("debug", 10), ("ERROR", 40), ("15", 15)])
def test_log_levels(text: str, level: int) -> None:
    assert read({"COMMLIB_LOG_LEVEL": text}).log_level == level


def test_empty_variables_count_as_unset() -> None:
    assert read({"COMMLIB_RANK": "", "COMMLIB_STREAMS": " ", "COMMLIB_SECRET": ""}).is_solo


# --- What is refused, and how


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("COMMLIB_PARTITION_BYTES", "100000"),
        ("COMMLIB_PARTITION_BYTES", "4MB"),
        ("COMMLIB_PARTITION_BYTES", "2G"),
        ("COMMLIB_PARTITION_BYTES", "-1"),
        ("COMMLIB_CREDIT_BYTES", "512K"),
        ("COMMLIB_STREAMS", "0"),
        ("COMMLIB_STREAMS", "two"),
        ("COMMLIB_STREAMS", "1.5"),
        ("COMMLIB_ARENA_BYTES", "1K"),
        ("COMMLIB_LOCAL_ROUTE", "fast"),
        ("COMMLIB_CONNECT_TIMEOUT_S", "0"),
        ("COMMLIB_CONNECT_TIMEOUT_S", "soon"),
        ("COMMLIB_OPERATION_TIMEOUT_S", "inf"),
        ("COMMLIB_PEER_TIMEOUT_S", "nan"),
        ("COMMLIB_ASYNC", "maybe"),
        ("COMMLIB_LOG_LEVEL", "LOUD"),
        ("COMMLIB_SCHEDULER", "node0"),
        ("COMMLIB_SCHEDULER", "node0:99999"),
        ("COMMLIB_RANK", "-1"),
        ("COMMLIB_RANK", "٣"),
        ("MASTER_PORT", "http"),
        ("DMLC_ROLE", "boss"),
    ],
)
def test_a_malformed_variable_is_named_with_its_value(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"MASTER_ADDR": "node0", variable: value})
    text = str(caught.value)
    assert variable in text
    assert value in text
    assert "expected" in text


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "1"}, ["WORLD_SIZE", "RANK is '1'"]),
        ({"WORLD_SIZE": "2"}, ["RANK", "WORLD_SIZE is '2'"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        (without(TORCHRUN, "LOCAL_RANK"), ["LOCAL_RANK", "LOCAL_WORLD_SIZE is '4'"]),
        (without(TORCHRUN, "MASTER_ADDR"), ["COMMLIB_SCHEDULER"]),
        (without(OPEN_MPI, "COMMLIB_SCHEDULER"), ["COMMLIB_SCHEDULER"]),
        (without(MPICH, "PMI_SIZE"), ["PMI_SIZE"]),
        (without(BYTEPS, "DMLC_WORKER_ID"), ["DMLC_WORKER_ID", "DMLC_NUM_WORKER"]),
        (without(BYTEPS, "DMLC_PS_ROOT_PORT"), ["DMLC_PS_ROOT_PORT"]),
        (TORCHRUN | {"RANK": "8"}, ["RANK is '8'", "0 to 7"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["LOCAL_RANK is '4'", "0 to 3"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE is '9'"]),
        (TORCHRUN | {"RANK": "0"}, ["LOCAL_RANK is '1'"]),
        (TORCHRUN | {"COMMLIB_SIZE": "3"}, ["RANK is '5'", "COMMLIB_SIZE is '3'"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, ["SLURM_STEP_TASKS_PER_NODE is '4'", "SLURM_NODEID"]),
        ({"COMMLIB_NUM_SERVERS": "1"}, ["COMMLIB_SCHEDULER", "COMMLIB_NUM_SERVERS is '1'"]),
        ({"COMMLIB_SCHEDULER_EXTERNAL": "1"}, ["COMMLIB_SCHEDULER is not set", "COMMLIB_SCHEDULER_EXTERNAL"]),
        ({"COMMLIB_RANK": "0"}, ["COMMLIB_SIZE"]),
    ],
)
def test_an_incomplete_or_contradictory_set_is_explained(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(environ)
    for text in (*named, "expected"):
        assert text in str(caught.value)


def test_a_server_without_an_address_is_explained() -> None:
    with pytest.raises(ConfigError, match="COMMLIB_SCHEDULER is not set, but a server needs it"):
        read({}, role="server")


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="sterams"):
        read({}, sterams=2)


@pytest.mark.parametrize(
    "wrong", [{"rank": "1"}, {"streams": True}, {"peer_timeout_s": float("nan")}, {"node": 1}, {"rank": 3}, {"size": 0}]
)
def test_a_config_made_by_hand_is_checked_too(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config(**wrong)
