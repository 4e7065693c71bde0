# SPDX-License-Identifier: Apache-2.0
"""The control thread: it sleeps until a socket, the core, another thread or the clock has something for it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from commlib.control.interface import Hooks

__all__ = ["ControlLoop", "Poller"]

log = logging.getLogger("commlib")

POLLIN = 1  # select.POLLIN and zmq.POLLIN


class Poller(Protocol):
    """What ``select.poll`` and ``zmq.Poller`` have in common."""

    def register(self, source: Any, mask: int, /) -> object:
        """Watch a descriptor, or a ZeroMQ socket."""

    def unregister(self, source: Any, /) -> object:
        """Watch it no longer."""

    def poll(self, timeout_ms: int | None = ..., /) -> list[tuple[Any, int]]:
        """What is ready."""


class ControlLoop:
    """Runs callbacks, one at a time, on one background thread. Whatever they raise is logged, and the loop goes on.

    The thread is a daemon, so that it can never keep an interpreter from ending; ``stop`` ends it properly.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()  # guards _wake_fd against being closed between a look and a write
        self._callbacks: dict[Any, Callable[[], None]] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._hooks = Hooks()
        self._next_tick: float | None = None
        self._stopping = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._watch(self._wake_fd, self._run_posted)

    @property
    def hooks(self) -> Hooks:
        """The hooks in use; for callbacks only."""
        return self._hooks

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="commlib-control", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread: what is being called is waited for, what was posted is still done. May repeat."""
        self._stopping = True
        if self._is_closed:
            return
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._run_posted()
        with self._wake_lock:
            self._is_closed = True
            os.close(self._wake_fd)

    def watch(self, source: Any, callback: Callable[[], None]) -> None:
        """Call `callback` when `source` is readable. Before `start`, or from a callback."""
        self._watch(source, callback)

    def unwatch(self, source: Any) -> None:
        """Forget a source. From a callback, or when the thread does not run."""
        if self._callbacks.pop(source, None) is not None:
            self._poller.unregister(source)

    def post(self, function: Callable[[], None]) -> None:
        """Have `function` called soon, on the thread. From any thread; never waits."""
        self._posted.append(function)
        self._wake()

    def call(self, function: Callable[[], None]) -> None:
        """Have `function` called on the thread, and wait until it was. Here and now if the thread does not run."""
        if self._thread is None or not self._thread.is_alive():
            function()
            return
        done = threading.Event()

        def run() -> None:
            try:
                function()
            finally:
                done.set()

        self.post(run)
        while not done.wait(1.0):
            if not self._thread.is_alive() and not done.is_set():
                return  # stopped meanwhile

    def use(self, hooks: Hooks) -> None:
        """Change the hooks. On the thread, or when it does not run."""
        if self._hooks.core_fd is not None:
            self.unwatch(self._hooks.core_fd)
        self._hooks = hooks
        if hooks.core_fd is not None:
            self._watch(hooks.core_fd, hooks.on_core_event)
        self._next_tick = None if hooks.tick_s is None else time.monotonic() + hooks.tick_s

    def guarded(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call what somebody else wrote."""
        try:
            function(*arguments)
        except Exception as error:
            log.error("%s in the control thread: %s", type(error).__name__, error)
            log.debug("where it happened", exc_info=error)

    def _watch(self, source: Any, callback: Callable[[], None]) -> None:
        self._callbacks[source] = callback
        self._poller.register(source, POLLIN)

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    def _run_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._posted:
            self.guarded(self._posted.popleft())

    def _run(self) -> None:
        while not self._stopping:
            timeout_ms = None
            if self._next_tick is not None:
                timeout_ms = max(0, int((self._next_tick - time.monotonic()) * 1000) + 1)
            for source, _ in self._poller.poll(timeout_ms):
                callback = self._callbacks.get(source)  # an earlier callback may have unwatched it
                if callback is not None:
                    self.guarded(callback)
            if self._next_tick is not None and time.monotonic() >= self._next_tick:
                self._next_tick = time.monotonic() + (self._hooks.tick_s or 0.0)
                self.guarded(self._hooks.on_tick)
