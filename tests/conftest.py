# SPDX-License-Identifier: Apache-2.0
"""What all tests share: labs need root, and soak tests run only when asked for."""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import lab

# What tests of one module share takes seconds to make: a build, or a job whose results all of them look at. One process
# runs them all, and they come first, so that no long one is left for the end.
SHARING = ("tests/torch/", "tests/tensorflow/", "tests/test_packaging.py", "tests/test_c_api.py")


class Scheduler(LoadScopeScheduling):
    """Gives tests to processes one by one, but those that share something together."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0] if nodeid.startswith(SHARING) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put first what shares something, and leave out soak tests unless `-m` says something about them."""
    items.sort(key=lambda item: not item.nodeid.startswith(SHARING))
    if "soak" in (config.getoption("-m") or ""):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=soak)
    items[:] = [item for item in items if item not in soak]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A lab that cannot be made is a reason to skip on somebody's desk, and a failure on CI."""
    problem = lab.what_is_missing() if item.get_closest_marker("lab") else None
    if problem is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"CI must be able to make labs: {problem}", pytrace=False)
    pytest.skip(problem)
