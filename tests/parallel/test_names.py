# SPDX-License-Identifier: Apache-2.0
"""What can be a name, and what cannot: said at once, and with nothing left behind."""

from __future__ import annotations

import pytest

from tests.lab import Lab
from tests.launch import run_job

SCRIPT = """
    import numpy as np, commlib
    from commlib import Sum
    from tests.launch import give

    commlib.init()
    size = commlib.size()
    ones = np.ones(3, np.float32)

    def refused(name, error, text):
        for call in (lambda: commlib.push_pull(ones, name=name), lambda: commlib.broadcast_(ones, 0, name=name),
                     lambda: commlib.declare([(name, 12)])):
            try:
                call()
            except error as found:
                assert text in str(found), found
            else:
                raise AssertionError(f"{name!r} was taken")

    refused(7, TypeError, "a name is a str, not a int")
    refused(b"bytes", TypeError, "a name is a str, not a bytes")
    refused("x" * 4097, ValueError, "at most 4096 characters, not 4097")
    refused("half \\ud800", ValueError, "half a surrogate pair")
    refused("\\0push_pull.5", ValueError, "begin with a zero character")

    class Text(str):
        def __str__(self):
            return "another"

    # These can, twice; a subclass of str is its text, and two names are one if their texts are.
    for name in ["", " ", "x" * 4096, "\\u00e4\\u65e5\\U0001f600", "a\\0b", "a\\nb", Text("t"), np.str_("n")]:
        for count in (3, 3, 2 << 20):  # the last has parts that were not declared at first
            assert np.all(commlib.push_pull(np.ones(count, np.float32), name=name, op=Sum) == size)
    assert np.all(commlib.push_pull(ones, name="t" if commlib.rank() else Text("t"), op=Sum) == size)
    assert np.all(commlib.push_pull(ones, op=Sum) == size)
    give("right")
    commlib.shutdown()
"""


@pytest.mark.parametrize("size", [1, 2])
def test_names_on_one_host(size: int) -> None:
    assert run_job(SCRIPT, hosts=[size], timeout=30) == ["right"] * size


@pytest.mark.lab
def test_names_on_several_hosts(lab: Lab) -> None:
    assert run_job(SCRIPT, hosts=[1, 1], servers=1, lab=lab, timeout=30) == ["right"] * 2
