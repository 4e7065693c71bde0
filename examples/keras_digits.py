# SPDX-License-Identifier: Apache-2.0
"""Trains a small network on handwritten digits by Keras's `fit`, on any number of processes.

    python examples/keras_digits.py                          one process
    commlib run -n 4 -- python examples/keras_digits.py      four processes, each on its shard of the data

Each rank takes every size-th sample (`shard`), the learning rate grows with the number of ranks and is warmed up,
metrics are averaged over the ranks, and only rank 0 prints.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import keras
import numpy as np
import tensorflow as tf

import commlib.tensorflow as bps
from commlib.tensorflow.keras import DistributedOptimizer, callbacks

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from error


def build_model() -> keras.Model:
    """Return a network for 8×8 images in 10 classes."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def same_on_all_ranks(model: keras.Model) -> bool:
    """Compare the weights of all ranks, to the last bit."""
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.weights)).hexdigest()
    return len({bps.broadcast_object(digest, root_rank=rank) for rank in range(bps.size())}) == 1


def main() -> None:
    """Train, test, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="samples per step, of each rank")
    args = parser.parse_args()

    bps.init()
    rank, size = bps.rank(), bps.size()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # several processes share the cores of this machine
    keras.utils.set_random_seed(rank)

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:1440], order[1440:]
    shuffled = tf.data.Dataset.from_tensor_slices((x[train], y[train])).shuffle(len(train), seed=1)
    # Whole batches only, and as many on every rank: one that had a batch more would wait for the others in vain.
    steps = len(train) // (args.batch * size)
    batches = shuffled.shard(size, rank).batch(args.batch, drop_remainder=True).take(steps)

    model = build_model()
    rate = 0.05 * size
    model.compile(
        optimizer=DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    started = time.perf_counter()
    history = model.fit(
        batches,
        epochs=args.epochs,
        verbose=2 if rank == 0 else 0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),  # before those that look at metrics
            callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3, steps_per_epoch=steps, verbose=1),
        ],
    )
    elapsed = time.perf_counter() - started

    _, accuracy = model.evaluate(x[test], y[test], verbose=0)
    identical = same_on_all_ranks(model)
    losses = history.history["loss"]
    if rank == 0:
        print(f"loss: {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last")
        print(f"test accuracy: {accuracy:.4f}")
        print(f"samples per second: {args.epochs * steps * args.batch * size / elapsed:.0f}")
        print(f"weights identical on all ranks: {'yes' if identical else 'no'}")
    bps.shutdown()
    if not identical:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
