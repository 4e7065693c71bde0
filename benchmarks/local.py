# SPDX-License-Identifier: Apache-2.0
"""Ranks on one host: sums by commlib, Open MPI and gloo beside a memcpy; what dtypes and operations cost; memory.

    python benchmarks/local.py [-n RANKS] [--quick] [--sizes 4KiB,64MiB] [--json FILE] [--png FILE]

All contenders live in the same processes and take turns. The dtypes are measured at the largest of the sizes, memory at
sixteen times that (1 GiB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import commlib
from harness import charts, contenders
from harness.group import Layout, call
from harness.libraries import OPEN_MPI, joined, present, what_is_missing
from harness.memory import Resident, Watch
from harness.options import positive, read_options, run_script
from harness.report import Report, Row, row, rows_of
from harness.sizes import KIB, MIB, size_in_words
from harness.turns import Contender, Turns, slowest, take_turns

SIZES = (4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB)
DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64")
WITH_AVERAGE = ("float32", "float16", "bfloat16")
REFERENCE = "Sum of float32"
TIMES_LARGER = 16  # what memory is measured at
REPETITIONS = 3  # of that
TIMEOUT_S = 600

SUMS, OPERATIONS, MEMORY = "sum of float32, in place but where said", "dtypes and operations", "memory"


@dataclass(frozen=True)
class Measured:
    """What one rank has measured."""

    sums: dict[int, Turns]  # by size
    operations: Turns
    memory: list[Resident]


def work(libraries: frozenset[str], sizes: Sequence[int], rounds: int, batch_s: float) -> Measured:
    """In each rank: all measurements."""
    with joined(libraries) as others:
        memory = _memory(TIMES_LARGER * max(sizes))  # first, before anything has grown
        sums = {}
        for size in sizes:
            count = size // 4
            runners = [
                contenders.in_arena(count),
                contenders.in_ordinary_memory(count),
                contenders.out_of_place(count),
                *contenders.of_mpi(others, count),
                *contenders.of_gloo(others, count),
                contenders.memcpy(count),
            ]
            sums[size] = take_turns(runners, rounds=rounds, batch_s=batch_s)
            del runners
        operations = take_turns(_operations(max(sizes)), rounds=rounds, batch_s=batch_s)
        return Measured(sums, operations, memory)


def _operations(size: int) -> list[Contender]:
    memory = commlib.zeros(size, np.uint8)  # all look at the same bytes, zeros in any dtype
    wanted = [(operation, name) for operation in ("Sum", "Min", "Max", "Product") for name in DTYPES]
    wanted += [("Average", name) for name in WITH_AVERAGE]

    def contender(operation: str, name: str) -> Contender | None:
        dtype = _dtype(name)
        if dtype is None:
            return None
        called, buffer, op = f"{operation} of {name}", memory.view(dtype), getattr(commlib, operation)
        return Contender(called, lambda: commlib.push_pull_(buffer, name=called, op=op))

    return [one for pair in wanted if (one := contender(*pair)) is not None]


def _dtype(name: str) -> np.dtype[Any] | None:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _memory(size: int) -> list[Resident]:
    buffer = commlib.zeros(size // 4, np.float32)  # written, so that it is there
    commlib.barrier()
    before = Resident.now()
    growth = []
    for _ in range(REPETITIONS):
        commlib.barrier()
        with Watch(before) as watch:
            commlib.push_pull_(buffer, name="memory", op=commlib.Sum)
        growth.append(watch.growth)
    commlib.barrier()  # nobody gives memory back while another looks
    return growth


def main() -> None:
    """Measure, and show."""
    options = read_options(
        __doc__ or "",
        sizes=SIZES,
        rounds=(5, 15),
        more=lambda parser: parser.add_argument("-n", "--ranks", type=positive, default=2, help="default: 2"),
    )
    ranks: int = options.own.ranks
    missing = what_is_missing(options.without)
    libraries = present(missing)
    report = Report("local", f"commlib and others: {ranks} ranks on one host", options, missing)
    by_rank: list[Measured] = call(
        work,
        libraries,
        options.sizes,
        options.rounds,
        0.005 if options.quick else 0.02,
        layout=Layout(ranks_per_host=ranks),
        with_mpi=OPEN_MPI in libraries,
        timeout_s=TIMEOUT_S,
    )
    for size in options.sizes:
        turns = [rank.sums[size] for rank in by_rank]
        rounds = {name: slowest(turns, name) for name in turns[0]}
        references = {"× memcpy": contenders.MEMCPY, "× commlib": contenders.ARENA}
        report.rows += rows_of(SUMS, size_in_words(size), rounds, size=size, references=references)
    report.rows += _operation_rows([rank.operations for rank in by_rank], max(options.sizes))
    report.rows += _memory_rows([rank.memory for rank in by_rank], TIMES_LARGER * max(options.sizes))
    if not any("bfloat16" in one.contender for one in report.rows):
        report.notes.append("Without bfloat16: ml_dtypes is not installed.")
    largest = max(options.sizes)
    report.notes += [
        "Times are medians over the rounds of the slowest rank; GB/s is a rank's bytes by that time. memcpy is a copy "
        "of as many bytes by all ranks at once. For Open MPI ranks are bound to a CPU each, as mpirun would, if there "
        "are enough; for the others they are not.",
        f"Dtypes: all look at the same {size_in_words(largest)} of zeros in the arena; the rate is bytes per second, "
        f"divided by those of {REFERENCE}.",
        "Memory: the most that is there more than before, while all ranks reduce "
        f"{size_in_words(TIMES_LARGER * largest)} each in their arenas, three times. Anonymous is RssAnon. Pages of "
        "arenas are counted where they are: blocks of the memfds, all arenas together. A rank's RssShmem also grows by "
        "what it reads in the arena of another, which is memory that was there before: mapped only.",
    ]
    report.finish(draw)


def _operation_rows(by_rank: list[Turns], size: int) -> list[Row]:
    seconds = {name: slowest(by_rank, name) for name in by_rank[0]}
    medians = {name: row("", "", "", values).median for name, values in seconds.items()}
    rows = []
    for name, values in seconds.items():
        operation, _, dtype = name.partition(" of ")
        ratios = {} if name == REFERENCE else {f"× the rate of {REFERENCE}": medians[REFERENCE] / medians[name]}
        rows.append(row(OPERATIONS, operation, dtype, values, size=size, ratios=ratios))
    return rows


def _memory_rows(by_rank: list[list[Resident]], size: int) -> list[Row]:
    def one(contender: str, case: str, rounds: list[int]) -> Row:
        values = [float(value) for value in rounds]
        return row(MEMORY, case, contender, values, unit="B", ratios={"× buffer": max(values) / size})

    rows = []
    for rank, growth in enumerate(by_rank):
        rows.append(one("anonymous", f"rank {rank}", [now.anonymous for now in growth]))
        rows.append(one("mapped only", f"rank {rank}", [now.mapped for now in growth]))
    shared = [max(now.shared for now in repetition) for repetition in zip(*by_rank, strict=True)]
    return [*rows, one("pages of arenas", "all ranks", shared)]


def draw(figure: Any, rows: list[Row]) -> None:
    """Latency over size, and the rates of dtypes."""
    left, right = figure.subplots(1, 2)
    charts.lines(left, [one for one in rows if one.section == SUMS], lambda one: one.size, xlabel="bytes of a rank")
    left.set_title("sum of float32", fontsize=10)
    sums = [one for one in rows if one.section == OPERATIONS]
    charts.bars(
        right,
        sums,
        lambda one: one.gb_per_s or 0.0,
        label=lambda rate: "",
        ylabel="GB/s of a rank",
    )
    right.set_title(f"dtypes and operations, {size_in_words(sums[0].size)}", fontsize=10)


if __name__ == "__main__":
    import local  # by the name that the processes it starts know it by

    run_script(local.main)
