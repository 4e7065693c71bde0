# SPDX-License-Identifier: Apache-2.0
"""The control plane of a job of one: the same registry, in this process, and nobody to ask."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence

from commlib.control.agreement import judge
from commlib.control.interface import Control, Hooks
from commlib.control.loop import ControlLoop
from commlib.control.messages import Declaration, Signature, UnnamedKeys, Verdict
from commlib.control.registry import Registry
from commlib.errors import NotInitializedError

__all__ = ["LocalControl"]


class LocalControl(Control):
    """A :class:`Control` without a scheduler. Its thread exists only while there is something to watch."""

    def __init__(self, partition_bytes: int) -> None:
        self._pid = os.getpid()
        self._registry = Registry(partition_bytes)
        self._lock = threading.Lock()  # guards _registry
        self._loop = ControlLoop(select.poll())
        self._closed = False

    @property
    def unnamed(self) -> dict[str, UnnamedKeys]:
        """The keys of unnamed operations, by kind."""
        return self._registry.unnamed

    def attach(self, hooks: Hooks) -> None:
        """See :meth:`Control.attach`."""
        self._check()
        self._loop.call(lambda: self._loop.use(hooks))
        if hooks.core_fd is not None or hooks.tick_s is not None:
            self._loop.start()

    def declare(self, names: Sequence[tuple[str, int]]) -> list[Declaration]:
        """See :meth:`Control.declare`."""
        self._check()
        with self._lock:
            return self._registry.declare(names)

    def report_mismatch(self, name: str, round_number: int, signature: Signature, timeout_s: float = 10.0) -> Verdict:
        """See :meth:`Control.report_mismatch`. One rank cannot disagree; the verdict says so."""
        self._check()
        return judge(name, round_number, {0: signature}, size=1)

    def stalled(self, name: str, round_number: int, waiting_s: float) -> None:
        """Nobody can be late."""

    def lost(self, rank: int | None, host: str, cause: str) -> None:
        """Nobody else is there to be lost, or to be told."""

    def bye(self, timeout_s: float = 5.0) -> None:
        """Nobody is there to be told."""

    def close(self) -> None:
        """See :meth:`Control.close`."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._loop.stop()
        self._loop.use(Hooks())

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise NotInitializedError("this process was forked from one that uses commlib; commlib cannot be used here")
        if self._closed:
            raise NotInitializedError("commlib has been shut down")
