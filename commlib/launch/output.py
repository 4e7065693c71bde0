# SPDX-License-Identifier: Apache-2.0
"""What the members of a job print, as lines with the member's name before them.

A line is what ends with a newline; it is written in one piece, and apart from the name byte for byte as it came. On a
terminal a carriage return ends a line too, so that progress bars move. What a member leaves at its end, unended by a
newline, is written as it is; only if somebody else has something to say after it, a newline goes between.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Outlet", "Pump", "pumps_for"]

_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 24  # is held back until it ends
_LINE_END = re.compile(rb"\n")
_TERMINAL_LINE_END = re.compile(rb"\n|\r(?!\n)")


@dataclass(eq=False)
class Outlet:
    """Where one output of one member goes: `prefix` before each line, to the descriptor `destination`."""

    prefix: bytes
    destination: int
    held: bytearray = field(default_factory=bytearray)  # a line that has not ended yet


class Pump(threading.Thread):
    """Carries lines from pipes to one file, in a thread of its own: it blocks when nobody reads what it writes.

    Takes over the reading ends, `outlets` by descriptor, and ends when all writing ends are closed. When the
    file takes no more (nobody reads it, a disk is full), the reading ends are closed, so that the members learn it from
    their own next write. `on_end` is called last, in this thread.
    """

    def __init__(self, outlets: Mapping[int, Outlet], on_end: Callable[[], object]) -> None:
        super().__init__(name="cl-output", daemon=True)
        self._outlets = dict(outlets)
        self._on_end = on_end
        self._unfinished: Outlet | None = None  # who wrote last, if that did not end a line
        terminal = any(os.isatty(outlet.destination) for outlet in outlets.values())
        self._line_end = _TERMINAL_LINE_END if terminal else _LINE_END
        self._ends = (b"\n", b"\r") if terminal else (b"\n",)

    def run(self) -> None:
        """Until the last writing end is closed."""
        with selectors.DefaultSelector() as selector:
            for descriptor, outlet in self._outlets.items():
                selector.register(descriptor, selectors.EVENT_READ, outlet)
            while selector.get_map():
                for key, _ in selector.select():
                    try:
                        more = self._carry(key.fd, key.data)
                    except OSError:
                        more = False
                    if not more:
                        selector.unregister(key.fd)
                        os.close(key.fd)
        self._on_end()

    def _carry(self, descriptor: int, outlet: Outlet) -> bool:
        """Take what is there and write what is complete; False at the end."""
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            if outlet.held:
                self._write(outlet, bytes(outlet.held))
            return False
        end = max(data.rfind(end) for end in self._ends) + 1
        if end == 0 and len(outlet.held) < _LONGEST_LINE:
            outlet.held += data
            return True
        end = end or len(data)  # a line that is too long to be held
        lines = bytes(outlet.held) + data[:end]
        outlet.held = bytearray(data[end:])
        self._write(outlet, lines)
        return True

    def _write(self, outlet: Outlet, lines: bytes) -> None:
        """`lines` with a prefix before each; the last one may be without its end, and then go on the next time."""
        between = b"" if self._unfinished is None or self._unfinished is outlet else b"\n"
        last = len(lines) - 1 if lines.endswith(self._ends) else len(lines)
        prefixed = self._line_end.sub(lambda end: end.group() + outlet.prefix, lines[:last]) + lines[last:]
        prefix = b"" if self._unfinished is outlet else outlet.prefix
        self._unfinished = None if last < len(lines) else outlet
        _write_all(outlet.destination, between + prefix + prefixed)


def pumps_for(outlets: Mapping[int, Outlet], on_end: Callable[[], object]) -> list[Pump]:
    """One pump for each file that is written to: standard output and error may be the same terminal, or may not."""
    by_file: dict[tuple[int, int], dict[int, Outlet]] = {}
    for descriptor, outlet in outlets.items():
        status = os.fstat(outlet.destination)
        by_file.setdefault((status.st_dev, status.st_ino), {})[descriptor] = outlet
    return [Pump(same, on_end) for same in by_file.values()]


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # somebody who shares the file has made it non-blocking
            select.select([], [descriptor], [])
