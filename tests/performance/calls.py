# SPDX-License-Identifier: Apache-2.0
"""Calls from Python to be counted from outside: a job of one process, with an array of 4 KiB.

Of each case some calls come first, so that what happens only once has happened; those that count are between two calls
of `getsid`, which nothing else here calls, and which Callgrind and strace both see. One line a case, at the end:
`<name of the case>\t<calls that count>`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

import commlib

CALLS = 1000
WARM_UP = 1100  # operations without a name have 1,024 keys, which are made at their first use

array = np.ones(1024, np.float32)


def named(calls: int) -> None:
    for _ in range(calls):
        commlib.push_pull_(array, name="a")


def unnamed(calls: int) -> None:
    for _ in range(calls):
        commlib.push_pull_(array)


def later(calls: int) -> None:
    for _ in range(calls):
        commlib.push_pull_async_(array, name="a").wait()


CASES: dict[str, Callable[[int], None]] = {
    "push_pull_ with a name": named,
    "push_pull_ without a name": unnamed,
    "push_pull_async_ and wait": later,
}

if __name__ == "__main__":
    commlib.init()
    for call in CASES.values():
        call(WARM_UP)
        os.getsid(0)
        call(CALLS)
        os.getsid(0)
    commlib.shutdown()
    assert np.all(array == 1)
    for name in CASES:
        print(f"{name}\t{CALLS}")
