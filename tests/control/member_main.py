# SPDX-License-Identifier: Apache-2.0
"""A member of a job, as a process that does what a test tells it. Started by its path; see members.py."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.control.bare import use_bare_package

use_bare_package()

from commlib.config import Config  # noqa: E402
from commlib.control.bootstrap import connect_server, connect_worker  # noqa: E402
from commlib.control.interface import Hooks  # noqa: E402
from commlib.control.messages import Signature  # noqa: E402
from commlib.errors import CommlibError  # noqa: E402


class Events:
    """What the control thread has told, in order, and a way to wait for more."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def hooks(self, **others: Any) -> Hooks:
        """Hooks that keep everything."""
        return Hooks(
            on_lost=lambda *what: self.add("lost", *what),
            on_scheduler_lost=lambda: self.add("scheduler lost"),
            on_over=lambda failed: self.add("over", failed),
            on_stall=lambda report: self.add("stall", report.name, report.round, report.missing, report.silent),
            **others,
        )

    def add(self, *what: Any) -> None:
        """Remember one."""
        os.write(self._write, json.dumps(what).encode() + b"\n")

    def next(self) -> Any:
        """Wait for the next one."""
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._read, 1)
        return json.loads(line)


def table_bytes(local_size: int) -> int:
    """Some size that depends on the number of ranks."""
    return 4096 * (local_size + 3)


def write_at(fd: int, offset: int, text: str) -> None:
    """Write into shared memory through a mapping of its own."""
    with mmap.mmap(fd, offset + len(text)) as memory:
        memory[offset:] = text.encode()


def read_at(fd: int, offset: int, count: int) -> str:
    """Read from shared memory through a mapping of its own."""
    with mmap.mmap(fd, offset + count) as memory:
        return memory[offset:].decode()


def main() -> None:
    """Evaluate or execute one line after another, and answer each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    names: dict[str, Any] = {
        "Config": Config,
        "Signature": Signature,
        "connect_server": connect_server,
        "connect_worker": connect_worker,
        "events": Events(),
        "os": os,
        "read_at": read_at,
        "sys": sys,
        "table_bytes": table_bytes,
        "write_at": write_at,
    }
    for line in sys.stdin:
        code = json.loads(line)
        try:
            try:
                value = eval(code, names)
            except SyntaxError:
                exec(code, names)
                value = None
            answer = {"value": value}
        except CommlibError as error:
            answer = {"error": type(error).__name__, "text": str(error), **vars(error)}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": repr(error)}
        print(
            json.dumps(answer, default=lambda o: {f: getattr(o, f) for f in o.__struct_fields__}),
            file=answers,
            flush=True,
        )


main()
