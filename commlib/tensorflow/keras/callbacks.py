# SPDX-License-Identifier: Apache-2.0
"""Callbacks for ``fit`` on several ranks. Their names and what they do are Horovod's, for Keras 3."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import keras
import numpy as np

import commlib
from commlib import Sum
from commlib.agreement import agree
from commlib.tensorflow.functions import broadcast_variables

Logs = MutableMapping[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the weights and the optimizer's state of rank ``root_rank`` before training begins.

    A model that is built by its first batch has nothing to be sent before it: then it is sent after the first batch,
    whose step each rank has taken from weights of its own, with gradients that were averaged over all ranks.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._is_done = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Build the optimizer, and send, if the model is built."""
        self._is_done = False
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Send, if that has not been possible before."""
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._is_done = True
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        # Not the states of random generators, which ranks should not share.
        broadcast_variables([*self.model.weights, *optimizer.variables], self.root_rank, prefix="keras.broadcast.")


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of each epoch over all ranks, weighted by how many samples each rank has seen.

    Put it *before* callbacks that look at metrics (``ReduceLROnPlateau``, ``EarlyStopping``, ``ModelCheckpoint``):
    those before it see this rank's. Ranks whose metrics have different names raise ``MismatchError``, all of them. The
    average of a metric that is no mean over samples (an AUC, for example) is the average of the ranks' values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[bool, float] = {}  # of training, and of validation

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Forget the last epoch's numbers of samples."""
        self._weights = {}

    def on_test_begin(self, logs: Logs = None) -> None:
        """Note how many samples training has seen: validation begins to count anew."""
        self._weights.setdefault(False, self._samples())

    def on_test_end(self, logs: Logs = None) -> None:
        """Note how many samples validation has seen."""
        self._weights[True] = self._samples()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average, in place."""
        if logs is None or commlib.size() == 1:
            return
        self._weights.setdefault(False, self._samples())
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        agree("metrics", [(name, "") for name in names], None, "keras.metrics")
        weights = np.array([self._weights.get(name.startswith("val_"), 1.0) for name in names])
        values = np.array([float(logs[name]) for name in names])
        sums = np.concatenate([weights * values, weights])
        commlib.push_pull_(sums, name="keras.metrics", op=Sum)
        for name, total, weight in zip(names, sums[: len(names)], sums[len(names) :], strict=True):
            if weight > 0:
                logs[name] = float(total / weight)

    def _samples(self) -> float:
        """The number of samples in the loss that the model keeps; 1 if it keeps none."""
        metrics = self.model.metrics
        variables: Any = metrics[0].variables if metrics and metrics[0].name == "loss" else ()
        return float(variables[1].numpy()) if len(variables) > 1 else 1.0


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies ``initial_lr`` by ``multiplier(epoch)``, from ``start_epoch`` until before ``end_epoch``.

    ``multiplier`` is a number or a function of the epoch. With ``staircase`` it is called at the beginning of each
    epoch, else before each batch, with a fraction of the epoch. ``momentum_correction`` does what Goyal et al.,
    "Accurate, Large Minibatch SGD" (2017), section 3, ask for where the learning rate is a factor inside the velocity,
    as in Keras: what is kept of earlier steps is multiplied by the ratio of the new learning rate to the old one.
    ``steps_per_epoch`` is found out where Keras knows it. The learning rate of each epoch is in its logs, as "lr".
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr must be given: the learning rate that the multiplier multiplies")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.staircase = staircase or not callable(multiplier)
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda _: multiplier
        self.current_epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find out how many batches an epoch has, if that matters."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError("Keras does not know how many batches an epoch has: give steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note where we are."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the learning rate, if it changes here."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        new = self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        optimizer.learning_rate = new
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum_correction and old != 0 and getattr(inner, "momentum", None):
            for velocity in getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or ():
                if velocity is not None:
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` over ``warmup_epochs``, batch by batch.

    The gradual warm-up of Goyal et al., "Accurate, Large Minibatch SGD" (2017), as Horovod has it: give it the learning
    rate that is scaled by the number of ranks. It grows linearly; at the last batch of the last of these epochs it is
    ``initial_lr``. With ``verbose`` rank 0 says when it is done. The other arguments are those of the schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # One batch ahead, so that an epoch ends with a round number.
            passed = epoch + 1 / self.steps_per_epoch
            return (passed * (commlib.size() - 1) / warmup_epochs + 1) / commlib.size()

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the learning rate, and say when it has reached its height."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and commlib.rank() == 0:
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            print(f"Epoch {epoch + 1}: the learning rate has reached {rate:g}.", flush=True)  # noqa: T201 - asked for
