# SPDX-License-Identifier: Apache-2.0
"""Which congestion control connections get, and how many connections there are between whom."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from commlib import errors
from commlib.config import Config
from commlib.control import congestion
from commlib.control.congestion import AUTO, SYSTEM, congestion_control_of, set_congestion_control


@pytest.fixture
def tcp() -> Iterator[socket.socket]:
    with socket.socket() as made:
        yield made


def test_the_systems_is_kept_when_asked_for(tcp: socket.socket) -> None:
    before = congestion_control_of(tcp)
    set_congestion_control(tcp, SYSTEM)
    assert congestion_control_of(tcp) == before


def test_a_name_is_used(tcp: socket.socket) -> None:
    set_congestion_control(tcp, "reno")  # every kernel has it, and everybody may use it
    assert congestion_control_of(tcp) == "reno"


def test_what_is_not_paced_is_kept(tcp: socket.socket) -> None:
    set_congestion_control(tcp, "reno")
    set_congestion_control(tcp, AUTO)
    assert congestion_control_of(tcp) == "reno"


def test_what_is_paced_is_replaced(tcp: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    set_congestion_control(tcp, "reno")
    monkeypatch.setattr(congestion, "_PACED", frozenset({"reno"}))
    monkeypatch.setattr(congestion, "_INSTEAD", ("no-such-thing", congestion_control_of(tcp)))
    set_congestion_control(tcp, AUTO)  # the first one is not there; the second one is taken
    assert congestion_control_of(tcp) == "reno"
    monkeypatch.setattr(congestion, "_INSTEAD", ("no-such-thing",))
    set_congestion_control(tcp, AUTO)  # nothing better is permitted: it goes on with what there is
    assert congestion_control_of(tcp) == "reno"


def test_a_name_that_is_not_there_is_told_with_those_that_are(tcp: socket.socket) -> None:
    with pytest.raises(errors.ConfigError, match=r"COMMLIB_CONGESTION is 'westworld'.*this kernel has .*reno"):
        set_congestion_control(tcp, "westworld")


@pytest.mark.parametrize("text", ["re no", "a-name-that-is-much-too-long", "reno;"])
def test_what_cannot_be_a_name_is_refused_early(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="COMMLIB_CONGESTION"):
        Config.from_environment({"COMMLIB_CONGESTION": text})


def test_the_setting_is_read() -> None:
    assert Config.from_environment({}).congestion == AUTO
    assert Config.from_environment({"COMMLIB_CONGESTION": "RENO"}).congestion == "reno"
