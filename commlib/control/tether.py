# SPDX-License-Identifier: Apache-2.0
"""What ties a child process to its parent's life."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable

__all__ = ["ParentTether"]

PR_SET_PDEATHSIG = 1


class ParentTether:
    """Lets a child notice that its parent has ended, however it ended.

    A pidfd says it best, but some containers forbid it. PR_SET_PDEATHSIG always works, but fires already when the
    *thread* that started the child ends: so its signal only wakes, and whether the parent lives is asked of the kernel,
    which keeps the parent's threads apart from its process. Asking also covers a parent that ended before all this.
    """

    def __init__(self, parent_pid: int) -> None:
        self._parent_pid = parent_pid
        self._wake, self._woken_by = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pidfd: int | None = None
        signal.signal(signal.SIGHUP, lambda *_: None)  # the wake-up descriptor is written to
        signal.set_wakeup_fd(self._woken_by, warn_on_full_buffer=False)
        _set_death_signal(signal.SIGHUP)
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(parent_pid)

    def descriptors(self) -> Iterable[int]:
        """Readable when `broken` should be asked."""
        return (self._wake,) if self._pidfd is None else (self._wake, self._pidfd)

    def broken(self) -> bool:
        """The parent has ended. Cheap; call it whenever one of the descriptors may be readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        return os.getppid() != self._parent_pid

    def release(self) -> None:
        """Live on without the parent, and hold nothing of its that somebody may wait for."""
        _set_death_signal(0)
        signal.set_wakeup_fd(-1)
        for descriptor in (self._wake, self._woken_by, self._pidfd):
            if descriptor is not None:
                os.close(descriptor)
        silence(2)


def silence(*descriptors: int) -> None:
    """Connect standard descriptors to nothing."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def _set_death_signal(number: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
