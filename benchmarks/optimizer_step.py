# SPDX-License-Identifier: Apache-2.0
"""What commlib's optimizer for PyTorch costs a step, apart from moving the bytes. Needs torch.

    python benchmarks/optimizer_step.py [--parameters 1000] [--batch 64] [--quick] [--json FILE] [--png FILE]

In one process there is nothing to send: an iteration of a small convolutional network, of the size that suits 8×8
images, with a plain optimizer and with a wrapped one. On two ranks: a step of many small parameters, with one operation
for each of them, as Horovod and BytePS have it, and with commlib's buckets; beside it what the same step takes with no
other rank.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import commlib
from harness import charts
from harness.group import Layout, call
from harness.libraries import GLOO, joined, present, what_is_missing
from harness.options import NotHereError, positive, read_options, run_script
from harness.report import Report, Row, rows_of
from harness.sizes import time_in_words
from harness.turns import Contender, Turns, slowest, take_turns

TIMEOUT_S = 300
PER_PARAMETER = 256  # elements

PLAIN, WRAPPED = "torch alone", "commlib, DistributedOptimizer"
ONE_BY_ONE, DDP = "commlib, one operation a parameter", f"torch DDP, {GLOO}"
ALONE, TOGETHER, COST = "1 process: an iteration", "2 ranks: a step", "2 ranks: what it adds to a step"


@dataclass(frozen=True)
class Task:
    """What is trained, on all ranks alike."""

    parameters: int
    batch: int
    rounds: int
    iterations: int  # of one turn
    libraries: frozenset[str]


# In the ranks.


def alone(task: Task) -> Turns:
    """In one process: iterations with either optimizer, one at a time and many of them: the difference is small."""
    import torch

    import commlib.torch as bps

    torch.set_num_threads(1)
    commlib.init()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(task.batch, 1, 8, 8, generator=generator)
    y = torch.randint(10, (task.batch,), generator=generator)

    def training(name: str, wrap: Callable[[Any, Any], Any]) -> Contender:
        torch.manual_seed(1)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 4 * 4, 10),
        )
        optimizer = wrap(network, torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9))

        def action() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()

        return Contender(name, action, action)

    runners = [
        training(PLAIN, lambda _, plain: plain),
        training(WRAPPED, lambda network, plain: bps.DistributedOptimizer(plain, network.named_parameters())),
    ]
    turns = take_turns(runners, rounds=task.rounds * 100, batch_s=0, warm_up=10)
    commlib.shutdown()
    return turns


def together(task: Task) -> Turns:
    """In each of two ranks: the turns of all contenders."""
    import torch

    torch.set_num_threads(1)
    with joined(task.libraries) as others:
        runners = [_plain(task), _wrapped(task), _one_by_one(task)]
        if others.gloo is not None:
            runners.append(_ddp(task))
        return take_turns(runners, rounds=task.rounds, batch_s=0, warm_up=2)


def _many(count: int) -> Any:
    """A model of many parameters that hardly computes anything."""
    import torch

    class Many(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            values = (torch.full((PER_PARAMETER,), float(i)) for i in range(count))
            self.values = torch.nn.ParameterList(map(torch.nn.Parameter, values))

        def forward(self, x: Any) -> Any:
            return torch.stack([*self.values]).mean() * x

    return Many()


def _steps(task: Task, name: str, module: Any, optimizer: Any, before_step: Callable[[], object]) -> Contender:
    import torch

    x = torch.ones(())

    def action() -> None:
        for _ in range(task.iterations):
            optimizer.zero_grad()
            module(x).backward()
            before_step()
            optimizer.step()

    return Contender(name, action, action)


def _sgd(module: Any) -> Any:
    import torch

    return torch.optim.SGD(module.parameters(), lr=0.01)


def _plain(task: Task) -> Contender:
    module = _many(task.parameters)
    return _steps(task, PLAIN, module, _sgd(module), lambda: None)


def _wrapped(task: Task) -> Contender:
    import commlib.torch as bps

    module = _many(task.parameters)
    optimizer = bps.DistributedOptimizer(_sgd(module), module.named_parameters())
    return _steps(task, WRAPPED, module, optimizer, lambda: None)


def _one_by_one(task: Task) -> Contender:
    import commlib.torch as bps

    module = _many(task.parameters)
    handles: list[Any] = []

    def hook(name: str) -> Callable[[Any], None]:
        return lambda param: handles.append(bps.push_pull_async_inplace(param.grad, name=name))

    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(hook(f"one by one/{name}"))

    def synchronize() -> None:
        while handles:
            bps.synchronize(handles.pop())

    return _steps(task, ONE_BY_ONE, module, _sgd(module), synchronize)


def _ddp(task: Task) -> Contender:
    import torch

    module = _many(task.parameters)
    parallel = torch.nn.parallel.DistributedDataParallel(module)
    return _steps(task, DDP, parallel, _sgd(module), lambda: None)


# In the benchmark itself.


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parameters", type=positive, default=1000, help="of the model on two ranks; default: 1000")
    parser.add_argument("--batch", type=positive, default=64, help="of the one process; default: 64")


def main() -> None:
    """Measure, and show."""
    options = read_options(__doc__ or "", sizes=(), rounds=(3, 9), more=_more_options)
    missing = what_is_missing(options.without, can_use_mpi=False)
    if GLOO in missing and missing[GLOO] != "left out":
        raise NotHereError(missing[GLOO])
    own = options.own
    task = Task(own.parameters, own.batch, options.rounds, iterations=20, libraries=present(missing))
    report = Report("optimizer_step", "PyTorch: what an optimizer costs a step", options, missing)
    (single,) = call(alone, task, layout=Layout(ranks_per_host=1), timeout_s=TIMEOUT_S)
    report.rows += _rows(dataclasses.replace(task, iterations=1), ALONE, [single], (PLAIN, WRAPPED))
    by_rank: list[Turns] = call(together, task, layout=Layout(ranks_per_host=2), timeout_s=TIMEOUT_S)
    report.rows += _rows(task, TOGETHER, by_rank, (PLAIN, WRAPPED, ONE_BY_ONE, DDP))
    report.rows += _costs(task, by_rank)
    report.notes += [
        f"Medians over the rounds of the slowest rank, on one thread each; a turn is one step in one process, and "
        f"{task.iterations} on two ranks, with {task.parameters} parameters of {PER_PARAMETER} elements each. "
        "What a step costs is the time it takes, less what it takes with no other rank."
    ]
    report.finish(draw)


def _seconds(task: Task, by_rank: Sequence[Turns], names: Sequence[str]) -> dict[str, list[float]]:
    return {name: [s / task.iterations for s in slowest(by_rank, name)] for name in names if name in by_rank[0]}


def _rows(task: Task, section: str, by_rank: Sequence[Turns], names: Sequence[str]) -> list[Row]:
    references = {"× torch alone": PLAIN}
    return list(rows_of(section, "step", _seconds(task, by_rank, names), size=0, references=references))


def _costs(task: Task, by_rank: Sequence[Turns]) -> list[Row]:
    seconds = _seconds(task, by_rank, (PLAIN, WRAPPED, ONE_BY_ONE, DDP))
    plain = seconds.pop(PLAIN)
    costs = {name: [one - other for one, other in zip(values, plain, strict=True)] for name, values in seconds.items()}
    return list(rows_of(COST, "step", costs, size=0, references={"× one by one": ONE_BY_ONE}))


def draw(figure: Any, rows: list[Row]) -> None:
    """A bar for each way to take a step on two ranks."""
    axes = figure.subplots()
    chosen = [row for row in rows if row.section == TOGETHER]
    charts.times_on_y(axes, chosen)
    charts.bars(axes, chosen, lambda one: one.median, label=time_in_words, ylabel="time of a step")


if __name__ == "__main__":
    import optimizer_step  # by the name that the processes it starts know it by

    run_script(optimizer_step.main)
