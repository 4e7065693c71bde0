# SPDX-License-Identifier: Apache-2.0
"""Contenders take turns: in each round each of them once, so that a machine that is slow for a while is so for all.

One that is too short for the clock is repeated within its turn. Each round begins with another one, and before each
turn all ranks meet. What is reported of a round is the slowest rank: a sum is there when all have it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import commlib

_MOST_REPEATS = 1000


@dataclass(frozen=True)
class Contender:
    """One way of doing what is measured. `check` does it once and raises if the result is wrong; turns are taken while
    what `surroundings` returns is entered.
    """

    name: str
    action: Callable[[], object]
    check: Callable[[], object] = field(default=lambda: None)
    surroundings: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True)
class Turn:
    """What one rank took for one repetition of an action: seconds, and CPU seconds of all its threads."""

    seconds: float
    cpu_seconds: float


Turns = dict[str, list[Turn]]  # by contender and round


def take_turns(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    batch_s: float = 0.01,
    warm_up: int = 2,
    before_round: Callable[[], object] = lambda: None,
) -> Turns:
    """Measure, on all ranks at once. Each turn lasts about `batch_s` seconds, or as long as the action does once; that
    is always so with 0. `before_round` is called on all ranks.
    """
    repeats: dict[str, int] = {}
    for contender in contenders:
        contender.check()
        repeats[contender.name] = _repeats(contender, batch_s)
    turns: Turns = {contender.name: [] for contender in contenders}
    for number in range(warm_up + rounds):
        before_round()
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            turn = _turn(contender, repeats[contender.name])
            if number >= warm_up:
                turns[contender.name].append(turn)
    return turns


def _turn(contender: Contender, repeats: int) -> Turn:
    action = contender.action
    with contender.surroundings():
        if repeats > 1:
            action()  # what others have left in the caches is not this one's
        commlib.barrier()
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(repeats):
            action()
        ended = time.perf_counter()
        return Turn((ended - began) / repeats, (time.process_time() - cpu) / repeats)


def _repeats(contender: Contender, batch_s: float) -> int:
    """How many repetitions make a turn: the same number on all ranks."""
    if batch_s == 0:
        return 1
    seconds = of_all(_turn(contender, 1).seconds)
    if seconds < batch_s:
        seconds = of_all(_turn(contender, 3).seconds)
    return max(1, min(_MOST_REPEATS, math.ceil(batch_s / seconds)))


def of_all(seconds: float) -> float:
    """Those of the slowest rank."""
    slowest = commlib.push_pull(np.array([seconds]), name="benchmark/seconds", op=commlib.Max)
    return float(slowest[0])


def slowest(by_rank: Sequence[Turns], name: str) -> list[float]:
    """The seconds of the slowest rank, by round."""
    return [max(turn.seconds for turn in turns) for turns in _rounds(by_rank, name)]


def cpu_of_all(by_rank: Sequence[Turns], name: str) -> list[float]:
    """The CPU seconds of all ranks together, by round."""
    return [sum(turn.cpu_seconds for turn in turns) for turns in _rounds(by_rank, name)]


def _rounds(by_rank: Sequence[Turns], name: str) -> list[tuple[Turn, ...]]:
    return list(zip(*(rank[name] for rank in by_rank), strict=True))


def checked(sources: Sequence[Any], results: Sequence[Any], action: Callable[[], object]) -> Callable[[], None]:
    """A check of sums: rank r contributes r + 1. Sources and results are NumPy arrays, one of each for each sum.

    Zeros are left behind: they stay zeros however often they are summed.
    """

    def check() -> None:
        for source in sources:
            source.fill(commlib.rank() + 1)
        action()
        expected = commlib.size() * (commlib.size() + 1) // 2
        for result in results:
            if not (result == expected).all():
                raise ArithmeticError(f"a sum is wrong: {result!r}, expected {expected} everywhere")
        for array in (*sources, *results):
            array.fill(0)

    return check
