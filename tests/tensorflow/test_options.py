# SPDX-License-Identifier: Apache-2.0
"""As test_training.py, with what takes long: options of optimizers and of `fit`, each traced for itself."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

import keras

import commlib.tensorflow as bps
from commlib.tensorflow.keras import DistributedOptimizer
from tests.tensorflow import outcomes, results_of
from tests.tensorflow.test_training import (
    OPTIMIZERS,
    STEPS,
    assert_same,
    data,
    equals,
    fit,
    mine,
    network,
    trained_alone,
)

pytestmark = pytest.mark.soak


def scenario_fit_eagerly() -> None:
    equals(network, OPTIMIZERS["adam"], run_eagerly=True)


def scenario_accumulation() -> None:
    for optimizer in OPTIMIZERS.values():
        equals(network, lambda optimizer=optimizer: optimizer(gradient_accumulation_steps=3), tolerance=1e-6)


def scenario_clipping_and_averages_of_weights() -> None:
    for options in ({"global_clipnorm": 0.1}, {"clipnorm": 0.1}, {"clipvalue": 0.01}, {"use_ema": True}):
        equals(network, lambda options=options: OPTIMIZERS["sgd"](**options))
    equals(network, lambda: OPTIMIZERS["sgd"](use_ema=True, ema_overwrite_frequency=5))


def scenario_loss_scale() -> None:
    scale = keras.optimizers.LossScaleOptimizer
    x, y = data(STEPS)
    reference = trained_alone(lambda: fit(network(), scale(OPTIMIZERS["sgd"](), initial_scale=64.0), x, y, size=1))
    outside, inside = network(), network()
    fit(outside, DistributedOptimizer(scale(OPTIMIZERS["sgd"](), initial_scale=64.0)), *mine(x, y), size=bps.size())
    assert_same(outside, reference)
    fit(inside, scale(DistributedOptimizer(OPTIMIZERS["sgd"]()), initial_scale=64.0), *mine(x, y), size=bps.size())
    assert_same(inside, reference)


def scenario_mixed_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        # Half-width activations: what is computed on parts of a batch is not what is computed on all of it.
        equals(network, OPTIMIZERS["sgd"], tolerance=5e-3)
    finally:
        keras.config.set_dtype_policy("float32")


def run() -> dict[str, str]:
    return outcomes({name: scenario for name, scenario in globals().items() if name.startswith("scenario_")})


WORKERS = [run]
SCENARIOS = [name for name in list(globals()) if name.startswith("scenario_")]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", SCENARIOS)
def test(name: str, size: int) -> None:
    for outcome in results_of(run, size):
        assert outcome[name] == "passed", outcome[name]
