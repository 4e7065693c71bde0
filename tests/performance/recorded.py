# SPDX-License-Identifier: Apache-2.0
"""What was counted when it was last looked at, in `recorded.toml`, and how far what is counted now may be from that."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.performance.counting import Count, Counts

FILE = Path(__file__).with_name("recorded.toml")
HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# What one operation costs: instructions, and system calls by name. Written by `python -m tests.performance.record`.
"""
HOW_TO_RECORD = """\
If it is meant to be so, record it, and say in the commit why: python -m tests.performance.record"""


@dataclass(frozen=True)
class Margin:
    """How much more (a part of it, and a few) and how much less (a part of it) is no reason to look at it."""

    more: float
    few: float = 0.0
    less: float = 0.25


MARGINS = {"instructions": Margin(more=0.10), "system calls": Margin(more=0.03, few=0.05)}
# Another compiler, Python or C library: what can be said then is that nothing has gone badly wrong.
OTHER_TOOLS = Margin(more=0.5, few=0.5, less=1.0)


@dataclass(frozen=True)
class Recorded:
    """What was counted in one program, and what it had been made with."""

    made_with: Mapping[str, str]
    counts: Mapping[str, Counts]  # "instructions", "system calls"

    @staticmethod
    def read(program: str, path: Path = FILE) -> Recorded:
        table: dict[str, Any] = tomllib.loads(path.read_text())[program]
        return Recorded(table.pop("made with"), table)

    def complaints(self, kind: str, measured: Counts, made_with: Mapping[str, str]) -> list[str]:
        """What is to be looked at, a line each."""
        same_tools = dict(made_with) == dict(self.made_with)
        margin = MARGINS[kind] if same_tools else OTHER_TOOLS
        recorded = self.counts[kind]
        found = [f"{case}: is recorded, but was not counted" for case in recorded if case not in measured]
        for case, now in measured.items():
            if case in recorded:
                found += _complaint(f"{case}: {_text(now)} {kind} an operation", recorded[case], now, margin)
            else:
                found.append(f"{case}: {_text(now)} {kind} an operation, and nothing is recorded")
        return found

    def other_tools(self, made_with: Mapping[str, str]) -> str:
        """How what it is made with differs from what it was made with; nothing if it does not."""
        names = sorted(made_with.keys() | self.made_with.keys())
        pairs = [(name, made_with.get(name), self.made_with.get(name)) for name in names]
        return "; ".join(f"{name} is {now}, was {was}" for name, now, was in pairs if now != was)


def written(recorded: Mapping[str, Recorded]) -> str:
    """The text of `recorded.toml`."""
    lines = [HEAD]
    for program, one in recorded.items():
        lines += [f"[{program}.{_quoted('made with')}]"]
        lines += [f"{_quoted(name)} = {json.dumps(value)}" for name, value in one.made_with.items()]
        for kind, counts in one.counts.items():
            lines += ["", f"[{program}.{_quoted(kind)}]"]
            for case, count in counts.items():
                lines += [f"{_quoted(case)} = {_toml(count)}"]
        lines += [""]
    return "\n".join(lines)


def _quoted(key: str) -> str:
    return key if key.isidentifier() else json.dumps(key)


def _rounded(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.2f}".rstrip("0").rstrip(".")


def _toml(count: Count) -> str:
    if not isinstance(count, dict):
        return _rounded(count)
    inner = ", ".join(f"{name} = {_rounded(number)}" for name, number in count.items())
    return f"{{ {inner} }}" if inner else "{}"


def _complaint(what: str, was: Count, now: Count, margin: Margin) -> list[str]:
    before, after = _total(was), _total(now)
    if after > before * (1 + margin.more) + margin.few:
        few = f" and {margin.few:g}" if margin.few else ""
        verdict = f"{margin.more:.0%}{few} more are allowed"
    elif after < before * (1 - margin.less):
        verdict = "so much better that it should be recorded, to stay so"
    else:
        return []
    change = f" ({after / before - 1:+.1%})" if before else ""
    return [f"{what}, recorded {_text(was)}{change}: {verdict}"]


def _total(count: Count) -> float:
    return sum(count.values()) if isinstance(count, dict) else count


def _text(count: Count) -> str:
    parts = ", ".join(f"{name} {_rounded(number)}" for name, number in count.items()) if isinstance(count, dict) else ""
    return _rounded(_total(count)) + (f" ({parts})" if parts else "")
