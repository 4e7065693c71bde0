# SPDX-License-Identifier: Apache-2.0
"""One operation of a process group as torch sees it, and the threads that look after those nobody waits for.

An operation is a *plan*: a generator that submits operations of the core and yields their handles, is resumed when all
of them have ended, and may then submit the next. Whoever waits for a work resumes its plan himself. Only where
nobody may be waiting (a future was asked for, other ranks need the next stage, another work is to follow) the threads
of this module do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import commlib
from commlib import _core
from commlib.errors import CommlibError, OperationTimeout

__all__ = ["Interim", "Plan", "Work"]


class Interim(list[commlib.Handle]):
    """The handles of a stage behind which there is another that other ranks need, whoever waits here."""


Plan = Generator[list[commlib.Handle], None, None]

SLICE_S = 0.1  # between looks at whether an operation can begin
LOOK_S = 1.0  # between looks at whether operations that somebody has futures of are late


class Work(dist.Work):
    """An operation in flight. Its tensors belong to it until ``wait()`` has returned.

    May be waited for from any thread, and again after it has timed out.
    """

    def __init__(
        self,
        plan: Plan,
        outputs: Sequence[torch.Tensor],
        timeout_s: float,
        *,
        explain: Callable[[CommlibError], CommlibError] = lambda error: error,
        source_rank: int = -1,
    ) -> None:
        """`explain` puts an error of the core into words about this operation."""
        super().__init__()
        self._plan: Plan | None = plan
        self._outputs = list(outputs)
        self._timeout_s = timeout_s
        self._explain = explain
        self._source = source_rank
        self._lock = threading.RLock()  # guards all that follows; a plan may be resumed by any thread
        self._begun: threading.Event | None = None  # set when it begins; None: it has begun at once
        self._after: Work | None = None  # what must end before it can begin
        self._handles: list[commlib.Handle] = []
        self._is_watched = False
        self._deadline = float("inf")
        self._over = False
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []
        self._future: Any = None

    # --- What torch calls

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended; True. Raises what it failed with, or OperationTimeout.

        `timeout`: None, or not positive: the group's. The operation stays in flight when it has passed.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        self.drive(time.monotonic() + (seconds if seconds > 0 else self._timeout_s))
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Say, without blocking, whether the operation has ended, with a result or an error."""
        self.advance()
        return self._over

    def is_success(self) -> bool:
        """Say, without blocking, whether the operation has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What the operation has failed with; None if it has not, or not yet. Does not block."""
        self.advance()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation writes. Blocks as :meth:`wait`."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of :meth:`result`, completed by a thread of commlib where nobody waits.

        torch makes a RuntimeError of what the operation has failed with, its text included. When the group's time limit
        has passed that is OperationTimeout.
        """
        with self._lock:
            is_first = self._future is None
            if is_first:
                ended = torch.futures.Future()
                # Of a future that was given an exception, C++ takes the exception for the result; of one whose callback
                # has raised, it does not.
                self._future = ended.then(lambda _: self.result())
                self._deadline = time.monotonic() + self._timeout_s
        if is_first:
            self.then(lambda: ended.set_result(None))
            self.watch()
        return self._future

    def source_rank(self) -> int:
        """The rank in the group that a received tensor is from."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    # --- What the process group calls

    def begin_after(self, previous: Work | None) -> None:
        """It is not to begin yet: `begin` is called later, when `previous` has ended, or whenever it can begin."""
        self._begun = threading.Event()
        self._after = previous

    def begin(self) -> None:
        """Submit the first stage."""
        with self._lock:
            self._after = None
            if not self._over:
                self._step()
            if self._begun is not None:
                self._begun.set()
        self._tell()

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended."""
        with self._lock:
            if not self._over:
                self._end(error)
            if self._begun is not None:
                self._begun.set()
        self._tell()

    def then(self, call: Callable[[], None]) -> None:
        """Call it once, when the operation has ended: by the thread that notices, at once if it has."""
        with self._lock:
            if not self._over or self._then:
                self._then.append(call)
                return
        call()

    def watch(self) -> None:
        """See to it that it ends although nobody waits for it."""
        with self._lock:
            if not self._is_watched and not self._over:
                self._is_watched = True
                self._subscribe()

    def advance(self) -> None:
        """Resume the plan if it can be. Does not block but for what the plan itself does."""
        if self._over:
            return
        with self._lock:
            # The handles are those of the stage in flight: none before the first one.
            while not self._over and self._handles and all(handle.done() for handle in self._handles):
                self._step()
        self._tell()

    def drive(self, deadline: float) -> None:
        """Block until it has ended, well or not. Raises OperationTimeout at `deadline` (of ``time.monotonic()``)."""
        while not self._over:
            begun, handles = self._begun, self._handles
            if begun is not None and not begun.is_set():
                self._drive_previous(begun, deadline)
                continue
            for handle in handles:
                try:
                    handle.wait(max(0.0, deadline - time.monotonic()))
                except OperationTimeout as error:
                    if not handle.done():
                        raise self._explain(error) from None
                except CommlibError:
                    pass  # `advance` meets it again
            self.advance()

    def expire(self, now: float) -> None:
        """Somebody has a future of it, and its time has passed: end it for him."""
        if now >= self._deadline:
            self.advance()
            text = f"the operation has not ended within the group's time limit of {self._timeout_s:g} s"
            self.fail(self._explain(OperationTimeout(text)))

    # --- Its own

    def _drive_previous(self, begun: threading.Event, deadline: float) -> None:
        previous = self._after
        what = "not all ranks of the group have connected in time"
        if previous is not None:
            previous.drive(deadline)
            what = "the operation could not begin in time"  # whoever has noticed that end is about to let it
        if not begun.wait(min(SLICE_S, max(0.0, deadline - time.monotonic()))) and time.monotonic() >= deadline:
            raise self._explain(OperationTimeout(what))

    def _step(self) -> None:
        """One stage has ended, or none has begun: on to the next. Called with the lock held."""
        assert self._plan is not None
        try:
            for handle in self._handles:
                handle.wait(0)
            self._handles = next(self._plan)
            self._subscribe()
        except StopIteration:
            self._end(None)
        except CommlibError as error:
            self._end(self._explain(error))
        except BaseException as error:  # of torch, or a signal's: whoever waits gets it
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with contextlib.suppress(Exception):
            if self._plan is not None:
                self._plan.close()
        self._plan, self._handles, self._after = None, [], None  # the tensors are the caller's again
        self._error = error
        self._over = True

    def _subscribe(self) -> None:
        if self._is_watched or isinstance(self._handles, Interim):
            watcher().watch(self, self._handles)

    def _tell(self) -> None:
        """Call those who want to know of the end. Not with the lock held: they may do anything."""
        while self._over and self._then:
            try:
                call = self._then.pop(0)
            except IndexError:  # another thread was faster
                return
            call()


class _Watcher:
    """Resumes the plans of those works for which nobody may be waiting.

    What is called when a work has ended may be anybody's, and may itself wait for another work's future. So whoever is
    about to make such calls leaves the watch to another thread: there is always one that has nothing else to do.
    """

    def __init__(self) -> None:
        self._queue = _core.CompletionQueue()
        self._poll = select.poll()
        self._poll.register(self._queue.fileno(), select.POLLIN)
        self._tokens = itertools.count()
        self._works: dict[int, Work] = {}
        self._watch = threading.Lock()  # who has it looks at the queue
        self._free = 0  # threads that have the watch, or wait for it; guarded by the next
        self._free_lock = threading.Lock()
        self._start()

    def watch(self, work: Work, handles: Sequence[commlib.Handle]) -> None:
        """Have the work advance as each of these ends."""
        for handle in handles:
            token = next(self._tokens)
            self._works[token] = work
            handle.subscribe(self._queue, token)

    def _start(self) -> None:
        self._free += 1
        threading.Thread(target=self._run, name="cl-torch", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._watch:
                # Works that are late are looked for only while there are some that have not ended.
                self._poll.poll(LOOK_S * 1000 if self._works else None)
                found = [self._works.pop(token, None) for token in self._queue.take()]
                pending = set(self._works.copy().values())
            with self._free_lock:
                self._free -= 1
                if self._free == 0:
                    self._start()
            for work in found:
                if work is not None:
                    work.advance()
            now = time.monotonic()
            for work in pending:
                work.expire(now)
            with self._free_lock:
                self._free += 1


_watcher: _Watcher | None = None
_watcher_lock = threading.Lock()


def _forget_in_child() -> None:
    global _watcher, _watcher_lock
    _watcher, _watcher_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


def watcher() -> _Watcher:
    """The process's, which is made when it is first needed."""
    global _watcher
    with _watcher_lock:
        if _watcher is None:
            _watcher = _Watcher()
        return _watcher
