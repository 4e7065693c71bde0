# SPDX-License-Identifier: Apache-2.0
"""Hosts that are network namespaces: other addresses, other loopbacks, and cables that can be pulled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.members import Job, Member
from tests.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]

LEAVE = "w.client.bye(); w.close()"
ENDS = (
    "{peer: [(s.getsockname()[0], s.getpeername()[0]) for s in map(lambda fd: socket.socket(fileno=os.dup(fd)), fds)]"
    " for peer, fds in w.peers.items()}"
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as made:
        yield made


def all_hear(members: list[Member]) -> None:
    for member in members:
        member.hear()


def test_hosts_announce_the_addresses_at_which_others_reach_them(lab: Lab) -> None:
    with Job([2, 1], servers=1, lab=lab, COMMLIB_STREAMS="2") as job:
        members = [*(job.worker(rank) for rank in range(3)), job.server()]
        all_hear(members)
        addresses = {0: lab.address(0), 1: lab.address(1), 2: lab.address(2)}
        for peer_id, member in ((0, members[0]), (1, members[2]), (2, members[3])):
            member("import socket")
            others = [other for other in addresses if other != peer_id]
            ends = [addresses[peer_id]]
            assert member(ENDS) == {str(other): [[*ends, addresses[other]]] * 2 for other in others}
        for member in members:
            member.tell(LEAVE)
        all_hear(members)


def test_an_interface_can_be_chosen_by_name(lab: Lab) -> None:
    with Job([1, 1], lab=lab, COMMLIB_INTERFACE="eth0") as job:
        workers = [job.worker(rank) for rank in range(2)]
        all_hear(workers)
        workers[1]("import socket")
        assert workers[1](ENDS) == {"0": [[lab.address(1), lab.address(0)]]}


def test_what_torchrun_sets_is_enough(lab: Lab) -> None:
    with Job([1, 1], lab=lab) as job:
        del job.common["COMMLIB_SCHEDULER"]
        job.common |= {"MASTER_ADDR": lab.address(0), "MASTER_PORT": "29500"}
        workers = [job.worker(rank) for rank in range(2)]
        all_hear(workers)
        assert workers[1]("w.client.address") == f"{lab.address(0)}:30500"


def test_without_a_secret_nobody_makes_one_up(lab: Lab, tmp_path: Path) -> None:
    with Job([1, 1], lab=lab, COMMLIB_SECRET="", HOME=str(tmp_path)) as job:
        for worker in [job.worker(rank) for rank in range(2)]:
            answer = worker.fails()
            assert answer["error"] == "ConfigError"
            assert "COMMLIB_SECRET is not set" in answer["text"]
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_hosts_share_is_enough_once_there_is_a_secret(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / ".commlib").mkdir()
    secret = tmp_path / ".commlib" / "secret"
    secret.touch(0o600)
    secret.write_text("of all hosts\n")
    with Job([1, 1], lab=lab, COMMLIB_SECRET="", HOME=str(tmp_path)) as job:
        all_hear([job.worker(rank) for rank in range(2)])


def test_a_pulled_cable_is_noticed_on_both_ends(lab: Lab) -> None:
    with Job([1, 1, 1], lab=lab, COMMLIB_PEER_TIMEOUT_S="2") as job:
        workers = [job.worker(rank) for rank in range(3)]
        all_hear(workers)
        try:
            lab.cut(2)
            cut = time.monotonic()
            for worker in workers[:2]:
                assert worker("events.next()")[:2] == ["lost", 2]
            assert workers[2]("events.next()") == ["scheduler lost"]
            assert time.monotonic() - cut < 15
        finally:
            lab.heal(2)


def test_a_host_that_cannot_be_reached_is_missing(lab: Lab) -> None:
    with Job([1, 1], lab=lab, COMMLIB_CONNECT_TIMEOUT_S="3") as job:
        lab.cut(1)
        try:
            workers = [job.worker(rank) for rank in range(2)]
            assert "rank 1" in workers[0].fails()["text"]
            assert "has answered at" in workers[1].fails()["text"]
        finally:
            lab.heal(1)
