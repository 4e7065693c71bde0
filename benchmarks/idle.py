# SPDX-License-Identifier: Apache-2.0
"""What a job that has nothing to do costs: CPU time of two ranks, a dedicated server and the scheduler while they rest.

    python benchmarks/idle.py [--seconds 10] [--quick] [--json FILE] [--png FILE]

All of it runs on this host; the ranks have summed something before they rest.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import commlib
from harness import charts
from harness.group import MARK, Layout, call
from harness.options import positive, read_options, run_script
from harness.report import Report, Row, row
from harness.sizes import KIB

SIZES = (400 * KIB,)  # of what is summed before the job rests
SUMS = 10
SETTLE_S = 1.0
TIMEOUT_S = 120
ALL = "all together"


def work(size: int, seconds: int, rounds: int) -> list[dict[str, float]]:
    """In each rank: work, then rest. Rank 0 looks at all processes; for each round, the CPU seconds of each."""
    commlib.init()
    buffer = commlib.zeros(size // 4, np.float32)
    for _ in range(SUMS):  # whatever runs only while there is work has been started
        commlib.push_pull_(buffer, name="work")
    commlib.barrier()
    time.sleep(SETTLE_S)
    if commlib.rank() == 0:
        used = [_used_in(seconds) for _ in range(rounds)]
    else:
        used = []
        time.sleep(seconds * rounds)
    commlib.barrier()
    commlib.shutdown()
    return used


def _used_in(seconds: int) -> dict[str, float]:
    processes = _processes()
    before = {pid: _cpu_seconds(pid) for pid in processes}
    time.sleep(seconds)
    return {name: _cpu_seconds(pid) - before[pid] for pid, name in processes.items()}


def _processes() -> dict[int, str]:
    """All processes of this group, by what they are in the job."""
    mark = f"{MARK}={os.environ[MARK]}"
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # it has ended, or is not ours
                continue
            if mark in environ:
                found[int(folder.name)] = _role(environ, command)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _role(environ: list[str], command: str) -> str:
    if "scheduler" in command:
        return "scheduler"
    ranks = [setting.partition("=")[2] for setting in environ if setting.startswith("COMMLIB_RANK=")]
    return f"rank {ranks[0]}" if ranks else "server"


def _cpu_seconds(pid: int) -> float:
    """What all threads of a process have used so far, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # the kernel's number for the CPU clock of another process


def main() -> None:
    """Measure, and show."""
    options = read_options(
        __doc__ or "",
        sizes=SIZES,
        rounds=(1, 3),
        more=lambda parser: parser.add_argument("--seconds", type=positive, default=10, help="of rest; default: 10"),
    )
    seconds: int = options.own.seconds
    layout = Layout(ranks_per_host=2, servers=1)
    report = Report("idle", "CPU time of a job that rests", options, {})
    time_limit = TIMEOUT_S + options.rounds * seconds
    rounds: list[dict[str, float]] = call(
        work, options.sizes[0], seconds, options.rounds, layout=layout, timeout_s=time_limit
    )[0]
    by_process = {name: [used[name] for used in rounds] for name in rounds[0]}
    by_process[ALL] = [sum(used.values()) for used in rounds]
    for name, values in by_process.items():
        percent = [100 * value / seconds for value in values]
        report.rows.append(row("resting", name, "commlib", percent, unit="% of a core"))
    report.notes.append(f"All threads of each process, over {seconds} s each time.")
    report.finish(draw)


def draw(figure: Any, rows: list[Row]) -> None:
    """Bars by process."""
    charts.bars(
        figure.subplots(), rows, lambda one: one.median, label=lambda share: f"{share:.3f} %", ylabel="% of a core"
    )


if __name__ == "__main__":
    import idle  # by the name that the processes it starts know it by

    run_script(idle.main)
