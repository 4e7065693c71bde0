# SPDX-License-Identifier: Apache-2.0
"""One lab for all tests of a file: a job's hosts come first, its servers after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab import Lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Six hosts: up to four with workers, and two dedicated servers."""
    with Lab(6) as made:
        yield made
