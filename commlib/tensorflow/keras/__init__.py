# SPDX-License-Identifier: Apache-2.0
"""commlib for Keras 3 on TensorFlow: an optimizer for ``fit``, callbacks, and loading of what was saved."""

from __future__ import annotations

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(f"commlib.tensorflow.keras needs Keras on TensorFlow, not on {keras.backend.backend()}")

from commlib.tensorflow.keras import callbacks
from commlib.tensorflow.keras.optimizer import DistributedOptimizer, load_model

__all__ = ["DistributedOptimizer", "callbacks", "load_model"]
