# SPDX-License-Identifier: Apache-2.0
"""Several hosts: commlib beside what the links allow, what plain sockets do with the same bytes, and gloo. Needs root.

    python benchmarks/network.py [--cases 2+0,4+2,2+0x2] [--parts shaped,unshaped,priority] [--quick] [--sizes 64MiB]
                                 [--json FILE] [--png FILE]

Hosts are network namespaces of this machine. Parts: `shaped` has links of 400 Mbit/s each way, and cases HOSTS+SERVERS,
with xRANKS where a host has several; `unshaped` has two hosts whose links are as fast as the machine is, and adds CPU
time and memory; `priority` has two hosts with links of 400 Mbit/s, and an urgent tensor behind many others. The first
size is that of large tensors, the last one, where there are several, that of small ones, which are measured on unshaped
links alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import commlib
from harness import charts, contenders
from harness.group import HOST, Layout, call
from harness.libraries import GLOO, joined, present, what_is_missing
from harness.memory import Resident, Watch
from harness.options import NotHereError, Options, listed, read_options, run_script
from harness.raw_tcp import PORT, Mesh, least_seconds, two_hop_traffic
from harness.report import Report, Row, row, rows_of
from harness.sizes import KIB, MIB, size_in_words, time_in_words
from harness.turns import Contender, Turns, cpu_of_all, slowest, take_turns
from tests import lab

SIZES, QUICK_SIZES = (64 * MIB, 4 * KIB), (16 * MIB, 4 * KIB)
RATE, RATE_IN_WORDS = "400mbit", "400 Mbit/s"
CASES = "2+0,3+0,4+0,4+1,4+2,4+4,2+0x2"
PARTS = ("shaped", "unshaped", "priority")
TIMEOUT_S = 300

COMMLIB, STREAM, SAME_TRAFFIC, OPTIMUM = "commlib", "TCP, one stream", "TCP, same traffic", "optimum"
SHAPED, UNSHAPED = f"links of {RATE_IN_WORDS} each way", "2 hosts, links unshaped"
CPU, RAW_CPU = "CPU time of both hosts", f"{SAME_TRAFFIC} + 2 × memcpy"
PRIORITY, MEMORY = f"2 hosts, {RATE_IN_WORDS}: an urgent tensor", "2 hosts: memory"
ALONE, BEHIND = "alone", "behind others"

PIECES = 16  # low-priority tensors
LOW_TIMES, URGENT_PART = 4, 16  # all of them are 4 × the large size, the urgent one a 16th of it: 256 MiB and 4 MiB
MEMORY_TIMES, REPETITIONS = 4, 3  # memory: of a buffer 4 × the large size, which is reduced three times


@dataclass(frozen=True)
class Case:
    """What is measured, on all ranks alike."""

    layout: Layout
    addresses: tuple[str, ...]  # of hosts, then of those of servers
    sizes: tuple[int, ...]
    rounds: int
    libraries: frozenset[str]

    def traffic(self, size: float) -> list[list[float]]:
        """Bytes from host to host."""
        return two_hop_traffic(self.layout.hosts, self.layout.servers, size)


# In the ranks, and beside the servers.


@contextlib.contextmanager
def _mesh(addresses: Sequence[str], port: int = PORT) -> Iterator[Mesh | None]:
    """Plain connections between all hosts with these addresses; on each of them one process has them."""
    host = commlib.node_rank()
    if commlib.local_rank() != 0 or host >= len(addresses):
        yield None
        return
    with contextlib.closing(Mesh(host, addresses, port)) as mesh:
        yield mesh


def serve(case: Case) -> None:
    """Beside a server: take part in the exchanges of plain sockets, while there are any."""
    index = int(os.environ[HOST])
    with contextlib.closing(Mesh(index, case.addresses)) as mesh:
        mesh.serve(case.traffic(case.sizes[0])[index], teller=0)


def _same_traffic(mesh: Mesh | None, case: Case, size: int) -> Contender:
    """The bytes that commlib's exchange needs, by plain sockets."""
    if mesh is None:
        return Contender(SAME_TRAFFIC, lambda: None)
    row = case.traffic(size)[mesh.index]
    servers = range(case.layout.hosts, case.layout.hosts + case.layout.servers)
    told = tuple(servers) if mesh.index == 0 else ()
    return Contender(SAME_TRAFFIC, lambda: mesh.exchange(row, told))


def _one_stream(mesh: Mesh | None, size: int) -> Contender:
    """`size` bytes between hosts 0 and 1, each way at once, on one connection that carries nothing else: TCP
    remembers what a connection has got when it had to share the link.
    """
    if mesh is None:
        return Contender(STREAM, lambda: None)
    row = (0, size) if mesh.index == 0 else (size, 0)
    return Contender(STREAM, lambda: mesh.exchange(row))


def _named(name: str, contender: Contender) -> Contender:
    return Contender(name, contender.action, contender.check)


def work_shaped(case: Case) -> Turns:
    """In each rank: the turns of all contenders."""
    size = case.sizes[0]
    with (
        joined(case.libraries, "eth0") as others,
        _mesh(case.addresses) as mesh,
        _mesh(case.addresses[:2], PORT + 1) as pair,
    ):
        runners = [
            _named(COMMLIB, contenders.in_arena(size // 4)),
            _one_stream(pair, size),
            _same_traffic(mesh, case, size),
            *contenders.of_gloo(others, size // 4),
        ]
        return take_turns(runners, rounds=case.rounds, batch_s=0, warm_up=1)


@dataclass(frozen=True)
class Unshaped:
    """What one rank has measured between two hosts with links as fast as the machine is."""

    turns: dict[int, Turns]  # by size
    memory: list[Resident]


def work_unshaped(case: Case) -> Unshaped:
    """In each rank: memory, and the turns of all contenders."""
    with joined(case.libraries, "eth0") as others, _mesh(case.addresses) as mesh:
        memory = _memory(MEMORY_TIMES * case.sizes[0])  # first, before anything has grown
        turns = {}
        for size in case.sizes:
            runners = [
                _named(COMMLIB, contenders.in_arena(size // 4)),
                _same_traffic(mesh, case, size),
                *contenders.of_gloo(others, size // 4),
                contenders.memcpy(size // 4),
            ]
            turns[size] = take_turns(runners, rounds=case.rounds)
            del runners
        return Unshaped(turns, memory)


def _memory(size: int) -> list[Resident]:
    buffer = commlib.zeros(size // 4, np.float32)  # written, so that it is there
    growth = []
    commlib.barrier()
    before = Resident.now()
    for _ in range(REPETITIONS):
        commlib.barrier()
        with Watch(before) as watch:
            commlib.push_pull_(buffer, name="memory", op=commlib.Sum)
        growth.append(watch.growth)
    commlib.barrier()  # nobody goes on while another looks
    return growth


def work_priority(case: Case) -> dict[str, list[float]]:
    """In each rank: seconds of an urgent tensor, alone and submitted when the first of many others has come back."""
    commlib.init()
    low_bytes = LOW_TIMES * case.sizes[0] // PIECES
    urgent = commlib.zeros(max(1, case.sizes[0] // URGENT_PART // 4), np.float32)
    low = [commlib.zeros(low_bytes // 4, np.float32) for _ in range(PIECES)]

    def of_urgent() -> float:
        began = time.perf_counter()
        commlib.push_pull_async_(urgent, name="urgent", op=commlib.Sum, priority=1).wait()
        return time.perf_counter() - began

    seconds: dict[str, list[float]] = {ALONE: [], BEHIND: []}
    for number in range(1 + case.rounds):  # the first one warms up
        commlib.barrier()
        alone = of_urgent()
        commlib.barrier()
        handles = [
            commlib.push_pull_async_(tensor, name=f"low{place}", op=commlib.Sum) for place, tensor in enumerate(low)
        ]
        handles[0].wait()
        behind = of_urgent()
        for handle in handles:
            handle.wait()
        if number > 0:
            seconds[ALONE].append(alone)
            seconds[BEHIND].append(behind)
    commlib.barrier()
    commlib.shutdown()
    return seconds


# In the benchmark itself.


def _layouts(text: str) -> Layout:
    match = re.fullmatch(r"(\d+)\+(\d+)(?:x(\d+))?", text.strip())
    if match is None or int(match[1]) < 2 or int(match[2]) > int(match[1]) or match[3] == "0":
        raise ValueError(f"{text!r} is no case: expected HOSTS+SERVERS or HOSTS+SERVERSxRANKS, as 2+0 or 4+2x2")
    return Layout(int(match[1]), int(match[3] or 1), int(match[2]))


def _part(text: str) -> str:
    if text not in PARTS:
        raise ValueError(f"{text!r} is no part: expected some of {', '.join(PARTS)}")
    return text


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=listed(_layouts), default=listed(_layouts)(CASES), help=f"default: {CASES}")
    parser.add_argument("--parts", type=listed(_part), default=PARTS, help=f"default: {','.join(PARTS)}")


def main() -> None:
    """Measure, and show."""
    options = read_options(__doc__ or "", sizes=SIZES, quick_sizes=QUICK_SIZES, rounds=(5, 5), more=_more_options)
    problem = lab.what_is_missing()
    if problem is not None:
        raise NotHereError(f"several hosts cannot be made: {problem}")
    missing = what_is_missing(options.without, can_use_mpi=False)
    report = Report("network", "commlib and others between hosts", options, missing)
    if "shaped" in options.own.parts:
        report.rows += _shaped(options, present(missing))
    if "unshaped" in options.own.parts:
        report.rows += _unshaped(options, present(missing))
    if "priority" in options.own.parts:
        report.rows += _priority(options)
    report.notes += [
        "Times are medians over the rounds of the slowest rank, of sums of float32 in place (commlib: in its arena).",
        f"Optimum: 2n(n−1)M/((n²+kn−2k)B) for n hosts, k servers, M bytes; B is the goodput of {STREAM}, both ways at "
        f"once, in the same round. {SAME_TRAFFIC}: what each host sends to each in that exchange, all at once over "
        "plain sockets, from memory to memory; connections that share a link do so unequally, so it may take longer "
        "than a sum.",
        "CPU time is user and system of all threads of both ranks; the scheduler, which rests, is not counted. Memory: "
        "the most that is there more than before; anonymous is RssAnon, pages of the arena are blocks of the memfd; "
        "the buffer itself was there before.",
    ]
    report.finish(draw)


def _case(options: Options, layout: Layout, hosts: lab.Lab, libraries: frozenset[str], sizes: Sequence[int]) -> Case:
    addresses = tuple(hosts.address(host) for host in range(layout.hosts + layout.servers))
    return Case(layout, addresses, tuple(sizes), options.rounds, libraries)


def _shaped(options: Options, libraries: frozenset[str]) -> Iterator[Row]:
    size = options.sizes[0]
    layouts: tuple[Layout, ...] = options.own.cases
    with lab.Lab(max(layout.hosts + layout.servers for layout in layouts), rate=RATE) as hosts:
        for layout in layouts:
            case = _case(options, layout, hosts, libraries, [size])
            by_rank: list[Turns] = call(
                work_shaped, case, layout=layout, lab=hosts, beside_servers=serve, timeout_s=TIMEOUT_S
            )
            yield from _shaped_rows(layout, size, by_rank)


def _shaped_rows(layout: Layout, size: int, by_rank: list[Turns]) -> Iterator[Row]:
    rounds = {name: slowest(by_rank, name) for name in by_rank[0]}
    goodput = [size / seconds for seconds in rounds.pop(STREAM)]
    rounds[OPTIMUM] = [least_seconds(layout.hosts, layout.servers, size, rate) for rate in goodput]
    title = f"{layout.hosts} hosts"
    title += f", {layout.servers} server{'s' * (layout.servers > 1)}" if layout.servers else ""
    title += f", {layout.ranks_per_host} ranks each" if layout.ranks_per_host > 1 else ""
    ordered = {name: rounds[name] for name in (COMMLIB, OPTIMUM, SAME_TRAFFIC, GLOO) if name in rounds}
    references = {"× optimum": OPTIMUM, "× TCP": SAME_TRAFFIC, "× commlib": COMMLIB}
    yield from rows_of(SHAPED, title, ordered, size=size, references=references)
    yield row(SHAPED, title, f"goodput of {STREAM}", [rate / 1e6 for rate in goodput], unit="MB/s")


def _unshaped(options: Options, libraries: frozenset[str]) -> Iterator[Row]:
    layout = Layout(hosts=2, ranks_per_host=1)
    sizes = tuple(dict.fromkeys((options.sizes[0], options.sizes[-1])))
    with lab.Lab(layout.hosts) as hosts:
        case = _case(options, layout, hosts, libraries, sizes)
        by_rank: list[Unshaped] = call(work_unshaped, case, layout=layout, lab=hosts, timeout_s=TIMEOUT_S)
    references = {"× TCP": SAME_TRAFFIC, "× commlib": COMMLIB}
    for size in sizes:
        turns = [rank.turns[size] for rank in by_rank]
        rounds = {name: slowest(turns, name) for name in turns[0]}
        yield from rows_of(UNSHAPED, size_in_words(size), rounds, size=size, references=references)
    yield from _cpu_rows([rank.turns[sizes[0]] for rank in by_rank], sizes[0])
    yield from _memory_rows([rank.memory for rank in by_rank], MEMORY_TIMES * sizes[0])


def _cpu_rows(turns: list[Turns], size: int) -> Iterator[Row]:
    used = {name: cpu_of_all(turns, name) for name in turns[0]}
    copies = used[contenders.MEMCPY]
    used[RAW_CPU] = [raw + 2 * copy for raw, copy in zip(used[SAME_TRAFFIC], copies, strict=True)]
    least = statistics.median(used[RAW_CPU])
    for name in (COMMLIB, RAW_CPU, SAME_TRAFFIC, contenders.MEMCPY, GLOO):
        if name in used:
            ratios = {} if name == RAW_CPU else {"× TCP + 2 memcpy": statistics.median(used[name]) / least}
            yield row(CPU, size_in_words(size), name, used[name], unit="CPU s", size=size, ratios=ratios)


def _memory_rows(by_rank: list[list[Resident]], size: int) -> Iterator[Row]:
    for rank, growth in enumerate(by_rank):
        for name, values in (
            ("anonymous", [float(now.anonymous) for now in growth]),
            ("pages of arena", [float(now.shared) for now in growth]),
        ):
            case = f"rank {rank}, {size_in_words(size)}"
            yield row(MEMORY, case, name, values, unit="B", ratios={"× buffer": max(values) / size})


def _priority(options: Options) -> Iterator[Row]:
    layout = Layout(hosts=2, ranks_per_host=1)
    size = options.sizes[0]
    with lab.Lab(layout.hosts, rate=RATE) as hosts:
        case = _case(options, layout, hosts, frozenset(), [size])
        by_rank = call(work_priority, case, layout=layout, lab=hosts, timeout_s=TIMEOUT_S)
    rounds = {
        name: [max(seconds) for seconds in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in (ALONE, BEHIND)
    }
    title = f"{size_in_words(size // URGENT_PART)} behind {size_in_words(LOW_TIMES * size)}"
    yield from rows_of(PRIORITY, title, rounds, size=size // URGENT_PART, references={"× alone": ALONE})


def draw(figure: Any, rows: list[Row]) -> None:
    """Times on shaped links by case, those on unshaped ones beside them."""
    shaped = [one for one in rows if one.section == SHAPED and one.unit == "s"]
    largest = max(one.size for one in rows)
    rest = [one for one in rows if one.section == UNSHAPED and one.size == largest]
    panels = [
        (chosen, title)
        for chosen, title in (
            (shaped, f"{size_in_words(largest)}, {SHAPED}"),
            (rest, f"{size_in_words(largest)}\n{UNSHAPED}"),
            ([one for one in rows if one.section == PRIORITY], PRIORITY.replace(": ", "\n")),
        )
        if chosen
    ]
    widths = [2 + len({one.case for one in chosen}) for chosen, _ in panels]
    drawn = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for axes, (chosen, title) in zip(drawn, panels, strict=True):
        charts.bars(
            axes,
            chosen,
            lambda one: one.median,
            label=time_in_words,
            ylabel="",
            group=lambda one: one.case.replace(", ", "\n"),
        )
        axes.yaxis.set_major_formatter(lambda seconds, _: time_in_words(seconds) if seconds else "0")
        axes.set_title(title, fontsize=9)
    charts.one_legend(figure)


if __name__ == "__main__":
    import network  # by the name that the processes it starts know it by

    run_script(network.main)
