# SPDX-License-Identifier: Apache-2.0
"""What commlib's optimizer for Keras costs a step of TensorFlow, apart from moving the bytes. Needs TensorFlow.

    python benchmarks/tensorflow_step.py [--variables 100] [--quick] [--json FILE] [--png FILE]

A model of many small variables, on two ranks: a step with a plain optimizer, with commlib's, and with a plain one whose
gradients go through a function of the host with the same inputs and outputs, which does nothing, or sums as many bytes
over the ranks, and so waits for the other one. What the two differ by is not the adapter's.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import commlib
from harness import charts
from harness.group import Layout, call
from harness.options import NotHereError, positive, read_options, run_script
from harness.report import Report, Row, rows_of
from harness.sizes import time_in_words
from harness.turns import Contender, Turns, slowest, take_turns

TIMEOUT_S = 300
PER_VARIABLE = 250  # elements

PLAIN, WRAPPED, EMPTY = "TensorFlow alone", "commlib, DistributedOptimizer", "an empty host call"
BYTES, ADAPTER = "a host call that moves the bytes", "commlib, without the bytes"
STEP, COST = "2 ranks: a step", "2 ranks: what it adds to a step"


@dataclass(frozen=True)
class Task:
    """What is trained, on all ranks alike."""

    variables: int
    rounds: int
    iterations: int  # of one turn


# In the ranks.


def work(task: Task) -> Turns:
    """In each of two ranks: the turns of all contenders."""
    import keras
    import tensorflow as tf

    from commlib.tensorflow.keras import DistributedOptimizer

    tf.config.threading.set_intra_op_parallelism_threads(1)
    commlib.init()
    flat = commlib.zeros(task.variables * PER_VARIABLE, "float32")
    runners = [
        _steps(task, PLAIN, keras.optimizers.SGD(0.01)),
        _steps(task, WRAPPED, DistributedOptimizer(keras.optimizers.SGD(0.01))),
        _steps(task, EMPTY, keras.optimizers.SGD(0.01), lambda: flat),
        _steps(task, BYTES, keras.optimizers.SGD(0.01), lambda: commlib.push_pull_(flat, name="bytes")),
    ]
    turns = take_turns(runners, rounds=task.rounds, batch_s=0, warm_up=2)
    commlib.shutdown()
    return turns


def _steps(task: Task, name: str, optimizer: Any, on_host: Callable[[], Any] | None = None) -> Contender:
    import keras
    import tensorflow as tf

    variables = [keras.Variable(tf.fill((PER_VARIABLE,), float(i))) for i in range(task.variables)]
    optimizer.build(variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.stack([variable.value for variable in variables]))
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        if on_host is not None:
            (whole,) = tf.numpy_function(lambda *_: [on_host()], gradients, [tf.float32])
            whole.set_shape([task.variables * PER_VARIABLE])
            gradients = tf.split(whole, task.variables)
        optimizer.apply(gradients, variables)

    def action() -> None:
        for _ in range(task.iterations):
            step()

    return Contender(name, action, action)


# In the benchmark itself.


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variables", type=positive, default=100, help="of the model; default: 100")


def main() -> None:
    """Measure, and show."""
    options = read_options(__doc__ or "", sizes=(), rounds=(3, 15), more=_more_options)
    if importlib.util.find_spec("tensorflow") is None:
        raise NotHereError("TensorFlow is not installed")
    task = Task(options.own.variables, options.rounds, iterations=20)
    report = Report("tensorflow_step", "TensorFlow: what an optimizer costs a step", options, {})
    by_rank: list[Turns] = call(work, task, layout=Layout(ranks_per_host=2), timeout_s=TIMEOUT_S)
    report.rows += _rows(task, by_rank)
    report.notes += [
        f"Medians over the rounds of the slowest rank; a turn is {task.iterations} steps on one thread a rank, of a "
        f"model of {task.variables} variables of {PER_VARIABLE} elements. What a step costs is the time it takes, less "
        "what it takes with TensorFlow alone."
    ]
    report.finish(draw)


def _rows(task: Task, by_rank: Sequence[Turns]) -> list[Row]:
    names = (PLAIN, WRAPPED, EMPTY, BYTES)
    seconds = {name: [s / task.iterations for s in slowest(by_rank, name)] for name in names}
    rows = list(rows_of(STEP, "step", seconds, size=0, references={"× TensorFlow alone": PLAIN}))
    plain = seconds.pop(PLAIN)
    costs = {name: [one - other for one, other in zip(values, plain, strict=True)] for name, values in seconds.items()}
    moved = [one - other for one, other in zip(seconds[BYTES], seconds[EMPTY], strict=True)]
    costs[ADAPTER] = [one - other for one, other in zip(costs[WRAPPED], moved, strict=True)]
    return rows + list(rows_of(COST, "step", costs, size=0, references={"× an empty host call": EMPTY}))


def draw(figure: Any, rows: list[Row]) -> None:
    """A bar for each way to take a step."""
    axes = figure.subplots()
    chosen = [row for row in rows if row.section == STEP]
    charts.times_on_y(axes, chosen)
    charts.bars(axes, chosen, lambda one: one.median, label=time_in_words, ylabel="time of a step")


if __name__ == "__main__":
    import tensorflow_step  # by the name that the processes it starts know it by

    run_script(tensorflow_step.main)
