# SPDX-License-Identifier: Apache-2.0
"""Jobs of real processes that do, one line of Python after another, what a test tells them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab import Lab

SCRIPT = Path(__file__).with_name("member_main.py")
SECRET = "the secret of the tests"
LIMIT_S = 20.0


class MemberError(AssertionError):
    """What a member raised; `answer` has its class's name, its text and its attributes."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(f"{answer['error']}: {answer['text']}")
        self.answer = answer


class Member:
    """One process. ``member("1 + 1")`` is 2; ``tell`` and ``hear`` are its halves, for what takes others to finish."""

    def __init__(self, environ: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("COMMLIB_", "MASTER_"))}
        command = [*prefix, sys.executable, str(SCRIPT)]
        self.process = subprocess.Popen(
            command, env={**clean, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._unread = b""

    def tell(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, limit_s: float = LIMIT_S) -> Any:
        assert self.process.stdout is not None
        end = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert readable, f"no answer within {limit_s} s"
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            assert part, f"the member has ended: {self.errors()}"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise MemberError(answer)
        return answer["value"]

    def __call__(self, code: str, limit_s: float = LIMIT_S) -> Any:
        self.tell(code)
        return self.hear(limit_s)

    def fails(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The error with which the last thing it was told ends."""
        try:
            value = self.hear(limit_s)
        except MemberError as error:
            return error.answer
        raise AssertionError(f"no error, but {value!r}")

    def errors(self) -> str:
        assert self.process.stderr is not None
        self.process.wait(LIMIT_S)
        return self.process.stderr.read().decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def end(self) -> int:
        """Let it come to its end; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(LIMIT_S)

    def discard(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


class Job:
    """Workers by rank, and servers, all with the same surroundings. Ended by leaving its ``with`` block.

    With a lab each node is one of its hosts, and servers are on those that come after.
    """

    def __init__(self, hosts: list[int], servers: int = 0, lab: Lab | None = None, **common: str) -> None:
        self.lab = lab
        self.id = f"test-{uuid.uuid4().hex}"
        self.common = {"COMMLIB_JOB": self.id, "COMMLIB_SECRET": SECRET, "COMMLIB_ARENA_BYTES": "16M", **common}
        self.hosts = hosts
        self.members: list[Member] = []
        if len(hosts) > 1 or servers:
            address = f"127.0.0.1:{free_port()}" if lab is None else f"{lab.address(0)}:5555"
            self.common.setdefault("COMMLIB_SCHEDULER", address)
            self.common["COMMLIB_NUM_SERVERS"] = str(servers)

    def node(self, rank: int) -> int:
        node = 0
        while rank >= sum(self.hosts[: node + 1]):
            node += 1
        return node

    def environ(self, rank: int) -> dict[str, str]:
        node = self.node(rank)
        first = sum(self.hosts[:node])
        return self.common | {
            "COMMLIB_RANK": str(rank),
            "COMMLIB_SIZE": str(sum(self.hosts)),
            "COMMLIB_LOCAL_RANK": str(rank - first),
            "COMMLIB_LOCAL_SIZE": str(self.hosts[node]),
            "COMMLIB_NODE": f"label-{node}",
        }

    def start(self, environ: Mapping[str, str], host: int, role: str = "worker") -> Member:
        member = Member(environ, () if self.lab is None else self.lab.command(host, []))
        self.members.append(member)
        if role == "worker":
            member.tell("w = connect_worker(Config.from_environment(), table_bytes); w.client.attach(events.hooks())")
        else:
            member.tell("w = connect_server(Config.from_environment(role='server')); w.client.attach(events.hooks())")
        return member

    def worker(self, rank: int, **changes: str) -> Member:
        return self.start(self.environ(rank) | changes, self.node(rank))

    def server(self) -> Member:
        return self.start(self.common, len(self.hosts), "server")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.discard()
        leftovers = list(processes_of(self.id))
        end = time.monotonic() + 3.0
        while leftovers and time.monotonic() < end:
            select.select([], [], [], 0.02)  # the last ones are on their way out
            leftovers = list(processes_of(self.id))
        for pid in leftovers:
            os.kill(pid, signal.SIGKILL)
        assert not leftovers, f"processes {leftovers} have outlived their job"


def processes_of(job: str) -> Iterator[int]:
    """The living processes, schedulers among them, that were started for a job."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ = (path / "environ").read_bytes()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"COMMLIB_JOB={job}".encode() in environ and state != "Z":
            yield int(path.name)


def free_port() -> int:
    """A port that nobody listens at, out of a range from which the kernel gives none away by itself."""
    import random
    import socket

    while True:
        port = random.randrange(10000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
