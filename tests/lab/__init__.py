# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces behind one switch, made and removed by the script `netlab`.

    with Lab(3, rate="1gbit") as lab:
        lab.popen(0, ["python", "server.py", lab.address(1)])
        lab.cut(2)

A lab has a name of its own, so that several can stand side by side. It is removed when the `with` ends, and what a test
run that was killed has left behind is removed by the next one. Tests that use it carry the marker `lab`.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NETLAB = str(Path(__file__).with_name("netlab"))
_STEP_TIMEOUT_S = 30
_numbers = itertools.count()


class LabError(RuntimeError):
    """A lab could not be made, changed or removed."""


def what_is_missing() -> str | None:
    """Why no lab can be made here; None if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (Debian package iproute2)" if missing else None


class Lab:
    """`n_hosts` hosts with addresses 10.77.0.1, 10.77.0.2, …, on a switch that leads nowhere else.

    `rate` is what each host's link carries in each direction, as `tc` writes it ("400mbit", "1gbit"); "none" leaves the
    links as fast as the machine is.
    """

    def __init__(self, n_hosts: int, rate: str = "none") -> None:
        self.n_hosts = n_hosts
        self.rate = rate
        self._prefix = f"clab{os.getpid()}x{next(_numbers)}"
        _remove_orphans()
        try:
            self._netlab("up", str(n_hosts), rate)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        """IPv4 address of a host, reachable from all hosts of this lab and from nowhere else."""
        return f"10.77.0.{self._checked(host) + 1}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """What to execute so that `argv` runs on a host. It becomes that process: no other one stays in between."""
        return ["ip", "netns", "exec", self._namespace(host), *argv]

    def network(self, host: int) -> str:
        """Path of the network namespace of a host."""
        return f"/run/netns/{self._namespace(host)}"

    def popen(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host; `options` as for `subprocess.Popen`. The caller ends it before the lab closes."""
        return subprocess.Popen(self.command(host, argv), env=env, **options)

    def cut(self, host: int) -> None:
        """Pull a host's network cable: packets on the way are lost, and nobody is told."""
        self._netlab("cut", str(self._checked(host)))

    def heal(self, host: int) -> None:
        """Put the cable back."""
        self._netlab("heal", str(self._checked(host)))

    def pace(self, host: int, rate: str) -> None:
        """Give a host's link another rate, written as the lab's, while it carries what it carries."""
        self._netlab("pace", str(self._checked(host)), rate)

    def processes(self) -> list[int]:
        """Ids of all processes that run on one of the hosts."""
        listed = [_run(["ip", "netns", "pids", self._namespace(host)]) for host in range(self.n_hosts)]
        return [int(pid) for text in listed for pid in text.split()]

    def close(self) -> None:
        """Remove the hosts and the switch. May be repeated."""
        self._netlab("down")

    def _namespace(self, host: int) -> str:
        return f"{self._prefix}-h{self._checked(host)}"

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.n_hosts:
            raise LabError(f"host {host} of a lab of {self.n_hosts}")
        return host

    def _netlab(self, *arguments: str) -> None:
        _run([_NETLAB, *arguments], self._prefix)


def _run(argv: Sequence[str], prefix: str = "") -> str:
    env = {**os.environ, "NETLAB_PREFIX": prefix}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=_STEP_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _remove_orphans() -> None:
    """Remove labs whose process is gone: its tests were killed before they could clean up."""
    names = re.findall(r"^(clab(\d+)x\d+)-", _run(["ip", "netns", "list"]), re.MULTILINE)
    for prefix, pid in set(names):
        if not Path("/proc", pid).exists():
            _run([_NETLAB, "down"], prefix)
