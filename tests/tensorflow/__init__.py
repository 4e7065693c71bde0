# SPDX-License-Identifier: Apache-2.0
"""Tests of commlib.tensorflow."""

from __future__ import annotations

import os

from tests.workers import message_of, outcomes, results_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

__all__ = ["message_of", "outcomes", "results_of"]
