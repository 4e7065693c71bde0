# SPDX-License-Identifier: Apache-2.0
"""Starting the scheduler: as a child process, or in this one for the command line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commlib.config import Config
from commlib.control.addresses import local_name
from commlib.control.links import AddressTaken, SchedulerOptions
from commlib.control.scheduler import Scheduler
from commlib.control.security import derive_keys, load_secret
from commlib.errors import CommlibError, ConfigError, OperationTimeout

__all__ = ["SchedulerProcess", "run_scheduler", "scheduler_addresses", "start_scheduler"]

log = logging.getLogger("commlib")


class SchedulerProcess:
    """A scheduler that this process has started. It ends by itself with its job, or with this process."""

    def __init__(self, process: subprocess.Popen[bytes], job: str, address: str) -> None:
        self.job = job
        self.address = address  # host:port, or ipc://@name
        self._process = process
        _started.append(self)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, None if it still runs after `timeout_s` seconds; it may then be left alone."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End it now, whatever its members think of that."""
        self._process.terminate()
        if self.wait(2.0) is None:
            self._process.kill()
            self._process.wait()


_started: list[SchedulerProcess] = []  # kept until they have ended, so that none stays a zombie


def scheduler_addresses(config: Config) -> tuple[str, ...]:
    """Where the scheduler of this job may be: host:port, or the abstract unix socket of a job on one host."""
    return config.scheduler_addresses() or (f"ipc://@{local_name('scheduler', config.job)}",)


def start_scheduler(config: Config, *, address: str | None = None, starter: str = "") -> SchedulerProcess:
    """Start the scheduler of the job as a child, and wait until it listens.

    `address` (host:port, where port 0 means any) overrides where `config` says that it should be. `starter` is the
    ``instance`` of the member that starts it: when that one leaves in order, the scheduler stays until the others have
    left. Raises AddressTaken, ConfigError, or CommlibError when the child fails.
    """
    addresses = (address,) if address is not None else scheduler_addresses(config)
    order = {
        "job": config.job,
        "secret": load_secret(config).hex(),
        "addresses": addresses,
        "connect_timeout_s": config.connect_timeout_s,
        "peer_timeout_s": config.peer_timeout_s,
        "starter": starter,
        "parent_pid": os.getpid(),
        "log_level": config.log_level,
        "sys_path": [os.path.abspath(entry) for entry in sys.path],
        "package_path": str(Path(__file__).resolve().parent.parent),
    }
    deadline = time.monotonic() + config.connect_timeout_s
    while True:
        _started[:] = [process for process in _started if process.wait(0.0) is None]
        try:
            return _start(order, deadline)
        except AddressTaken:
            # Perhaps by the scheduler of the previous job of this process, which its last members are just leaving.
            previous = next((process for process in _started if process.job == config.job), None)
            if previous is None:
                raise
            if previous.wait(max(0.0, deadline - time.monotonic())) is None:
                raise AddressTaken(
                    f"the scheduler of the previous job {config.job!r} of this process still runs, because not all of "
                    f"its members have left within {config.connect_timeout_s:g} s"
                ) from None


def _start(order: Mapping[str, Any], deadline: float) -> SchedulerProcess:
    if not sys.executable:
        raise ConfigError(
            "this Python does not know its own program (sys.executable), so it cannot start a scheduler; start "
            "`commlib scheduler` beside the job and set COMMLIB_SCHEDULER_EXTERNAL=1"
        )
    # -S and -P: the child is handed the path on which this process finds its modules, and adds nothing to it.
    command = [sys.executable, "-S", "-P", str(Path(__file__).with_name("scheduler_main.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        report = _converse(process, json.dumps(order).encode(), deadline)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if "address" in report:
        return SchedulerProcess(process, order["job"], report["address"])
    process.wait()
    raise (AddressTaken if report.get("kind") == AddressTaken.__name__ else ConfigError)(report["error"])


def _converse(process: subprocess.Popen[bytes], order: bytes, deadline: float) -> dict[str, str]:
    """Give the child its order and read its report."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as stdin, process.stdout as stdout:
        with contextlib.suppress(BrokenPipeError):  # it has died at once; that its report is empty says so below
            stdin.write(order)
            stdin.close()
        answer = b""
        while True:
            readable, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise OperationTimeout("the scheduler's process has not begun to listen in time")
            part = os.read(stdout.fileno(), 65536)
            if not part:
                break
            answer += part
    try:
        report: dict[str, str] = json.loads(answer)
    except ValueError:
        status = process.wait()
        raise CommlibError(f"the scheduler's process has ended with status {status} before it listened") from None
    return report


def run_scheduler(config: Config) -> int:
    """Be the scheduler, in this process, until the job is over. Returns an exit status; see :meth:`Scheduler.run`."""
    keys = derive_keys(load_secret(config), config.job)
    scheduler = Scheduler(
        SchedulerOptions(
            job=config.job,
            keys=keys,
            addresses=scheduler_addresses(config),
            connect_timeout_s=config.connect_timeout_s,
            peer_timeout_s=config.peer_timeout_s,
        )
    )
    try:
        log.info("the scheduler of the job %s listens at %s", config.job, scheduler.bind())
        return scheduler.run()
    finally:
        scheduler.close()
