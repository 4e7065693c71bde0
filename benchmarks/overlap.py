# SPDX-License-Identifier: Apache-2.0
"""Training on two hosts: how much of the communication is hidden behind the computation. Needs root, and torch.

    python benchmarks/overlap.py [--layers 12] [--width 512] [--batch 2048] [--quick] [--json FILE] [--png FILE]

Hosts are network namespaces of this machine. Before each round their links are made so fast that moving all gradients
takes as long as the backward pass does at that time. What is reported is one iteration: of computing alone, of
communicating alone, of both with commlib's optimizer, with its CrossBarrier, and with torch's DistributedDataParallel
over gloo; and of both at once where neither has to wait for the other, which is as well as it can be done where they
share the CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import commlib
from harness import charts
from harness.group import Layout, call
from harness.libraries import GLOO, joined, present, what_is_missing
from harness.options import NotHereError, positive, read_options, run_script
from harness.report import Report, Row, row
from harness.sizes import size_in_words, time_in_words
from harness.turns import Contender, Turns, of_all, slowest, take_turns
from tests import lab

TIMEOUT_S = 300
PART_BYTES = 1 << 20  # of what is moved alone, as of the optimizer's buckets
LEARNING_RATE = 1e-4
PIXELS, CLASSES = 64, 10

COMPUTE, COMMUNICATE, SUM = "computation alone", "communication alone", "one after the other"
AT_ONCE = "both at once, of nothing to do with each other"
OPTIMIZER, CROSS_BARRIER, DDP = "commlib, DistributedOptimizer", "commlib, CrossBarrier", f"torch DDP, {GLOO}"
SECTION = "2 hosts: one iteration"


@dataclass(frozen=True)
class Task:
    """What is trained, on all ranks alike."""

    layers: int
    width: int
    batch: int
    rounds: int
    iterations: int  # of one turn
    libraries: frozenset[str]

    @property
    def bytes_of_gradients(self) -> int:
        """Of one iteration."""
        return 4 * sum((before + 1) * after for before, after in itertools.pairwise(self.widths))

    @property
    def widths(self) -> list[int]:
        """What goes into each layer, and what comes out of the last one: a classifier of images of 8×8 pixels."""
        return [PIXELS, *[self.width] * (self.layers - 1), CLASSES]

    def network(self) -> Any:
        """As many layers as said."""
        import torch

        torch.manual_seed(1)
        layers: list[Any] = []
        for before, after in itertools.pairwise(self.widths):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])

    def data(self) -> tuple[Any, Any]:
        """A batch of this rank's, and the classes."""
        import torch

        generator = torch.Generator().manual_seed(commlib.rank())
        x = torch.randn(self.batch, PIXELS, generator=generator)
        return x, torch.randint(CLASSES, (self.batch,), generator=generator)


# In the ranks.


def own_cpus() -> None:
    """As hosts have CPUs of their own, and as many: one that computes is not slowed down by what another one sends.

    Before anything starts a thread. Nothing where there is one CPU.
    """
    cpus = sorted(os.sched_getaffinity(0))
    even = len(cpus) // 2 * 2
    os.sched_setaffinity(0, cpus[int(os.environ["COMMLIB_RANK"]) : even : 2] or cpus)


def _pacing(task: Task, hosts: lab.Lab, backward_s: list[float]) -> Callable[[], None]:
    """Gives the links the rate that fits a backward pass, while all ranks compute, and notes how long that takes."""
    import torch

    network, (x, y) = task.network(), task.data()

    def pace() -> None:
        seconds = []
        for _ in range(1 + task.iterations):  # the first one finds no memory that is there already
            network.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(x), y)
            commlib.barrier()
            began = time.perf_counter()
            loss.backward()
            seconds.append(time.perf_counter() - began)
        backward_s.append(of_all(statistics.median(seconds[1:])))
        if commlib.rank() == 0:
            for host in range(hosts.n_hosts):
                hosts.pace(host, f"{round(8 * task.bytes_of_gradients / backward_s[-1])}bit")
        commlib.barrier()

    return pace


def work(task: Task, hosts: lab.Lab) -> tuple[Turns, list[float]]:
    """In each rank: the turns of all contenders, and the seconds of a backward pass, by round."""
    own_cpus()
    import torch

    torch.set_num_threads(1)
    with joined(task.libraries, "eth0") as others:
        runners = [
            _computing(task),
            _communicating(task),
            _at_once(task),
            _with_optimizer(task),
            _with_cross_barrier(task),
        ]
        if others.gloo is not None:
            runners.append(_with_ddp(task))
        backward_s: list[float] = []
        pace = _pacing(task, hosts, backward_s)
        turns = take_turns(runners, rounds=task.rounds, batch_s=0, warm_up=1, before_round=pace)
        return turns, backward_s[1:]


def _training(
    task: Task,
    name: str,
    network: Any,
    optimizer: Any,
    *,
    begin: Callable[[], object] = lambda: None,
    finish: Callable[[], object] = lambda: None,
) -> Contender:
    """Some iterations of a training script, each after `begin`; the last one is over when its weights are there."""
    import torch

    x, y = task.data()

    def action() -> None:
        for _ in range(task.iterations):
            begin()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
        finish()

    return Contender(name, action, action)


def _sgd(network: Any) -> Any:
    import torch

    return torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)


def _computing(task: Task) -> Contender:
    network = task.network()
    # All meet before each iteration, as they do where they exchange gradients: it lasts as long as the slower rank's.
    return _training(task, COMPUTE, network, _sgd(network), begin=commlib.barrier)


def _communicating(task: Task) -> Contender:
    move = _moving(task, COMMUNICATE)

    def action() -> None:
        for _ in range(task.iterations):
            for handle in move():
                handle.wait()

    return Contender(COMMUNICATE, action, action)


def _at_once(task: Task) -> Contender:
    import torch

    network, (x, y) = task.network(), task.data()
    optimizer, move = _sgd(network), _moving(task, AT_ONCE)

    def action() -> None:
        for _ in range(task.iterations):
            handles = move()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
            for handle in handles:
                handle.wait()

    return Contender(AT_ONCE, action, action)


def _moving(task: Task, name: str) -> Callable[[], list[commlib.Handle]]:
    """Starts to move as much as all gradients, in parts."""
    whole, rest = divmod(task.bytes_of_gradients, PART_BYTES)
    parts = [commlib.zeros(size // 4, np.float32) for size in [PART_BYTES] * whole + [rest] * (rest > 0)]
    return lambda: [commlib.push_pull_async_(part, name=f"{name}/{i}") for i, part in enumerate(parts)]


def _with_optimizer(task: Task) -> Contender:
    import commlib.torch as bps

    network = task.network()
    optimizer = bps.DistributedOptimizer(_sgd(network), network.named_parameters())
    return _training(task, OPTIMIZER, network, optimizer)


def _with_cross_barrier(task: Task) -> Contender:
    from commlib.torch.cross_barrier import CrossBarrier

    network = task.network()
    optimizer = CrossBarrier(network, _sgd(network), network.named_parameters())
    return _training(task, CROSS_BARRIER, network, optimizer, finish=optimizer.synchronize)


def _with_ddp(task: Task) -> Contender:
    import torch

    network = task.network()
    parallel = torch.nn.parallel.DistributedDataParallel(network)
    return _training(task, DDP, parallel, _sgd(network))


# In the benchmark itself.


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=12, help="default: 12")
    parser.add_argument("--width", type=positive, default=512, help="of each layer; default: 512")
    parser.add_argument("--batch", type=positive, default=2048, help="of each rank; default: 2048")


def main() -> None:
    """Measure, and show."""
    options = read_options(__doc__ or "", sizes=(), rounds=(3, 9), more=_more_options)
    problem = lab.what_is_missing()
    if problem is not None:
        raise NotHereError(f"several hosts cannot be made: {problem}")
    missing = what_is_missing(options.without, can_use_mpi=False)
    if GLOO in missing and missing[GLOO] != "left out":
        raise NotHereError(missing[GLOO])
    own = options.own
    task = Task(own.layers, own.width, own.batch, options.rounds, iterations=4, libraries=present(missing))
    layout = Layout(hosts=2, ranks_per_host=1)
    report = Report("overlap", f"{task.layers} layers, {task.width} wide: training on 2 hosts", options, missing)
    with lab.Lab(layout.hosts) as hosts:
        measured: list[tuple[Turns, list[float]]] = call(
            work, task, hosts, layout=layout, lab=hosts, timeout_s=TIMEOUT_S
        )
    report.rows += _rows(task, [turns for turns, _ in measured])
    _, backward = measured[0]
    fastest, slowest_link = (8e-6 * task.bytes_of_gradients / seconds for seconds in (min(backward), max(backward)))
    report.notes += [
        f"Medians over the rounds of the slowest rank, of the ratios, too; a turn is {task.iterations} iterations on "
        f"one thread a rank. A backward pass takes {time_in_words(min(backward))} to {time_in_words(max(backward))}; "
        f"links carry {slowest_link:.0f} to {fastest:.0f} Mbit/s each way, so that "
        f"{size_in_words(task.bytes_of_gradients)} of gradients take as long."
    ]
    report.finish(draw)


def _rows(task: Task, by_rank: Sequence[Turns]) -> list[Row]:
    rounds = {name: [s / task.iterations for s in slowest(by_rank, name)] for name in by_rank[0]}
    rounds[SUM] = [a + b for a, b in zip(rounds[COMPUTE], rounds[COMMUNICATE], strict=True)]
    names = (COMPUTE, COMMUNICATE, SUM, AT_ONCE, OPTIMIZER, CROSS_BARRIER, DDP)
    ordered = {name: rounds[name] for name in names if name in rounds}
    # Round by round: from one to the next the machine, and with it the links, may have become faster or slower.
    ratios = {
        name: statistics.median(mine / both for mine, both in zip(seconds, rounds[SUM], strict=True))
        for name, seconds in ordered.items()
    }
    return [
        row(
            SECTION,
            "iteration",
            name,
            seconds,
            size=task.bytes_of_gradients,
            ratios={} if name == SUM else {"× one after the other": ratios[name]},
        )
        for name, seconds in ordered.items()
    ]


def draw(figure: Any, rows: list[Row]) -> None:
    """A bar for each."""
    axes = figure.subplots()
    charts.times_on_y(axes, rows)
    charts.bars(axes, rows, lambda one: one.median, label=time_in_words, ylabel="time of an iteration")


if __name__ == "__main__":
    import overlap  # by the name that the processes it starts know it by

    run_script(overlap.main)
