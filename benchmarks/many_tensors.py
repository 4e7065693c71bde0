# SPDX-License-Identifier: Apache-2.0
"""Many small tensors: submitted to commlib one after another and then waited for, beside as many calls of the others.

    python benchmarks/many_tensors.py [-n RANKS] [--tensors 1000] [--quick] [--sizes 64,1KiB] [--json FILE] [--png FILE]

The sizes are those of one tensor. What is reported is the time until the last one has been summed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import commlib
from harness import charts
from harness.contenders import ARENA, ORDINARY, on_one_cpu
from harness.group import Layout, call
from harness.libraries import GLOO, OPEN_MPI, Joined, joined, present, what_is_missing
from harness.options import positive, read_options, run_script
from harness.report import Report, Row, rows_of
from harness.sizes import KIB, size_in_words, time_in_words
from harness.turns import Contender, Turns, checked, slowest, take_turns

SIZES = (64, KIB, 16 * KIB)
GROUPED = "commlib, in a group"
TIMEOUT_S = 600


def work(libraries: frozenset[str], sizes: Sequence[int], tensors: int, rounds: int) -> dict[int, Turns]:
    """In each rank: the turns of each size."""
    with joined(libraries) as others:
        return {size: take_turns(_contenders(others, size // 4, tensors), rounds=rounds, warm_up=1) for size in sizes}


def _contenders(others: Joined, count: int, tensors: int) -> list[Contender]:
    runners = [
        _of_commlib(ARENA, [commlib.empty(count, np.float32) for _ in range(tensors)]),
        _of_commlib(ORDINARY, _buffers(count, tensors)),
        _grouped(_buffers(count, tensors)),
    ]
    if others.mpi is not None:
        runners += _of_mpi(others.mpi, _buffers(count, tensors))
    if others.gloo is not None:
        runners += _of_gloo(others, [others.torch.empty(count) for _ in range(tensors)])
    return runners


def _buffers(count: int, tensors: int) -> list[Any]:
    return [np.empty(count, np.float32) for _ in range(tensors)]


def _of_commlib(name: str, buffers: list[Any]) -> Contender:
    named = [(buffer, f"{name}/{buffer.size}/{number}") for number, buffer in enumerate(buffers)]

    def action() -> None:
        submit, add = commlib.push_pull_async_, commlib.Sum
        for handle in [submit(buffer, name=tensor, op=add) for buffer, tensor in named]:
            handle.wait()

    return Contender(name, action, checked(buffers, buffers, action))


def _grouped(buffers: list[Any]) -> Contender:
    def action() -> None:
        commlib.push_pull_group_async_(buffers, name=f"group/{buffers[0].size}", op=commlib.Sum).wait()

    return Contender(GROUPED, action, checked(buffers, buffers, action))


def _of_mpi(mpi: Any, buffers: list[Any]) -> list[Contender]:
    in_place, add, world = mpi.IN_PLACE, mpi.SUM, mpi.COMM_WORLD

    def blocking() -> None:
        for buffer in buffers:
            world.Allreduce(in_place, buffer, op=add)

    def at_once() -> None:
        mpi.Request.Waitall([world.Iallreduce(in_place, buffer, op=add) for buffer in buffers])
        # What is complete here may still have to leave, and does so in Open MPI's calls only: nobody goes on, to wait
        # for the others in another library, before all have got it.
        world.Barrier()

    return [
        Contender(f"{OPEN_MPI}, {name}", action, checked(buffers, buffers, action), on_one_cpu)
        for name, action in (("blocking", blocking), ("non-blocking", at_once))
    ]


def _of_gloo(others: Joined, tensors: list[Any]) -> list[Contender]:
    all_reduce = others.gloo.all_reduce

    def blocking() -> None:
        for tensor in tensors:
            all_reduce(tensor)

    def at_once() -> None:
        for pending in [all_reduce(tensor, async_op=True) for tensor in tensors]:
            pending.wait()

    buffers = [tensor.numpy() for tensor in tensors]
    return [
        Contender(f"{GLOO}, {name}", action, checked(buffers, buffers, action))
        for name, action in (("blocking", blocking), ("async", at_once))
    ]


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=positive, default=2, help="default: 2")
    parser.add_argument("--tensors", type=positive, default=1000, help="default: 1000")


def main() -> None:
    """Measure, and show."""
    options = read_options(__doc__ or "", sizes=SIZES, rounds=(5, 7), more=_more_options)
    ranks, tensors = options.own.ranks, options.own.tensors
    missing = what_is_missing(options.without)
    libraries = present(missing)
    report = Report("many_tensors", f"{tensors} tensors of float32, {ranks} ranks on one host", options, missing)
    by_rank: list[dict[int, Turns]] = call(
        work,
        libraries,
        options.sizes,
        tensors,
        options.rounds,
        layout=Layout(ranks_per_host=ranks),
        with_mpi=OPEN_MPI in libraries,
        timeout_s=TIMEOUT_S,
    )
    for size in options.sizes:
        turns = [rank[size] for rank in by_rank]
        rounds = {name: slowest(turns, name) for name in turns[0]}
        references = {"× commlib": ARENA}
        case = f"{tensors} × {size_in_words(size)}"
        report.rows += rows_of("all tensors", case, rounds, size=tensors * size, references=references)
    report.notes += [
        "The time for all tensors: median over the rounds, of the slowest rank. commlib: each is submitted under its "
        "name, asynchronously, then all are waited for; in a group, all by one call. For Open MPI ranks are bound to a "
        "CPU each, as mpirun would; for the others they are not."
    ]
    report.finish(draw)


def draw(figure: Any, rows: list[Row]) -> None:
    """Bars by size."""
    axes = figure.subplots()
    charts.times_on_y(axes, rows)
    charts.bars(axes, rows, lambda one: one.median, label=time_in_words, ylabel="time for all tensors")
    axes.set_ylim(bottom=10 ** math.floor(math.log10(min(one.median for one in rows))))  # bars of some height


if __name__ == "__main__":
    import many_tensors  # by the name that the processes it starts know it by

    run_script(many_tensors.main)
