# SPDX-License-Identifier: Apache-2.0
"""The scheduler's own process. Started by its path, by commlib/control/scheduler_process.py; not to be imported.

The package's ``__init__`` is not run here: a bare package stands in for it, so that neither the compiled core nor NumPy
is loaded, and the process is up in a few tens of milliseconds. Its orders come through standard input, the secret among
them, and where it listens, or why not, goes out through standard output.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import types
from typing import Any


def _serve(order: dict[str, Any]) -> int:
    from commlib.control.links import SchedulerOptions
    from commlib.control.scheduler import Scheduler
    from commlib.control.security import derive_keys
    from commlib.control.tether import ParentTether, silence
    from commlib.errors import CommlibError

    def report(**fields: Any) -> None:
        os.write(1, json.dumps(fields).encode())
        silence(0, 1)  # end of file for the parent

    tether = ParentTether(order["parent_pid"])
    options = SchedulerOptions(
        job=order["job"],
        keys=derive_keys(bytes.fromhex(order["secret"]), order["job"]),
        addresses=tuple(order["addresses"]),
        connect_timeout_s=order["connect_timeout_s"],
        peer_timeout_s=order["peer_timeout_s"],
        starter=order["starter"],
    )
    scheduler = Scheduler(options, tether)
    try:
        address = scheduler.bind()
    except CommlibError as error:
        scheduler.close()
        report(error=str(error), kind=type(error).__name__)
        return 1
    report(address=address)
    try:
        return scheduler.run()
    finally:
        scheduler.close()


def main() -> int:
    """Read the order, serve, return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers; the scheduler ends when they have
    order = json.load(sys.stdin)
    sys.path[:] = order["sys_path"]
    package = types.ModuleType("commlib")
    package.__path__ = [order["package_path"]]
    sys.modules["commlib"] = package
    logging.basicConfig(level=order["log_level"], format="commlib scheduler: %(message)s")
    os.chdir("/")  # hold nothing
    return _serve(order)


if __name__ == "__main__":
    sys.exit(main())
