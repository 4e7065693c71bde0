# SPDX-License-Identifier: Apache-2.0
"""What each process of a group runs: `python -m harness.worker CALL RESULT`, both files; "{rank}" is MPI's."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path


def main() -> None:
    """Make the call that is in a file, and leave what it returned in another."""
    function, args = pickle.loads(Path(sys.argv[1]).read_bytes())
    value = function(*args)
    path = sys.argv[2].replace("{rank}", os.environ.get("OMPI_COMM_WORLD_RANK", ""))
    Path(path).write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    main()
