# SPDX-License-Identifier: Apache-2.0
"""A member's line to a scheduler that is a process of its own."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commlib.config import Config
from commlib.control import messages as m
from commlib.control.client import ControlClient
from commlib.control.interface import Control, Hooks
from commlib.control.local import LocalControl
from commlib.control.rendezvous import join
from commlib.control.scheduler_process import SchedulerProcess, start_scheduler
from commlib.control.security import derive_keys
from commlib.errors import CommlibError, ConfigError, NotInitializedError, PeerLostError
from tests.control.bare import REPOSITORY
from tests.control.fakes import LIMIT_S, FakeJob, Heard, hello, in_thread

pytestmark = pytest.mark.timeout(60)

CONFIG = Config(job="job", secret="secret", connect_timeout_s=LIMIT_S)
KEYS = derive_keys(b"secret", "job")


@pytest.fixture
def scheduler() -> Iterator[SchedulerProcess]:
    process = start_scheduler(CONFIG, address="127.0.0.1:0")
    yield process
    process.stop()


def join_both(address: str) -> list[ControlClient]:
    def one(rank: int) -> ControlClient:
        return ControlClient(join((address,), KEYS, hello(rank, 2), connect_timeout_s=LIMIT_S, peer_timeout_s=30.0))

    joining = [in_thread(lambda rank=rank: one(rank)) for rank in range(2)]  # type: ignore[misc]
    return [future.result(LIMIT_S) for future in joining]


def test_when_the_scheduler_dies_all_that_wait_fail_soon_and_later_calls_at_once(scheduler: SchedulerProcess) -> None:
    clients = join_both(scheduler.address)
    heard = [Heard(client) for client in clients]
    assert clients[0].declare([("before", 1)])
    os.kill(scheduler.pid, signal.SIGSTOP)
    waiting = [
        in_thread(lambda: clients[0].declare([("during", 1)])),
        in_thread(lambda: clients[1].report_mismatch("t", 1, m.Signature(), timeout_s=LIMIT_S)),
        in_thread(lambda: clients[1].wait_over(LIMIT_S)),
    ]
    with pytest.raises(TimeoutError):
        waiting[0].result(0.2)
    os.kill(scheduler.pid, signal.SIGKILL)
    killed = time.monotonic()
    for future in waiting:
        error = future.exception(LIMIT_S)
        assert isinstance(error, PeerLostError)
        assert error.rank is None
        assert "scheduler" in str(error)
    assert time.monotonic() - killed < 2
    for one in heard:
        one.wait("scheduler lost")
    with pytest.raises(PeerLostError, match="scheduler"):
        clients[0].declare([("after", 1)])
    for client in clients:
        client.stalled("t", 1, 5.0)
        client.lost(0, "h", "c")
        client.bye()
        client.close()


def test_an_orderly_end_is_no_loss(scheduler: SchedulerProcess) -> None:
    clients = join_both(scheduler.address)
    heard = [Heard(client) for client in clients]
    for client in clients:
        client.bye()
    assert scheduler.wait(LIMIT_S) == 0
    for client in clients:
        client.close()
    assert [one.kinds() for one in heard] == [[], []]


def test_after_close_everything_says_so_and_close_may_be_repeated() -> None:
    with FakeJob() as job:
        client = job.join(hello(0, 1))
        client.bye()
        client.bye()
        client.close()
        client.close()
        with pytest.raises(NotInitializedError, match="shut down"):
            client.declare([("t", 1)])
        with pytest.raises(NotInitializedError, match="shut down"):
            client.report_mismatch("t", 1, m.Signature())
        client.stalled("t", 1, 1.0)
        client.detach()


def test_closing_frees_threads_and_descriptors() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with FakeJob() as job:
        job.join_all(hello(0, 2), hello(1, 2))[0].declare([("t", 1)])
        for client in job.clients:
            client.bye()
            client.close()
        job.ended.result(LIMIT_S)
    before = count()
    for _ in range(3):
        with FakeJob() as job:
            job.join_all(hello(0, 2), hello(1, 2))[0].declare([("t", 1)])
            for client in job.clients:
                client.bye()
                client.close()
            job.ended.result(LIMIT_S)
    assert count() == before


def test_many_threads_may_ask_at_once() -> None:
    with FakeJob() as job:
        client = job.join(hello(0, 1))
        asking = [in_thread(lambda i=i: client.declare([(f"{i % 5}", 1)])) for i in range(40)]  # type: ignore[misc]
        answers = [future.result(LIMIT_S)[0] for future in asking]
        assert all(answers[i] == answers[i % 5] for i in range(40))


@pytest.mark.parametrize("names", [[("t", -1)], [("t" * 5000, 1)], [("\udc80", 1)], [("t", 1 << 62)]])
def test_what_the_scheduler_would_not_understand_is_refused_here(names: list[tuple[str, int]]) -> None:
    with FakeJob() as job:
        client = job.join(hello(0, 1))
        with pytest.raises(ConfigError, match="cannot be said"):
            client.declare(names)
        assert client.declare([("ü" * 4096, 1)])


# --- Hooks


@pytest.fixture(params=["scheduler", "alone"])
def control(request: pytest.FixtureRequest) -> Iterator[Control]:
    if request.param == "alone":
        alone = LocalControl(65536)
        yield alone
        alone.close()
        return
    with FakeJob() as job:
        yield job.join(hello(0, 1))


class Core:
    """An event descriptor, as the core has one."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.events = 0
        self.came = threading.Event()

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def take(self) -> None:
        self.events += os.eventfd_read(self.fd)
        self.came.set()


def test_the_cores_events_are_passed_on_until_the_hooks_are_detached(control: Control) -> None:
    core = Core()
    control.attach(Hooks(core_fd=core.fd, on_core_event=core.take))
    core.ring()
    assert core.came.wait(LIMIT_S)
    control.detach()
    core.ring()
    ticks = threading.Event()
    control.attach(Hooks(tick_s=0.01, on_tick=ticks.set))
    assert ticks.wait(LIMIT_S)
    assert core.events == 1
    os.close(core.fd)


def test_a_hook_that_fails_is_logged_without_a_traceback_and_the_thread_goes_on(
    control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    core = Core()

    def fail() -> None:
        core.take()
        raise RuntimeError("the hook's own fault")

    with caplog.at_level(logging.INFO, "commlib"):
        control.attach(Hooks(core_fd=core.fd, on_core_event=fail))
        for _ in range(3):
            core.came.clear()
            core.ring()
            assert core.came.wait(LIMIT_S)
        control.detach()
    assert caplog.text.count("RuntimeError in the control thread: the hook's own fault") == core.events
    assert "Traceback" not in caplog.text
    assert control.declare([("still", 1)])
    os.close(core.fd)


def test_ticks_come_at_their_rate(control: Control) -> None:
    times: list[float] = []
    enough = threading.Event()

    def tick() -> None:
        times.append(time.monotonic())
        if len(times) == 5:
            enough.set()

    started = time.monotonic()
    control.attach(Hooks(tick_s=0.05, on_tick=tick))
    assert enough.wait(LIMIT_S)
    assert times[4] - started >= 0.25
    control.detach()


def test_alone_there_is_a_registry_and_nobody_to_disagree_with() -> None:
    control = LocalControl(65536)
    threads = threading.active_count()
    (first,) = control.declare([("t", 100_000)])
    assert len(first.extents) == 1
    assert first.extents[0][1] == 2
    assert control.declare([("t", 100_000)]) == [first]
    assert control.unnamed["barrier"].first_key == 2048
    assert control.report_mismatch("t", 1, m.Signature()).field == ""
    control.stalled("t", 1, 5.0)
    control.lost(None, "", "")
    control.attach(Hooks())
    control.bye()
    assert threading.active_count() == threads
    control.close()
    control.close()
    with pytest.raises(NotInitializedError):
        control.declare([("t", 1)])


# --- Processes


def ends_soon(pid: int) -> bool:
    """A process, not of this one's children, is no more, or only waits for its parent to look."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        select.select([], [], [], 0.01)
    return False


PREAMBLE = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from tests.control.bare import use_bare_package; use_bare_package()
from commlib.control.client import ControlClient
from commlib.control.rendezvous import join
from commlib.control.security import derive_keys
from commlib.errors import *
from tests.control.fakes import hello
keys = derive_keys(b"secret", "job")
client = ControlClient(join((sys.argv[2],), keys, hello(0, 1), connect_timeout_s=20, peer_timeout_s=30))
"""


def run_member(code: str, address: str, **others: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREAMBLE + code, str(REPOSITORY), address]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, **others)


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "client.declare([('t', 1)])", "client.bye()"])
def test_a_program_that_forgets_to_close_still_ends(scheduler: SchedulerProcess, end: str) -> None:
    started = time.monotonic()
    ran = run_member(end, scheduler.address)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert time.monotonic() - started < 10
    assert scheduler.wait(LIMIT_S) == (0 if "bye" in end else 1)


def test_waiting_can_be_interrupted(scheduler: SchedulerProcess) -> None:
    code = f"""
os.kill({scheduler.pid}, signal.SIGSTOP)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    client.declare([("t", 1)])
except KeyboardInterrupt:
    print("interrupted")
os.kill({scheduler.pid}, signal.SIGCONT)
print(len(client.declare([("u", 1)])))
client.bye()
client.close()
"""
    ran = run_member(code, scheduler.address)
    assert (ran.stdout, ran.stderr) == ("interrupted\n1\n", "")


def test_a_forked_child_has_no_control_plane_and_does_not_hide_its_parents_death(scheduler: SchedulerProcess) -> None:
    """A data loader lives on when the trainer is killed: the scheduler sees the death all the same."""
    code = """
r, w = os.pipe()
child = os.fork()
if child == 0:
    for call in (lambda: client.declare([("t", 1)]), lambda: client.lost(0, "", ""), lambda: client.attach(None)):
        try:
            call()
        except NotInitializedError as error:
            os.write(w, b"refused " if "fork" in str(error) else b"wrong ")
    client.bye()
    client.close()
    os.write(w, b"done\\n")
    time.sleep(20)
    os._exit(0)
told = b""
while not told.endswith(b"\\n"):
    told += os.read(r, 100)
print(told.decode(), child, len(client.declare([("t", 1)])), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, str(REPOSITORY), scheduler.address], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"refused refused refused done\n"
        child, declared = process.stdout.readline().split()
        assert declared == b"1"
        process.wait(LIMIT_S)
        killed = time.monotonic()
        try:
            assert scheduler.wait(LIMIT_S) == 1
            assert time.monotonic() - killed < 3
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_the_schedulers_process_loads_neither_core_nor_numpy_and_listens_only_where_it_should(
    scheduler: SchedulerProcess,
) -> None:
    with open(f"/proc/{scheduler.pid}/maps", encoding="utf-8") as maps:
        loaded = maps.read()
    assert "zmq" in loaded
    for unwanted in ("numpy", "commlib/_core", "torch"):
        assert unwanted not in loaded
    host, port = scheduler.address.split(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port))):
        pass


def test_the_scheduler_ends_with_the_process_that_started_it() -> None:
    code = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.control.bare import use_bare_package; use_bare_package()
from commlib.config import Config
from commlib.control.scheduler_process import start_scheduler
import threading
def start():
    global process
    process = start_scheduler(Config(job="job", secret="secret", connect_timeout_s=100), address="127.0.0.1:0")
# A thread that ends must not take it along; only the process may.
thread = threading.Thread(target=start); thread.start(); thread.join()
process._process.poll()
print(process.pid, process.wait(0.5), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    started = time.monotonic()
    # Its standard error goes where this one waits for end of file: that comes only if the scheduler lets go of it.
    ran = subprocess.run([sys.executable, "-c", code, str(REPOSITORY)], capture_output=True, timeout=30, check=False)
    assert ran.returncode == -signal.SIGKILL
    pid, status = ran.stdout.split()
    assert status == b"None"
    assert time.monotonic() - started < 10
    assert ends_soon(int(pid))


def test_a_scheduler_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        start_scheduler(CONFIG, address="no-such-host.invalid:5555")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ConfigError, match="COMMLIB_SCHEDULER_EXTERNAL"):
        start_scheduler(CONFIG, address="127.0.0.1:0")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CommlibError, match="status 1"):
        start_scheduler(CONFIG, address="127.0.0.1:0")
