# SPDX-License-Identifier: Apache-2.0
"""What each process of a job runs: `python sums.py JOB FOLDER`. It finds its place, meets the test and sums."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

COUNTS = (1, 1023, 700_001)  # the last one in more than one partition
ROUNDS = 3


def contribution(job: int, rank: int, count: int) -> np.ndarray[Any, np.dtype[Any]]:
    """What a rank adds, in float64: whole numbers, so that sums are exact, and no two jobs or ranks have the same."""
    return np.arange(count) % 997 * (rank + 1.0) + 1e6 * job + 10.0**rank


def main(job: int, folder: Path) -> None:
    """Be one process of a job."""
    import commlib

    commlib.init()
    rank = commlib.rank()
    with socket.socket(socket.AF_UNIX) as meeting:
        meeting.connect(str(folder / "meeting"))
        meeting.sendall(f"{job} {rank}".encode())
        if meeting.recv(1) != b"!":
            raise EOFError("the test is gone")
    sums = [
        [commlib.push_pull(contribution(job, rank, count), name=f"x{count}", op=commlib.Sum) for count in COUNTS]
        for _ in range(ROUNDS)
    ]
    place = (rank, commlib.size(), commlib.local_rank(), commlib.local_size(), commlib.num_servers())
    (folder / f"{job}-{os.getpid()}.result").write_bytes(pickle.dumps((place, sums)))
    commlib.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
