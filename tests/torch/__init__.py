# SPDX-License-Identifier: Apache-2.0
"""Tests of commlib.torch."""

from __future__ import annotations

from tests.workers import message_of, outcomes, results_of

__all__ = ["message_of", "outcomes", "results_of"]
