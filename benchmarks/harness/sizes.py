# SPDX-License-Identifier: Apache-2.0
"""Sizes, times and shares, as people write and read them."""

from __future__ import annotations

import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"": 1, "kib": KIB, "mib": MIB, "gib": GIB}


def byte_count(text: str) -> int:
    """Read a size such as 4096, 4KiB or 64MiB. Raises ValueError for what is no whole number of float32."""
    match = re.fullmatch(r"(\d+)\s*(|kib|mib|gib)", text.strip().lower())
    count = int(match[1]) * _UNITS[match[2]] if match else 0
    if count <= 0 or count % 4:
        raise ValueError(f"{text!r} is no size: expected a multiple of 4 such as 4096, 4KiB or 64MiB")
    return count


def size_in_words(size: float) -> str:
    """4 KiB, 64 MiB, 100 B; rounded where it is no whole number of a unit."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.4g} B"


def time_in_words(seconds: float) -> str:
    """1.23 µs, 45.6 ms, 7.89 s."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:#.3g} {name}".replace(". ", " ")
    return f"{seconds * 1e6:#.3g} µs".replace(". ", " ")


def span_in_words(least: float, most: float, unit: str) -> str:
    """351 … 359 ms, 988 ms … 1.33 s: the unit is said once where it is the same."""
    first, last = in_words(least, unit), in_words(most, unit)
    (number, _, own), (_, _, other) = first.partition(" "), last.partition(" ")
    return f"{number if own == other else first} … {last}"


def in_words(value: float, unit: str) -> str:
    """A value of a unit: "s" (also "CPU s"), "B", or any other."""
    if unit == "B":
        return size_in_words(value)
    if unit == "s":
        return time_in_words(value)
    if unit == "CPU s":
        return time_in_words(value) + " CPU"
    return f"{value:.3g} {unit}"
