# SPDX-License-Identifier: Apache-2.0
"""Operations that a step has left in flight, because it was broken off by a timeout.

They have their names and their memory. The next step that needs those names waits for them first.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import commlib
from commlib.api import session
from commlib.errors import CommlibError, OperationTimeout

Flight = tuple[str, commlib.Handle]  # an operation's name, and its handle

_lock = threading.Lock()
_left_over: dict[str, commlib.Handle] = {}
_whose: Any = None  # a weak reference to the session whose operations these are
_steps: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()  # in another one, others take part


def settle(name: str) -> None:
    """Before an operation of this name is submitted: wait for the one that an earlier step has left."""
    global _whose
    with _lock:
        if _whose is None or _whose() is not session():
            _left_over.clear()  # they ended with their session
            _whose = weakref.ref(session())
        handle = _left_over.get(name)
    if handle is None:
        return
    try:
        handle.wait()
    except OperationTimeout:
        raise  # and it stays known
    except CommlibError:
        pass  # the step that submitted it has ended, with that or with another error
    with _lock:
        if _left_over.get(name) is handle:
            del _left_over[name]


def leave(flights: Sequence[Flight]) -> None:
    """The step that has submitted these ends without having waited for them."""
    with _lock:
        _left_over.update(flights)


def wait(flights: Sequence[Flight]) -> list[Any]:
    """Their results. Waits for all, then raises the first error; after a timeout the rest is left over."""
    results, errors = [], []
    for number, (_, handle) in enumerate(flights):
        try:
            results.append(handle.wait())
        except OperationTimeout:
            leave(flights[number:])
            raise
        except CommlibError as error:
            errors.append(error)
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
