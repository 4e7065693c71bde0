# SPDX-License-Identifier: Apache-2.0
"""Joining and leaving a job, which Ctrl-C may end at any moment, but not in the middle of something.

Python runs signal handlers in the main thread, between any two of its steps, and they may raise whatever they like: a
socket that has just been made would be nobody's, a membership that has just begun nobody's either. So what belongs
together is made and given up in another thread, and the main thread waits for that.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["Stop", "Stopped", "uninterrupted", "wait_for"]

GIVE_UP_S = 10.0
SLICE_S = 0.1

T = TypeVar("T")


class Stopped(BaseException):
    """What the thread ends with that was asked to stop. Nobody outside of it sees it."""


class Stop:
    """Somebody wants the work to end: `fileno` is readable from then on, and `check` raises."""

    def __init__(self) -> None:
        self._asked = False
        self._fd = -1
        self._then: Callable[[], object] = lambda: None

    def fileno(self) -> int:
        """Readable when `check` raises. Opened when it is asked for."""
        if self._fd < 0:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            if self._asked:  # just now
                os.eventfd_write(self._fd, 1)
        return self._fd

    def check(self) -> None:
        """Raise Stopped if it was asked for."""
        if self._asked:
            raise Stopped

    def then(self, call: Callable[[], object]) -> None:
        """What also has to be called, in the thread that asks; only the last one counts. Raises as `check`."""
        self._then = call
        self.check()

    def ask(self) -> None:
        """Ask the work to end."""
        self._asked = True
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)
        self._then()

    def close(self) -> None:
        """Give back the descriptor, when nobody waits for it any more. May be repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def uninterrupted(work: Callable[[Stop], object], undo: Callable[[], object]) -> None:
    """Call `work` where no signal handler can interrupt it, and wait for it. It keeps by itself what it makes.

    If the wait is interrupted, `work` is asked to stop, and when it has ended `undo` is called; then what has
    interrupted it is raised. A second interruption is not waited for. Raises what `work` raises.
    """
    stop = Stop()
    failure: list[BaseException] = []
    # Only steps of C here, which a handler cannot break: not so threading.Thread and threading.Event.
    to_begin: SimpleQueue[None] = SimpleQueue()
    to_begin.put(None)
    ended: SimpleQueue[None] = SimpleQueue()

    def call() -> None:
        if _taken(to_begin):
            try:
                work(stop)
            except BaseException as error:
                failure.append(error)
            ended.put(None)
            ended.put(None)  # for who is interrupted just when the first one was taken

    undone: SimpleQueue[None] = SimpleQueue()

    def give_up() -> None:
        undo()
        undone.put(None)

    if threading.current_thread() is not threading.main_thread():
        call()
        stop.close()
    else:
        try:
            _begin(call)
            wait_for(ended)
            stop.close()
        except BaseException:
            stop.ask()
            if not _taken(to_begin) and _taken(ended, GIVE_UP_S):
                stop.close()
                failure.clear()
                _begin(give_up)
                _taken(undone, GIVE_UP_S)
            raise
    if failure:
        raise failure[0]


def wait_for(queue: SimpleQueue[T]) -> T:
    """`queue.get()`, for the main thread: a signal that comes just before it sleeps must not wait until it wakes."""
    while True:
        try:
            return queue.get(timeout=SLICE_S)
        except Empty:
            continue


def _taken(queue: SimpleQueue[None], timeout_s: float = 0.0) -> bool:
    try:
        queue.get(timeout=timeout_s)
    except Empty:
        return False
    return True


def _begin(call: Callable[[], object]) -> None:
    try:
        _thread.start_new_thread(call, ())
    except RuntimeError:  # at the end of the interpreter there are no new threads
        call()
