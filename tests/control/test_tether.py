# SPDX-License-Identifier: Apache-2.0
"""A child that ends with its parent, also where the kernel has no pidfd or a container forbids it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.control.bare import REPOSITORY

pytestmark = pytest.mark.timeout(60)

CHILD = """
import os, select, sys
sys.path.insert(0, sys.argv[1])
from tests.control.bare import use_bare_package; use_bare_package()
from commlib.control.tether import ParentTether
if sys.argv[2] == "no pidfd":
    def forbidden(pid):
        raise PermissionError(1, "not in this container")
    os.pidfd_open = forbidden
out = int(sys.argv[3])
tether = ParentTether(os.getppid())
os.write(out, b"tied\\n")
while True:
    ready, _, _ = select.select(list(tether.descriptors()), [], [], 20)
    os.write(out, b"woken\\n" if ready else b"timeout\\n")
    if tether.broken():
        break
os.write(out, b"broken\\n")
"""
# The thread that starts the child ends before the process does, which must only wake the child.
PARENT = """
import subprocess, sys, threading
def start():
    subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], pass_fds=[int(sys.argv[-1])])
    started.set()
    stay.wait()
started, stay = threading.Event(), threading.Event()
thread = threading.Thread(target=start)
thread.start()
started.wait()
sys.stdin.readline()
stay.set()
thread.join()
print("thread ended", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["with pidfd", "no pidfd"])
def test_the_end_of_the_parent_is_noticed_and_the_end_of_one_of_its_threads_is_not_mistaken_for_it(how: str) -> None:
    reading, writing = os.pipe()
    arguments = [CHILD, str(REPOSITORY), how, str(writing)]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[writing],
    ) as parent:
        os.close(writing)
        said = _Lines(reading)
        assert said.next() == b"tied"
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"thread ended\n"
        assert said.next() == b"woken"  # by the signal of PR_SET_PDEATHSIG; and it is not broken
        assert not select.select([reading], [], [], 0.3)[0]
        parent.send_signal(signal.SIGKILL)
        rest = [said.next()]
        while rest[-1] != b"broken":
            rest.append(said.next())
        assert set(rest[:-1]) == {b"woken"}
    os.close(reading)


class _Lines:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def next(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            ready: Any = select.select([self._fd], [], [], 20)[0]
            assert ready, "nothing was said"
            part = os.read(self._fd, 1)
            assert part, "it has ended"
            line += part
        return line[:-1]
