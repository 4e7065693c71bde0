# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: options, groups of processes, contenders that take turns, plain sockets, results."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
REPOSITORY = BENCHMARKS.parent

# A script has only its own folder on its path; labs of several hosts are those of the tests.
if str(REPOSITORY) not in sys.path:
    sys.path.append(str(REPOSITORY))
