# SPDX-License-Identifier: Apache-2.0
"""One process's membership in a job, from ``init`` to ``shutdown``: the core's worker, the control plane, words."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import operator
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from commlib import _core, errors
from commlib.config import LOCAL_ROUTES, Config
from commlib.control.agreement import describe_late, describe_stall
from commlib.control.bootstrap import connect_worker
from commlib.control.interface import Hooks
from commlib.control.interrupt import Stop
from commlib.control.messages import Declaration, Signature, StallReport, Verdict
from commlib.control.registry import describe_name
from commlib.launch.blame import tell_supervisor
from commlib.losses import CAUSE_LEFT, CAUSE_TOLD, NOBODY, Told, cause_in_words, member_in_words, peer_lost

log = logging.getLogger("commlib")

UNNAMED_MARK = "\0"  # how names of unnamed operations begin
MAX_NAME_CHARACTERS = 4096  # of Text in commlib/control/messages.py
VERDICT_TIMEOUT_S = 10.0
KEPT_VERDICTS = 8  # of each name; as many signatures are kept to explain them
SHUTDOWN_TIMEOUT_S = 5.0
IN_FLIGHT_S = 0.5
BLAME_S = 0.5
ASK_WHO_IS_LATE_S = 1.0  # a shorter time limit is no complaint
WHO_IS_LATE_S = 1.0

FORKED = "this is a forked child of a process that called commlib.init(): it cannot communicate"


class Session:
    """What `commlib.init` makes. Its methods may be called from any thread; they block only where they say so."""

    def __init__(self, config: Config, stop: Stop) -> None:
        """Joins the job; see `connect_worker`."""
        self.config = config
        self.wiring = connect_worker(config, _core.table_bytes, stop)
        wiring = self.wiring
        self.rank = wiring.rank
        self.parameters = wiring.parameters
        try:
            self.worker = _core.Worker(
                self,
                wiring,
                default_timeout=self.parameters.operation_timeout_s,
                route=LOCAL_ROUTES.index(config.local_route),
                log_level=config.log_level,
            )
        except BaseException:
            wiring.close()
            raise
        wiring.close_memory()
        self._told: Told | None = None
        self._told_came = threading.Event()
        self._blamed = False
        self._late: dict[tuple[str, int], SimpleQueue[StallReport]] = {}  # of threads that wait for the answer
        self._verdicts: dict[str, dict[int, Verdict]] = {}  # by name and round
        self._verdict_came = threading.Condition()
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopCompletions] = WeakKeyDictionary()
        self._speed_time = time.time()
        self._speed_bytes = 0
        self._warned: set[tuple[str, int]] = set()
        stall_s = self.parameters.stall_warning_s
        wiring.client.attach(
            Hooks(
                on_lost=self._on_lost,
                on_stall=self._on_stall,
                submitted_round=self.worker.submitted_round,
                core_fd=self.worker.disagreement_descriptor(),
                on_core_event=self._on_disagreements,
                # Half the period: a stall is reported after at most one and a half of it.
                tick_s=max(stall_s / 2, 0.05) if stall_s > 0 else None,
                on_tick=self._look_for_stalls,
            )
        )

    def shutdown(self) -> None:
        """Leave in order. Blocks until what is on its way to others has left, at most about 10 s."""
        self._wait_for_what_is_in_flight()
        # No hook may run while the core goes away; the descriptor it watches is the worker's.
        self.wiring.client.detach()
        self.worker.shutdown(SHUTDOWN_TIMEOUT_S)
        self._pass_on_log()
        lost = self.worker.aborted()
        if lost is None:
            self.wiring.client.bye()
        elif lost[1] != CAUSE_TOLD:
            # Or else our own end, which is its consequence, would be taken for the first one.
            rank, host, _ = member_in_words(self.wiring, lost[0])
            text = cause_in_words(lost[1])
            self.wiring.client.lost(rank, host, text.partition(": ")[2] or f"it {text}")
        self.wiring.client.close()

    def _wait_for_what_is_in_flight(self) -> None:
        """Nobody has waited for it, but it may well be about to end; what is broken off ends the job for all ranks."""
        deadline = time.monotonic() + IN_FLIGHT_S
        self.worker.settle()
        while self.worker.aborted() is None and self.worker.waiting(0, 1) and time.monotonic() < deadline:
            time.sleep(0.005)  # the core wakes nobody for "all has ended"; once a job, IN_FLIGHT_S at most

    # --- What the worker asks

    def declare(self, name: str, nbytes: int) -> tuple[int, int, Sequence[tuple[int, int]]]:
        """Key, cursor and rows of a name. Waits for the scheduler, not for other ranks."""
        found = self._ask_scheduler([(name, nbytes)])[0]
        return found.declared_key, found.cursor, found.extents

    def declare_many(self, names: Sequence[tuple[str, int]]) -> None:
        """Number many names, each with its tensor's bytes, in one round trip. Known ones cost nothing."""
        checked = [(self.checked_name(name), nbytes) for name, nbytes in names]
        new = [(name, nbytes) for name, nbytes in checked if not self.worker.knows(name)]
        if new:
            for (name, _), found in zip(new, self._ask_scheduler(new), strict=True):
                self.worker.add_declared(name, found.declared_key, found.cursor, found.extents)

    def _ask_scheduler(self, names: Sequence[tuple[str, int]]) -> list[Declaration]:
        try:
            return self.wiring.client.declare(names)
        except errors.PeerLostError:
            # The scheduler goes with the rank that has started it; whose end that was the core knows a moment later.
            deadline = time.monotonic() + BLAME_S
            while self.worker.aborted() is None and time.monotonic() < deadline:
                time.sleep(0.005)  # nor for this, and the job is lost anyway; BLAME_S at most
            if self.worker.aborted() is None:
                raise
        raise self.failure(errors.Code.PEER_LOST, NOBODY, "", 0)

    @staticmethod
    def checked_name(name: object) -> str:
        """A name that others can be told. Raises TypeError for what is no str, ValueError for what cannot be sent."""
        if not isinstance(name, str):
            raise TypeError(f"a name is a str, not a {type(name).__name__}")
        name = str.__str__(name)  # of a subclass, as numpy.str_, only the text can be sent
        if len(name) > MAX_NAME_CHARACTERS:
            raise ValueError(f"a name has at most {MAX_NAME_CHARACTERS} characters, not {len(name)}: {name[:40]!r}…")
        if name.startswith(UNNAMED_MARK):
            raise ValueError(f"a name does not begin with a zero character: {name!r}")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name!r} cannot be a name: it has half a surrogate pair in it") from error
        return name

    def unnamed_key(self, kind: str, number: int) -> tuple[int, int, Sequence[tuple[int, int]]]:
        """Key, cursor and row of the recycled name no. `number` of a kind of operation."""
        keys = self.wiring.unnamed[kind]
        cursor = keys.first_cursor + number * keys.cursor_stride
        return keys.first_key + number, cursor, [(keys.first_row + number, 1)]

    @staticmethod
    def hash_of(signature: tuple[Any, ...]) -> int:
        """64 bits that are the same on all ranks exactly when the signature is."""
        digest = hashlib.blake2b(repr(signature).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def empty_for(self, tensor: Any, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """Where the result of an out-of-place operation goes: arena memory, so that others can write it directly."""
        return self.empty(shape, getattr(tensor, "dtype", None) if isinstance(tensor, np.ndarray) else dtype_of(dtype))

    def empty(self, shape: Any, dtype: Any) -> npt.NDArray[Any]:
        """A new array in the arena, 64-byte aligned; ordinary memory when the arena is full."""
        wanted = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        count = math.prod(map(operator.index, shape))
        block = self.worker.allocate(count * wanted.itemsize) if count > 0 else None
        if block is None:
            return np.empty(shape, wanted)
        return np.frombuffer(block, wanted, count).reshape(shape)

    # --- Words

    def refusal(self, code: int, name: str | None) -> errors.CommlibError:
        """Why the core did not accept an operation."""
        if code == errors.Code.PEER_LOST:
            return self.failure(code, NOBODY, name or "", 0)
        text = {
            errors.Code.NOT_INITIALIZED: FORKED,
            errors.Code.OUT_OF_MEMORY: "there is no memory for another operation",
            errors.Code.UNSUPPORTED: "COMMLIB_LOCAL_ROUTE=arena takes only memory made by commlib.empty() or zeros()",
        }.get(errors.Code(code), f"the operation was refused with code {code}")
        return errors.from_code(code, text)

    def failure(self, code: int, member: int, name: str, round_number: int) -> errors.CommlibError:
        """The error an operation failed with. For a mismatch, waits up to 10 s for what the other ranks said."""
        if code == errors.Code.MISMATCH:
            return self._mismatch(name, round_number)
        if code == errors.Code.OUT_OF_MEMORY:
            full = f"the arena of {member_in_words(self.wiring, member)[2]} is full; see COMMLIB_ARENA_BYTES"
            return errors.from_code(code, f"{describe_name(name, round_number)} failed: {full}")
        if code == errors.Code.SHUT_DOWN:
            return errors.from_code(code)
        if code != errors.Code.PEER_LOST:
            return errors.from_code(code, f"{describe_name(name, round_number)} failed")
        # One operation fails for a member that has left in order, all of them for one that is lost.
        member, cause = self.worker.aborted() or (member, CAUSE_LEFT)
        if member == self.rank and cause == CAUSE_LEFT:
            return errors.from_code(errors.Code.SHUT_DOWN)
        if cause == CAUSE_TOLD:
            # Another rank of this host heard it first and left a number in shared memory; the words are on their way.
            self._told_came.wait(BLAME_S)
        error = peer_lost(self.wiring, member, cause, self._told)
        if error.rank is not None and not self._blamed:
            self._blamed = True
            tell_supervisor(error.rank)
        return error

    def timed_out(self, handle: _core.Handle, name: str, round_number: int, timeout: float) -> errors.OperationTimeout:
        """The error for an operation that is late. Asks who is late, up to 1 s, unless that was short."""
        late = ""
        if timeout >= ASK_WHO_IS_LATE_S:
            report = self._who_is_late(name, round_number, timeout)
            late = f": {describe_late(report)}" if report is not None else ""
        text = f"{describe_name(name, round_number)} has not completed after {timeout:g} s{late}"
        again = "It stays in flight, and this error's `handle` can be waited for again"
        return errors.OperationTimeout(f"{text}. {again}", handle=handle)

    def _who_is_late(self, name: str, round_number: int, waiting_s: float) -> StallReport | None:
        answer = self._late[name, round_number] = SimpleQueue()
        self.wiring.client.stalled(name, round_number, waiting_s)
        try:
            return answer.get(timeout=WHO_IS_LATE_S)
        except Empty:
            return None
        finally:
            self._late.pop((name, round_number), None)  # an answer that comes later is a warning

    def _mismatch(self, name: str, round_number: int) -> errors.MismatchError:
        with self._verdict_came:
            self._verdict_came.wait_for(lambda: round_number in self._verdicts.get(name, ()), VERDICT_TIMEOUT_S)
            verdict = self._verdicts.get(name, {}).get(round_number)
        title = name if not name.startswith(UNNAMED_MARK) else describe_name(name, round_number)
        if verdict is None:
            text = f"the ranks do not agree about {describe_name(name, round_number)}"
            return errors.MismatchError(text, tensor=title)
        return errors.MismatchError(verdict.text, tensor=title, field=verdict.field, values=verdict.values)

    # --- Hooks of the control thread

    def _on_lost(self, rank: int | None, host: str, cause: str) -> None:
        self._told = Told(rank, host, cause)
        self._told_came.set()
        self.worker.abort(NOBODY if rank is None else rank, CAUSE_TOLD)

    def _on_stall(self, report: StallReport) -> None:
        answer = self._late.pop((report.name, report.round), None)
        if answer is not None:
            answer.put(report)
        else:
            log.warning("%s", describe_stall(report))

    def _on_disagreements(self) -> None:
        for name, round_number, (collective, op, dtype, shape, root, compression) in self.worker.take_disagreements():
            signature = Signature(collective, op, dtype, shape, root, compression)
            # Its own thread: the verdict takes until all ranks have reported, and a hook must not wait.
            threading.Thread(
                target=self._ask_for_verdict, args=(name, round_number, signature), name="cl-verdict", daemon=True
            ).start()

    def _ask_for_verdict(self, name: str, round_number: int, signature: Signature) -> None:
        try:
            verdict = self.wiring.client.report_mismatch(name, round_number, signature, VERDICT_TIMEOUT_S)
        except errors.CommlibError as error:
            text = f"the ranks do not agree about {describe_name(name, round_number)} ({error})"
            verdict = Verdict(name, round_number, "", text, {})
        with self._verdict_came:
            of_name = self._verdicts.setdefault(name, {})
            of_name[round_number] = verdict
            for old in sorted(of_name)[:-KEPT_VERDICTS]:
                del of_name[old]
            self._verdict_came.notify_all()

    def _look_for_stalls(self) -> None:
        self._pass_on_log()
        stall_s = self.parameters.stall_warning_s
        waiting = self.worker.waiting(stall_s)
        self._warned &= set(waiting)
        for name, round_number in waiting[:8]:
            if (name, round_number) not in self._warned:
                self._warned.add((name, round_number))
                self.wiring.client.stalled(name, round_number, stall_s)

    def _pass_on_log(self) -> None:
        for level, text in self.worker.take_log():
            log.log(level, "%s", text)

    # --- Others

    def speed(self) -> tuple[float, float]:
        """(now in unix seconds, MB/s of finished operations since the last call)."""
        now, done = time.time(), self.worker.finished_bytes()
        speed = (done - self._speed_bytes) / max(now - self._speed_time, 1e-9) / 1e6
        self._speed_time, self._speed_bytes = now, done
        return now, speed

    async def wait_in_event_loop(self, handle: _core.Handle) -> Any:
        """The result of an operation, without blocking the running event loop."""
        if not handle.done():
            loop = asyncio.get_running_loop()
            completions = self._loops.get(loop)
            if completions is None:
                completions = self._loops[loop] = _LoopCompletions(loop)
            await completions.wait_for(handle)
        return handle.wait(0)


class _LoopCompletions:
    """One descriptor per event loop, on which it hears of all operations that are awaited in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = _core.CompletionQueue()
        self._tokens = itertools.count()
        self._futures: dict[int, asyncio.Future[None]] = {}
        loop.add_reader(self._queue.fileno(), self._drain)

    def _drain(self) -> None:
        for token in self._queue.take():
            future = self._futures.pop(token, None)
            if future is not None and not future.done():
                future.set_result(None)

    async def wait_for(self, handle: _core.Handle) -> None:
        token = next(self._tokens)
        future = self._futures[token] = asyncio.get_running_loop().create_future()
        handle.subscribe(self._queue, token)
        await future


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of one of the ten names; bfloat16 is ml_dtypes'."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes  # only where bfloat16 is used
    except ImportError:
        raise errors.UnsupportedError("NumPy arrays of bfloat16 need ml_dtypes: pip install 'commlib[bf16]'") from None
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16
