# SPDX-License-Identifier: Apache-2.0
"""What was measured: as JSON, as one table, and as a picture."""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.machine import machine, versions
from harness.options import NotHereError, Options
from harness.sizes import in_words, span_in_words


@dataclass(frozen=True)
class Row:
    """One contender in one case. `rounds` are the values that `median` is of; `ratios` are by their headings.

    `size` is the bytes that each rank has of what is summed, 0 where that says nothing.
    """

    section: str
    case: str
    contender: str
    unit: str
    median: float
    rounds: list[float]
    size: int = 0
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float | None:
        """Bytes of a rank by time, in 10⁹ bytes per second."""
        return self.size / self.median / 1e9 if self.size and self.unit == "s" else None


def row(
    section: str,
    case: str,
    contender: str,
    rounds: Sequence[float],
    *,
    unit: str = "s",
    size: int = 0,
    ratios: Mapping[str, float] | None = None,
) -> Row:
    """A row, whose median is taken here."""
    return Row(section, case, contender, unit, statistics.median(rounds), list(rounds), size, dict(ratios or {}))


def rows_of(
    section: str, case: str, rounds: Mapping[str, Sequence[float]], *, size: int, references: Mapping[str, str]
) -> list[Row]:
    """A row for each contender, from its seconds by round. `references`: heading of a ratio → contender it is to."""
    medians = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    return [
        row(
            section,
            case,
            name,
            seconds,
            size=size,
            ratios={
                heading: medians[name] / medians[other]
                for heading, other in references.items()
                if other in medians and other != name
            },
        )
        for name, seconds in rounds.items()
    ]


class Report:
    """All rows of one benchmark. `notes` stand below the table and say what its numbers are."""

    def __init__(self, benchmark: str, title: str, options: Options, missing: Mapping[str, str]) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = [f"Without {name}: {reason}." for name, reason in sorted(missing.items())]
        self._benchmark = benchmark
        self._title = title
        self._options = options
        self._missing = dict(missing)
        self._machine = machine()  # the load before anything is measured
        self._began = datetime.datetime.now(datetime.UTC)
        self._clock = time.monotonic()
        if options.png is not None:
            _matplotlib()  # found out before anything is measured

    def finish(self, draw: Callable[[Any, list[Row]], None]) -> None:
        """Print the table; write the JSON and the picture where they are wanted. `draw` fills a figure."""
        self._print()
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self._as_json(), indent=1, ensure_ascii=False) + "\n")
        if self._options.png is not None:
            self._paint(self._options.png, draw)

    def _as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self._benchmark,
            "title": self._title,
            "command": self._options.command,
            "began": self._began.isoformat(timespec="seconds"),
            "took_s": round(time.monotonic() - self._clock, 1),
            "machine": self._machine,
            "versions": versions(),
            "missing": self._missing,
            "notes": self.notes,
            "rows": [asdict(one) for one in self.rows],
        }

    def _print(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self._heading(), title_justify="left", box=None, pad_edge=False, header_style="bold")
        for heading in ("", "", "median", "least … most", "GB/s", "ratios"):
            table.add_column(heading, justify="left" if heading in ("", "ratios") else "right", no_wrap=True)
        section = case = ""
        for one in self.rows:
            if one.section != section:
                table.add_row()
                table.add_row(f"[bold]{one.section}[/]")
            is_new = (one.section, one.case) != (section, case)
            section, case = one.section, one.case
            table.add_row(
                one.case if is_new else "",
                one.contender,
                in_words(one.median, one.unit),
                span_in_words(min(one.rounds), max(one.rounds), one.unit),
                "" if one.gb_per_s is None else f"{one.gb_per_s:.3g}",
                ", ".join(f"{ratio:.3g} {heading}" for heading, ratio in one.ratios.items()),
            )
        console = Console(highlight=False)
        # Nothing is cut off, however narrow the terminal.
        console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
        console.print(table)
        console.print()
        for note in self.notes:
            console.print(note)

    def _heading(self) -> str:
        processor, cpus = self._machine["processor"], self._machine["cpus"]
        return f"{self._title}\n{processor}, {cpus} CPUs, {self._options.rounds} rounds\n"

    def _paint(self, path: Path, draw: Callable[[Any, list[Row]], None]) -> None:
        figure = _matplotlib().figure(figsize=(11, 5.2), layout="constrained")
        figure.suptitle(f"{self._title} — {self._machine['processor']}, {self._machine['cpus']} CPUs", fontsize=11)
        draw(figure, self.rows)
        figure.savefig(path, dpi=130, format="png")


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise NotHereError("--png needs matplotlib: pip install -e '.[bench]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
