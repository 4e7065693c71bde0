# SPDX-License-Identifier: Apache-2.0
"""Who said what when ranks disagree, and who is late when they wait: what the scheduler collects from them.

Nothing here knows sockets or clocks: the scheduler passes the time in and sends what comes out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from commlib.control.messages import Signature, Stalled, StallReport, Verdict
from commlib.control.registry import describe_name

__all__ = ["REPORT_WINDOW_S", "StallBook", "VerdictBook", "count_ranks", "describe_late", "describe_stall", "judge"]

REPORT_WINDOW_S = 5.0  # how long after the first report the others are waited for
KEPT_VERDICTS = 4096

# In this order: of several fields that differ, the one that explains the others comes first.
_FIELDS = ("collective", "dtype", "shape", "op", "root", "compression", "group")


def count_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: ``0, 2-5, 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs)


def _on_ranks(ranks: list[int]) -> str:
    return f"on {'rank' if len(ranks) == 1 else 'ranks'} {count_ranks(ranks)}"


def _shown(value: Any) -> str:
    """A value as a Python user would write it."""
    if isinstance(value, tuple):
        if value and isinstance(value[0], tuple):
            return f"a group of {len(value)}"
        return f"({value[0]},)" if len(value) == 1 else f"({', '.join(map(str, value))})"
    return "none" if value in (None, "") else str(value)


def judge(name: str, round_number: int, reports: Mapping[int, Signature], size: int) -> Verdict:
    """What the ranks disagree about, in words and in values."""
    subject = describe_name(name, round_number)
    silent = [rank for rank in range(size) if rank not in reports]
    for name_of_field in _FIELDS:
        values = {rank: getattr(reports[rank], name_of_field) for rank in sorted(reports)}
        groups: dict[Any, list[int]] = {}
        for rank, value in values.items():
            groups.setdefault(value, []).append(rank)
        if len(groups) > 1:
            subject_of, shown = name_of_field, {value: _shown(value) for value in groups}
            if len(set(shown.values())) == 1:  # groups of as many tensors: the first of them that is not the same
                at = next(at for at, shapes in enumerate(zip(*groups, strict=True)) if len(set(shapes)) > 1)
                subject_of, shown = f"{name_of_field} of no. {at}", {value: _shown(value[at]) for value in groups}
            said = "; ".join(f"{shown[value]} {_on_ranks(ranks)}" for value, ranks in groups.items())
            rest = f"; nothing was heard from {_on_ranks(silent).removeprefix('on ')}" if silent else ""
            return Verdict(
                name,
                round_number,
                name_of_field,
                f"{subject}: ranks disagree about {subject_of}: {said}{rest}",
                values,
            )
    text = f"{subject}: ranks disagree, but {_on_ranks(sorted(reports))} all is the same"
    if silent:
        text += f", and nothing was heard from {_on_ranks(silent).removeprefix('on ')}"
    return Verdict(name, round_number, "", text, {})


def describe_stall(report: StallReport) -> str:
    """What waits for whom, in words."""
    return f"{describe_name(report.name, report.round)}: waiting for {report.waiting_s:.0f} s; {describe_late(report)}"


def describe_late(report: StallReport) -> str:
    """Who is late, in words."""

    def named(members: Iterable[tuple[int, str]]) -> str:
        return ", ".join(f"rank {rank} on host {host}" for rank, host in members)

    late = [f"not submitted by {named(report.missing)}"] if report.missing else []
    late += [f"no answer from {named(report.silent)}"] if report.silent else []
    return "; ".join(late) or "all ranks have submitted it"


@dataclass
class _Case:
    deadline: float
    reports: dict[int, Signature] = field(default_factory=dict)
    verdict: Verdict | None = None


class VerdictBook:
    """The reports of rounds in which ranks disagree. A verdict, once given, stands, also for ranks that come later."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._cases: OrderedDict[tuple[str, int], _Case] = OrderedDict()
        self._left: set[int] = set()

    def report(
        self, rank: int, name: str, round_number: int, signature: Signature, now: float
    ) -> list[tuple[int, Verdict]]:
        """Take one rank's report. Returns whom to send which verdict, now."""
        case = self._cases.setdefault((name, round_number), _Case(now + REPORT_WINDOW_S))
        while len(self._cases) > KEPT_VERDICTS:
            self._cases.popitem(last=False)
        if case.verdict is not None:
            return [(rank, case.verdict)]
        case.reports[rank] = signature
        return self._close(name, round_number, case, now)

    def leave(self, rank: int, now: float) -> list[tuple[int, Verdict]]:
        """A rank is gone: nobody waits for its reports any more."""
        self._left.add(rank)
        return self.expire(now)

    def expire(self, now: float) -> list[tuple[int, Verdict]]:
        """The verdicts whose time has come: whom to send which."""
        open_cases = [(key, case) for key, case in self._cases.items() if case.verdict is None]
        return [sent for (name, r), case in open_cases for sent in self._close(name, r, case, now)]

    def next_deadline(self) -> float | None:
        """When to call `expire`, None if nothing is open."""
        return min((case.deadline for case in self._cases.values() if case.verdict is None), default=None)

    def _close(self, name: str, round_number: int, case: _Case, now: float) -> list[tuple[int, Verdict]]:
        if len(case.reports.keys() | self._left) < self._size and now < case.deadline:
            return []
        case.verdict = judge(name, round_number, case.reports, self._size)
        return [(rank, case.verdict) for rank in case.reports]


@dataclass
class _Inquiry:
    name: str
    round: int
    waiting_s: float
    deadline: float
    askers: set[int]
    waiting_for: set[int]
    missing: set[int]


class StallBook:
    """Questions who has not submitted a round. Several ranks that ask the same at once share one round of answers."""

    def __init__(self) -> None:
        self._inquiries: dict[int, _Inquiry] = {}
        self._next = 0

    def ask(
        self, asker: int, stalled: Stalled, present: Collection[int], absent: Collection[int], now: float
    ) -> int | None:
        """A rank asks. Returns the number of the question to put to all who are present, None if it is being put.

        Those who are absent, having left, are missing without being asked.
        """
        for inquiry in self._inquiries.values():
            if (inquiry.name, inquiry.round) == (stalled.name, stalled.round):
                inquiry.askers.add(asker)
                return None
        self._next += 1
        self._inquiries[self._next] = _Inquiry(
            stalled.name,
            stalled.round,
            stalled.waiting_s,
            deadline=now + REPORT_WINDOW_S,
            askers={asker},
            waiting_for=set(present),
            missing=set(absent),
        )
        return self._next

    def answer(self, rank: int, query: int, submitted_round: int) -> None:
        """A rank says which round it has submitted last."""
        inquiry = self._inquiries.get(query)
        if inquiry is None or rank not in inquiry.waiting_for:
            return
        inquiry.waiting_for.discard(rank)
        if submitted_round < inquiry.round:
            inquiry.missing.add(rank)

    def leave(self, rank: int) -> None:
        """A rank is gone: it has not submitted, and will not answer."""
        for inquiry in self._inquiries.values():
            if rank in inquiry.waiting_for:
                inquiry.waiting_for.discard(rank)
                inquiry.missing.add(rank)

    def expire(self, now: float, hosts: Mapping[int, str]) -> list[tuple[int, StallReport]]:
        """The reports that are complete or whose time has come: whom to send which. `hosts` names each rank's host."""
        sent = []
        for query, inquiry in list(self._inquiries.items()):
            if inquiry.waiting_for and now < inquiry.deadline:
                continue
            del self._inquiries[query]
            named = [
                tuple((rank, hosts.get(rank, "")) for rank in sorted(ranks))
                for ranks in (inquiry.missing, inquiry.waiting_for)
            ]
            report = StallReport(inquiry.name, inquiry.round, inquiry.waiting_s, named[0], named[1])
            sent += [(asker, report) for asker in inquiry.askers]
        return sent

    def next_deadline(self) -> float | None:
        """When to call `expire` at the latest, None if nobody asks."""
        return min((inquiry.deadline for inquiry in self._inquiries.values()), default=None)
