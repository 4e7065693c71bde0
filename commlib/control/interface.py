# SPDX-License-Identifier: Apache-2.0
"""What a member asks the control plane, and what the control plane asks the member."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commlib.control.agreement import describe_stall
from commlib.control.messages import Declaration, Signature, StallReport, Verdict

__all__ = ["Control", "Hooks"]

log = logging.getLogger("commlib")


def _warn_of_stall(report: StallReport) -> None:
    log.warning("%s", describe_stall(report))


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Called on the control thread, one at a time. They must not block; what they raise is logged and forgotten.

    ``on_lost``, ``on_scheduler_lost`` and ``on_over`` are also called for what happened before they were attached.
    """

    on_lost: Callable[[int | None, str, str], None] = lambda rank, host, cause: None  # a member: rank, host, cause
    on_scheduler_lost: Callable[[], None] = lambda: None  # declaring new names and the like now fail
    on_over: Callable[[bool], None] = lambda failed: None  # servers only: no worker needs you any more
    submitted_round: Callable[[str], int] = lambda name: 0  # the last round of the name submitted here, 0 if none
    on_stall: Callable[[StallReport], None] = _warn_of_stall  # the answer to `stalled`, which is logged by default
    core_fd: int | None = None  # watched, not owned; must stay open until `detach` or `close`
    on_core_event: Callable[[], None] = lambda: None  # core_fd is readable; must read it
    tick_s: float | None = None  # how often to call `on_tick`, in seconds; None: never
    on_tick: Callable[[], None] = lambda: None


class Control(ABC):
    """One member's side of the control plane. Every method may be called from any thread, but not from a hook.

    A forked child has no control plane: there every method raises NotInitializedError, but close() does nothing.
    """

    @abstractmethod
    def attach(self, hooks: Hooks) -> None:
        """Use these hooks from now on, instead of those before."""

    def detach(self) -> None:
        """Call no hook any more. When this returns none is running and ``core_fd`` may be closed."""
        self.attach(Hooks())

    @abstractmethod
    def declare(self, names: Sequence[tuple[str, int]]) -> list[Declaration]:
        """Number `names`, each with the bytes of its tensor. Waits for the scheduler, not for other ranks.

        All or none are declared. Raises ConfigError when the job has no room for them, PeerLostError when the scheduler
        is lost.
        """

    @abstractmethod
    def report_mismatch(self, name: str, round_number: int, signature: Signature, timeout_s: float = 10.0) -> Verdict:
        """Say what this rank submitted in a round in which the ranks disagree, and wait for what the others said.

        The verdict comes when all ranks have reported, at the latest 5 s after the first. Raises OperationTimeout after
        `timeout_s` seconds, PeerLostError when the scheduler is lost.
        """

    @abstractmethod
    def stalled(self, name: str, round_number: int, waiting_s: float) -> None:
        """Ask who has not submitted this round. Does not wait: the answer goes to ``on_stall``."""

    @abstractmethod
    def lost(self, rank: int | None, host: str, cause: str) -> None:
        """Tell everybody that a member is lost. Does not wait."""

    @abstractmethod
    def bye(self, timeout_s: float = 5.0) -> None:
        """Leave in order. Waits up to `timeout_s` seconds for the scheduler to know; raises nothing, may repeat."""

    @abstractmethod
    def close(self) -> None:
        """End the control thread and free everything. Waiting calls of other threads fail. Never hangs, may repeat."""
