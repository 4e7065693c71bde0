# SPDX-License-Identifier: Apache-2.0
"""The command line that all benchmarks have, and how one of them ends."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from harness import REPOSITORY
from harness.group import GroupError
from harness.libraries import GLOO, OPEN_MPI
from harness.sizes import byte_count
from tests.lab import LabError

T = TypeVar("T")
_LIBRARIES = {"mpi": OPEN_MPI, "gloo": GLOO}


class NotHereError(RuntimeError):
    """Something cannot be measured on this machine; the text says why."""


@dataclass(frozen=True)
class Options:
    """What was asked for: sizes in bytes, and how many rounds are reported."""

    quick: bool
    sizes: tuple[int, ...]
    rounds: int
    without: frozenset[str]
    json: Path | None
    png: Path | None
    own: argparse.Namespace  # what the script alone has
    command: str  # as somebody in the root of the repository would type it


def read_options(
    description: str,
    *,
    sizes: Sequence[int],
    rounds: tuple[int, int],
    quick_sizes: Sequence[int] | None = None,
    more: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> Options:
    """Read the command line. `rounds`: how many there are, with --quick and without; `more` adds a script's options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--sizes", type=listed(byte_count), help="such as 4KiB,64MiB")
    parser.add_argument("--rounds", type=positive, help="default: {1}, and {0} with --quick".format(*rounds))
    parser.add_argument("--without", choices=_LIBRARIES, action="append", default=[], help="leave a library out")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write everything that was measured there")
    parser.add_argument("--png", type=writable, metavar="FILE", help="draw it there")
    more(parser)
    own = parser.parse_args()
    return Options(
        quick=own.quick,
        sizes=own.sizes or tuple(quick_sizes if own.quick and quick_sizes else sizes),
        rounds=own.rounds or rounds[0 if own.quick else 1],
        without=frozenset(_LIBRARIES[name] for name in own.without),
        json=own.json,
        png=own.png,
        own=own,
        command=shlex.join(["python", os.path.relpath(sys.argv[0], REPOSITORY), *sys.argv[1:]]),
    )


def run_script(main: Callable[[], None]) -> None:
    """Call a script's `main`. What is wrong with the surroundings is told in words, and the status is 1."""
    # What was begun is undone (processes, hosts) where Python ends in order.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        main()
    except (GroupError, LabError, NotHereError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def listed(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """What reads a list with commas by reading its parts."""

    def read_all(text: str) -> tuple[T, ...]:
        try:
            return tuple(read(part) for part in text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_all


def positive(text: str) -> int:
    """Read a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 1 or more")
    return int(text)


def writable(text: str) -> Path:
    """A file that can be written: found out before anything is measured."""
    path = Path(text).absolute()
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path
