# SPDX-License-Identifier: Apache-2.0
"""Operations cost no more instructions and system calls than is recorded, and nobody gets better without saying so."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from tests.performance import counting, recorded
from tests.performance.counting import Counts
from tests.performance.recorded import Recorded

pytestmark = pytest.mark.timeout(240)

TOOLS = {"compiler": "gcc 12"}


def held_against(instructions: Counts, now: Counts, made_with: dict[str, str] = TOOLS) -> list[str]:
    return Recorded(TOOLS, {"instructions": instructions}).complaints("instructions", now, made_with)


@pytest.mark.parametrize(("program", "kind"), [(p, k) for p, kinds in counting.MEASUREMENTS.items() for k in kinds])
def test_as_recorded(program: str, kind: str, tmp_path: Path) -> None:
    problem = counting.what_is_missing()
    if problem is not None and os.environ.get("CI"):
        pytest.fail(f"CI must be able to count: {problem}", pytrace=False)
    was = Recorded.read(program)
    if problem is None and platform.machine() != was.made_with["machine"]:
        problem = f"recorded on {was.made_with['machine']}, and this is {platform.machine()}"
    if problem is not None:
        pytest.skip(problem)
    found = counting.MEASUREMENTS[program][kind](tmp_path)
    tools = counting.made_with(program)
    complaints = was.complaints(kind, found, tools)
    if complaints:
        others = was.other_tools(tools)
        if others:
            complaints.append(f"Other tools than then, so more than usual is allowed: {others}")
        complaints.append(f"The profiles, or the trace, are in {tmp_path}")
        pytest.fail("\n".join([*complaints, recorded.HOW_TO_RECORD]), pytrace=False)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    counts: dict[str, Counts] = {
        "instructions": {"2 ranks, 4 KiB": 12345.4, "few": 7.25},
        "system calls": {"a": {}, "b": {"recvfrom": 12.5, "write": 0.333}},
    }
    path = tmp_path / "recorded.toml"
    path.write_text(recorded.written({"core": Recorded(TOOLS | {"two words": 'a "b"'}, counts)}))
    read = Recorded.read("core", path)
    assert read.made_with == TOOLS | {"two words": 'a "b"'}
    assert read.counts == {
        "instructions": {"2 ranks, 4 KiB": 12345, "few": 7.25},
        "system calls": {"a": {}, "b": {"recvfrom": 12.5, "write": 0.33}},
    }
    assert list(read.counts["instructions"]) == ["2 ranks, 4 KiB", "few"]


def test_more_than_the_margin_is_too_much() -> None:
    assert held_against({"a": 1000}, {"a": 1099}) == []
    assert held_against({"a": 1000, "b": 5}, {"a": 1101, "b": 5}) == [
        "a: 1101 instructions an operation, recorded 1000 (+10.1%): 10% more are allowed"
    ]


def test_much_less_is_to_be_recorded() -> None:
    assert held_against({"a": 1000}, {"a": 751}) == []
    (complaint,) = held_against({"a": 1000}, {"a": 749})
    assert "(-25.1%): so much better" in complaint


def test_cases_are_those_that_are_recorded() -> None:
    assert held_against({"old": 1000}, {"new": 10}) == [
        "old: is recorded, but was not counted",
        "new: 10 instructions an operation, and nothing is recorded",
    ]


def test_other_tools_have_a_wider_margin() -> None:
    other = {"compiler": "gcc 13"}
    assert held_against({"a": 1000}, {"a": 1400}, other) == held_against({"a": 1000}, {"a": 100}, other) == []
    assert len(held_against({"a": 1000}, {"a": 1600}, other)) == 1
    assert Recorded(TOOLS, {}).other_tools(other) == "compiler is gcc 13, was gcc 12"
    assert Recorded(TOOLS, {}).other_tools(TOOLS) == ""


def test_system_calls_count_together_whatever_they_are() -> None:
    was = Recorded(TOOLS, {"system calls": {"quiet": {}, "loud": {"sendmsg": 40, "readv": 60}}})
    assert was.complaints("system calls", {"quiet": {"futex": 0.04}, "loud": {"send": 50, "recv": 53}}, TOOLS) == []
    assert was.complaints("system calls", {"quiet": {"futex": 0.5}, "loud": {"sendmsg": 104}}, TOOLS) == [
        "quiet: 0.5 (futex 0.5) system calls an operation, recorded 0: 3% and 0.05 more are allowed",
        "loud: 104 (sendmsg 104) system calls an operation, recorded 100 (sendmsg 40, readv 60) (+4.0%): "
        "3% and 0.05 more are allowed",
    ]
