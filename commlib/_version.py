# SPDX-License-Identifier: Apache-2.0
"""The version, alone, so that it can be read without importing anything."""

__version__ = "0.1.0"
