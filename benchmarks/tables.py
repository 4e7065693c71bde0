# SPDX-License-Identifier: Apache-2.0
"""The results of `make bench` as tables in Markdown, as docs/performance.md has them.

python benchmarks/tables.py benchmarks/results/local.json …
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.sizes import in_words, span_in_words

Row = dict[str, Any]  # one of "rows" in the JSON


def extremes(values: list[float]) -> tuple[float, float]:
    """The least and the most."""
    return min(values), max(values)


def tables(result: dict[str, Any]) -> Iterable[str]:
    """Lines of Markdown: a table for each section of one script's results."""
    for section, rows in groupby(result["rows"], key=lambda row: row["section"]):
        yield f"| {section} | | median | least … most | ratios |"
        yield "|---|---|---:|---:|---|"
        last = ""
        for row in rows:
            case = row["case"] if row["case"] != last else ""
            last = row["case"]
            median, span = in_words(row["median"], row["unit"]), span_in_words(*extremes(row["rounds"]), row["unit"])
            ratios = ", ".join(f"{ratio:.3g} {heading}" for heading, ratio in row["ratios"].items())
            yield f"| {case} | {row['contender']} | {median} | {span} | {ratios} |"
        yield ""


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    for path in parser.parse_args().results:
        result = json.loads(path.read_text())
        machine = result["machine"]
        print(f"## {result['title']}\n")
        command = re.sub(r" --(json|png) \S+", "", result["command"])
        print(f"`{command}`, {machine['processor']}, {machine['cpus']} CPUs, {result['took_s']:.0f} s.\n")
        print("\n".join(tables(result)))


if __name__ == "__main__":
    main()
