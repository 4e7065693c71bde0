# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from commlib.control.agreement import REPORT_WINDOW_S, StallBook, VerdictBook, count_ranks, describe_stall, judge
from commlib.control.messages import Signature, Stalled, StallReport

BASE: dict[str, Any] = {"collective": "push_pull", "op": "average", "dtype": "float32", "shape": (3, 4)}


def signature(**changes: Any) -> Signature:
    return Signature(**BASE | changes)


def test_the_verdict_names_tensor_field_and_who_said_what() -> None:
    reports = {0: signature(), 1: signature(shape=(4, 3)), 2: signature()}
    verdict = judge("grad.0", 1, reports, 3)
    assert verdict.text == 'tensor "grad.0": ranks disagree about shape: (3, 4) on ranks 0, 2; (4, 3) on rank 1'
    assert verdict.field == "shape"
    assert verdict.values == {0: (3, 4), 1: (4, 3), 2: (3, 4)}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"dtype": "float16"}, "dtype", "float16 on rank 1"),
        ({"op": "sum"}, "op", "sum on rank 1"),
        ({"collective": "broadcast", "root": 0}, "collective", "broadcast on rank 1"),
        ({"root": 3}, "root", "none on rank 0; 3 on rank 1"),
        ({"compression": "fp16"}, "compression", "fp16 on rank 1"),
        ({"group": "odd"}, "group", "odd on rank 1"),
        ({"shape": ()}, "shape", "() on rank 1"),
        ({"shape": (7,)}, "shape", "(7,) on rank 1"),
        ({"shape": (7,), "dtype": "int8"}, "dtype", "int8 on rank 1"),
    ],
)
def test_every_field_is_compared(changes: dict[str, Any], field: str, words: str) -> None:
    verdict = judge("t", 1, {0: signature(), 1: signature(**changes)}, 2)
    assert verdict.field == field
    assert words in verdict.text


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (((3,), (2, 2)), ((3,), (4,)), "shape of no. 1: (2, 2) on rank 0; (4,) on rank 1"),
        (((3,), ()), ((3,), (), ()), "shape: a group of 2 on rank 0; a group of 3 on rank 1"),
        (((3,),), (3,), "shape: a group of 1 on rank 0; (3,) on rank 1"),
    ],
)
def test_of_groups_only_what_differs_is_said(one: Any, other: Any, words: str) -> None:
    verdict = judge("t", 1, {0: signature(shape=one), 1: signature(shape=other)}, 2)
    assert words in verdict.text
    assert verdict.field == "shape"
    assert verdict.values == {0: one, 1: other}


def test_the_text_does_not_depend_on_the_order_of_reports() -> None:
    said = [(0, signature()), (1, signature(op="sum")), (2, signature()), (3, signature(op="max"))]
    assert len({judge("t", 1, dict(order), 4).text for order in permutations(said)}) == 1


def test_silence_is_mentioned() -> None:
    assert "nothing was heard from rank 2" in judge("t", 1, {0: signature(), 1: signature(op="sum")}, 3).text
    same = judge("t", 1, {0: signature(), 1: signature()}, 4)
    assert same.field == ""
    assert "ranks 2, 3" in same.text


def test_ranks_are_counted_in_runs() -> None:
    assert count_ranks([7, 1, 0, 2, 5, 8]) == "0-2, 5, 7, 8"
    assert count_ranks([]) == ""


def test_the_verdict_waits_for_all_and_goes_to_all() -> None:
    book = VerdictBook(3)
    assert book.report(0, "t", 1, signature(), now=0.0) == []
    assert book.report(1, "t", 1, signature(op="sum"), now=1.0) == []
    sent = book.report(2, "t", 1, signature(), now=2.0)
    assert sorted(rank for rank, _ in sent) == [0, 1, 2]
    assert len({id(verdict) for _, verdict in sent}) == 1
    assert book.next_deadline() is None


def test_after_the_window_it_speaks_and_late_ranks_hear_the_same() -> None:
    book = VerdictBook(3)
    book.report(0, "t", 1, signature(), now=10.0)
    book.report(2, "t", 1, signature(op="sum"), now=11.0)
    assert book.next_deadline() == 10.0 + REPORT_WINDOW_S
    assert book.expire(14.9) == []
    sent = book.expire(15.0)
    assert [rank for rank, _ in sent] == [0, 2]
    assert book.report(1, "t", 1, signature(), now=99.0) == [(1, sent[0][1])]
    assert book.next_deadline() is None


def test_rounds_and_names_are_judged_apart() -> None:
    book = VerdictBook(2)
    book.report(0, "t", 1, signature(), now=0.0)
    assert book.report(1, "t", 2, signature(), now=0.0) == []
    assert book.report(1, "u", 1, signature(), now=0.0) == []
    assert len(book.report(1, "t", 1, signature(op="sum"), now=0.0)) == 2


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    book = VerdictBook(3)
    book.report(0, "t", 1, signature(), now=0.0)
    book.report(1, "t", 1, signature(op="sum"), now=0.0)
    sent = book.leave(2, now=0.1)
    assert [rank for rank, _ in sent] == [0, 1]


def test_a_stall_report_names_who_is_late() -> None:
    book = StallBook()
    query = book.ask(0, Stalled("t", 7, 60.0), present=[0, 1, 2, 3], absent=[], now=0.0)
    assert query is not None
    book.answer(0, query, 7)
    book.answer(1, query, 6)
    book.answer(2, query, 0)
    assert book.expire(1.0, {}) == []
    book.answer(3, query, 8)
    ((asker, report),) = book.expire(1.0, {1: "a", 2: "b"})
    assert asker == 0
    assert (report.missing, report.silent) == (((1, "a"), (2, "b")), ())
    assert book.next_deadline() is None


def test_those_who_ask_the_same_share_the_question() -> None:
    book = StallBook()
    query = book.ask(0, Stalled("t", 7, 60.0), present=[0, 1], absent=[], now=0.0)
    assert query is not None
    assert book.ask(1, Stalled("t", 7, 60.0), present=[0, 1], absent=[], now=0.0) is None
    other = book.ask(1, Stalled("t", 8, 60.0), present=[0, 1], absent=[], now=0.0)
    assert other not in (None, query)
    book.answer(0, query, 7)
    book.answer(1, query, 7)
    assert sorted(asker for asker, _ in book.expire(0.0, {})) == [0, 1]


def test_who_does_not_answer_or_is_gone_is_reported_as_such() -> None:
    book = StallBook()
    query = book.ask(0, Stalled("t", 7, 60.0), present=[0, 1, 2], absent=[], now=0.0)
    assert query is not None
    book.answer(0, query, 7)
    book.leave(2)
    book.answer(9, query, 0)  # never asked
    assert book.expire(REPORT_WINDOW_S - 0.1, {}) == []
    ((_, report),) = book.expire(REPORT_WINDOW_S, {})
    assert report.missing == ((2, ""),)
    assert report.silent == ((1, ""),)


def test_who_has_left_is_missing_without_being_asked() -> None:
    book = StallBook()
    query = book.ask(0, Stalled("t", 7, 60.0), present=[0], absent=[1], now=0.0)
    assert query is not None
    book.answer(0, query, 7)
    ((_, report),) = book.expire(0.0, {1: "a"})
    assert report.missing == ((1, "a"),)


def test_a_stall_in_words() -> None:
    report = StallReport("t", 7, 61.3, missing=((1, "a"), (3, "b")), silent=((2, "c"),))
    assert describe_stall(report) == (
        'tensor "t": waiting for 61 s; not submitted by rank 1 on host a, rank 3 on host b; no answer from '
        "rank 2 on host c"
    )
    assert "all ranks have submitted it" in describe_stall(StallReport("t", 7, 61.3, (), ()))
