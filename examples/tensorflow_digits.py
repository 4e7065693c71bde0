# SPDX-License-Identifier: Apache-2.0
"""Trains a small network on handwritten digits with a TensorFlow loop of its own, on any number of processes.

python examples/tensorflow_digits.py                          one process
commlib run -n 4 -- python examples/tensorflow_digits.py      four processes, each on its part of every batch
"""

from __future__ import annotations

import argparse
import hashlib
import time

import keras
import numpy as np
import tensorflow as tf

import commlib.tensorflow as bps

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
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all ranks together")
    args = parser.parse_args()

    bps.init()
    rank, size = bps.rank(), bps.size()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # several processes share the cores of this machine
    keras.utils.set_random_seed(rank)

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:1440], order[1440:]

    model = build_model()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            # Dividing by samples/size, not by len(y), makes the average over the ranks the mean over the whole batch,
            # also where the ranks' parts of it differ in size.
            loss = loss_of(y, model(x, training=True)) * float(size) / samples
        gradients = bps.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    optimizer.build(model.trainable_variables)
    bps.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)

    losses: list[float] = []
    samples = 0
    started = time.perf_counter()
    for epoch in range(args.epochs):
        # All ranks draw the same global batches, and each takes its part of every one.
        shuffled = np.random.default_rng(epoch).permutation(train)
        total, steps = 0.0, 0
        for begin in range(0, len(shuffled), args.batch):
            batch = shuffled[begin : begin + args.batch]
            mine = np.array_split(batch, size)[rank]
            total += float(step(tf.constant(x[mine]), tf.constant(y[mine]), tf.constant(float(len(batch)))))
            steps += 1
            samples += len(batch)
        losses.append(float(bps.push_pull(tf.constant(total / steps))))
        if rank == 0:
            print(f"epoch {epoch + 1:3}: loss {losses[-1]:.4f}", flush=True)
    elapsed = time.perf_counter() - started

    accuracy = float(np.mean(np.argmax(model(x[test]).numpy(), axis=1) == y[test]))
    identical = same_on_all_ranks(model)
    if rank == 0:
        print(f"loss: {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last")
        print(f"test accuracy: {accuracy:.4f}")
        print(f"samples per second: {samples / elapsed:.0f}")
        print(f"weights identical on all ranks: {'yes' if identical else 'no'}")
    bps.shutdown()
    if not identical:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
