# SPDX-License-Identifier: Apache-2.0
"""The control plane works without the compiled core, and its tests run where that is not built."""

from __future__ import annotations

from tests.control.bare import use_bare_package

try:
    import commlib  # noqa: F401
except ImportError:
    use_bare_package()
