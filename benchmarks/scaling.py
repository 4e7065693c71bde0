# SPDX-License-Identifier: Apache-2.0
"""More ranks on one host, and more hosts: the same sum by commlib, Open MPI and gloo; on one host, beside a memcpy.

    python benchmarks/scaling.py [--ranks 1,2,4,8] [--hosts 2,4] [--quick] [--sizes 4KiB,4MiB] [--json FILE]
                                 [--png FILE]

Hosts are network namespaces of this machine, with one rank each and links as fast as the machine is; they need root.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from harness import charts, contenders
from harness.group import Layout, call
from harness.libraries import OPEN_MPI, joined, present, what_is_missing
from harness.options import Options, listed, positive, read_options, run_script
from harness.report import Report, Row, rows_of
from harness.sizes import KIB, MIB, size_in_words
from harness.turns import Turns, slowest, take_turns
from tests import lab

SIZES = (4 * KIB, 4 * MIB)
RANKS, HOSTS = (1, 2, 4, 8), (2, 4)
LOOPBACK = "lo"  # what one host is reached by
TIMEOUT_S = 300
ON_ONE_HOST, BETWEEN_HOSTS = "ranks on one host", "hosts with one rank each"


def work(libraries: frozenset[str], interface: str, sizes: Sequence[int], rounds: int) -> dict[int, Turns]:
    """In each rank: the turns of each size."""
    with joined(libraries, interface) as others:
        turns = {}
        for size in sizes:
            runners = [
                contenders.in_arena(size // 4),
                *contenders.of_mpi(others, size // 4),
                *contenders.of_gloo(others, size // 4),
            ]
            if interface == LOOPBACK:
                runners.append(contenders.memcpy(size // 4))
            turns[size] = take_turns(runners, rounds=rounds)
        return turns


def main() -> None:
    """Measure, and show."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=listed(positive), default=RANKS, help="on one host; default: 1,2,4,8")
        parser.add_argument("--hosts", type=listed(positive), help="default: 2,4 for root, else none")

    options = read_options(__doc__ or "", sizes=SIZES, rounds=(5, 15), more=more)
    missing = what_is_missing(options.without)
    report = Report("scaling", "commlib and others: more ranks, more hosts", options, missing)
    report.rows += _on_one_host(options, present(missing))
    problem = lab.what_is_missing()
    if problem is None:
        report.rows += _between_hosts(options, present(missing) - {OPEN_MPI})
    else:
        report.notes.append(f"Without several hosts: {problem}.")
    report.notes += [
        "Times are medians over the rounds of the slowest rank, of sums of float32 in place (commlib: in its arena). "
        "Where there are more ranks than CPUs they share them; if not, each is bound to one for Open MPI, as mpirun "
        "would, and not for the others. memcpy: as many bytes, by all ranks at once. "
        "It and Open MPI are on one host only."
    ]
    report.finish(draw)


def _on_one_host(options: Options, libraries: frozenset[str]) -> Iterator[Row]:
    for ranks in options.own.ranks:
        by_rank = call(
            work,
            libraries,
            LOOPBACK,
            options.sizes,
            options.rounds,
            layout=Layout(ranks_per_host=ranks),
            with_mpi=OPEN_MPI in libraries,
            timeout_s=TIMEOUT_S,
        )
        yield from _rows(ON_ONE_HOST, ranks, by_rank)


def _between_hosts(options: Options, libraries: frozenset[str]) -> Iterator[Row]:
    numbers = options.own.hosts or HOSTS
    with lab.Lab(max(numbers)) as hosts:
        for number in numbers:
            by_rank = call(
                work,
                libraries,
                "eth0",
                options.sizes,
                options.rounds,
                layout=Layout(hosts=number, ranks_per_host=1),
                lab=hosts,
                timeout_s=TIMEOUT_S,
            )
            yield from _rows(BETWEEN_HOSTS, number, by_rank)


def _rows(section: str, number: int, by_rank: list[dict[int, Turns]]) -> Iterator[Row]:
    for size in by_rank[0]:
        turns = [rank[size] for rank in by_rank]
        rounds = {name: slowest(turns, name) for name in turns[0]}
        case = f"{number} {section.split()[0]}, {size_in_words(size)}"
        yield from rows_of(
            section, case, rounds, size=size, references={"× memcpy": contenders.MEMCPY, "× commlib": contenders.ARENA}
        )


def draw(figure: Any, rows: list[Row]) -> None:
    """Time over the number of ranks, or hosts; the smallest and the largest size."""
    sizes = sorted({one.size for one in rows})
    sizes = list(dict.fromkeys((sizes[0], sizes[-1])))
    sections = list(dict.fromkeys(one.section for one in rows))
    panels = figure.subplots(1, len(sizes) * len(sections), squeeze=False)[0]
    for place, axes in enumerate(panels):
        section, size = sections[place // len(sizes)], sizes[place % len(sizes)]
        own = [one for one in rows if (one.section, one.size) == (section, size)]
        charts.lines(axes, own, lambda one: int(one.case.split()[0]), xlabel=section, tick=lambda n: f"{n:.0f}")
        axes.set_title(size_in_words(size), fontsize=10)
    charts.one_legend(figure)


if __name__ == "__main__":
    import scaling  # by the name that the processes it starts know it by

    run_script(scaling.main)
