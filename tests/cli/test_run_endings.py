# SPDX-License-Identifier: Apache-2.0
"""However a job ends, its status tells how, and nothing of it is left (`started` sees to that)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cli.command import COMMLIB, environment, fifo, python, run, started

BUSY_S = 4.0  # how late a busy machine may be

# Starts something in the same process group and something in a session of its own, says so, and waits for ever.
FAMILY = """
    import os, subprocess, sys, threading
    for new_session in (False, True):
        subprocess.Popen(["sleep", "1000"], start_new_session=new_session)
    print("ready")
    threading.Event().wait()
"""
# The same, and deaf.
STUBBORN = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]\n" + "\n".join(
    line.strip() if not line.startswith("        ") else "    " + line.strip() for line in FAMILY.strip().splitlines()
)


def await_ready(process: subprocess.Popen[bytes], ranks: int) -> None:
    """All ranks have printed "ready"."""
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(ranks)) == [b"[%d] ready\n" % rank for rank in range(ranks)]


def by_rank(*commands: str) -> list[str]:
    """Shell commands, one for each rank."""
    cases = " ".join(f"{rank}) {command};;" for rank, command in enumerate(commands))
    return ["sh", "-c", f"case $COMMLIB_RANK in {cases} esac"]


def test_success() -> None:
    done = run("run", "-n", "3", "--", "true")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_status_of_a_failure() -> None:
    done = run("run", "-n", "3", "--", *by_rank("exit 0", "exit 42", "exit 0"))
    assert done.returncode == 42
    assert b"rank 1 ended with status 42" in done.stderr


@pytest.mark.parametrize("name", ["KILL", "SEGV", "ABRT", "TERM"])
def test_status_of_a_signal(name: str) -> None:
    done = run("run", "-n", "2", "--", *by_rank("exit 0", f"kill -{name} $$"))
    assert done.returncode == 128 + signal.Signals[f"SIG{name}"]
    assert f"rank 1 was ended by SIG{name}".encode() in done.stderr


def test_the_first_failure_counts_even_if_it_is_noticed_late(tmp_path: Path) -> None:
    """Rank 1 ends first, then rank 0, both while the launcher cannot look."""
    pipes = [fifo(tmp_path, "0"), fifo(tmp_path, "1")]
    commands = by_rank(f"echo $$; cat {pipes[0]}; exit 5", f"echo $$; cat {pipes[1]}; exit 6")
    with started("run", "-n", "2", "--", *commands) as process:
        assert process.stdout is not None
        pids = dict(process.stdout.readline().split() for _ in range(2))
        process.send_signal(signal.SIGSTOP)
        for rank in (1, 0):
            pidfd = os.pidfd_open(int(pids[b"[%d]" % rank]))
            pipes[rank].write_text("")
            assert select.select([pidfd], [], [], 20)[0]
            os.close(pidfd)
        process.send_signal(signal.SIGCONT)
        assert process.wait(20) == 6


def test_the_others_may_end_by_themselves(tmp_path: Path) -> None:
    """Rank 0 sees the death of rank 1 as the end of a file, and has time for a last word."""
    pipe = fifo(tmp_path, "pipe")
    done = run("run", "-n", "2", "--", *by_rank(f"cat {pipe}; echo last word", f"exec 3>{pipe}; kill -9 $$"))
    assert done.returncode == 128 + 9
    assert done.stdout == b"[0] last word\n"
    assert b"stopping" not in done.stderr


def test_those_who_do_not_are_stopped() -> None:
    with started("run", "-n", "3", "--", *by_rank("exit 9", "sleep 1000", "sleep 1000")) as process:
        assert process.stderr is not None
        assert b"rank 0 ended with status 9; 2 more now have 3 s to end" in process.stderr.readline()
        began = time.monotonic()
        assert b"stopping rank 1, rank 2" in process.stderr.readline()
        assert process.wait(20) == 9
        assert 1.5 < time.monotonic() - began < 3 + BUSY_S


def test_those_who_are_deaf_are_killed() -> None:
    script = "import os, sys; os.environ['COMMLIB_RANK'] == '0' and sys.exit(9)\n" + STUBBORN
    with started("run", "-n", "2", "--", *python(script)) as process:
        assert process.stderr is not None
        assert b"rank 0 ended with status 9" in process.stderr.readline()
        began = time.monotonic()
        assert process.wait(20) == 9
        assert 2 < time.monotonic() - began < 4 + BUSY_S


def test_what_a_successful_job_leaves_running_is_stopped() -> None:
    done = run("run", "-n", "2", "--", "sh", "-c", "sleep 1000 & setsid sleep 1000 & exit 0", timeout=20)
    assert done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_whole_family(number: signal.Signals) -> None:
    with started("run", "-n", "2", "--", *python(FAMILY)) as process:
        await_ready(process, 2)
        process.send_signal(number)
        began = time.monotonic()
        assert process.wait(20) == 128 + number
        assert time.monotonic() - began < 4 + BUSY_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_deaf_too(number: signal.Signals) -> None:
    with started("run", "-n", "2", "--", *python(STUBBORN)) as process:
        await_ready(process, 2)
        process.send_signal(number)
        began = time.monotonic()
        assert process.wait(20) == 128 + signal.SIGKILL
        assert time.monotonic() - began < 4 + BUSY_S


def test_a_second_signal_does_not_wait() -> None:
    with started("run", "-n", "2", "--", *python(STUBBORN)) as process:
        await_ready(process, 2)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        os.sched_yield()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGKILL
        assert time.monotonic() - began < 3.5  # an ending without haste takes 4


def test_workers_may_handle_the_signal() -> None:
    script = """
        import signal, sys, threading
        def save(number, frame):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready")
        threading.Event().wait()
    """
    with started("run", "-n", "2", "--", *python(script)) as process:
        await_ready(process, 2)
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert sorted(stdout.splitlines()) == [b"[0] saved", b"[1] saved"]


def test_other_signals_are_passed_on_and_end_nothing() -> None:
    script = """
        import os, signal, threading
        heard = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: heard.set())
        print("ready")
        assert heard.wait(20)
        print("heard")
    """
    with started("run", "-n", "2", "--", *python(script)) as process:
        await_ready(process, 2)
        process.send_signal(signal.SIGUSR1)
        stdout, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert sorted(stdout.splitlines()) == [b"[0] heard", b"[1] heard"]


@pytest.mark.parametrize("command", [python(STUBBORN), ["sh", "-c", "sleep 1000 & echo ready; sleep 1000"]])
def test_nobody_outlives_a_launcher_that_was_killed(command: list[str]) -> None:
    script_without_session = [part.replace("(False, True)", "(False,)") for part in command]
    with started("run", "-n", "2", "--", *script_without_session) as process:
        await_ready(process, 2)
        process.kill()
        assert process.wait(20) == -signal.SIGKILL


def test_a_launcher_can_be_interrupted_while_nobody_reads_its_output() -> None:
    with started("run", "-n", "2", "--", "yes") as process:
        assert process.stdout is not None
        process.stdout.read(10)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGINT
        assert time.monotonic() - began < 4 + BUSY_S


def test_a_command_that_does_not_exist() -> None:
    done = run("run", "-n", "2", "--", "no-such-program")
    assert done.returncode == 127
    assert b"no-such-program: No such file or directory" in done.stderr


def test_a_command_that_cannot_be_executed(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    assert run("run", "-n", "2", "--", str(tmp_path / "data")).returncode == 126


@pytest.mark.parametrize("script", ["exit 0", "exit 3", "kill -9 $$"])
def test_containers_without_pidfd(script: str) -> None:
    launcher = """
        import os, sys
        def forbidden(pid, flags=0):
            raise PermissionError(1, "Operation not permitted")
        os.pidfd_open = forbidden
        from commlib.cli import main
        main(["run", "-n", "2", "--", "sh", "-c", sys.argv[1]])
    """
    argv = [sys.executable, "-c", textwrap.dedent(launcher), script]
    done = subprocess.run(argv, env=environment(), capture_output=True, timeout=30, check=False)
    assert done.returncode == {"exit 0": 0, "exit 3": 3, "kill -9 $$": 137}[script], done.stderr


def test_a_parent_that_ignores_the_ends_of_children_does_not_hide_them() -> None:
    """Being ignored is inherited, and the kernel then forgets the status of every child."""
    argv = ["sh", "-c", 'trap "" CHLD; exec "$@"', "sh", *COMMLIB, "run", "-n", "2", "--", "sh", "-c", "exit 7"]
    done = subprocess.run(argv, env=environment(), capture_output=True, timeout=30, check=False)
    assert done.returncode == 7


def test_what_was_ignored_stays_ignored() -> None:
    """As under nohup."""
    with started("run", "-n", "1", "--", *python("print('ready'); input()"), preexec_fn=_ignore_hangups) as process:
        await_ready(process, 1)
        process.send_signal(signal.SIGHUP)
        assert process.communicate(b"\n", timeout=20) == (b"", b"")
        assert process.returncode == 0


def _ignore_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
