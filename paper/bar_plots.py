"""Plots of bars: accuracies, costs, and the angles' histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastfedul.report.drawing import BLUE, FAINT, GREEN, INK, VERMILLION
from fastfedul.report.wording import show_bytes
from paper.columns import Group, find, papers_time, show_percent
from paper.experiments import PAPER
from paper.plot_style import (
    BACKDOOR,
    MAIN,
    ORANGE,
    SKY,
    label_percent,
    legend_below,
    mean_and_interval,
    render,
    value_of,
    whiskers,
)
from paper.summary import WIDE_DEGREES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.36
_BIN = 2.5
_MOST_BINS = 40
_SMALL = 8.5
_COLUMN = 1.115  # where the figures end, to the right of the bars


def draw_accuracies(stem: str, title: str, group: Group) -> str:
    """Return bars of main and backdoor accuracy, the paper's as hollow markers."""

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        _add_shares(axes, group, MAIN, -_BAR / 2, BLUE)
        _add_shares(axes, group, BACKDOOR, _BAR / 2, VERMILLION)
        _add_papers(axes, group)
        _name_methods(axes, group)
        _tell_missing(axes, group)
        label_percent(axes.xaxis)
        axes.set_xlim(0, 1.12)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.spines["bottom"].set_bounds(0, 1)
        axes.grid(axis="x")
        axes.set_xlabel(mean_and_interval(group))
        legend_below(figure, axes)

    return render(stem, title, 1.3 + 0.42 * len(group), paint)


def draw_costs(stem: str, title: str, group: Group) -> str:
    """Return bars of seconds and of bytes, on logarithmic axes."""

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        times = [line.seconds for line in group]
        _add_log_bars(left, times, 0, 0.6, SKY, "time")
        papers = _add_papers_times(left, group)
        _use_log(left, [*times, *papers], "time to forget", 10, _seconds)
        kinds = {
            "history stored": (BLUE, [line.stored_bytes for line in group]),
            "history read": (GREEN, [line.bytes_read for line in group]),
            "peak memory": (ORANGE, [line.peak_bytes for line in group]),
        }
        for place, (label, (colour, values)) in enumerate(kinds.items()):
            _add_log_bars(right, values, (place - 1) * 0.26, 0.25, colour, label)
        numbers = [value for _, values in kinds.values() for value in values]
        _use_log(right, numbers, "bytes (no bar: none, or unknown)", 16, _bytes)
        _name_methods(left, group)
        _tell_missing(left, group)
        for place, line in enumerate(group):
            if line.num_measured and not line.seconds:
                _write(left, place, "not timed yet")
        legend_below(figure, left, right)

    return render(stem, title, 1.3 + 0.42 * len(group), paint)


def draw_angles(stem: str, title: str, group: Group) -> str:
    """Return a histogram per method of how far the output units turned."""
    top = max((max(line.unit_angles, default=0.0) for line in group), default=0.0)
    top = max(top, WIDE_DEGREES + _BIN)
    width = _BIN if top / _BIN <= _MOST_BINS else top / _MOST_BINS
    edges = [width * step for step in range(int(top / width) + 2)]

    def paint(figure: Figure) -> None:
        panels = figure.subplots(
            len(group), 1, sharex=True, sharey=True, squeeze=False
        )[:, 0]
        colours = (BLUE, VERMILLION) * len(group)
        for axes, line, colour in zip(panels, group, colours, strict=False):
            axes.hist(line.unit_angles, edges, color=colour, edgecolor="white")
            axes.axvline(WIDE_DEGREES, color=FAINT, linestyle=":")
            mean = line.mean_unit_angle
            said = "no result" if mean is None else f"mean {mean:.1f}°"
            axes.set_title(f"{line.label} ({said})")
            if mean is not None:
                axes.axvline(mean, color=INK, linestyle="--", linewidth=1.4)
            axes.set_ylabel("output units")
            axes.yaxis.get_major_locator().set_params(integer=True)
            axes.set_xlim(0, edges[-1])
            axes.grid(axis="y")
        panels[-1].set_xlabel(
            "angle to the retrained model in degrees (dashed: mean; dotted: "
            f"{WIDE_DEGREES:g})"
        )

    return render(stem, title, 1.0 + 1.6 * len(group), paint)


def _add_shares(axes: Axes, group: Group, name: str, shift: float, colour: str) -> None:
    ends = whiskers(group, name)
    label: str | None = name
    for place, (line, end) in enumerate(zip(group, ends, strict=True)):
        value = value_of(line, name)
        if value is None:
            continue
        at = place + shift
        axes.barh(at, value, _BAR, color=colour, label=label)
        label = None
        if any(end):
            reach = [[end[0]], [end[1]]]
            axes.errorbar(value, at, xerr=reach, color=INK, capsize=2, linewidth=1.1)
        text = show_percent(value)
        axes.text(_COLUMN, at, text, ha="right", va="center", fontsize=_SMALL)


def _add_papers(axes: Axes, group: Group) -> None:
    label: str | None = "paper"
    for place, line in enumerate(group):
        if line.paper is None:
            continue
        rows = [place - _BAR / 2, place + _BAR / 2]
        axes.plot(
            line.paper,
            rows,
            "D",
            markerfacecolor="white",
            markeredgecolor=INK,
            markersize=5,
            label=label,
            clip_on=False,
            zorder=4,
        )
        label = None


def _name_methods(axes: Axes, group: Group) -> None:
    axes.set_yticks(range(len(group)), [line.label for line in group])
    axes.set_ylim(len(group) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _tell_missing(axes: Axes, group: Group) -> None:
    """Write where there are no numbers, and why; above the paper's backdoor."""
    for place, line in enumerate(group):
        if not line.num_measured:
            said = "refused" if line.refused else "not run yet"
            _write(axes, place - _BAR / 2, said)


def _write(axes: Axes, at: float, text: str) -> None:
    """Write where a bar would begin."""
    axes.text(
        0.02,
        at,
        text,
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=_SMALL,
        color=FAINT,
    )


def _add_log_bars(
    axes: Axes,
    values: Sequence[float | None],
    shift: float,
    width: float,
    colour: str,
    label: str,
) -> None:
    known = [(place + shift, value) for place, value in enumerate(values) if value]
    if known:
        places, numbers = zip(*known, strict=True)
        axes.barh(places, numbers, width, color=colour, label=label)


def _add_papers_times(axes: Axes, group: Group) -> list[float]:
    """Mark the paper's ratios from our time of Fast-FedUL on, and return the times."""
    base = find(PAPER.label, group)
    if base is None or not base.seconds:
        return []
    ratios = [(place, papers_time(line)) for place, line in enumerate(group)]
    known = [(place, ratio * base.seconds) for place, ratio in ratios if ratio]
    times = [time for _, time in known]
    if known:
        axes.plot(
            times,
            [place for place, _ in known],
            "D",
            color=INK,
            markerfacecolor="white",
            label=f"paper: ratio to {PAPER.label}",
        )
    return times


def _use_log(
    axes: Axes,
    values: Sequence[float | None],
    label: str,
    base: int,
    show: Callable[[float], str],
) -> None:
    """Make an axis logarithmic, from one power of the base to another."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    logarithms = [math.log(value, base) for value in values if value] or [0.5]
    first = math.floor(min(logarithms) - 0.1)
    axes.set_xscale("log", base=base)
    axes.set_xlim(float(base) ** first, float(base) ** math.ceil(max(logarithms)))
    axes.xaxis.set_major_locator(LogLocator(base, numticks=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=_SMALL)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    axes.grid(axis="x")


def _seconds(value: float) -> str:
    return f"{value:,g} s"


def _bytes(value: float) -> str:
    # A label of an axis never breaks between a number and its unit.
    return show_bytes(value).replace(".0", "").replace(" ", "\u00a0")
