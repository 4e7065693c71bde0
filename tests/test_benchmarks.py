# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run from end to end, in their shortest form, and say what they have measured; what, is no test's."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch import REPOSITORY, environment, leftovers

LIMIT_S = 100
FEW = ["--quick", "--rounds", "2"]


def run(name: str, *args: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(REPOSITORY / "benchmarks" / name), *args]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def measured(tmp_path: Path, name: str, *args: str) -> dict[str, Any]:
    """What a benchmark has written, after a look at what all of them write."""
    results, picture = tmp_path / "results.json", tmp_path / "picture.png"
    done = run(name, *args, "--json", str(results), "--png", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    report: dict[str, Any] = json.loads(results.read_text())
    assert report["benchmark"] == name.removesuffix(".py")
    assert report["command"].startswith(f"python benchmarks/{name} ")
    assert report["machine"]["cpus"] >= 1
    assert {"python", "commlib"} <= report["versions"].keys()
    assert report["took_s"] > 0
    for row in report["rows"]:
        assert row["contender"] in done.stdout
        assert row["median"] == pytest.approx(statistics.median(row["rounds"]))
        if row["unit"] == "s" and "what it adds" not in row["section"]:  # a difference of two may be anything
            assert min(row["rounds"]) > 0, row
    for note in report["notes"]:
        assert note.split()[0] in done.stdout
    return report


def contenders(report: dict[str, Any], section: str, case: str) -> dict[str, dict[str, Any]]:
    """The rows of a case, by contender."""
    rows = [row for row in report["rows"] if row["section"].startswith(section) and row["case"] == case]
    return {row["contender"]: row for row in rows}


def test_local(tmp_path: Path) -> None:
    report = measured(tmp_path, "local.py", *FEW, "--sizes", "4KiB,64KiB")
    assert report["missing"] == {}
    for case, size in (("4 KiB", 4096), ("64 KiB", 65536)):
        rows = contenders(report, "sum of float32", case)
        own = ["commlib, arena", "commlib, ordinary", "commlib, out of place"]
        assert list(rows) == [*own, "Open MPI", "gloo", "memcpy"]
        arena, memcpy = rows["commlib, arena"], rows["memcpy"]
        assert arena["size"] == size
        assert len(arena["rounds"]) == 2
        assert arena["ratios"] == {"× memcpy": pytest.approx(arena["median"] / memcpy["median"])}
        assert rows["gloo"]["ratios"]["× commlib"] == pytest.approx(rows["gloo"]["median"] / arena["median"])
    assert list(contenders(report, "dtypes", "Average")) == ["float32", "float16", "bfloat16"]
    assert len(contenders(report, "dtypes", "Product")) == 8
    memory = contenders(report, "memory", "all ranks")["pages of arenas"]
    assert memory["unit"] == "B"
    assert memory["ratios"]["× buffer"] == max(memory["rounds"]) / (16 * 65536)


def test_many_tensors(tmp_path: Path) -> None:
    report = measured(tmp_path, "many_tensors.py", *FEW, "--sizes", "64", "--tensors", "10", "--without", "gloo")
    assert report["missing"] == {"gloo": "left out"}
    rows = contenders(report, "all tensors", "10 × 64 B")
    own = ["commlib, arena", "commlib, ordinary", "commlib, in a group"]
    assert list(rows) == [*own, "Open MPI, blocking", "Open MPI, non-blocking"]


@pytest.mark.lab
def test_scaling(tmp_path: Path) -> None:
    args = ["--sizes", "4KiB", "--ranks", "1,3", "--hosts", "2", "--without", "gloo"]
    report = measured(tmp_path, "scaling.py", *FEW, *args)
    assert list(contenders(report, "ranks", "1 ranks, 4 KiB")) == ["commlib, arena", "Open MPI", "memcpy"]
    assert list(contenders(report, "ranks", "3 ranks, 4 KiB")) == ["commlib, arena", "Open MPI", "memcpy"]
    assert list(contenders(report, "hosts", "2 hosts, 4 KiB")) == ["commlib, arena"]


@pytest.mark.lab
def test_network(tmp_path: Path) -> None:
    report = measured(tmp_path, "network.py", *FEW, "--sizes", "256KiB,4KiB", "--cases", "2+1x2")
    rows = contenders(report, "links of 400 Mbit/s", "2 hosts, 1 server, 2 ranks each")
    assert list(rows) == ["commlib", "optimum", "TCP, same traffic", "gloo", "goodput of TCP, one stream"]
    goodput = rows["goodput of TCP, one stream"]
    optimum = [2 * 2 * 1 * 262144 / ((4 + 2 - 2) * rate * 1e6) for rate in goodput["rounds"]]
    assert rows["optimum"]["rounds"] == pytest.approx(optimum)
    assert rows["commlib"]["ratios"].keys() == {"× optimum", "× TCP"}
    for case in ("256 KiB", "4 KiB"):
        assert list(contenders(report, "2 hosts, links unshaped", case)) == [
            "commlib",
            "TCP, same traffic",
            "gloo",
            "memcpy",
        ]
    cpu = contenders(report, "CPU", "256 KiB")
    assert cpu["TCP, same traffic + 2 × memcpy"]["rounds"] == [
        pytest.approx(tcp + 2 * copy)
        for tcp, copy in zip(cpu["TCP, same traffic"]["rounds"], cpu["memcpy"]["rounds"], strict=True)
    ]
    assert list(contenders(report, "2 hosts, 400 Mbit/s", "16 KiB behind 1 MiB")) == ["alone", "behind others"]
    assert len(contenders(report, "2 hosts: memory", "rank 1, 1 MiB")) == 2


@pytest.mark.lab
def test_overlap(tmp_path: Path) -> None:
    report = measured(
        tmp_path, "overlap.py", *FEW, "--layers", "2", "--width", "64", "--batch", "16", "--without", "gloo"
    )
    rows = contenders(report, "2 hosts", "iteration")
    alone, moving, total = (rows[n] for n in ("computation alone", "communication alone", "one after the other"))
    assert total["rounds"] == [pytest.approx(a + b) for a, b in zip(alone["rounds"], moving["rounds"], strict=True)]
    assert len(rows) == 6


def test_optimizer_step(tmp_path: Path) -> None:
    report = measured(tmp_path, "optimizer_step.py", *FEW, "--parameters", "20", "--batch", "8")
    assert list(contenders(report, "1 process", "step")) == ["torch alone", "commlib, DistributedOptimizer"]
    steps, costs = contenders(report, "2 ranks: a step", "step"), contenders(report, "2 ranks: what it adds", "step")
    plain = steps.pop("torch alone")["rounds"]
    for name, row in steps.items():
        assert costs[name]["rounds"] == [pytest.approx(a - b) for a, b in zip(row["rounds"], plain, strict=True)]


def test_idle(tmp_path: Path) -> None:
    report = measured(tmp_path, "idle.py", "--quick", "--seconds", "1")
    rows = {row["case"]: row for row in report["rows"]}
    assert rows.keys() == {"rank 0", "rank 1", "scheduler", "server", "all together"}
    together = sum(row["median"] for name, row in rows.items() if name != "all together")
    assert rows["all together"]["median"] == pytest.approx(together)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--sizes", "5"], "'5' is no size"),
        (["--rounds", "0"], "'0' is no whole number"),
        (["--json", "/no/such/folder/x.json"], "cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused(args: list[str], word: str) -> None:
    assert word in run("local.py", *args, status=2).stderr


GROUP = """
import operator, time
from harness.group import Layout, call
from harness.options import run_script
run_script(lambda: call({call}, layout=Layout(ranks_per_host=2), timeout_s={limit}))
"""


@pytest.mark.parametrize(
    ("call", "limit", "said"),
    [
        (
            "operator.truediv, 1, 0",
            60,
            ["not all processes ended well", "rank 1 ended with status 1", "division by zero"],
        ),
        ("time.sleep, 600", 1, ["no end within 1 s", "rank 0 had to be stopped", "rank 1 had to be stopped"]),
    ],
)
def test_a_group_that_fails_is_told_in_words(call: str, limit: int, said: list[str]) -> None:
    mark = "BENCHMARK_TEST", call
    argv = [sys.executable, "-c", GROUP.format(call=call, limit=limit)]
    env = environment({"PYTHONPATH": str(REPOSITORY / "benchmarks")}, dict([mark]))
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"-c: {said[0]}\n")
    assert [words for words in said if words not in done.stderr] == []
    assert leftovers(*mark) == []


def test_nothing_is_left_of_one_that_is_ended() -> None:
    mark = "BENCHMARK_TEST", f"{id(object())}-{time.monotonic_ns()}"
    argv = [sys.executable, str(REPOSITORY / "benchmarks" / "idle.py"), "--seconds", "100"]
    with subprocess.Popen(argv, env=environment(dict([mark])), stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + LIMIT_S
        while len(leftovers(*mark, grace_s=0)) < 5:  # the script, two ranks, a server and the scheduler
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert leftovers(*mark) == []
