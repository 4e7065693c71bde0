# SPDX-License-Identifier: Apache-2.0
"""Counts everything and writes it down in `recorded.toml`: python -m tests.performance.record."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.performance import counting, recorded


def main() -> None:
    problem = counting.what_is_missing()
    if problem is not None:
        sys.exit(problem)
    found = {}
    for program, measurements in counting.MEASUREMENTS.items():
        counts = {}
        for kind, measure in measurements.items():
            print(f"{program}: {kind}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="commlib-counting-") as folder:
                counts[kind] = measure(Path(folder))
        found[program] = recorded.Recorded(counting.made_with(program), counts)
    recorded.FILE.write_text(recorded.written(found))


if __name__ == "__main__":
    main()
