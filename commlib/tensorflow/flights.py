# SPDX-License-Identifier: Apache-2.0
"""Operations on their way, by name: what a step submits, and waits for later, perhaps in another call of the host.

A step that is broken off by a timeout leaves operations in flight, which have their names and their memory. The next
step that needs those names waits for them first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import commlib
from commlib.api import session
from commlib.errors import CommlibError, OperationTimeout

_lock = threading.Lock()
_handles: dict[str, commlib.Handle] = {}
_steps: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # by session: of another one, others take part


def submit(name: str, start: Callable[[], commlib.Handle]) -> None:
    """Start the operation of this name, which is in flight until somebody has waited for it."""
    with _lock:
        left_over = _handles.get(name)
    if left_over is not None:
        try:
            left_over.wait()
        except OperationTimeout:
            raise  # and it stays known
        except CommlibError:
            pass  # the step that submitted it has ended, with that or with another error
    handle = start()
    with _lock:
        _handles[name] = handle


def wait(names: Sequence[str]) -> list[Any]:
    """Their results. Waits for all, then raises the first error; after a timeout they stay known."""
    results, errors = [], []
    for name in names:
        with _lock:
            handle = _handles[name]
        try:
            results.append(handle.wait())
        except OperationTimeout:
            raise
        except CommlibError as error:
            errors.append(error)
        with _lock:
            del _handles[name]
    if errors:
        raise errors[0]
    return results


def step(name: str) -> int:
    """How often a step of this name has begun: the same on all ranks, unless one of them has broken one off.

    For steps of several operations, one after the other: what one rank has submitted in an earlier step must not be
    taken for a part of a later one.
    """
    with _lock:
        steps = _steps.setdefault(session(), Counter())
        steps[name] += 1
        return steps[name]
