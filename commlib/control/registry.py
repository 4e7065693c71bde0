# SPDX-License-Identifier: Apache-2.0
"""What names mean: which key, which place in the job's virtual byte space, which rows of the ready table.

Whoever declares a name first decides, and nothing that was once answered ever changes, so ranks may declare in any
order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from commlib.control.messages import UNNAMED_COUNT, UNNAMED_KINDS, Declaration, UnnamedKeys
from commlib.errors import ConfigError

__all__ = ["MAX_PARTS", "MAX_ROWS", "Registry", "describe_name", "unnamed_name"]

MAX_ROWS = 1 << 22  # of the ready table
MAX_PARTS = 1 << 16  # key = declared_key << 16 | part
CURSOR_ALIGNMENT = 64
GRANULE_BYTES = 64 * 1024  # consecutive unnamed operations go to consecutive granules, hence to different owners

_UNNAMED = re.compile(r"\0(\w+)\.(\d{1,4})", re.ASCII)


def unnamed_name(kind: str, index: int) -> str:
    """The name under which recycled key number `index` of `kind` is declared when it needs more than one part."""
    return f"\0{kind}.{index}"


def describe_name(name: str, round_number: int = 1) -> str:
    """A name as people should read it. Unnamed operations are counted in program order, from 1."""
    match = _UNNAMED.fullmatch(name)
    if match is None:
        return f'tensor "{name}"'
    return f"unnamed {match[1]} number {max(round_number - 1, 0) * UNNAMED_COUNT + int(match[2]) + 1}"


@dataclass
class _Entry:
    declared_key: int
    cursor: int
    extents: list[tuple[int, int]] = field(default_factory=list)  # runs (first row, parts)

    @property
    def parts(self) -> int:
        return sum(parts for _, parts in self.extents)

    def answer(self, parts: int) -> Declaration:
        """The rows of the first `parts` parts: the same for all who ask for as many, however far the name has grown."""
        runs = []
        for first_row, run_parts in self.extents:
            if parts == 0:
                break
            taken = min(parts, run_parts)
            runs.append((first_row, taken))
            parts -= taken
        return Declaration(self.declared_key, self.cursor, tuple(runs))


class Registry:
    """All names of a job. Not thread-safe."""

    def __init__(self, partition_bytes: int, max_rows: int = MAX_ROWS) -> None:
        self._partition_bytes = partition_bytes
        self._max_rows = max_rows
        self._entries: dict[str, _Entry] = {}
        self._next_key = 0
        self._next_row = 0
        self._next_cursor = 0
        self.unnamed: dict[str, UnnamedKeys] = {kind: self._reserve(kind) for kind in UNNAMED_KINDS}

    def _reserve(self, kind: str) -> UnnamedKeys:
        keys = UnnamedKeys(self._next_key, self._next_row, self._next_cursor, GRANULE_BYTES)
        self._next_key += UNNAMED_COUNT
        self._next_row += UNNAMED_COUNT
        self._next_cursor += UNNAMED_COUNT * GRANULE_BYTES
        return keys

    def _unnamed_entry(self, name: str) -> _Entry | None:
        """What was reserved for an unnamed operation, whether or not somebody has asked for it yet."""
        match = _UNNAMED.fullmatch(name)
        if match is None or match[1] not in self.unnamed or int(match[2]) >= UNNAMED_COUNT:
            return None
        keys, index = self.unnamed[match[1]], int(match[2])
        if name != unnamed_name(match[1], index):  # with leading zeros, say
            return None
        cursor = keys.first_cursor + index * keys.cursor_stride
        return self._entries.setdefault(name, _Entry(keys.first_key + index, cursor, [(keys.first_row + index, 1)]))

    def parts(self, total_bytes: int) -> int:
        """How many partitions a tensor of `total_bytes` has; an empty one has one."""
        return max(1, -(-total_bytes // self._partition_bytes))

    def declare(self, names: Sequence[tuple[str, int]]) -> list[Declaration]:
        """The places of `names`, each with its bytes. All or none; raises ConfigError if there is no room for them."""
        self._check(names)
        return [self._declare(name, total_bytes) for name, total_bytes in names]

    def _check(self, names: Sequence[tuple[str, int]]) -> None:
        grown: dict[str, int] = {}
        for name, total_bytes in names:
            parts = self.parts(total_bytes)
            if parts > MAX_PARTS:
                raise ConfigError(
                    f"{describe_name(name)} has {total_bytes} bytes, more than {MAX_PARTS} partitions of "
                    f"{self._partition_bytes}; expected a larger COMMLIB_PARTITION_BYTES"
                )
            if name.startswith("\0") and self._unnamed_entry(name) is None:
                raise ConfigError(f"names that begin with a zero byte are commlib's own, unlike {name!r}")
            grown[name] = max(parts, grown.get(name, 0))
        rows = sum(max(0, parts - self._parts_of(name)) for name, parts in grown.items())
        if self._next_row + rows > self._max_rows:
            raise ConfigError(
                f"the job has no room for {describe_name(names[0][0])} and the {len(names) - 1} names with it: they "
                f"need {rows} partitions, and {self._max_rows - self._next_row} of {self._max_rows} are left. Use "
                "fewer names (the same in every step), or a larger COMMLIB_PARTITION_BYTES"
            )

    def _parts_of(self, name: str) -> int:
        entry = self._entries.get(name)
        return entry.parts if entry else 0

    def _declare(self, name: str, total_bytes: int) -> Declaration:
        parts = self.parts(total_bytes)
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(self._next_key, self._next_cursor)
            self._next_key += 1
            self._next_cursor += max(1, -(-total_bytes // CURSOR_ALIGNMENT)) * CURSOR_ALIGNMENT
        missing = parts - entry.parts
        if missing > 0:
            entry.extents.append((self._next_row, missing))
            self._next_row += missing
        return entry.answer(parts)
