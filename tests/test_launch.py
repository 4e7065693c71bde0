# SPDX-License-Identifier: Apache-2.0
"""The helpers that other tests stand on: jobs end, fail and are cleaned up as they say; labs are what they seem."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launch import Job, JobError, run_job

PLACE = """
    import os
    from tests.launch import give
    give({name: os.environ.get("COMMLIB_" + name) for name in
          ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE", "SCHEDULER", "NUM_SERVERS", "EXTRA")})
"""


def test_every_rank_knows_its_place() -> None:
    values = run_job(PLACE, hosts=[1, 2], rank_env={2: {"COMMLIB_EXTRA": "x"}}, timeout=30)
    assert [value["RANK"] for value in values] == ["0", "1", "2"]
    assert [value["SIZE"] for value in values] == ["3"] * 3
    assert [value["LOCAL_RANK"] for value in values] == ["0", "0", "1"]
    assert [value["LOCAL_SIZE"] for value in values] == ["1", "2", "2"]
    assert [value["NODE"] for value in values] == ["host0", "host1", "host1"]
    assert values[0]["SCHEDULER"].startswith("127.0.0.1:")
    assert [value["EXTRA"] for value in values] == [None, None, "x"]


def test_ranks_can_be_placed_in_any_order() -> None:
    values = run_job(PLACE, hosts=[2, 1], placement=[0, 1, 0], timeout=30)
    assert [value["NODE"] for value in values] == ["host0", "host1", "host0"]
    assert [value["LOCAL_RANK"] for value in values] == ["0", "0", "1"]


def test_one_host_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLIB_SCHEDULER", "of somebody else")
    assert run_job(PLACE, hosts=[1], timeout=30)[0]["SCHEDULER"] is None


def test_a_failure_shows_all_output() -> None:
    script = 'import os, sys; print("said by", os.environ["COMMLIB_RANK"]); sys.exit(int(os.environ["COMMLIB_RANK"]))'
    with pytest.raises(JobError) as raised:
        run_job(script, hosts=[2], timeout=30)
    assert "failed: rank 1" in str(raised.value)
    assert "said by 0" in str(raised.value)
    assert "said by 1" in str(raised.value)


def test_a_job_that_hangs_is_ended_and_says_where() -> None:
    script = """
        import threading
        def hang_here():
            threading.Event().wait()
        hang_here()
    """
    began = time.monotonic()
    with pytest.raises(JobError, match="hang_here"):
        run_job(script, hosts=[2], timeout=2)
    assert time.monotonic() - began < 10


def test_what_a_job_leaves_behind_is_found_and_killed(tmp_path: Path) -> None:
    script = f"""
        import subprocess
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    """
    with pytest.raises(JobError, match=r"left processes behind.*sleep 1000"):
        run_job(script, timeout=30)
    command = Path("/proc", (tmp_path / "pid").read_text(), "cmdline")
    assert not command.exists() or not command.read_bytes()  # gone, or not yet buried by its new parent


def test_a_test_and_its_workers_can_talk() -> None:
    script = """
        import os
        from tests.launch import announce, give, listen
        announce("ready")
        give(listen())
        announce("done")
        listen()
    """
    with Job(script, hosts=[2]) as job:
        job.await_event("ready", timeout=20)
        job.tell(0, "one")
        job.tell(1, "two")
        job.await_event("done", timeout=20)
        job.kill(0)
        assert [outcome.status for outcome in job.await_end([0])] == [-signal.SIGKILL]
        job.tell(1, "end")
        outcomes = job.wait(20)
    assert [outcome.status for outcome in outcomes] == [-signal.SIGKILL, 0]
    assert [outcome.value for outcome in outcomes] == ["one", "two"]


def test_awaiting_a_worker_that_ended_fails_at_once() -> None:
    began = time.monotonic()
    with Job("print('I only wanted to say hello')") as job, pytest.raises(JobError, match="hello"):
        job.await_event("never", timeout=60)
    assert time.monotonic() - began < 20


@pytest.mark.lab
def test_hosts_of_a_lab_reach_each_other_and_nothing_else() -> None:
    script = """
        import os, socket
        from tests.launch import announce, give, listen
        rank = int(os.environ["COMMLIB_RANK"])
        if rank == 0:
            server = socket.create_server(("10.77.0.1", 7000))
            announce("listening")
            connection, (peer, _) = server.accept()
            give((peer, connection.recv(100)))
        else:
            listen()
            connection = socket.create_connection(("10.77.0.1", 7000), timeout=10)
            connection.sendall(b"hello")
            try:
                socket.create_connection(("192.0.2.1", 80), timeout=5)
            except OSError as error:
                give(error.errno)
    """
    with Lab(2) as lab, Job(script, hosts=[1, 1], lab=lab) as job:
        job.await_event("listening", ranks=[0])
        job.tell(1, "go")
        outcomes = job.wait(30)
    assert outcomes[0].value == ("10.77.0.2", b"hello")
    assert outcomes[1].value == 101  # ENETUNREACH


@pytest.mark.lab
def test_labs_stand_side_by_side_and_can_be_cut() -> None:
    def reaches(lab: Lab) -> bool:
        ask = f"import socket; socket.create_connection(('{lab.address(0)}', 7000), timeout=1)"
        process = lab.popen(1, [sys.executable, "-c", ask], stderr=subprocess.DEVNULL)
        return process.wait(20) == 0

    answer = "import socket; s = socket.create_server(('', 7000)); print(flush=True); [s.accept() for _ in range(9)]"
    with Lab(2) as one, Lab(2, rate="100mbit") as two:
        servers = [lab.popen(0, [sys.executable, "-c", answer], stdout=subprocess.PIPE) for lab in (one, two)]
        try:
            for server in servers:
                assert server.stdout is not None
                server.stdout.readline()
            assert reaches(one)
            assert reaches(two)
            one.cut(1)
            assert not reaches(one)
            assert reaches(two)
            one.heal(1)
            assert reaches(one)
            assert one.processes() == [servers[0].pid]
        finally:
            for server in servers:
                server.kill()
                server.communicate()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"clab{os.getpid()}x" not in listed


@pytest.mark.lab
@pytest.mark.parametrize("from_the_start", [True, False])
def test_the_rate_of_a_lab_holds(from_the_start: bool) -> None:
    script = """
        import os, socket, time
        from tests.launch import announce, give, listen
        size = 4 << 20
        if os.environ["COMMLIB_RANK"] == "0":
            server = socket.create_server(("10.77.0.1", 7000))
            announce("listening")
            connection, _ = server.accept()
            began = time.monotonic()
            received = 0
            while received < size:
                received += len(connection.recv(1 << 20))
            give(time.monotonic() - began)
        else:
            listen()
            socket.create_connection(("10.77.0.1", 7000)).sendall(bytes(size))
    """
    with Lab(2, rate="80mbit" if from_the_start else "1mbit") as lab, Job(script, hosts=[1, 1], lab=lab) as job:
        job.await_event("listening", ranks=[0])
        if not from_the_start:
            lab.pace(0, "80mbit")
            lab.pace(1, "none")
        job.tell(1, "go")
        took = job.wait(30)[0].value
    assert 0.35 < took < 2.0  # 4 MiB at 10 MB/s


@pytest.mark.lab
def test_labs_of_dead_test_runs_are_removed() -> None:
    make = "import os; from tests.lab import Lab; lab = Lab(1); print(os.getpid(), flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", make], capture_output=True, text=True, timeout=30, check=False)
    orphan = f"clab{int(done.stdout)}x"
    listing = ["ip", "netns", "list"]
    assert orphan in subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    with Lab(1):
        assert orphan not in subprocess.run(listing, capture_output=True, text=True, check=True).stdout


def test_no_port_is_given_twice_while_it_is_held() -> None:
    values = run_job(PLACE, hosts=[1, 1], timeout=30)
    port = int(values[0]["SCHEDULER"].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        again = run_job(PLACE, hosts=[1, 1], timeout=30)
    assert int(again[0]["SCHEDULER"].rpartition(":")[2]) != port
