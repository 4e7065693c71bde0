# SPDX-License-Identifier: Apache-2.0
"""The scheduler with members that say what a test wants."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import Any

import msgspec
import pytest
import zmq

from commlib.control import agreement
from commlib.control import messages as m
from commlib.control.client import ControlClient
from commlib.control.interface import Hooks
from commlib.control.links import AddressTaken, Links, SchedulerOptions
from commlib.control.rendezvous import Line, join
from commlib.control.scheduler import Scheduler
from commlib.control.security import derive_keys
from commlib.errors import ConfigError, OperationTimeout, PeerLostError
from tests.control.fakes import LIMIT_S, FakeJob, Heard, hello, in_thread

pytestmark = pytest.mark.timeout(60)


def on_two_hosts(rank: int, size: int, **changes: Any) -> m.Hello:
    """The first half of the ranks on one host, the rest on another."""
    half = size // 2
    return hello(rank, size, node=str(rank // half), local_rank=rank % half, local_size=half, **changes)


# --- Coming together


def test_everybody_hears_the_same_topology_and_rank_0s_parameters() -> None:
    other = m.Parameters(
        partition_bytes=1 << 20,
        credit_bytes=1 << 20,
        streams=7,
        stall_warning_s=1,
        operation_timeout_s=1,
        peer_timeout_s=1,
        asynchronous=True,
    )
    with FakeJob() as job:
        said = [on_two_hosts(rank, 4, num_servers=1, arena_bytes=(rank + 1) << 20) for rank in range(4)]
        said[3] = on_two_hosts(3, 4, num_servers=1, parameters=other)
        clients = job.join_all(*said, hello(0, 0, role="server", host="extra", parameters=None))
        first = clients[0].welcome
        assert [(w.rank, w.node, w.local_rank, w.host, w.pid) for w in first.members] == [
            (rank, rank // 2, rank % 2, f"host{rank}", 1000 + rank) for rank in range(4)
        ]
        assert first.servers == ("extra",)
        assert first.arena_bytes == (1 << 20, 1 << 20)
        assert first.parameters == said[0].parameters
        for client in clients[1:4]:
            assert client.welcome == first
        assert clients[4].welcome.server_index == 0


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    with FakeJob() as job:
        labels = ["z", "a", "z", "m"]
        said = [
            hello(rank, 4, node=label, local_rank=labels[:rank].count(label), local_size=labels.count(label))
            for rank, label in enumerate(labels)
        ]
        (first, *_) = job.join_all(*reversed(said))
        assert [member.node for member in first.welcome.members] == [0, 1, 0, 2]


def test_many_members() -> None:
    with FakeJob() as job:
        clients = job.join_all(*(hello(rank, 24) for rank in range(24)))
        assert all(len(client.welcome.members) == 24 for client in clients)
        answers = [in_thread(lambda c=c: c.declare([("t", 5), ("u", 9)])) for c in clients]  # type: ignore[misc]
        assert len({repr(answer.result(LIMIT_S)) for answer in answers}) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 0, "local_rank": 0}, ["two workers have rank 0", "process 1000", "process 1001"]),
        ({"size": 3}, ["number of workers", "2 on rank 0; 3 on rank 1"]),
        ({"num_servers": 1}, ["number of servers", "COMMLIB_NUM_SERVERS"]),
        ({"local_rank": 0}, ["two workers have local rank 0", "COMMLIB_NODE"]),
        ({"local_size": 1, "local_rank": 0, "rank": 1, "node": "1"}, ["'0' has 1 workers, but they expect 2"]),
        ({"local_size": 3}, ["disagree about how many they are"]),
        ({"local_rank": 2}, ["is local rank 2, but says that its host has 2"]),
        ({"rank": 5}, ["has only 2 workers"]),
        ({"version": "2.0"}, ["1.0", "2.0", "nstall the same version"]),
        ({"protocol": 99}, ["protocol 99"]),
        ({"job": "another"}, ["'another'"]),
        ({"role": "spy"}, ["'spy'"]),
        ({"parameters": None}, ["makes no sense"]),
    ],
)
def test_members_that_do_not_fit_together_are_all_refused(changes: dict[str, Any], words: list[str]) -> None:
    with FakeJob() as job:
        first = job.joining(hello(0, 2))
        wrong = msgspec.structs.replace(hello(1, 2), **changes)
        if "job" in changes:  # the keys would keep it out; this one has stolen them
            with pytest.raises(ConfigError, match="another"):
                _say_hello(job, wrong)
        second = job.joining(wrong) if "job" not in changes else None
        errors = [future.exception(LIMIT_S) for future in (first, second) if future is not None]
        for error in errors:
            assert isinstance(error, ConfigError)
            for word in words:
                assert word in str(error)


def _say_hello(job: FakeJob, said: m.Hello) -> None:
    with zmq.Context() as context:
        line = Line(context, job.address, job.keys, 30.0)
        try:
            line.send(said)
            assert line.socket.poll(int(LIMIT_S * 1000))
            answer = line.receive()
            assert isinstance(answer, m.Refused)
            raise ConfigError(answer.reason)
        finally:
            line.close()


def test_who_comes_after_a_refusal_hears_it_too() -> None:
    with FakeJob() as job:
        early = [job.joining(hello(0, 3)), job.joining(hello(0, 3))]
        reasons = {str(future.exception(LIMIT_S)) for future in early}
        late = job.joining(hello(1, 3))
        assert reasons | {str(late.exception(LIMIT_S))} == reasons
        assert len(reasons) == 1
        assert job.ended.result(LIMIT_S) == 1  # all that were expected have been told


def test_a_server_too_many_is_sent_away_alone() -> None:
    with FakeJob() as job:
        first = job.joining(hello(0, 2, num_servers=0))
        server = job.joining(hello(0, 0, role="server", parameters=None))
        error = server.exception(LIMIT_S)
        assert isinstance(error, ConfigError)
        assert "COMMLIB_NUM_SERVERS" in str(error)
        job.join(hello(1, 2))
        first.result(LIMIT_S)


def test_a_stranger_after_the_welcome_is_refused_with_words() -> None:
    with FakeJob() as job:
        job.join_all(hello(0, 2), hello(1, 2))
        with pytest.raises(ConfigError, match=r"complete and running.*rank 1"):
            job.join(hello(1, 2))
        for stranger in (hello(0, 0, role="server", parameters=None), hello(2, 3), hello(2, 2)):
            with pytest.raises(ConfigError, match="complete and running"):
                job.join(stranger)


def test_who_goes_away_before_the_welcome_is_forgotten_and_may_come_again() -> None:
    with FakeJob() as job:
        impatient = job.joining(hello(1, 3), limit_s=0.5)
        assert isinstance(impatient.exception(LIMIT_S), OperationTimeout)
        clients = job.join_all(*(hello(rank, 3) for rank in range(3)))
        assert len(clients[0].welcome.members) == 3


def test_who_waits_in_vain_is_told_for_whom() -> None:
    with FakeJob() as job:
        waiting = [job.joining(hello(rank, 5, num_servers=2), limit_s=1.0) for rank in (0, 3)]
        for future in waiting:
            error = future.exception(LIMIT_S)
            assert isinstance(error, OperationTimeout)
            assert "rank 1, 2, 4" in str(error)
            assert "2 dedicated servers" in str(error)
            assert "COMMLIB_CONNECT_TIMEOUT_S" in str(error)


def test_the_scheduler_itself_gives_up_and_says_so_to_all() -> None:
    with FakeJob(connect_timeout_s=0.7) as job:
        error = job.joining(hello(0, 2)).exception(LIMIT_S)
        assert isinstance(error, OperationTimeout)
        assert "still waits for rank 1" in str(error)
        assert job.ended.result(LIMIT_S) == 1


def test_a_scheduler_that_nobody_joins_ends_with_a_message(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "commlib"), FakeJob(connect_timeout_s=0.3) as job:
        assert job.ended.result(LIMIT_S) == 1
    assert "no member of the job job has come within 0.3 s" in caplog.text


def test_while_waiting_members_log_who_is_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commlib.control.rendezvous.PATIENCE_S", 0.2)
    with caplog.at_level(logging.WARNING, "commlib"), FakeJob() as job:
        waiting = job.joining(hello(0, 2), limit_s=1.0)
        assert isinstance(waiting.exception(LIMIT_S), OperationTimeout)
    assert caplog.text.count("still waits for rank 1") >= 3


# --- Addresses


def test_an_address_that_is_taken_is_an_error_that_says_so() -> None:
    with FakeJob() as job:
        second = Scheduler(SchedulerOptions(job="job", keys=job.keys, addresses=(job.address,)))
        with pytest.raises(AddressTaken, match=f"{job.address}: the address is taken"):
            second.bind()
        second.close()


def test_the_first_free_address_is_used() -> None:
    with FakeJob() as job:
        host, port = job.address.split(":")
        next_port = f"{host}:{(int(port) + 1) % 65536}"
        second = Scheduler(
            SchedulerOptions(job="job", keys=job.keys, addresses=(job.address, next_port, "127.0.0.1:0"))
        )
        assert second.bind() not in ("", job.address)
        second.close()
        both = Scheduler(SchedulerOptions(job="job", keys=job.keys, addresses=(job.address, job.address)))
        with pytest.raises(AddressTaken, match="all are taken"):
            both.bind()
        both.close()


def test_a_host_that_nobody_knows_is_explained() -> None:
    address = "no-such-host.invalid:5555"
    links = Links(SchedulerOptions(job="job", keys=derive_keys(b"secret", "job"), addresses=(address,)))
    with pytest.raises(ConfigError, match=r"'no-such-host.invalid' is unknown"):
        links.bind()
    links.close()


def test_last_words_are_heard_before_the_hanging_up() -> None:
    count = 300
    keys = derive_keys(b"secret", "job")
    heard: dict[bytes, list[m.FromMember | None]] = {}
    with zmq.Context() as context:
        links = Links(SchedulerOptions(job="job", keys=keys, addresses=("127.0.0.1:0",)))
        address = links.bind()

        def speak() -> None:
            for _ in range(count):
                line = Line(context, address, keys, 30.0)
                while not line.is_up:
                    line.monitor.poll(1000)
                    line.watch()
                for word in ("first", "last"):
                    line.send(m.Probe(word))
                line.close(flush=True)

        speakers = [threading.Thread(target=speak) for _ in range(2)]
        for speaker in speakers:
            speaker.start()
        poller = zmq.Poller()
        for socket in links.sockets():
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + LIMIT_S
        while sum(words[-1] is None for words in heard.values()) < 2 * count and time.monotonic() < deadline:
            poller.poll(0 if links.has_more() else 100)
            for identity, message in links.events():
                heard.setdefault(identity, []).append(message)
        for speaker in speakers:
            speaker.join()
        links.close()
    assert list(heard.values()) == [[m.Probe("first"), m.Probe("last"), None]] * (2 * count)


# --- What members ask


def test_malformed_and_misplaced_messages_are_answered_and_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "commlib"), FakeJob() as job, zmq.Context() as context:
        clients = job.join_all(hello(0, 2), hello(1, 2))
        line = Line(context, job.address, job.keys, 30.0)
        garbage = [[b""], [b"garbage"], [b"\xc1" * 1000], [b"a", b"b", b"c"], [m.encode(m.Go())]]
        for frames in garbage:
            line.socket.send_multipart(frames)
        line.send(m.Declare(1, (("t", 1),)))
        line.send(m.Bye())
        line.send(m.Probe("another job"))
        answers: list[m.FromScheduler | None] = []
        while len(answers) < len(garbage) + 3:
            assert line.socket.poll(int(LIMIT_S * 1000))
            answers.append(line.receive())
        line.close()
        assert all(isinstance(answer, m.Error) for answer in answers)
        assert clients[0].declare([("t", 1)]) == clients[1].declare([("t", 1)])
    assert caplog.text.count("a malformed message") == len(garbage)


def test_errors_of_the_registry_reach_the_one_who_asked() -> None:
    with FakeJob() as job:
        first, second = job.join_all(hello(0, 2), hello(1, 2))
        with pytest.raises(ConfigError, match="COMMLIB_PARTITION_BYTES"):
            first.declare([("huge", 1 << 40)])
        assert second.declare([]) == []
        assert second.declare([("fine", 1)])


def test_whole_models_are_declared_at_once() -> None:
    with FakeJob() as job:
        first, second = job.join_all(hello(0, 2), hello(1, 2))
        names = [(f"layer.{i}", i * 1000) for i in range(10_000)]
        found = first.declare(names)
        assert len(found) == 10_000
        assert second.declare(names[::-1]) == found[::-1]


def test_a_disagreement_is_explained_to_all_also_to_those_who_come_later() -> None:
    with FakeJob() as job:
        clients = job.join_all(*(hello(rank, 3) for rank in range(3)))
        shapes = [(3, 4), (4, 3), (3, 4)]
        verdicts = [
            in_thread(lambda c=c, s=s: c.report_mismatch("grad.0", 1, m.Signature(shape=s)))  # type: ignore[misc]
            for c, s in zip(clients, shapes, strict=True)
        ]
        heard = [future.result(LIMIT_S) for future in verdicts]
        assert heard[0].text == 'tensor "grad.0": ranks disagree about shape: (3, 4) on ranks 0, 2; (4, 3) on rank 1'
        assert heard[0].values == {0: (3, 4), 1: (4, 3), 2: (3, 4)}
        assert heard == [heard[0]] * 3
        assert clients[1].report_mismatch("grad.0", 1, m.Signature(shape=(9,))) == heard[0]


def test_who_does_not_report_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "REPORT_WINDOW_S", 0.3)
    with FakeJob() as job:
        clients = job.join_all(*(hello(rank, 3) for rank in range(3)))
        other = in_thread(lambda: clients[1].report_mismatch("t", 1, m.Signature(op="sum")))
        verdict = clients[0].report_mismatch("t", 1, m.Signature(op="max"))
        assert other.result(LIMIT_S) == verdict
        assert "max on rank 0; sum on rank 1; nothing was heard from rank 2" in verdict.text
        assert clients[2].report_mismatch("t", 1, m.Signature()) == verdict


def test_a_report_that_gets_no_verdict_ends_in_time() -> None:
    with FakeJob() as job:
        clients = job.join_all(hello(0, 2), hello(1, 2))
        with pytest.raises(OperationTimeout, match='tensor "t"'):
            clients[0].report_mismatch("t", 1, m.Signature(), timeout_s=0.1)


def test_a_stall_report_names_ranks_and_hosts_that_are_late() -> None:
    with FakeJob() as job:
        clients = job.join_all(*(hello(rank, 4) for rank in range(4)))
        submitted = [5, 4, 5, 0]
        heard = [
            Heard(client, submitted_round=lambda name, r=rounds: r if name == "t" else 99)
            for client, rounds in zip(clients, submitted, strict=True)
        ]
        clients[0].stalled("t", 5, 61.0)
        _, report = heard[0].wait("stall")
        assert (report.name, report.round) == ("t", 5)
        assert report.missing == ((1, "host1"), (3, "host3"))
        assert report.silent == ()
        assert report.waiting_s == 61.0


def test_a_hook_that_fails_makes_its_rank_silent_not_dead(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "REPORT_WINDOW_S", 0.3)
    with caplog.at_level(logging.ERROR, "commlib"), FakeJob() as job:
        clients = job.join_all(hello(0, 2), hello(1, 2))
        heard = Heard(clients[0], submitted_round=lambda name: 1)
        clients[1].attach(Hooks(submitted_round=lambda name: 1 // 0))
        clients[0].stalled("t", 1, 61.0)
        assert heard.wait("stall")[1].silent == ((1, "host1"),)
        assert clients[1].declare([("t", 1)])
    assert "modulo by zero" in caplog.text


# --- Leaving and being lost


def test_when_all_have_left_servers_are_told_and_the_scheduler_ends() -> None:
    with FakeJob() as job:
        *workers, server = job.join_all(
            hello(0, 2, num_servers=1), hello(1, 2, num_servers=1), hello(0, 0, role="server", parameters=None)
        )
        heard = Heard(server)
        workers[0].bye()
        workers[0].close()
        assert workers[1].declare([("still", 1)])
        assert heard.kinds() == []
        workers[1].bye()
        workers[1].close()
        assert heard.wait("over") == ("over", False)
        assert server.wait_over(LIMIT_S) is False
        server.bye()
        server.close()
        assert job.ended.result(LIMIT_S) == 0


def test_who_hangs_up_without_a_word_is_lost_and_everybody_hears_it() -> None:
    with FakeJob() as job:
        *workers, server = job.join_all(
            *(hello(rank, 3, num_servers=1) for rank in range(3)), hello(0, 0, role="server", parameters=None)
        )
        heard = [Heard(client) for client in (workers[0], workers[2], server)]
        workers[1].close()
        for one in heard:
            _, rank, host, cause = one.wait("lost")
            assert (rank, host) == (1, "host1")
            assert "connection" in cause
        assert heard[2].wait("over") == ("over", True)
        with pytest.raises(OperationTimeout, match="has not ended yet, though it has lost a member on host1"):
            job.join(hello(1, 3), limit_s=0.5)
        for client in (workers[0], workers[2], server):
            client.bye()
            client.close()
        assert job.ended.result(LIMIT_S) == 1


def test_a_loss_before_hooks_are_attached_is_not_missed() -> None:
    with FakeJob() as job:
        clients = job.join_all(hello(0, 2), hello(1, 2))
        clients[1].close()
        readable, _, _ = select.select([clients[0]], [], [], LIMIT_S)
        assert readable
        with pytest.raises(PeerLostError) as caught:
            clients[0].check()
        assert caught.value.rank == 1
        assert Heard(clients[0]).wait("lost")[1] == 1


def test_what_a_member_says_about_another_is_passed_on_once() -> None:
    with FakeJob() as job:
        clients = job.join_all(*(hello(rank, 3) for rank in range(3)))
        heard = [Heard(client) for client in clients]
        clients[0].lost(2, "host2", "its process has ended")
        heard[1].wait("lost")
        clients[1].lost(0, "host0", "hearsay")
        for one in heard:
            assert one.wait("lost") == ("lost", 2, "host2", "its process has ended")
        clients[0].declare([("a", 1)])
        clients[1].declare([("a", 1)])
        assert all(one.kinds() == ["lost"] for one in heard)


def test_a_lost_server_has_no_rank() -> None:
    with FakeJob() as job:
        worker, server = job.join_all(
            hello(0, 1, num_servers=1), hello(0, 0, role="server", parameters=None, host="extra")
        )
        heard = Heard(worker)
        server.close()
        assert heard.wait("lost")[1:3] == (None, "extra")


def test_the_next_job_of_the_same_id_waits_for_the_last_to_end() -> None:
    """Two ranks shut down and start again at once; one is faster than the other."""
    with FakeJob() as job:
        first, second = job.join_all(hello(0, 2), hello(1, 2))
        first.bye()
        first.close()
        again = job.joining(hello(0, 2), limit_s=LIMIT_S)
        with pytest.raises(TimeoutError):
            again.result(0.5)
        second.bye()
        second.close()
        assert job.ended.result(LIMIT_S) == 0
        with FakeJob(address=job.address) as next_job:
            next_job.join(hello(1, 2))
            again.result(LIMIT_S)


def test_a_silent_member_is_lost_after_the_peer_timeout() -> None:
    """Its heartbeats stop, though nothing hangs up: like a host without power."""
    import subprocess
    import sys

    from tests.control.bare import REPOSITORY

    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.control.bare import use_bare_package; use_bare_package()\n"
        "from commlib.control.rendezvous import join\n"
        "from commlib.control.security import derive_keys\n"
        "from tests.control.fakes import hello\n"
        "join((sys.argv[2],), derive_keys(b'secret', 'job'), hello(1, 2), connect_timeout_s=20, peer_timeout_s=30)\n"
        "print('joined', flush=True); sys.stdin.read()\n"
    )
    with FakeJob(peer_timeout_s=1.0) as job:
        joining = job.joining(hello(0, 2))
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(REPOSITORY), job.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            heard = Heard(joining.result(LIMIT_S))
            assert child.stdout is not None
            assert child.stdout.readline() == b"joined\n"
            started = time.monotonic()
            os.kill(child.pid, 19)
            assert heard.wait("lost")[1:3] == (1, "host1")
            assert time.monotonic() - started < 10
        finally:
            child.kill()
            child.communicate()


def test_a_short_peer_timeout_loses_nobody_who_lives() -> None:
    with FakeJob(peer_timeout_s=1.2) as job:
        joining = [
            in_thread(
                lambda rank=rank: ControlClient(  # type: ignore[misc]
                    join((job.address,), job.keys, hello(rank, 2), connect_timeout_s=LIMIT_S, peer_timeout_s=1.2)
                )
            )
            for rank in range(2)
        ]
        job.clients += [future.result(LIMIT_S) for future in joining]
        heard = [Heard(client) for client in job.clients]
        readable, _, _ = select.select(job.clients, [], [], 4.0)
        assert readable == []
        assert [one.kinds() for one in heard] == [[], []]
