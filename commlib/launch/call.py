# SPDX-License-Identifier: Apache-2.0
"""The processes behind `commlib.run`. Started by its path, by commlib/launch/function.py; not to be imported.

call.py supervise FOLDER    keeps the workers together
call.py work FOLDER         is one of them
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any


def _supervise(folder: Path, order: dict[str, Any]) -> int:
    from commlib.launch.job import local_job
    from commlib.launch.supervisor import supervise, tie_to

    tie_to(order["parent"])
    command = [sys.executable, "-P", __file__, "work", str(folder)]
    members = local_job(command, workers=order["workers"], servers=order["servers"])
    ending = supervise(members, quiet=True)
    (folder / "endings").write_text(json.dumps(ending.returncodes))
    if os.getppid() != order["parent"]:
        shutil.rmtree(folder, ignore_errors=True)  # nobody is left who would
    return ending.status


def _work(folder: Path) -> int:
    from commlib.launch.function import answer

    return answer(folder, int(os.environ["COMMLIB_RANK"]))


def main() -> int:
    """Find modules where the calling program finds them, and do what the command line says."""
    role, folder = sys.argv[1], Path(sys.argv[2])
    order = json.loads((folder / "order").read_text())
    sys.path[:] = order["sys_path"]
    return _supervise(folder, order) if role == "supervise" else _work(folder)


if __name__ == "__main__":
    sys.exit(main())
