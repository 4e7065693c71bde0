# SPDX-License-Identifier: Apache-2.0
"""What workers print comes out as it went in, each line with its rank in front."""

from __future__ import annotations

import os
import pty
import random
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import COMMLIB, environment, fifo, python, run, started

# Writes what lies in the file <folder>/<rank>, in pieces of unfortunate sizes.
DRIBBLE = """
    import os, sys
    data = open(os.path.join(sys.argv[1], os.environ["COMMLIB_RANK"]), "rb").read()
    size = int(sys.argv[2])
    for start in range(0, len(data), size):
        os.write(1, data[start:start + size])
"""


def parted(output: bytes, ranks: int) -> list[bytes]:
    """What each rank wrote, out of prefixed lines."""
    found = [b""] * ranks
    for line in output.splitlines(keepends=True) if b"\r" not in output else re.findall(rb"[^\n]*\n|[^\n]+$", output):
        prefix, rest = line.split(b" ", 1)
        found[int(prefix.strip(b"[]"))] += rest
    return found


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("text", b"one\ntwo\n\n\nfive\n"),
        ("not UTF-8", bytes(range(256)).replace(b"\n", b"") + b"\n\xff\xfe\n\x00\x00\n"),
        ("carriage returns", b"10%\r20%\r30%\r\n\rdone\r\n\r\r\n"),
        ("looks like a prefix", b"[0] x\n[1] \n"),
        ("only newlines", b"\n" * 1000),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("size", [1, 7, 100000])
def test_lines_are_unchanged(tmp_path: Path, name: str, data: bytes, size: int) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).write_bytes(data)
    done = run("run", "-n", "3", "--", *python(DRIBBLE, tmp_path, size))
    assert (done.returncode, done.stderr) == (0, b"")
    assert parted(done.stdout, 3) == [data] * 3


def test_many_lines_and_long_lines_of_several_ranks_stay_whole(tmp_path: Path) -> None:
    noise = random.Random(5)
    sent = []
    for rank in range(4):
        lengths = [noise.randrange(200) for _ in range(3000)] + [3_000_000 + rank, 70_000, 0]
        lines = [noise.randbytes(length).replace(b"\n", b"n") for length in lengths]
        sent.append(b"\n".join(lines) + b"\n")
        (tmp_path / str(rank)).write_bytes(sent[rank])
    done = run("run", "-n", "4", "--", *python(DRIBBLE, tmp_path, 4099))
    assert done.returncode == 0
    received = [b""] * 4
    for line in done.stdout.split(b"\n")[:-1]:
        prefix, rest = line.split(b" ", 1)
        received[int(prefix[1:-1])] += rest + b"\n"
    assert received == sent


def test_a_last_line_without_an_end_gets_none() -> None:
    done = run("run", "-n", "1", "--", "printf", "a\nb")
    assert done.stdout == b"[0] a\n[0] b"


def test_last_lines_without_an_end_do_not_run_into_each_other() -> None:
    done = run("run", "-n", "3", "--", "sh", "-c", "printf tail$COMMLIB_RANK")
    assert sorted(done.stdout.split(b"\n")) == [b"[0] tail0", b"[1] tail1", b"[2] tail2"]


def test_standard_error_stays_standard_error() -> None:
    done = run("run", "-n", "2", "--", "sh", "-c", "echo out; echo err >&2")
    assert sorted(done.stdout.splitlines()) == [b"[0] out", b"[1] out"]
    assert sorted(done.stderr.splitlines()) == [b"[0] err", b"[1] err"]


def test_standard_error_and_output_in_one_file_do_not_mix_within_lines(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log:
        run("run", "-n", "2", "--", "sh", "-c", "printf out; printf err >&2", stdout=log, stderr=log)
    lines = sorted((tmp_path / "log").read_bytes().split(b"\n"))
    assert lines == [b"[0] err", b"[0] out", b"[1] err", b"[1] out"]


def test_lines_come_as_they_are_written_without_flushing() -> None:
    script = "print('first'); input(); print('second')"
    with started("run", "-n", "1", "--", *python(script)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[0] first\n"
        assert process.communicate(b"go on\n", timeout=20)[0] == b"[0] second\n"
    assert process.returncode == 0


def test_without_prefixes_output_is_left_alone(tmp_path: Path) -> None:
    done = run("run", "-n", "2", "--no-prefix", "--", "sh", "-c", "printf 'a\\rb'; printf e >&2")
    assert (done.stdout, done.stderr) == (b"a\rba\rb", b"ee")
    with open(tmp_path / "log", "wb") as log:
        run("run", "-n", "1", "--no-prefix", "--", "sh", "-c", "readlink /proc/self/fd/1", stdout=log)
    assert (tmp_path / "log").read_text() == f"{tmp_path / 'log'}\n"


def test_progress_moves_on_a_terminal(tmp_path: Path) -> None:
    go_on = fifo(tmp_path, "go_on")
    script = "import sys; sys.stdout.write('10%\\r20%\\r'); sys.stdout.flush(); open(sys.argv[1]).read(); print('done')"
    terminal, its_end = pty.openpty()
    with started("run", "-n", "1", "--", *python(script, go_on), stdout=its_end) as process:
        os.close(its_end)
        shown = b""
        while shown != b"[0] 10%\r[0] 20%\r":
            shown += os.read(terminal, 1000)
            assert b"[0] 10%\r[0] 20%\r".startswith(shown)
        go_on.write_text("")
        process.wait(20)
        assert os.read(terminal, 1000) == b"[0] done\r\n"
    os.close(terminal)


def test_when_nobody_reads_any_more_the_workers_learn_it() -> None:
    with started("run", "-n", "2", "--", "yes", "spam") as process:
        assert process.stdout is not None
        assert process.stdout.readline() in (b"[0] spam\n", b"[1] spam\n")
        process.stdout.close()
        assert process.wait(20) == 128 + 13  # SIGPIPE, as without a launcher
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_a_file_that_has_become_non_blocking_loses_nothing() -> None:
    size = 2_000_000
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with started("run", "-n", "1", "--", *python(f"print('x' * {size})"), stdout=writing) as process:
        os.close(writing)
        with open(reading, "rb") as pipe:
            received = pipe.read()
        assert process.wait(20) == 0
    assert received == b"[0] " + b"x" * size + b"\n"


def test_closed_standard_output_is_no_trouble() -> None:
    line = ["sh", "-c", '"$@" >&-', "sh", *COMMLIB, "run", "-n", "2", "--", "sh", "-c", "echo x; exit 3"]
    done = subprocess.run(line, env=environment(), capture_output=True, timeout=30, check=False)
    assert done.returncode == 3
    assert b"Traceback" not in done.stderr


def test_a_full_disk_is_told_to_the_workers() -> None:
    with open("/dev/full", "wb") as full:
        done = run("run", "-n", "2", "--", "yes", stdout=full)
    assert done.returncode == 128 + 13
    assert b"Traceback" not in done.stderr
