# SPDX-License-Identifier: Apache-2.0
"""`commlib bench`: sums of float32 buffers, in place, over processes of this host, beside a memcpy of the same size.

Everything of one size is measured in turns: a sum of a buffer in the arena, a sum of an ordinary one, and a memcpy by
all processes at once, then again. So a machine that is slow for a while is slow for all three.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from commlib._version import __version__

__all__ = ["Report", "Row", "measure", "save", "show"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(4 * KIB << shift for shift in range(0, 16, 2))  # 4 KiB … 64 MiB
WARM_UP_ROUNDS = 3
MEMCPY = "memcpy"

Timings = dict[str, list[float]]  # seconds, by kind of buffer and round


@dataclass(frozen=True)
class Row:
    """One size and kind of buffer. Latencies in microseconds, bandwidths in GB/s (10⁹ bytes per second)."""

    size_bytes: int
    buffer: str
    latency_us: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float
    memcpy_us: float
    times_memcpy: float


@dataclass(frozen=True)
class Report:
    """What was measured, and where."""

    version: str
    machine: str
    cpus: int
    workers: int
    rows: list[Row]


def measure(workers: int, sizes: Sequence[int] = SIZES) -> Report:
    """Run the measurement in `workers` new processes. Takes some seconds; raises what `commlib.run` raises."""
    import commlib

    by_rank = commlib.run(_work, (list(sizes),), np=workers)
    rows = [
        _row(size, kind, workers, [timings[size] for timings in by_rank])
        for size in sizes
        for kind in by_rank[0][size]
        if kind != MEMCPY
    ]
    return Report(__version__, platform.machine(), len(os.sched_getaffinity(0)), workers, rows)


def show(report: Report) -> None:
    """Print the report as a table."""
    from rich.console import Console
    from rich.table import Table

    title = f"commlib {report.version}, {report.workers} processes on {report.cpus} CPUs: sum of float32, in place"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("size", "buffer", "latency µs", "algorithm GB/s", "bus GB/s", "memcpy µs", "× memcpy"):
        table.add_column(heading, justify="left" if heading == "buffer" else "right")
    for row in report.rows:
        table.add_row(
            f"{row.size_bytes // MIB} MiB" if row.size_bytes >= MIB else f"{row.size_bytes // KIB} KiB",
            row.buffer,
            f"{row.latency_us:.1f}",
            f"{row.algorithm_gb_per_s:.2f}",
            f"{row.bus_gb_per_s:.2f}",
            f"{row.memcpy_us:.1f}",
            f"{row.times_memcpy:.2f}",
        )
    Console(highlight=False).print(table)


def save(report: Report, path: str) -> None:
    """Write the report as JSON."""
    Path(path).write_text(json.dumps(asdict(report), indent=2) + "\n")


def _row(size: int, kind: str, workers: int, timings: Sequence[Timings]) -> Row:
    def median(what: str) -> float:
        """Over the rounds, of the slowest process: a sum is there when all have it."""
        slowest: list[float] = [max(times) for times in zip(*(rank[what] for rank in timings), strict=True)]
        return statistics.median(slowest)

    seconds, memcpy_seconds = median(kind), median(MEMCPY)
    algorithm = size / seconds / 1e9
    return Row(
        size_bytes=size,
        buffer=kind,
        latency_us=seconds * 1e6,
        algorithm_gb_per_s=algorithm,
        bus_gb_per_s=algorithm * 2 * (workers - 1) / workers,
        memcpy_us=memcpy_seconds * 1e6,
        times_memcpy=seconds / memcpy_seconds,
    )


def _work(sizes: Sequence[int]) -> dict[int, Timings]:
    """In a worker: the timings of all sizes."""
    import commlib

    try:
        commlib.init()
        try:
            return {size: _timings(size) for size in sizes}
        finally:
            commlib.shutdown()
    except KeyboardInterrupt:
        sys.exit(130)  # without a word: whoever typed it knows


def _timings(size: int) -> Timings:
    import commlib

    count = size // 4
    arena, ordinary = commlib.empty(count, np.float32), np.empty(count, np.float32)
    source, destination = np.ones(count, np.float32), np.ones(count, np.float32)
    # Zeros stay zeros however often they are summed; written once, so that the memory is there.
    arena.fill(0)
    ordinary.fill(0)

    def summed(buffer: np.ndarray[tuple[int, ...], np.dtype[np.float32]], name: str) -> Callable[[], object]:
        return lambda: commlib.push_pull_(buffer, name=name, op=commlib.Sum)

    actions: dict[str, Callable[[], object]] = {
        "arena": summed(arena, f"bench/arena/{size}"),
        "ordinary": summed(ordinary, f"bench/ordinary/{size}"),
        MEMCPY: lambda: np.copyto(destination, source),
    }
    repeats = max(1, min(32, 256 * KIB // size))  # of what is too short for one look at the clock
    rounds = max(9, min(100, 128 * MIB // size))
    timings: Timings = {kind: [] for kind in actions}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for kind, action in actions.items():
            commlib.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                action()
            timings[kind].append((time.perf_counter() - began) / repeats)
    return {kind: values[WARM_UP_ROUNDS:] for kind, values in timings.items()}
