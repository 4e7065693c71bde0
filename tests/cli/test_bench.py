# SPDX-License-Identifier: Apache-2.0
"""`commlib bench` measures what it says, and its numbers fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commlib.cli import bench
from tests.cli.command import run


def test_latency_is_the_median_of_the_slowest() -> None:
    timings = [
        {"arena": [1e-3, 5e-3, 2e-3], "memcpy": [1e-3, 1e-3, 1e-3]},
        {"arena": [4e-3, 1e-3, 1e-3], "memcpy": [2e-3, 1e-3, 2e-3]},
    ]
    row = bench._row(8_000_000, "arena", 2, timings)
    assert row.latency_us == pytest.approx(4000)
    assert row.memcpy_us == pytest.approx(2000)
    assert row.times_memcpy == pytest.approx(2)
    assert row.algorithm_gb_per_s == pytest.approx(2)
    assert row.bus_gb_per_s == pytest.approx(2)


@pytest.mark.parametrize(("workers", "factor"), [(1, 0), (2, 1), (4, 1.5)])
def test_bus_bandwidth_is_that_of_nccl_tests(workers: int, factor: float) -> None:
    row = bench._row(1000, "arena", workers, [{"arena": [1e-6], "memcpy": [1e-6]}] * workers)
    assert row.bus_gb_per_s == pytest.approx(row.algorithm_gb_per_s * factor)


def test_the_command(tmp_path: Path) -> None:
    done = run("bench", "-n", "2", "--json", str(tmp_path / "report.json"), timeout=110)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["workers"] == 2
    assert [(row["size_bytes"], row["buffer"]) for row in report["rows"]] == [
        (4096 * 4**step, buffer) for step in range(8) for buffer in ("arena", "ordinary")
    ]
    for row in report["rows"]:
        assert row["latency_us"] > 0
        assert row["algorithm_gb_per_s"] == pytest.approx(row["size_bytes"] / row["latency_us"] / 1e3)
        assert row["bus_gb_per_s"] == pytest.approx(row["algorithm_gb_per_s"])
        assert row["times_memcpy"] == pytest.approx(row["latency_us"] / row["memcpy_us"])
    table = done.stdout.decode()
    assert table.count("arena") == table.count("ordinary") == 8
    assert "64 MiB" in table
