# SPDX-License-Identifier: Apache-2.0
"""What a worker finds when it starts: its place, its share of the CPUs, its standard input."""

from __future__ import annotations

import json
import os

import pytest

from tests.cli.command import environment, python, run

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def surroundings(*arguments: str, **changes: str) -> list[dict[str, str]]:
    """The environment of each rank."""
    done = run("run", *arguments, "--", *python(SHOW), env=environment(**changes))
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    return [json.loads(line.split(b" ", 1)[1]) for line in lines if not line.startswith(b"[server")]


def test_each_rank_knows_its_place() -> None:
    seen = surroundings("-n", "3")
    for rank, env in enumerate(seen):
        assert env["COMMLIB_RANK"] == env["COMMLIB_LOCAL_RANK"] == str(rank)
        assert env["COMMLIB_SIZE"] == env["COMMLIB_LOCAL_SIZE"] == "3"


def test_each_job_has_a_name_and_a_secret_of_its_own() -> None:
    one, two = surroundings("-n", "2"), surroundings("-n", "2")
    for name in ("COMMLIB_JOB", "COMMLIB_SECRET"):
        assert one[0][name] == one[1][name]
        assert one[0][name] != two[0][name]


def test_a_secret_of_the_user_is_kept() -> None:
    assert surroundings("-n", "1", COMMLIB_SECRET="known")[0]["COMMLIB_SECRET"] == "known"


def test_nothing_of_another_job_reaches_this_one() -> None:
    env = surroundings(
        "-n",
        "1",
        COMMLIB_RANK="7",
        COMMLIB_JOB="x",
        COMMLIB_SCHEDULER="far:1",
        COMMLIB_NUM_SERVERS="3",
        COMMLIB_NODE="n",
    )[0]
    assert env["COMMLIB_RANK"] == "0"
    assert env["COMMLIB_JOB"] != "x"
    assert not {"COMMLIB_SCHEDULER", "COMMLIB_NUM_SERVERS", "COMMLIB_NODE"} & env.keys()


def test_settings_of_the_user_do() -> None:
    assert surroundings("-n", "1", COMMLIB_PARTITION_BYTES="1M")[0]["COMMLIB_PARTITION_BYTES"] == "1M"


@pytest.mark.parametrize("workers", [1, 2, 64])
def test_each_worker_gets_its_share_of_the_cpus(workers: int) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // workers)
    assert {env["OMP_NUM_THREADS"] for env in surroundings("-n", str(workers))} == {str(share)}


def test_a_number_of_threads_that_is_set_stays() -> None:
    assert surroundings("-n", "2", OMP_NUM_THREADS="5")[1]["OMP_NUM_THREADS"] == "5"


def test_rank_0_reads_standard_input_and_the_others_nothing() -> None:
    done = run("run", "-n", "3", "--", "sh", "-c", 'echo "$(cat)"', stdin=b"for rank 0")
    assert sorted(done.stdout.splitlines()) == [b"[0] for rank 0", b"[1] ", b"[2] "]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "0", "--", "true"],
        ["--", "true"],
        ["-n", "2"],
        ["-n", "2", "--server", "1", "--", "true"],
        ["-n", "x", "true"],
    ],
)
def test_misuse_is_explained_and_starts_nothing(arguments: list[str]) -> None:
    done = run("run", *arguments)
    assert done.returncode == 2
    assert b"Usage: commlib run" in done.stderr


def test_a_command_needs_no_dashes_before_it() -> None:
    done = run("run", "-n", "1", "echo", "-n", "--help")
    assert done.stdout == b"[0] --help"


@pytest.mark.parametrize("command", ["run", "server", "scheduler", "bench", "doctor"])
def test_every_command_has_a_help(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"Usage: commlib {command}".encode() in done.stdout


def test_the_version() -> None:
    from commlib._version import __version__

    assert run("--version").stdout.decode() == f"commlib {__version__}\n"


def test_the_command_is_installed() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="commlib")
    assert script.value == "commlib.cli:main"
