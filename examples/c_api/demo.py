# SPDX-License-Identifier: Apache-2.0
"""Uses the two modules of this example; see setup.py."""

import numpy as np
from histogram import histogram
from norm import norm

import commlib

commlib.init()
values = np.random.default_rng(commlib.rank()).normal(size=10_000)
counts = histogram(values, -4.0, 4.0, 16)
length = norm(values)
if commlib.rank() == 0:
    for i, count in enumerate(counts):
        print(f"{i / 2 - 4:5.1f} {'#' * (60 * count // max(counts))}")
    print(f"{sum(counts)} values from {commlib.size()} ranks, norm {length:.3f}")
commlib.shutdown()
