# SPDX-License-Identifier: Apache-2.0
"""Makes ``commlib.control`` importable without running the package's ``__init__``, which needs the compiled core."""

from __future__ import annotations

import sys
import types
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def use_bare_package() -> None:
    """Put a package without contents in the place of ``commlib``; its submodules are found as always."""
    package = types.ModuleType("commlib")
    package.__path__ = [str(REPOSITORY / "commlib")]
    sys.modules["commlib"] = package
