# SPDX-License-Identifier: Apache-2.0
"""Functions that are run by all ranks of a job, for tests of adapters.

Importing a framework takes seconds, so there is one job for each module and number of ranks: it calls all functions
that the module lists as WORKERS, and each test looks at what one of them has returned.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import commlib
from tests.launch import JobError, run_job

# What each process does first: there are few CPUs.
PRELUDES = {
    "torch": "import torch; torch.set_num_threads(1)",
    "tensorflow": "import tensorflow as tf; tf.config.threading.set_intra_op_parallelism_threads(1)",
}
TIMEOUTS_S = {"torch": 100, "tensorflow": 200}  # of all of a module's workers; pytest's own is above


def results_of(worker: Callable[[], Any], size: int) -> list[Any]:
    """What `worker`, one of the WORKERS of its module, returned in a job of `size` processes, by rank."""
    outcome = _job(worker.__module__, size)
    if isinstance(outcome, JobError):
        raise outcome
    return [results[worker.__name__] for results in outcome]


@cache
def _job(module: str, size: int) -> list[Any] | JobError:
    """The results of a job by rank, or how it failed: it is run once in any case."""
    framework = next(framework for framework in PRELUDES if framework in module)
    script = f"""
        {PRELUDES[framework]}
        import commlib
        from tests.launch import give
        from {module} import WORKERS
        commlib.init()
        give({{worker.__name__: worker() for worker in WORKERS}})
        commlib.shutdown()
    """
    try:
        return run_job(script, hosts=[size], timeout=TIMEOUTS_S[framework])
    except JobError as error:
        return error


def outcomes(scenarios: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Run scenarios on this rank; "passed", or the traceback, of each.

    One that fails does so on all ranks or leaves the others waiting, so it ends the run.
    """
    results: dict[str, str] = {}
    for name, function in scenarios.items():
        try:
            function()
            results[name] = "passed"
        except Exception:
            results[name] = traceback.format_exc()
            if commlib.size() > 1:
                commlib.barrier(timeout=10)
    return results


def message_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of what `call` raises, or ("", "") if it does not."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
