# SPDX-License-Identifier: Apache-2.0
"""Trains a network written by hand in NumPy on handwritten digits, on any number of processes.

    python examples/numpy_digits.py                          one process
    commlib run -n 4 -- python examples/numpy_digits.py      four processes, same result

This is how a framework of one's own uses commlib: parameters and gradients live in arrays of `commlib.empty`, which all
processes of a host can reach without a copy. The gradient of a layer is handed over as soon as it is there, and travels
while those of earlier layers are computed.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

import commlib

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from error

Array = npt.NDArray[np.float32]
LEARNING_RATE = 0.1
MOMENTUM = 0.9


class Dense:
    """A fully connected layer, with its gradients and the momentum of its parameters."""

    def __init__(self, name: str, inputs: int, outputs: int, rng: np.random.Generator) -> None:
        self.params: dict[str, Array] = {
            f"{name}.weight": commlib.empty((inputs, outputs), np.float32),
            f"{name}.bias": commlib.empty((outputs,), np.float32),
        }
        self.grads: dict[str, Array] = {
            key: commlib.empty(param.shape, np.float32) for key, param in self.params.items()
        }
        self.velocity = {key: np.zeros_like(param) for key, param in self.params.items()}
        self.weight, self.bias = self.params.values()
        self.weight[:] = rng.normal(0, np.sqrt(2 / inputs), self.weight.shape)
        self.bias[:] = 0
        self.inputs: Array

    def forward(self, inputs: Array) -> Array:
        """Return the outputs for a batch of inputs, and keep the inputs for `backward`."""
        self.inputs = inputs
        outputs: Array = inputs @ self.weight + self.bias
        return outputs

    def backward(self, grad: Array) -> Array:
        """Fill in the gradients of the parameters; return that of the inputs."""
        grad_weight, grad_bias = self.grads.values()
        np.matmul(self.inputs.T, grad, out=grad_weight)
        np.sum(grad, axis=0, out=grad_bias)
        grad_inputs: Array = grad @ self.weight.T
        return grad_inputs

    def update(self) -> None:
        """Take one step of stochastic gradient descent with momentum."""
        for key, param in self.params.items():
            self.velocity[key] = MOMENTUM * self.velocity[key] + self.grads[key]
            param -= LEARNING_RATE * self.velocity[key]


class Network:
    """Dense layers with ReLU between them, and cross entropy on top."""

    def __init__(self, sizes: list[int], rng: np.random.Generator) -> None:
        self.layers = [Dense(f"layer{i}", *shape, rng) for i, shape in enumerate(pairwise(sizes))]

    def params(self) -> dict[str, Array]:
        """Return all parameters by name."""
        return {key: param for layer in self.layers for key, param in layer.params.items()}

    def forward(self, x: Array) -> Array:
        """Return the logits of the ten digits for a batch of images."""
        for layer in self.layers[:-1]:
            x = np.maximum(layer.forward(x), 0)
        return self.layers[-1].forward(x)

    def train_step(self, x: Array, y: npt.NDArray[np.int64], batch: int) -> float:
        """Learn from this rank's part of a global batch of `batch` samples; return its part of the mean loss."""
        logits = self.forward(x)
        logits -= logits.max(axis=1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        loss = -log_probs[np.arange(len(y)), y].sum() / batch

        # Dividing by batch/size, not by len(y), makes the average over the ranks the mean over the whole batch even
        # where the ranks' parts of it differ in size.
        grad = np.exp(log_probs)
        grad[np.arange(len(y)), y] -= 1
        grad *= np.float32(commlib.size() / batch)

        handles = []
        for index, layer in reversed(list(enumerate(self.layers))):
            grad = layer.backward(grad)
            # The next step needs the first layer first, so that has the highest priority.
            handles += [
                commlib.push_pull_async_(layer_grad, name=f"grad.{key}", op=commlib.Average, priority=-index)
                for key, layer_grad in layer.grads.items()
            ]
            if index > 0:
                grad *= layer.inputs > 0  # the ReLU before this layer
        for handle in handles:
            handle.wait()
        for layer in self.layers:
            layer.update()
        return float(loss)


def same_on_all_ranks(params: dict[str, Array]) -> bool:
    """Compare the parameters of all ranks, to the last bit."""
    digest = hashlib.sha256(b"".join(param.tobytes() for param in params.values())).hexdigest()
    return len({commlib.broadcast_object(digest, root_rank=rank) for rank in range(commlib.size())}) == 1


def main() -> None:
    """Train, test, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all ranks together")
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--save", metavar="FILE", help="write the weights to FILE, in NumPy's .npz format")
    args = parser.parse_args()

    commlib.init()
    rank, size = commlib.rank(), commlib.size()

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    x_train, y_train, x_test, y_test = x[:1440], y[:1440], x[1440:], y[1440:]

    network = Network([64, 128, 64, 10], np.random.default_rng(rank))
    for key, param in network.params().items():
        commlib.broadcast_(param, root_rank=0, name=key)

    losses: list[float] = []
    steps = samples = 0
    started = time.perf_counter()
    for epoch in range(args.epochs):
        batches = np.split(
            np.random.default_rng(epoch).permutation(len(y_train)), range(args.batch, len(y_train), args.batch)
        )
        batches = batches[: None if args.steps is None else args.steps - steps]
        if not batches:
            break
        parts = np.zeros(len(batches), np.float64)
        for i, batch in enumerate(batches):
            mine = np.array_split(batch, size)[rank]
            parts[i] = network.train_step(x_train[mine], y_train[mine], len(batch))
        steps += len(batches)
        samples += sum(map(len, batches))
        losses.append(commlib.push_pull(parts, name="loss", op=commlib.Sum).mean())
        if rank == 0:
            print(f"epoch {epoch + 1:3}: loss {losses[-1]:.4f}", flush=True)
    elapsed = time.perf_counter() - started

    accuracy = (network.forward(x_test).argmax(axis=1) == y_test).mean()
    identical = same_on_all_ranks(network.params())
    if rank == 0:
        if args.save:
            weights: dict[str, Any] = network.params()
            np.savez(args.save, **weights)
        print(f"loss: {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last")
        print(f"test accuracy: {accuracy:.4f}")
        print(f"samples per second: {samples / elapsed:.0f}")
        print(f"weights identical on all ranks: {'yes' if identical else 'no'}")
    commlib.shutdown()
    if not identical:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
