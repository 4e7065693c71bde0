# SPDX-License-Identifier: Apache-2.0
"""Real processes on this machine, from settings to connected members."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from commlib.config import Config
from commlib.control.addresses import local_name
from commlib.control.bootstrap import connect_server, connect_worker
from commlib.errors import ConfigError
from tests.control.members import LIMIT_S, Job, Member, free_port, processes_of

pytestmark = pytest.mark.timeout(90)

ABOUT = """dict(
    rank=w.rank, size=w.size, local=(w.local_rank, w.local_size), node=(w.node, w.num_nodes), peer_id=w.peer_id,
    members=[(m.rank, m.node, m.local_rank, m.pid) for m in w.members], servers=w.servers, per_node=w.ranks_per_node,
    arenas=len(w.arena_fds), arena_bytes=w.arena_bytes, pids=w.local_pids, local_sockets=sorted(w.local_socket_fds),
    peers={peer: len(fds) for peer, fds in w.peers.items()}, pid=os.getpid(), partition=w.parameters.partition_bytes,
)"""
LEAVE = "w.client.bye(); w.close()"


def abstract_names(*names: str) -> list[str]:
    """At which of these abstract unix sockets somebody listens."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    listening = {line[7] for line in lines if len(line) == 8 and line[3] == "00010000"}
    return [name for name in names if f"@{name}" in listening]


def all_hear(members: list[Member]) -> None:
    for member in members:
        member.hear()


def leave(members: list[Member]) -> None:
    for member in members:
        member.tell(LEAVE)
    all_hear(members)
    assert [member.end() for member in members] == [0] * len(members)
    assert [member.errors() for member in members] == [""] * len(members)


def test_four_workers_on_one_host_share_their_memory() -> None:
    with Job([4]) as job:
        workers = [job.worker(rank) for rank in range(4)]
        all_hear(workers)
        about = [worker(ABOUT) for worker in workers]
        pids = [one["pid"] for one in about]
        for rank, one in enumerate(about):
            assert (one["rank"], one["size"], one["local"], one["node"]) == (rank, 4, [rank, 4], [0, 1])
            assert one["members"] == [[r, 0, r, pids[r]] for r in range(4)]
            assert one["pids"] == pids
            assert one["per_node"] == [4]
            assert one["arena_bytes"] == [16 << 20] * 4
            assert one["local_sockets"] == ([1, 2, 3] if rank == 0 else [0])
            assert one["peers"] == {}
        for rank, worker in enumerate(workers):
            worker(f"write_at(w.arena_fds[{rank}], {4096 * rank}, 'arena of {rank}')")
            worker(f"write_at(w.table_fd, {64 * rank}, 'row of {rank}')")
        for worker in workers:
            for rank in range(4):
                assert worker(f"read_at(w.arena_fds[{rank}], {4096 * rank}, 10)") == f"arena of {rank}"
                assert worker(f"read_at(w.table_fd, {64 * rank}, 8)") == f"row of {rank}"
            assert worker("os.fstat(w.table_fd).st_size") == 4096 * 7
        names = [local_name("root", job.id, "label-0"), local_name("scheduler", job.id)]
        assert abstract_names(*names) == names[1:]  # the root listens no more
        leave(workers)
        assert abstract_names(*names) == []


def test_local_sockets_connect_root_and_others() -> None:
    with Job([3]) as job:
        workers = [job.worker(rank) for rank in range(3)]
        all_hear(workers)
        for rank in (1, 2):
            workers[rank](f"os.write(w.local_socket_fds[0], b'from {rank}')")
            workers[0](f"os.set_blocking(w.local_socket_fds[{rank}], True)")
            assert workers[0](f"os.read(w.local_socket_fds[{rank}], 99).decode()") == f"from {rank}"
        leave(workers)


def test_two_hosts_and_a_server_are_meshed_stream_by_stream() -> None:
    with Job([2, 3], servers=1, COMMLIB_STREAMS="2") as job:
        workers = [job.worker(rank) for rank in reversed(range(5))][::-1]
        server = job.server()
        all_hear([*workers, server])
        about = [member(ABOUT) for member in (*workers, server)]
        assert [one["node"] for one in about] == [[0, 2], [0, 2], [1, 2], [1, 2], [1, 2], [-1, 2]]
        assert [one["peer_id"] for one in about] == [0, 0, 1, 1, 1, 2]
        assert [one["per_node"] for one in about] == [[2, 3]] * 6
        assert [one["arenas"] for one in about] == [2, 2, 3, 3, 3, 0]
        assert [one["servers"] for one in about] == [[socket.gethostname()]] * 6
        two = {"streams": 2}["streams"]
        expected: list[dict[str, int]] = [{"1": two, "2": two}, {}, {"0": two, "2": two}, {}, {}, {"0": two, "1": two}]
        assert [one["peers"] for one in about] == expected
        nodes = {0: workers[0], 1: workers[2], 2: server}
        for a, first in nodes.items():
            for b, second in nodes.items():
                for stream in range(2) if a != b else ():
                    words = f"{a} to {b} by {stream}"
                    first(f"os.write(w.peers[{b}][{stream}], {words.encode()!r})")
                    second(f"os.set_blocking(w.peers[{a}][{stream}], True)")
                    assert second(f"os.read(w.peers[{a}][{stream}], 99).decode()") == words
        # What two hosts have of their own is not the same memory.
        workers[0]("write_at(w.table_fd, 0, 'host 0')")
        assert workers[1]("read_at(w.table_fd, 0, 6)") == "host 0"
        assert workers[2]("read_at(w.table_fd, 0, 6)") == "\0" * 6
        for worker in workers:
            worker.tell(LEAVE)
        all_hear(workers)
        assert server("events.next()") == ["over", False]
        leave([server])
        assert [worker.end() for worker in workers] == [0] * 5


def test_parameters_are_rank_0s_and_names_are_numbered_for_all() -> None:
    with Job([1, 1]) as job:
        workers = [job.worker(0, COMMLIB_PARTITION_BYTES="64K"), job.worker(1, COMMLIB_PARTITION_BYTES="1M")]
        all_hear(workers)
        assert [worker(ABOUT)["partition"] for worker in workers] == [65536, 65536]
        asked = "w.client.declare([('a', 200_000), ('b', 0)])"
        found = [worker(asked) for worker in workers]
        assert found[0] == found[1]
        assert found[0][0]["extents"] == [[3072, 4]]
        leave(workers)


def test_every_descriptor_is_close_on_exec_and_every_socket_non_blocking() -> None:
    with Job([2, 1]) as job:
        workers = [job.worker(rank) for rank in range(3)]
        all_hear(workers)
        for worker in workers:
            assert not worker("[fd for fd in w.descriptors() if os.get_inheritable(fd)]")
            sockets = "[*w.local_socket_fds.values(), *(fd for fds in w.peers.values() for fd in fds)]"
            assert not worker(f"[fd for fd in {sockets} if os.get_blocking(fd)]")
            assert worker(f"len({sockets})") > 0
        leave(workers)


def test_the_smallest_wish_of_a_host_decides_the_size_of_its_arenas() -> None:
    with Job([2]) as job:
        workers = [job.worker(0), job.worker(1, COMMLIB_ARENA_BYTES="3M")]
        all_hear(workers)
        assert [worker(ABOUT)["arena_bytes"] for worker in workers] == [[3 << 20] * 2] * 2
        assert workers[0]("[os.fstat(fd).st_size for fd in w.arena_fds]") == [3 << 20] * 2
        leave(workers)


def test_a_job_of_one_needs_nobody() -> None:
    before = set(os.listdir("/proc/self/fd"))
    asked: list[int] = []

    def table_bytes(local_size: int) -> int:
        asked.append(local_size)
        return 12288

    wiring = connect_worker(Config(arena_bytes=16 << 20), table_bytes)
    assert (wiring.size, wiring.num_nodes, wiring.ranks_per_node, wiring.local_pids) == (1, 1, (1,), (os.getpid(),))
    assert set(asked) == {1}
    assert os.fstat(wiring.table_fd).st_size == 12288
    assert os.fstat(wiring.arena_fds[0]).st_size == 16 << 20
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in wiring.descriptors())
    assert wiring.client.declare([("t", 1)])[0].declared_key == 3072
    wiring.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_one_worker_and_a_server() -> None:
    with Job([1], servers=1) as job:
        members = [job.worker(0), job.server()]
        all_hear(members)
        assert members[0](ABOUT)["peers"] == {"1": 1}
        leave(members[:1])
        assert members[1]("events.next()") == ["over", False]
        leave(members[1:])


def test_addresses_next_to_the_launchers_are_found() -> None:
    """What torchrun sets, on two hosts, with the first of the addresses taken by somebody else."""
    port = free_port()
    with Job([1, 1]) as job, socket.create_server(("127.0.0.1", port + 1000)):
        del job.common["COMMLIB_SCHEDULER"]
        job.common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        workers = [job.worker(rank) for rank in range(2)]
        all_hear(workers)
        assert int(workers[1]("w.client.address").split(":")[1]) in range(port + 1001, port + 1016)
        leave(workers)


def test_a_scheduler_may_stand_alone() -> None:
    with Job([1, 1]) as job:
        job.common["COMMLIB_SCHEDULER_EXTERNAL"] = "1"
        scheduler = Member(job.common)
        job.members.append(scheduler)
        scheduler("from commlib.control.scheduler_process import run_scheduler")
        scheduler.tell("run_scheduler(Config.from_environment(role='scheduler'))")
        workers = [job.worker(rank) for rank in range(2)]
        all_hear(workers)
        leave(workers)
        assert scheduler.hear() == 0


# --- Again and again


def test_the_same_processes_may_leave_and_join_again_at_their_own_pace() -> None:
    with Job([2, 1]) as job:
        workers = [job.worker(rank) for rank in range(3)]
        all_hear(workers)
        for worker in workers:
            worker("counts = []")
        again = (
            "w.client.bye(); w.close(); counts.append(len(os.listdir('/proc/self/fd'))); "
            "w = connect_worker(Config.from_environment(), table_bytes)"
        )
        for turn in range(4):
            for rank in (0, 2, 1) if turn % 2 else (1, 2, 0):
                workers[rank].tell(again)
                if turn == 3:  # the others find the job of the last turn still running
                    time.sleep(0.15)
            all_hear(workers)
            assert len({repr(worker("w.client.declare([('t', 1)])")) for worker in workers}) == 1
        assert [worker("len(set(counts))") for worker in workers] == [1, 1, 1]  # nothing stays open
        leave(workers)


def test_rank_0_may_leave_long_before_the_others() -> None:
    with Job([1, 1], servers=1) as job:
        workers = [job.worker(rank) for rank in range(2)]
        server = job.server()
        all_hear([*workers, server])
        leave(workers[:1])
        assert workers[1]("w.client.declare([('late', 1)])")
        leave(workers[1:])
        assert server("events.next()") == ["over", False]
        leave([server])


# --- What goes wrong


def test_a_missing_rank_is_named_by_all_that_are_there() -> None:
    with Job([4], COMMLIB_CONNECT_TIMEOUT_S="2") as job:
        workers = [job.worker(rank) for rank in (0, 1, 3)]
        for worker in workers:
            answer = worker.fails()
            assert answer["error"] == "OperationTimeout"
            assert "rank 2" in answer["text"]
            assert "COMMLIB_CONNECT_TIMEOUT_S" in answer["text"]


def test_a_missing_server_is_named() -> None:
    with Job([1, 1], servers=1, COMMLIB_CONNECT_TIMEOUT_S="2") as job:
        for worker in [job.worker(rank) for rank in range(2)]:
            assert "1 dedicated server" in worker.fails()["text"]


def test_without_rank_0_members_say_that_no_scheduler_answered() -> None:
    with Job([1, 1], COMMLIB_CONNECT_TIMEOUT_S="1") as job:
        answer = job.worker(1).fails()
        assert answer["error"] == "OperationTimeout"
        assert f"no scheduler of the job '{job.id}' has answered at {job.common['COMMLIB_SCHEDULER']}" in answer["text"]


@pytest.mark.parametrize("rank", [0, 1])
def test_two_with_one_rank_are_told_about_each_other(rank: int) -> None:
    with Job([3]) as job:
        workers = [job.worker(rank), job.worker(rank), job.worker(1 - rank)]
        for worker in workers:
            answer = worker.fails()
            assert answer["error"] == "ConfigError"
            assert f"two workers have rank {rank}" in answer["text"]
            for other in workers[:2]:
                assert f"process {other.process.pid}" in answer["text"]


def test_sizes_that_differ_are_refused_everywhere() -> None:
    with Job([1, 1, 1]) as job:
        workers = [job.worker(0), job.worker(1, COMMLIB_SIZE="2"), job.worker(2)]
        for worker in workers:
            assert "disagree about the number of workers" in worker.fails()["text"]


def test_one_rank_with_another_secret_is_told_how_to_share_it() -> None:
    with Job([1, 1], COMMLIB_CONNECT_TIMEOUT_S="6") as job:
        workers = [job.worker(0), job.worker(1, COMMLIB_SECRET="something else")]
        answer = workers[1].fails()
        assert answer["error"] == "AuthenticationError"
        assert "COMMLIB_SECRET" in answer["text"]
        workers[0].kill()


def test_an_address_that_is_taken_is_an_error_that_says_so() -> None:
    with Job([1, 1]) as job, socket.create_server(("127.0.0.1", int(job.common["COMMLIB_SCHEDULER"].split(":")[1]))):
        answer = job.worker(0).fails()
        assert answer["error"] == "AddressTaken"
        assert "the address is taken" in answer["text"]


def test_an_interface_that_does_not_exist_is_explained_and_the_others_do_not_wait() -> None:
    with Job([1, 1]) as job:
        workers = [job.worker(0), job.worker(1, COMMLIB_INTERFACE="no-such-interface0")]
        answer = workers[1].fails()
        assert answer["error"] == "ConfigError"
        assert "COMMLIB_INTERFACE is 'no-such-interface0'" in answer["text"]
        lost = workers[0].fails()
        assert (lost["error"], lost["rank"]) == ("PeerLostError", 1)


def test_a_worker_that_should_have_been_a_server_is_told() -> None:
    with pytest.raises(ConfigError, match="commlib server"):
        connect_worker(Config(role="server", size=0, scheduler="127.0.0.1:1"), lambda n: 4096)
    with pytest.raises(ConfigError, match="server"):
        connect_server(Config())


def test_an_address_is_needed_where_settings_made_by_hand_have_none() -> None:
    with pytest.raises(ConfigError, match="COMMLIB_SCHEDULER"):
        connect_worker(Config(size=2), lambda n: 4096)


# --- Deaths


def test_a_worker_that_is_killed_is_reported_to_all_with_rank_and_host() -> None:
    with Job([2, 1], servers=1) as job:
        workers = [job.worker(rank) for rank in range(3)]
        server = job.server()
        all_hear([*workers, server])
        workers[1].kill()
        for member in (workers[0], workers[2], server):
            kind, rank, host, _ = member("events.next()")
            assert (kind, rank, host) == ("lost", 1, socket.gethostname())
        assert server("events.next()") == ["over", True]
        leave([workers[0], workers[2], server])


def test_rank_0s_death_is_reported_before_its_scheduler_goes_with_it() -> None:
    with Job([1, 1], servers=1) as job:
        workers = [job.worker(rank) for rank in range(2)]
        server = job.server()
        all_hear([*workers, server])
        workers[0].kill()
        for member in (workers[1], server):
            kind, rank, host, _ = member("events.next()")
            assert (kind, rank, host) == ("lost", 0, socket.gethostname())
        assert server("events.next()") == ["over", True]
        assert workers[1]("events.next()") == ["scheduler lost"]
        leave([workers[1], server])


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_while_connecting_ends_the_waiting_of_the_others(victim: int) -> None:
    """The victim is welcomed with the others, and hangs when it should share its memory.

    It is asked for the bytes of the table once before it joins, and again then.
    """
    with Job([2, 1]) as job:
        workers = [Member(job.environ(rank)) for rank in range(3)]
        job.members += workers
        hang = "lambda n: asked.pop() if asked else (os.write(2, b'welcome\\n'), os.read(os.pipe()[0], 1))"
        for rank, worker in enumerate(workers):
            how = hang if rank == victim else "table_bytes"
            worker.tell(f"asked = [table_bytes(2)]; w = connect_worker(Config.from_environment(), {how})")
        stderr = workers[victim].process.stderr
        assert stderr is not None
        assert stderr.readline() == b"welcome\n"
        workers[victim].kill()
        started = time.monotonic()
        for rank, worker in enumerate(workers):
            if rank != victim:
                assert worker.fails()["error"] == "PeerLostError"
        assert time.monotonic() - started < 5


def test_what_fails_leaves_no_descriptor_open() -> None:
    with Job([2], COMMLIB_CONNECT_TIMEOUT_S="1") as job:
        member = Member(job.environ(0))
        job.members.append(member)
        member("attempt = lambda: connect_worker(Config.from_environment(), table_bytes)")
        counts = []
        for _ in range(3):
            member.tell("attempt()")
            assert "rank 1" in member.fails()["text"]
            counts.append(member("(sorted(os.listdir('/proc/self/fd')), __import__('threading').active_count())"))
        assert counts[0] == counts[1] == counts[2]
        assert not list(set(processes_of(job.id)) - {member.process.pid})


def test_ctrl_c_ends_the_waiting_and_the_scheduler() -> None:
    with Job([2]) as job:
        worker = job.worker(0)
        end = time.monotonic() + LIMIT_S
        name = local_name("scheduler", job.id)
        while not abstract_names(name) and time.monotonic() < end:
            time.sleep(0.02)
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(LIMIT_S) != 0
        end = time.monotonic() + 5
        while abstract_names(name) and time.monotonic() < end:
            time.sleep(0.02)
        assert abstract_names(name) == []


# --- Rest


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have used; the first figure of schedstat is in nanoseconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def test_whoever_has_nothing_to_do_sleeps() -> None:
    """Scheduler and members, over 6 seconds: their heartbeats cost a few milliseconds."""
    with Job([2, 1]) as job:
        workers = [job.worker(rank) for rank in range(3)]
        all_hear(workers)
        pids = list(processes_of(job.id))
        assert len(pids) == 4
        before = {pid: cpu_seconds(pid) for pid in pids}
        time.sleep(6.0)
        used = {pid: cpu_seconds(pid) - before[pid] for pid in pids}
        assert 0 < max(used.values()) < 0.015, used
        leave(workers)
