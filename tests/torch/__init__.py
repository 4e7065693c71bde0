# SPDX-License-Identifier: Apache-2.0
"""Tests of commlib.torch. Importing torch takes seconds, so each job makes many checks and hands their results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.launch import run_job


def run_ranks(worker: Callable[[], Any], size: int, timeout: float = 90) -> list[Any]:
    """Call `worker`, a function of a test module, in `size` processes after `init`; return the results by rank."""
    script = f"""
        import torch
        torch.set_num_threads(1)
        import commlib.torch as bps
        from tests.launch import give
        from {worker.__module__} import {worker.__name__} as worker
        bps.init()
        give(worker())
        bps.shutdown()
    """
    return run_job(script, hosts=[size], timeout=timeout)


def message_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of what `call` raises, or ("", "") if it does not."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
