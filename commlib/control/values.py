# SPDX-License-Identifier: Apache-2.0
"""How the text of a variable becomes a value. Each function raises ValueError, saying what was expected."""

from __future__ import annotations

import logging
import re

__all__ = ["byte_count", "flag", "log_level", "seconds", "whole_number"]


def whole_number(text: str) -> int:
    """Digits."""
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise ValueError("a whole number, 0 or more")
    return int(text)


def byte_count(text: str) -> int:
    """A number of bytes, with or without a suffix."""
    match = re.fullmatch(r"(\d+)\s*(?:([kmgt])(?:ib)?|b)?", text, re.ASCII | re.IGNORECASE)
    if match is None:
        raise ValueError("a number of bytes, as 4194304, 4096K, 4MiB or 1G (powers of 1024)")
    return int(match[1]) << (10 * " kmgt".index((match[2] or " ").lower()))


def seconds(text: str) -> float:
    """A decimal number."""
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text, re.ASCII):
        raise ValueError("a number of seconds, 0 or more")
    return float(text)


def flag(text: str) -> bool:
    """Yes or no."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("0 or 1")


def log_level(text: str) -> int:
    """A level of ``logging``, by name or number."""
    level = logging.getLevelNamesMapping().get(text.upper())
    if level is not None:
        return level
    if re.fullmatch(r"\d+", text, re.ASCII):
        return int(text)
    raise ValueError("DEBUG, INFO, WARNING, ERROR, CRITICAL or a number")
