# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.control import messages as m

EVERY_MESSAGE = [
    m.Probe("job"),
    m.Hello(protocol=1, version="1", job="j", instance="i", role="server", host="h", pid=1),
    m.Endpoint("127.0.0.1:5"),
    m.Declare(3, (("a", 5), ("b", 1 << 40))),
    m.Report("t", 9, m.Signature(shape=(3, 0, 1 << 33), root=-1)),
    m.Submitted(1, 2),
    m.Gone(None, "h", "c"),
    m.Bye(),
]


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_what_is_said_is_what_is_heard(message: m.FromMember) -> None:
    assert m.decode_from_member(m.encode(message)) == message


def test_shapes_in_verdicts_arrive_as_tuples() -> None:
    verdict = m.Verdict("t", 1, "shape", "text", {0: (3, 4), 1: ()})
    assert m.decode_from_scheduler(m.encode(verdict)) == verdict


@given(st.binary(max_size=200))
def test_garbage_is_malformed_and_nothing_else(data: bytes) -> None:
    for decode in (m.decode_from_member, m.decode_from_scheduler):
        try:
            decode(data)
        except m.MalformedMessage:
            continue


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"type": "Nothing"},
        {"type": "Declare", "request": 1},
        {"type": "Declare", "request": -1, "names": []},
        {"type": "Declare", "request": 1, "names": [["a", -1]]},
        {"type": "Declare", "request": 1, "names": [["a" * 5000, 1]]},
        {"type": "Declare", "request": 1, "names": [["a", 1 << 63]]},
        {"type": "Declare", "request": "1", "names": []},
        {"type": "Report", "name": "t", "round": 1, "signature": {"shape": [1.5]}},
        {"type": "Welcome"},
    ],
)
def test_fields_are_checked(wrong: object) -> None:
    with pytest.raises(m.MalformedMessage):
        m.decode_from_member(msgspec.msgpack.encode(wrong))
