# SPDX-License-Identifier: Apache-2.0
"""What all tests share: labs need root, and soak tests run only when asked for."""

from __future__ import annotations

import os

import pytest

from tests import lab


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out soak tests unless `-m` says something about them."""
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
