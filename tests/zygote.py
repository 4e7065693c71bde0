# SPDX-License-Identifier: Apache-2.0
"""Processes that have imported what they need already, for tests that start hundreds of them.

Importing torch and making an optimizer takes 3.5 s of CPU, importing commlib half a second. A *zygote* does it once,
and forks for each worker that a job asks for; what it forks becomes, as far as it can tell, a fresh process: with a
session, streams, an environment, a network and a `__main__` of its own. Where there is a framework, nothing of commlib
is imported before the fork.

Strings hash differently in the processes of a real job, and so must they here: ranks take turns between two zygotes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

FRAMEWORKS = {"torch": ("torch", "torch._dynamo"), "tensorflow": ("tensorflow", "keras")}
PRELOADED = {"commlib": ("asyncio", "ml_dtypes", "numpy", "commlib"), **FRAMEWORKS}
_CLONE_NEWNET = 0x40000000
_FDS = 4  # stdin, stdout, stderr, events
_MAX_BYTES = 1 << 20
_EARLY = ("LD_", "MALLOC_", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONWARNINGS", "TORCH")

REPOSITORY = Path(__file__).resolve().parent.parent


# What a test uses.


class Forked:
    """As much of `subprocess.Popen` as a job uses, of a process that a zygote has forked."""

    def __init__(self, pid: int, zygote: Zygote, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._zygote = zygote
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self.returncode = self._zygote.status_of(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The same, within `timeout` seconds."""
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """A process that forks when asked to."""

    def __init__(self, preloaded: str, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", preloaded, str(theirs.fileno())],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._statuses: dict[int, int] = {}
        self._pids: list[int] = []

    def fork(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        network: str,
        mark: str,
        events: str,
        outputs: Sequence[int],
    ) -> Forked:
        """Run the script `argv[0]`. `outputs` are its stdout, its stderr and the descriptor that `env[events]` names.

        `network` is the path of a network namespace, or empty. The file `mark` is open as long as the process, or what
        it forks, lives and has not executed another program.
        """
        request = json.dumps(
            {"argv": list(argv), "env": dict(env), "cwd": cwd, "network": network, "mark": mark, "events": events}
        )
        stdin, ours = os.pipe()
        try:
            socket.send_fds(self._socket, [request.encode()], [stdin, *outputs])
        finally:
            os.close(stdin)
        while not self._pids:
            self._receive()
        return Forked(self._pids.pop(), self, os.fdopen(ours, "wb"))

    def status_of(self, pid: int) -> int:
        """The exit status of a process that has ended. The zygote will know it in a moment."""
        while pid not in self._statuses:
            self._receive()
        return self._statuses.pop(pid)

    def _receive(self) -> None:
        message = self._socket.recv(_MAX_BYTES)
        if not message:
            raise RuntimeError(f"the zygote has ended with status {self._process.wait(timeout=10)}")
        kind, pid, status = json.loads(message)
        if kind == "born":
            self._pids.append(pid)
        else:
            self._statuses[pid] = status


_zygotes: dict[tuple[str, int], Zygote] = {}


def of(preloaded: str, rank: int) -> Zygote:
    """The zygote of a rank, which is made when it is first asked for."""
    key = preloaded, rank % 2
    if key not in _zygotes:
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
        _zygotes[key] = Zygote(preloaded, env)
    return _zygotes[key]


def preloaded_for(script: str, env: Mapping[str, str]) -> str | None:
    """Which zygote suits a script, if one does, and nothing in its environment has to be there at Python's start."""
    if any(name.startswith(_EARLY) and os.environ.get(name) != value for name, value in env.items()):
        return None
    text = Path(script).read_text()
    used = [framework for framework in FRAMEWORKS if framework in text] or ["commlib"]
    return used[0] if len(used) == 1 else None


# What the zygote does.

_libc = ctypes.CDLL(None, use_errno=True)


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork when asked to, and tell how each ended. Returns in what has been forked, and there alone."""
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ, 0)
    while True:
        for key, _ in selector.select():
            pid = key.data
            if pid:
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(BrokenPipeError):
                    channel.send(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode())
                continue
            message, fds, _, _ = socket.recv_fds(channel, _MAX_BYTES, _FDS)
            if not message:
                os._exit(0)  # the tests are over
            request: dict[str, Any] = json.loads(message)
            ready, say_ready = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                selector.close()
                channel.close()
                os.close(ready)
                _become(request, fds)
                os.write(say_ready, b"!")
                os.close(say_ready)
                return request
            os.close(say_ready)
            for fd in fds:
                os.close(fd)
            os.read(ready, 1)
            os.close(ready)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            channel.send(json.dumps(["born", pid, 0]).encode())


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Take over the streams, the environment and the folder."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    os.set_inheritable(fds[3], True)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ[request["events"]] = str(fds[3])
    os.chdir(request["cwd"])
    if request["network"]:
        network = os.open(request["network"], os.O_RDONLY | os.O_CLOEXEC)
        if _libc.setns(network, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the network", request["network"])
        os.close(network)
    os.open(request["mark"], os.O_RDONLY | os.O_CREAT, 0o600)
    sys.argv[:] = request["argv"]
    sys.path[0] = os.path.dirname(request["argv"][0])
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' matter
    _channel = socket.socket(fileno=int(sys.argv[2]))
    os.set_inheritable(_channel.fileno(), False)
    for _name in PRELOADED[sys.argv[1]]:
        importlib.import_module(_name)
    _script = _serve(_channel)["argv"][0]
    runpy.run_path(_script, run_name="__main__")
