# SPDX-License-Identifier: Apache-2.0
"""Tests of commlib.tensorflow."""

from __future__ import annotations

import os

from tests.workers import message_of, outcomes, results_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if os.environ.get("CI"):
    import tensorflow  # noqa: F401 - on somebody's desk its tests are skipped without it, there they are not

__all__ = ["message_of", "outcomes", "results_of"]
