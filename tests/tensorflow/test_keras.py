# SPDX-License-Identifier: Apache-2.0
"""Keras's optimizer, wrapped: what it is, how it is saved. Callbacks, value by value. What ranks disagree about."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import commlib
import commlib.tensorflow as bps
from commlib.tensorflow.distribute import CrossDeviceOps
from commlib.tensorflow.keras import DistributedOptimizer, callbacks, load_model
from tests.launch import REPOSITORY, Job, environment, run_job
from tests.tensorflow import message_of, outcomes, results_of
from tests.tensorflow.test_training import BATCH, OPTIMIZERS, data, mine, network

pytestmark = pytest.mark.timeout(240)  # one job runs them all
SIZES = [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
Call = Callable[..., Any]


def batch_of(model: Any) -> tuple[Any, Any]:
    random = np.random.default_rng(bps.rank())
    return random.standard_normal((6, 7)).astype("float32"), random.standard_normal((6, 3)).astype("float32")


def scenario_is_what_it_wraps() -> None:
    plain = keras.optimizers.Adam(0.01, clipnorm=1.0)
    config = plain.get_config()
    wrapped = DistributedOptimizer(plain)
    assert wrapped is plain
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert type(wrapped).__name__ == "Adam"
    assert wrapped.get_config() == config
    assert type(type(wrapped).from_config(config)) is keras.optimizers.Adam
    serialized = keras.optimizers.serialize(wrapped)
    expected = keras.optimizers.serialize(keras.optimizers.Adam.from_config(config))
    assert serialized == expected
    assert serialized["module"] == "keras.optimizers"
    assert type(keras.optimizers.deserialize(serialized)) is keras.optimizers.Adam
    assert message_of(lambda: DistributedOptimizer(wrapped))[0] == "ValueError"
    assert message_of(lambda: DistributedOptimizer(object()))[0] == "TypeError"
    assert message_of(lambda: DistributedOptimizer(keras.optimizers.SGD(), op=bps.Max))[0] == "ValueError"


def scenario_saved_and_loaded() -> None:
    model = network()
    model.compile(DistributedOptimizer(OPTIMIZERS["adam"]()), "mse")
    x, y = data(3)
    model.fit(*mine(x, y), batch_size=BATCH // bps.size(), shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.keras")
        model.save(path)
        plain = keras.models.load_model(path)
        again = load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam
    for other in (plain, again):
        for one, two in zip(
            [*model.weights, *model.optimizer.variables], [*other.weights, *other.optimizer.variables], strict=True
        ):
            assert np.array_equal(one.numpy(), two.numpy()), one.path
    again.fit(*mine(x, y), batch_size=BATCH // bps.size(), shuffle=False, verbose=0)
    for weight in again.weights:
        assert np.array_equal(weight.numpy(), bps.broadcast(tf.constant(weight.numpy()), 0).numpy())


def scenario_apply_in_all_ways() -> None:
    mean = np.mean(range(1, bps.size() + 1))
    for run in (lambda f: f, tf.function):
        _apply_in_all_ways(run, mean)


def _apply_in_all_ways(run: Call, mean: Any) -> None:
    variable = keras.Variable([1.0, 2.0])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    gradient = tf.fill((2,), float(bps.rank() + 1))
    run(lambda: optimizer.apply([gradient], [variable]))()
    run(lambda: optimizer.apply([gradient]))()
    run(lambda: optimizer.apply_gradients([(gradient, variable)]))()
    assert np.allclose(variable.numpy(), np.array([1.0, 2.0]) - 3 * mean)


def scenario_an_optimizer_that_takes_another_way() -> None:
    class Odd(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            for variable, gradient in zip(trainable_variables, grads, strict=True):
                variable.assign_sub(gradient)

    variable = keras.Variable([1.0])
    optimizer = DistributedOptimizer(Odd(1.0))
    error, text = message_of(lambda: optimizer.apply([tf.constant([1.0])], [variable]))
    assert error == "UnsupportedError"
    assert "_clip_gradients" in text
    model = network()
    model.compile(DistributedOptimizer(Odd(1.0)), "mse")
    error, text = message_of(lambda: model.fit(*batch_of(model), verbose=0))
    assert "_clip_gradients" in text


def scenario_xla_is_refused() -> None:
    if bps.size() == 1:
        return
    model = network()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse", jit_compile=True)
    error, text = message_of(lambda: model.fit(*batch_of(model), verbose=0))
    assert "jit_compile=False" in text, (error, text)


def scenario_a_loss_scale_put_around_later() -> None:
    model = network()
    inner = DistributedOptimizer(keras.optimizers.SGD(0.1))
    inner.build(model.trainable_variables)
    outer = keras.optimizers.LossScaleOptimizer(inner)
    gradients = [tf.zeros_like(variable) for variable in model.trainable_variables]
    outer.apply(gradients, model.trainable_variables)  # builds it once more, and that is when it is noticed
    assert type(outer).__name__ == "LossScaleOptimizer"
    assert type(outer) is not keras.optimizers.LossScaleOptimizer


def scenario_broadcast_at_the_beginning() -> None:
    model = network()
    for weight in model.weights:
        weight.assign(weight + float(bps.rank()))
    reference = [weight.numpy() for weight in network().weights]
    seen: list[Any] = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda *_, **__: seen.append([w.numpy() for w in model.weights])
    )
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    model.fit(*batch_of(model), verbose=0, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0), look])
    assert all(np.array_equal(a, b) for a, b in zip(seen[0], reference, strict=True))
    # A model that its first batch builds.
    keras.utils.set_random_seed(bps.rank())
    lazy = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)])
    lazy.compile(DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    lazy.fit(*batch_of(lazy), batch_size=2, verbose=0, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])
    for variable in [*lazy.weights, *lazy.optimizer.variables]:
        value = tf.constant(variable.numpy())
        assert np.array_equal(bps.broadcast(value, 0), value), variable.path


class Counting(keras.callbacks.Callback):
    """Notes what later callbacks, and the history, see."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def scenario_metrics_are_averaged_by_samples() -> None:
    rank, size = bps.rank(), bps.size()
    model = network()
    # Ranks have the same number of batches, and not of samples: 4 of at most 6 + rank.
    counts = [4 * (6 + other) - other for other in range(size)]
    random = np.random.default_rng(5)
    parts = [(random.standard_normal((n, 7)).astype("f"), random.standard_normal((n, 3)).astype("f")) for n in counts]
    tests = [(x[: 3 + other], y[: 3 + other]) for other, (x, y) in enumerate(parts)]
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", metrics=["mae"])
    counting = Counting()
    for validation in (None, tests[rank]):
        history = model.fit(
            *parts[rank],
            batch_size=6 + rank,
            epochs=2,
            verbose=0,
            validation_data=validation,
            callbacks=[callbacks.MetricAverageCallback(), counting],
        )
        everything = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        of_tests = [np.concatenate(arrays) for arrays in zip(*tests, strict=True)]
        expected = {"": everything, "val_": of_tests} if validation is not None else {"": everything}
        for prefix, (x, y) in expected.items():
            difference = model(x).numpy() - y
            assert np.allclose(history.history[f"{prefix}loss"], np.mean(difference**2), rtol=1e-5)
            assert np.allclose(history.history[f"{prefix}mae"], np.mean(np.abs(difference)), rtol=1e-5)
            assert np.allclose(counting.logs[-1][f"{prefix}loss"], np.mean(difference**2), rtol=1e-5)


def scenario_metrics_of_weighted_samples_in_uneven_batches() -> None:
    """As many batches on all ranks, the last of which are of one sample and more."""
    random = np.random.default_rng(3)
    counts = [4 * 2 + 1 + rank % 3 for rank in range(bps.size())]
    x = [random.standard_normal((count, 7)).astype("f") for count in counts]
    y = [random.standard_normal((count, 3)).astype("f") for count in counts]
    weights = [random.uniform(0, 2, count).astype("f") for count in counts]
    model = network()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    mine = bps.rank()
    average = callbacks.MetricAverageCallback()
    history = model.fit(
        x[mine], y[mine], sample_weight=weights[mine], batch_size=4, epochs=2, verbose=0, callbacks=[average]
    )
    losses = [np.mean((model(part).numpy() - y[rank]) ** 2, axis=1) * weights[rank] for rank, part in enumerate(x)]
    # Keras divides by the number of samples, not by the sum of their weights.
    assert np.allclose(history.history["loss"], np.sum(np.concatenate(losses)) / sum(counts), rtol=1e-5)


def scenario_metrics_of_other_names() -> None:
    if bps.size() == 1:
        return
    model = network()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"] if bps.rank() else ["mse"])
    error, text = message_of(
        lambda: model.fit(*batch_of(model), verbose=0, callbacks=[callbacks.MetricAverageCallback()])
    )
    assert error == "MismatchError"
    assert "mae" in text or "mean" in text


def rates(callback: Any, epochs: int, steps: int, optimizer: Any = None) -> tuple[list[float], Any]:
    """The learning rate in each batch, and the history."""
    model = network()
    optimizer = optimizer or keras.optimizers.SGD(9.0)
    model.compile(DistributedOptimizer(optimizer), "mse")
    seen: list[float] = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: seen.append(float(model.optimizer.learning_rate.numpy()))
    )
    x, y = np.zeros((steps * 2, 7), "f"), np.zeros((steps * 2, 3), "f")
    history = model.fit(x, y, batch_size=2, epochs=epochs, verbose=0, callbacks=[callback, look])
    return seen, history.history


def scenario_warm_up() -> None:
    size, steps, epochs, rate = bps.size(), 4, 5, 0.4
    seen, history = rates(callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3, verbose=1), epochs, steps)
    expected = []
    for epoch in range(epochs):
        for batch in range(steps):
            # Goyal et al.: from rate/size to rate, by a constant amount each iteration.
            passed = min((epoch + (batch + 1) / steps) / 3, 1.0)
            expected.append(rate / size + (rate - rate / size) * passed)
    assert np.allclose(seen, expected, rtol=1e-6)
    assert np.allclose(history["lr"], expected[steps - 1 :: steps], rtol=1e-6)


def scenario_schedules() -> None:
    seen, _ = rates(callbacks.LearningRateScheduleCallback(0.5, 0.1, start_epoch=1, end_epoch=3), 4, 3)
    assert np.allclose(seen, [9.0] * 3 + [0.05] * 9)  # what it was until then, and stays
    seen, _ = rates(callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5**epoch), 3, 2)
    assert np.allclose(seen, [0.5, 0.5, 0.25, 0.25, 0.125, 0.125])
    schedule = callbacks.LearningRateScheduleCallback(
        0.5, lambda epoch: 1 / (1 + epoch), staircase=False, steps_per_epoch=2
    )
    seen, _ = rates(schedule, 2, 2)
    assert np.allclose(seen, [0.5 / (1 + t) for t in (0, 0.5, 1, 1.5)])
    nothing: Any = None
    assert message_of(lambda: callbacks.LearningRateScheduleCallback(nothing, 1.0))[0] == "ValueError"


def scenario_momentum_is_corrected() -> None:
    """What is kept of earlier steps is what it would have been, had the new rate been in force all along."""

    def weights(correction: bool) -> Any:
        model = network()
        model.compile(DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)), "mse")
        schedule = callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 10.0**-epoch, momentum_correction=correction
        )
        x, y = data(2)
        model.fit(x, y, batch_size=2 * BATCH, epochs=2, verbose=0, shuffle=False, callbacks=[schedule])
        return model.weights[0].numpy()

    def by_hand(correction: bool) -> Any:
        model = network()
        x, y = data(2)
        velocity = [np.zeros(weight.shape) for weight in model.weights]
        for rate, ratio in ((0.1, 0.0), (0.01, 0.1)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, [weight.value for weight in model.weights])
            for i, (weight, gradient) in enumerate(zip(model.weights, gradients, strict=True)):
                velocity[i] = 0.5 * velocity[i] * (ratio if correction else 1.0) - rate * gradient.numpy()
                weight.assign(weight + velocity[i])
        return model.weights[0].numpy()

    for correction in (True, False):
        assert np.allclose(weights(correction), by_hand(correction), rtol=1e-5, atol=1e-7), correction


def scenario_variables_of_other_shapes() -> None:
    if bps.size() == 1:
        return
    model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(3 + bps.rank())])
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.zeros((4, 7), "f")
    error, text = message_of(lambda: model.fit(x, np.zeros((4, 3 + bps.rank()), "f"), verbose=0))
    assert error in ("UnknownError", "InvalidArgumentError")
    assert "MismatchError" in text
    assert "(7, 3)" in text
    assert isinstance(bps.last_error(), commlib.errors.MismatchError)


def scenario_tapes_leave_nothing_behind() -> None:
    import gc

    variable = tf.Variable(tf.zeros(1000))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * 2.0)
        bps.DistributedGradientTape(tape).gradient(loss, [variable])

    for _ in range(20):
        step()
    gc.collect()
    objects, nbytes = len(gc.get_objects()), commlib.api.session().worker.allocated_bytes()
    for _ in range(1000):
        step()
    gc.collect()
    assert len(gc.get_objects()) < objects + 200
    assert commlib.api.session().worker.allocated_bytes() <= nbytes + 65536


def scenario_cross_device_ops_need_several_devices() -> None:
    error, text = message_of(CrossDeviceOps)
    assert error == "ValueError"
    assert "DistributedOptimizer" in text


def run() -> dict[str, str]:
    return outcomes({name: scenario for name, scenario in globals().items() if name.startswith("scenario_")})


WORKERS = [run]
SCENARIOS: list[str] = [name for name in list(globals()) if name.startswith("scenario_")]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
def test(name: str, size: int) -> None:
    for outcome in results_of(run, size):
        assert outcome[name] == "passed", outcome[name]


@pytest.mark.parametrize("example", [pytest.param("tensorflow_digits.py", marks=pytest.mark.soak), "keras_digits.py"])
def test_examples_learn(example: str) -> None:
    with Job(REPOSITORY / "examples" / example, hosts=[2]) as job:
        ended = job.wait(timeout=100)
    assert [outcome.status for outcome in ended] == [0, 0], "\n".join(map(str, ended))
    said = ended[0].stdout
    assert float(re.search(r"test accuracy: (\S+)", said)[1]) >= 0.95  # type: ignore[index]
    assert "weights identical on all ranks: yes" in said


@pytest.mark.soak
def test_the_benchmark_runs(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    script = str(REPOSITORY / "benchmarks" / "tensorflow_step.py")
    argv = [sys.executable, script, "--quick", "--rounds", "2", "--variables", "7", "--json", str(results)]
    subprocess.run(argv, env=environment(), check=True, timeout=100)
    rows = {
        (row["section"].partition(": ")[2], row["contender"]): row["rounds"]
        for row in json.loads(results.read_text())["rows"]
    }
    step, cost = "a step", "what it adds to a step"
    for name in ("commlib, DistributedOptimizer", "an empty host call"):
        for whole, plain, added in zip(rows[step, name], rows[step, "TensorFlow alone"], rows[cost, name], strict=True):
            assert added == pytest.approx(whole - plain)
    assert (cost, "commlib, without the bytes") in rows


# Two replicas in each process: Keras, and a loop of one's own, against one process on the whole batch.
REPLICAS = """
    import numpy as np
    import tensorflow as tf
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    import keras
    import commlib.tensorflow as bps
    from commlib.tensorflow.distribute import CrossDeviceOps
    from commlib.tensorflow.keras import DistributedOptimizer
    from commlib.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback
    from tests.launch import give
    from tests.tensorflow import message_of

    bps.init()
    rank, size = bps.rank(), bps.size()
    BATCH, STEPS = 24, 5
    random = np.random.default_rng(1)
    words = random.integers(0, 17, (BATCH * STEPS, 3)).astype("int32")
    numbers = random.standard_normal((BATCH * STEPS, 5)).astype("float32")
    y = random.standard_normal((BATCH * STEPS, 2)).astype("float32")
    share = BATCH // size
    mine = np.concatenate([np.arange(step * BATCH + rank * share, step * BATCH + (rank + 1) * share)
                           for step in range(STEPS)])

    def network(seed):
        keras.utils.set_random_seed(seed)
        first, second = keras.Input((3,), dtype="int32"), keras.Input((5,))
        embedded = keras.layers.Flatten()(keras.layers.Embedding(17, 3)(first))
        hidden = keras.layers.Dense(7, "tanh")(keras.layers.Concatenate()([embedded, second]))
        return keras.Model([first, second], keras.layers.Dense(2)(hidden))

    def fitted(model, rows, batch, callbacks=()):
        # Linear in the gradients: Keras's Adam does not sum slices of one row before it squares them.
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit([words[rows], numbers[rows]], y[rows], batch_size=batch, shuffle=False, verbose=0,
                  callbacks=list(callbacks))
        return model.get_weights()

    truth = fitted(network(0), slice(None), BATCH)
    for sparse_as_dense in (False, True):
        strategy = tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"], cross_device_ops=CrossDeviceOps(sparse_as_dense=sparse_as_dense)
        )
        with strategy.scope():
            model = network(rank)
            got = fitted(model, mine, share, [BroadcastGlobalVariablesCallback(0)])
        for weights, expected in zip(got, truth, strict=True):
            np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)

    def replica():
        context = tf.distribute.get_replica_context()
        number = 10.0 * rank + tf.cast(context.replica_id_in_sync_group, tf.float32)
        values = [tf.fill((3,), number), tf.fill((2, 2), number + 1)]
        return context.all_reduce("SUM", values), context.all_reduce("MEAN", values[0])

    every = [10.0 * r + n for r in range(size) for n in range(2)]
    for run in (strategy.run, tf.function(strategy.run)):
        for again in range(3):
            (three, four), mean = run(replica)
            for value in strategy.experimental_local_results(three):
                assert value.numpy().tolist() == [2 * np.mean(every)] * 3
            for value in strategy.experimental_local_results(four):
                assert np.all(value.numpy() == 2 * np.mean(every) + 2)
            for value in strategy.experimental_local_results(mean):
                assert np.all(value.numpy() == np.mean(every))

    with strategy.scope():
        model = network(0)
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        error, text = message_of(lambda: model.fit([words[:8], numbers[:8]], y[:8], verbose=0))
    assert "CrossDeviceOps()" in text, text
    give([weights.tobytes() for weights in got])
"""


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)])
def test_several_replicas_a_process(size: int) -> None:
    results = run_job(REPLICAS, hosts=[size], timeout=200)
    assert results == [results[0]] * size


# One rank in one order, the other in the other.
BOTH_ADAPTERS = """
    import importlib, os, sys

    order = ["torch", "tensorflow"]
    if os.environ["COMMLIB_RANK"] == "1":
        order.reverse()
    first = importlib.import_module(f"commlib.{order[0]}")
    assert order[1] not in sys.modules, order
    importlib.import_module(f"commlib.{order[1]}")
    import tensorflow as tf, torch
    import commlib.torch, commlib.tensorflow
    from tests.launch import give

    first.init()
    one = commlib.torch.push_pull(torch.ones(3), op=first.Sum)
    two = commlib.tensorflow.push_pull(tf.ones(3), op=first.Sum)
    give((order[0], one.tolist(), two.numpy().tolist()))
"""


def test_both_adapters_in_one_process() -> None:
    given = run_job(BOTH_ADAPTERS, hosts=[2], timeout=100)
    assert given == [("torch", [2.0] * 3, [2.0] * 3), ("tensorflow", [2.0] * 3, [2.0] * 3)]
