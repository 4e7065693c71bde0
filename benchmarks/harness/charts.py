# SPDX-License-Identifier: Apache-2.0
"""Pictures of rows: lines over sizes or numbers of ranks, and bars. Each contender has one colour in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness.contenders import ARENA, MEMCPY, ORDINARY, OUT_OF_PLACE
from harness.libraries import GLOO, OPEN_MPI
from harness.report import Row
from harness.sizes import size_in_words, time_in_words

# Colours that can be told apart by everybody (after Okabe and Ito).
_COLOURS = {
    ARENA: "#0072B2",
    "commlib": "#0072B2",
    ORDINARY: "#56B4E9",
    OUT_OF_PLACE: "#009E73",
    OPEN_MPI: "#D55E00",
    f"{OPEN_MPI}, blocking": "#D55E00",
    f"{OPEN_MPI}, non-blocking": "#F4A582",
    GLOO: "#E69F00",
    f"{GLOO}, blocking": "#E69F00",
    f"{GLOO}, async": "#F5D58A",
    MEMCPY: "#777777",
    "optimum": "#222222",
    "TCP, same traffic": "#999999",
}
_MORE_COLOURS = ("#08306B", "#2171B5", "#6BAED6", "#C6DBEF", "#7F2704", "#D94801", "#FD8D3C", "#FDD0A2")


def lines(
    axes: Any,
    rows: Sequence[Row],
    at: Callable[[Row], float],
    *,
    xlabel: str,
    tick: Callable[[float], str] = size_in_words,
) -> None:
    """Time by size or number of ranks, a line for each contender, both axes logarithmic; from least to most shaded."""
    contenders = list(dict.fromkeys(one.contender for one in rows))
    for contender in contenders:
        own = sorted((one for one in rows if one.contender == contender), key=at)
        places = [at(one) for one in own]
        style = "--" if contender == MEMCPY else "-"
        colour = _colour(contender, contenders)
        axes.plot(places, [one.median for one in own], style, marker="o", ms=4, color=colour, label=contender)
        least, most = [min(one.rounds) for one in own], [max(one.rounds) for one in own]
        axes.fill_between(places, least, most, color=colour, alpha=0.12, linewidth=0)
    places = sorted({at(one) for one in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [tick(place) for place in places])
    times_on_y(axes, rows)
    axes.set_xlabel(xlabel, fontsize=9)
    _frame(axes)


def bars(
    axes: Any,
    rows: Sequence[Row],
    value: Callable[[Row], float],
    *,
    label: Callable[[float], str],
    ylabel: str,
    group: Callable[[Row], str] = lambda one: one.case,
) -> None:
    """Bars in groups, one group a case, each with its value above it."""
    groups = list(dict.fromkeys(group(one) for one in rows))
    contenders = list(dict.fromkeys(one.contender for one in rows))
    width = 0.8 / len(contenders)
    for place, contender in enumerate(contenders):
        own = [one for one in rows if one.contender == contender]
        places = [groups.index(group(one)) + (place - (len(contenders) - 1) / 2) * width for one in own]
        drawn = axes.bar(places, [value(one) for one in own], width * 0.92, color=_colour(contender, contenders))
        drawn.set_label(contender)
        crowded = len(groups) * len(contenders) > 12
        texts = [label(value(one)) for one in own]
        axes.bar_label(drawn, texts, fontsize=7, padding=2, rotation=90 if crowded else 0)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.18)
    axes.set_ylabel(ylabel, fontsize=9)
    _frame(axes)
    axes.tick_params(axis="x", labelsize=8 if len(groups) < 6 else 7)


def times_on_y(axes: Any, rows: Sequence[Row]) -> None:
    """A logarithmic axis of times, with a few more ticks where it spans little."""
    from matplotlib.ticker import LogLocator

    seconds = [value for one in rows for value in one.rounds]
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if max(seconds) > 100 * min(seconds) else (1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: time_in_words(value))
    axes.minorticks_off()


def one_legend(figure: Any) -> None:
    """In place of those of all panels, which show the same."""
    shown: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
        axes.get_legend().remove()
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), frameon=False, fontsize=8)


def _frame(axes: Any) -> None:
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    shown = len(axes.get_legend_handles_labels()[1])
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": min(shown, 4)}
    axes.legend(frameon=False, fontsize=8, **below)


def _colour(contender: str, contenders: Sequence[str]) -> str:
    others = [name for name in contenders if name not in _COLOURS]
    return _COLOURS.get(contender) or _MORE_COLOURS[others.index(contender) % len(_MORE_COLOURS)]
