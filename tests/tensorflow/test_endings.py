# SPDX-License-Identifier: Apache-2.0
"""One rank stops before the others: in the middle of `fit`, or of a loop of one's own. All others hear of it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from tests.launch import Job

WAYS = [pytest.param("fit", marks=pytest.mark.soak), "function", pytest.param("eager", marks=pytest.mark.soak)]

# Each rank gives what ended its training: the class and the text of what was raised, commlib's own error, and how many
# steps it had taken. The rank that `stops` does so after two.
SCRIPT = """
    import os, signal, sys, time
    import numpy as np
    import tensorflow as tf
    import keras
    import commlib.tensorflow as bps
    from commlib.tensorflow.keras import DistributedOptimizer
    from tests.launch import announce, give, listen

    manner, way = sys.argv[1:]
    bps.init()
    rank = bps.rank()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(2)])
    x, y = np.ones((40, 3), "float32"), np.ones((40, 2), "float32")
    steps = 0

    class OfItsOwn(Exception):
        pass

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            taken()

    def taken():
        global steps
        steps += 1
        if steps == 2 and rank == 1:
            if manner == "raises":
                raise OfItsOwn
            if manner == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if manner == "frozen":
                announce("frozen")
                os.kill(os.getpid(), signal.SIGSTOP)
            if manner == "waits":
                listen()
                os._exit(0)

    def train():
        count = 2 if manner == "has less" and rank == 1 else 10
        optimizer = keras.optimizers.SGD(0.1)
        if way == "fit":
            model.compile(DistributedOptimizer(optimizer), "mse")
            model.fit(x[: 4 * count], y[: 4 * count], batch_size=4, verbose=0, callbacks=[Stops()])
            return

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x[:4]) - y[:4]) ** 2)
            gradients = bps.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        run = tf.function(step) if way == "function" else step
        for _ in range(count):
            run()
            taken()

    try:
        train()
        give(("", "", "", steps))
    except OfItsOwn:
        pass
    except Exception as error:
        last = error if way == "eager" else bps.last_error()
        give((type(error).__name__, str(error), type(last).__name__, steps))
    announce("over")
"""


def end_of(manner: str, way: str, **env: str) -> dict[int, Any]:
    """What the ranks have given, of those that end by themselves."""
    with Job(SCRIPT, hosts=[3], args=[manner, way], env=env) as job:
        others = [0, 2]
        if manner == "frozen":
            job.await_event("frozen", ranks=[1], timeout=60)
        job.await_event("over", ranks=others, timeout=60)
        if manner == "waits":
            job.tell(1, "go")
        if manner == "frozen":
            job.kill(1, signal.SIGKILL)
        outcomes = job.wait(30)
        return {rank: outcomes[rank].value for rank in range(3)}


def check_lost(given: dict[int, Any], way: str) -> None:
    for rank in (0, 2):
        kind, text, own, steps = given[rank]
        assert own == "PeerLostError", given
        assert "rank 1" in text, given
        assert steps == 2, given
        assert kind == "PeerLostError" or (way != "eager" and kind.endswith("Error")), given


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("manner", ["has less", "raises", "killed"])
def test_who_is_gone_is_named(manner: str, way: str) -> None:
    given = end_of(manner, way)
    if manner == "has less":
        assert given[1] == ("", "", "", 2)
    check_lost(given, way)


def test_who_is_frozen_is_named() -> None:
    check_lost(end_of("frozen", "fit", COMMLIB_PEER_TIMEOUT_S="2"), "fit")


@pytest.mark.parametrize("way", WAYS)
def test_who_does_not_come_is_named(way: str) -> None:
    given = end_of("waits", way, COMMLIB_OPERATION_TIMEOUT_S="2")
    for rank in (0, 2):
        _, text, own, steps = given[rank]
        assert own in ("OperationTimeout", "PeerLostError"), given  # the first to give up leaves the other
        assert steps == 2, given
        assert "rank 1" in text or "left the job" in text, given
    assert "OperationTimeout" in (given[0][2], given[2][2])


# Each gives, of every step, the error's class, or which steps of the two ranks were added up.
LATE = """
    import numpy as np
    import tensorflow as tf
    import commlib.tensorflow as bps
    from commlib.errors import CommlibError
    from commlib.tensorflow import sparse
    from tests.launch import announce, give, listen

    bps.init()
    rank, steps = bps.rank(), []
    for step in range(1, 7):
        if step == 2 and rank == 1:
            listen()
        slices = tf.IndexedSlices(tf.fill([1 + rank, 3], float(step)), tf.range(1 + rank), (9, 3))
        try:
            (result,) = sparse.gathered([slices], bps.Sum, "late")
        except CommlibError as error:
            steps.append(type(error).__name__)
        else:
            steps.append((result.values[0, 0].numpy(), result.values[1, 0].numpy()))
        if step == 2 and rank == 0:
            announce("late")
    give(steps)
"""


def test_steps_that_were_broken_off_are_not_mixed_with_others() -> None:
    with Job(LATE, hosts=[2], env={"COMMLIB_OPERATION_TIMEOUT_S": "1"}) as job:
        job.await_event("late", ranks=[0], timeout=60)
        job.tell(1, "go")
        given = [outcome.value for outcome in job.wait(60)]
    for steps in given:
        assert steps[0] == (1, 1)
        assert all(isinstance(one, str) or one[0] == one[1] for one in steps), given
    assert given[0][1] == "OperationTimeout"
    assert {one for steps in given for one in steps[1:] if isinstance(one, str)} <= {
        "OperationTimeout",
        "MismatchError",
        "PeerLostError",  # the other has ended
    }, given
