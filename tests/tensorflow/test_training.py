# SPDX-License-Identifier: Apache-2.0
"""Twenty steps on several ranks give the weights of one process with the whole batch, and the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import commlib.tensorflow as bps
from commlib.errors import MismatchError
from commlib.tensorflow import flights
from commlib.tensorflow.keras import DistributedOptimizer
from tests.tensorflow import message_of, outcomes, results_of

pytestmark = pytest.mark.timeout(240)  # one job runs them all
SIZES = [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(4, marks=pytest.mark.soak)]
STEPS = 20
BATCH = 12  # can be dealt to 1, 2 and 4 ranks evenly

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **options: keras.optimizers.SGD(0.05, momentum=0.9, **options),
    "adam": lambda **options: keras.optimizers.Adam(0.01, **options),
    "adamw": lambda **options: keras.optimizers.AdamW(0.01, weight_decay=0.1, **options),
}


def network() -> Any:
    # Sizes that are no multiples of 16.
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [keras.Input((7,)), keras.layers.Dense(13, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    )


def words() -> Any:
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Embedding(11, 5), keras.layers.Flatten(), keras.layers.Dense(3)]
    )


def data(steps: int, of_words: bool = False) -> tuple[Any, Any]:
    random = np.random.default_rng(11)
    x = random.integers(0, 11, (steps * BATCH, 3)) if of_words else random.standard_normal((steps * BATCH, 7))
    y = random.standard_normal((steps * BATCH, 3))
    return x.astype(np.int32 if of_words else np.float32), y.astype(np.float32)


def mine(*arrays: Any) -> list[Any]:
    """This rank's part of each batch, batch after batch."""
    size, rank = bps.size(), bps.rank()
    parts = []
    for array in arrays:
        batches = array.reshape(-1, size, BATCH // size, *array.shape[1:])
        parts.append(np.ascontiguousarray(batches[:, rank]).reshape(-1, *array.shape[1:]))
    return parts


def trained_alone(train: Callable[[], Any]) -> list[Any]:
    """The weights of the model that `train` returns, in one process: of rank 0, for all."""
    weights = [weight.numpy() for weight in train().weights] if bps.rank() == 0 else None
    return list(bps.broadcast_object(weights, 0))


def assert_same(model: Any, reference: list[Any], tolerance: float = 1e-5) -> None:
    for one, b in zip(model.weights, reference, strict=True):
        a = one.numpy()
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), (one.path, np.linalg.norm(a - b))
        first = bps.broadcast(tf.constant(a), 0).numpy()
        assert np.array_equal(a, first), f"{one.path} is not the same on rank {bps.rank()}"


def loop(
    model: Any, optimizer: Any, x: Any, y: Any, *, size: int, run: Callable[..., Any], wrap: Callable[..., Any]
) -> Any:
    """A loop of one's own over batches; returns the model."""

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = run(step)
    count = BATCH // size
    for begin in range(0, len(x), count):
        step(tf.constant(x[begin : begin + count]), tf.constant(y[begin : begin + count]))
    return model


def scenario_loops_of_one_s_own() -> None:
    for make, of_words in ((network, False), (words, True)):
        x, y = data(STEPS, of_words)

        def alone(make: Any = make, x: Any = x, y: Any = y) -> Any:
            return loop(make(), OPTIMIZERS["sgd"](), x, y, size=1, run=tf.function, wrap=lambda tape: tape)

        reference = trained_alone(alone)
        for run in (lambda f: f, tf.function):
            for options in ({}, {"sparse_as_dense": True}):
                model = make()
                wrap = lambda tape, options=options: bps.DistributedGradientTape(tape, **options)  # noqa: E731
                loop(model, OPTIMIZERS["sgd"](), *mine(x, y), size=bps.size(), run=run, wrap=wrap)
                assert_same(model, reference)
            # Or the optimizer does it.
            model = make()
            optimizer = DistributedOptimizer(OPTIMIZERS["sgd"]())
            loop(model, optimizer, *mine(x, y), size=bps.size(), run=run, wrap=lambda tape: tape)
            assert_same(model, reference)


def fit(model: Any, optimizer: Any, x: Any, y: Any, *, size: int, **options: Any) -> Any:
    model.compile(optimizer, "mse", **options)
    model.fit(x, y, batch_size=BATCH // size, shuffle=False, verbose=0)
    return model


def equals(
    make: Callable[..., Any],
    optimizer: Callable[..., Any],
    of_words: bool = False,
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    x, y = data(STEPS, of_words)
    reference = trained_alone(lambda: fit(make(), optimizer(), x, y, size=1, **options))
    model = fit(make(), DistributedOptimizer(optimizer()), *mine(x, y), size=bps.size(), **options)
    assert_same(model, reference, tolerance)


def scenario_fit() -> None:
    for optimizer in OPTIMIZERS.values():
        equals(network, optimizer)


def scenario_embeddings() -> None:
    for optimizer in OPTIMIZERS.values():
        equals(words, optimizer, of_words=True)
    equals(words, lambda: OPTIMIZERS["sgd"](gradient_accumulation_steps=2), of_words=True)


def scenario_one_rank_has_an_infinity() -> None:
    """All skip that step, and none hangs."""
    scale = keras.optimizers.LossScaleOptimizer
    x, y = data(6)
    hurt_x = x.copy()
    hurt_x[2 * BATCH] = np.inf  # of rank 0, in the third batch
    kept = np.concatenate([x[: 2 * BATCH], x[3 * BATCH :]]), np.concatenate([y[: 2 * BATCH], y[3 * BATCH :]])
    reference = trained_alone(lambda: fit(network(), OPTIMIZERS["sgd"](), *kept, size=1))
    for make in (
        lambda: DistributedOptimizer(scale(OPTIMIZERS["sgd"]())),
        lambda: scale(DistributedOptimizer(OPTIMIZERS["sgd"]())),
    ):
        model = network()
        optimizer: Any = make()  # type: ignore[no-untyped-call]
        fit(model, optimizer, *mine(hurt_x, y), size=bps.size())
        assert_same(model, reference)
        assert float(optimizer.dynamic_scale.numpy()) == 2.0**14


def scenario_unused_variables_and_local_ones() -> None:
    used, unused, local = (tf.Variable([1.0, 2.0]) for _ in range(3))
    x = float(bps.rank() + 1)
    mean = np.mean(range(1, bps.size() + 1))
    for run in (lambda f: f, tf.function):

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((used + local) * x)
            tape = bps.DistributedGradientTape(tape, local_variables=[local])
            gradients = tape.gradient(loss, {"a": used, "b": [unused, local]})
            assert gradients["b"][0] is None
            return gradients["a"], gradients["b"][1]

        first, second = run(step)()
        assert np.allclose(first, mean)
        assert np.allclose(second, x)


def scenario_one_rank_has_made_more_models() -> None:
    """So Keras numbers its names differently: that is no disagreement."""
    keras.backend.clear_session()
    models = [network() for _ in range(3 if bps.rank() == 0 else 1)]
    bps.broadcast_variables(models[-1].variables, 0)
    x, y = data(2)
    wrap = bps.DistributedGradientTape
    for run in (lambda f: f, tf.function):
        loop(models[-1], OPTIMIZERS["sgd"](), *mine(x, y), size=bps.size(), run=run, wrap=wrap)


def scenario_a_disagreement_is_told_once() -> None:
    variables = [tf.Variable(tf.ones(3)), tf.Variable(tf.ones(4))]

    @tf.function
    def step(which: int) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[which] ** 2)
        return bps.DistributedGradientTape(tape).gradient(loss, variables[which])

    for _ in range(3):
        assert np.allclose(step(0), 2)
        if bps.size() > 1:
            _, text = message_of(lambda: step(1 if bps.rank() == 0 else 0))
            assert "MismatchError" in text, text


def scenario_a_disagreement_about_slices_is_told_once() -> None:
    variables = [tf.Variable(tf.ones((4, 3))), tf.Variable(tf.ones((4, 2)))]

    def step(which: int) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variables[which], [bps.rank()]) ** 2)
        return bps.DistributedGradientTape(tape).gradient(loss, variables[which])

    for _ in range(3):
        gradient = step(0)
        assert np.array_equal(gradient.indices, range(bps.size()))
        assert np.allclose(gradient.values, 2 / bps.size())
        if bps.size() > 1:
            _, text = message_of(lambda: step(1 if bps.rank() == 0 else 0))
            assert "rank 0" in text, text


def scenario_what_goes_with_slices_is_waited_for() -> None:
    """A name is not left in flight because another operation of the step has failed."""
    waited: list[int] = []

    class Fails:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)
            if self.number != 1:
                raise MismatchError(f"number {self.number}")

    names = [f"slices.{number}" for number in range(3)]
    error, text = message_of(lambda: flights.wait([(name, Fails(i)) for i, name in enumerate(names)]))  # type: ignore[misc]
    assert (error, text) == ("MismatchError", "number 0")
    assert waited == [0, 1, 2]


def scenario_many_groups() -> None:
    """More than fits into one group, of several dtypes."""
    random = np.random.default_rng(1)
    variables = [
        tf.Variable(random.standard_normal(n), dtype=d) for n in (300_001, 7, 500_003) for d in ("float32", "float64")
    ]
    for run in (lambda f: f, tf.function):

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.cast(tf.reduce_sum(v * v), tf.float64) for v in variables]) * (bps.rank() + 1)
            return bps.DistributedGradientTape(tape).gradient(loss, variables)

        for gradient, variable in zip(run(step)(), variables, strict=True):
            assert gradient.dtype == variable.dtype
            assert np.allclose(gradient, 2 * variable.numpy() * np.mean(range(1, bps.size() + 1)))


def run() -> dict[str, str]:
    return outcomes({name: scenario for name, scenario in globals().items() if name.startswith("scenario_")})


WORKERS = [run]
SCENARIOS = [name for name in list(globals()) if name.startswith("scenario_")]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
def test(name: str, size: int) -> None:
    for outcome in results_of(run, size):
        assert outcome[name] == "passed", outcome[name]
