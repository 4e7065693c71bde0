# SPDX-License-Identifier: Apache-2.0
"""Starting the command `commlib`, and being sure that nothing of it is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.launch import REPOSITORY, leftovers

COMMLIB = [sys.executable, "-m", "commlib.cli"]
_MARK = "COMMAND_TEST"
_numbers = itertools.count()


def environment(**changes: str) -> dict[str, str]:
    """Of a shell in which commlib was never heard of."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COMMLIB_")}
    for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        kept.pop(name, None)
    return {**kept, "PYTHONPATH": str(REPOSITORY), **changes}


def python(script: str, *arguments: object) -> list[str]:
    """A command that runs `script` in a bare, quick Python."""
    return [sys.executable, "-S", "-c", textwrap.dedent(script), *map(str, arguments)]


@contextlib.contextmanager
def started(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`commlib` with `arguments`; everything it started must be gone soon after it has ended, and is in any case."""
    mark = f"{os.getpid()}-{next(_numbers)}"
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(
        [*COMMLIB, *arguments], env={**(env or environment()), _MARK: mark}, **{**pipes, **options}
    )
    try:
        yield process
        process.wait(20)
        assert leftovers(_MARK, mark) == []
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
        for line in leftovers(_MARK, mark, 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)


def run(*arguments: str, stdin: bytes = b"", timeout: float = 30, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """`commlib` with `arguments`, to its end."""
    with started(*arguments, **options) as process:
        stdout, stderr = process.communicate(stdin, timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def fifo(folder: Path, name: str) -> Path:
    """A named pipe: who opens it waits for the one at the other end, and sees its death as an end of file."""
    path = folder / name
    os.mkfifo(path)
    return path
