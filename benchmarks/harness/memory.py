# SPDX-License-Identifier: Apache-2.0
"""How much memory a process has got more of while it does something."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_INTERVAL_S = 0.005


@dataclass(frozen=True)
class Resident:
    """Bytes. `anonymous`: what the process alone has (RssAnon). `shared`: pages that exist of all memfds which it has
    open, arenas of other ranks among them. `mapped`: shared pages that it has looked at (RssShmem), which grows when
    it reads memory that another rank has long had.
    """

    anonymous: int
    shared: int
    mapped: int

    @classmethod
    def now(cls) -> Self:
        """As it is at this moment."""
        status = Path("/proc/self/status").read_text()
        found = dict(re.findall(r"^(Rss\w+):\s+(\d+) kB$", status, re.MULTILINE))
        return cls(int(found["RssAnon"]) << 10, _memfd_bytes(), int(found["RssShmem"]) << 10)


class Watch:
    """The most that this process has had more of since `before`, while the `with` lasted; looks every 5 ms."""

    def __init__(self, before: Resident) -> None:
        self._before = before
        self._most = before
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> Resident:
        """In bytes; of each kind by itself."""
        most, before = self._most, self._before
        return Resident(most.anonymous - before.anonymous, most.shared - before.shared, most.mapped - before.mapped)

    def _look(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_INTERVAL_S)
            now, most = Resident.now(), self._most
            self._most = Resident(
                max(now.anonymous, most.anonymous), max(now.shared, most.shared), max(now.mapped, most.mapped)
            )


def _memfd_bytes() -> int:
    blocks: dict[tuple[int, int], int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                status = os.stat(f"/proc/self/fd/{name}")
                blocks[status.st_dev, status.st_ino] = status.st_blocks
    return sum(blocks.values()) * 512
