"""The charts of a report, each as SVG text that reads well on a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.report.content import Floats, RoundPoint, Row
from fastfedul.report.drawing import (
    ATTACK,
    BLUE,
    INK,
    RIGHT,
    VERMILLION,
    add_legend,
    draw,
    label_percent,
    plot_shares,
    use_whole_numbers,
)
from fastfedul.report.wording import (
    describe_shares,
    shorten,
    show_number,
    show_share,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_COLUMNS = 18
_BIN_WIDTHS = (0.25, 0.5, 1, 2, 5, 10, 15)


def draw_rounds(
    rounds: Sequence[RoundPoint], forgotten: Sequence[tuple[int, str]] = ()
) -> str:
    """Return the course of training, with the moments of forgetting marked."""

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        at = [point.round for point in rounds]
        plot_shares(axes, at, rounds)
        _mark_end(axes, rounds[-1])
        for number in sorted({number for number, _ in forgotten}):
            _mark_forgetting(axes, number, forgotten)
        low, high = min(at), max([*at, *(number for number, _ in forgotten)])
        air = max((high - low) * 0.04, 0.5)
        axes.set_xlim(low - air, high + air)
        use_whole_numbers(axes.xaxis)
        axes.set_xlabel("rounds of training")
        add_legend(figure)

    first, last = rounds[0], rounds[-1]
    text = (
        f"Line chart. Round {first.round}: "
        f"{describe_shares(first.main, first.backdoor)}; round {last.round}: "
        f"{describe_shares(last.main, last.backdoor)}"
    )
    return draw("rounds", text, 250, paint)


def draw_bars(rows: Sequence[Row]) -> str:
    """Return bars for every model: right answers, and how often the attack works."""
    attacked = any(row.backdoor is not None for row in rows)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        _add_bars(axes, rows, RIGHT, -0.2 if attacked else 0.0)
        if attacked:
            _add_bars(axes, rows, ATTACK, 0.2)
        names = [shorten(row.method, _LABEL_COLUMNS) for row in rows]
        axes.set_yticks(range(1, len(rows) + 1), names)
        axes.set_ylim(len(rows) + 0.5, 0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        label_percent(axes.xaxis)
        axes.set_xlim(0, 1.22)
        axes.spines["bottom"].set_bounds(0, 1)
        axes.grid(axis="x")
        add_legend(figure)

    text = "Bar chart. " + "; ".join(
        f"{shorten(row.method)}: {describe_shares(row.main, row.backdoor)}"
        for row in rows[:12]
    )
    return draw("bars", text, 62 + (46 if attacked else 30) * len(rows), paint)


def draw_angles(unit_angles: Mapping[str, Floats]) -> str:
    """Return a histogram per method of how far the output units turned."""
    finite = {
        method: np.asarray(angles, np.float64)[np.isfinite(angles)]
        for method, angles in unit_angles.items()
    }
    top = max(
        (float(angles.max()) for angles in finite.values() if angles.size), default=0
    )
    width = next((w for w in _BIN_WIDTHS if top / w <= 15), _BIN_WIDTHS[-1])
    edges = np.arange(math.floor(top / width) + 2) * width

    def paint(figure: Figure) -> None:
        panels = figure.subplots(
            len(finite), 1, sharex=True, sharey=True, squeeze=False
        )
        for axes, (method, angles) in zip(panels[:, 0], finite.items(), strict=True):
            axes.hist(angles, edges, color=BLUE, alpha=0.8, edgecolor="white")
            _mark_mean(axes, angles)
            axes.set_title(shorten(method, 30), loc="left", fontsize=11)
            use_whole_numbers(axes.yaxis, 3)
            axes.grid(axis="y")
        panels[-1, 0].set_xlabel("angle to the retrained model (degrees)")
        figure.supylabel("output units", fontsize=11)

    text = "Histograms of angles to the retrained model. " + "; ".join(
        f"{shorten(method)}: mean {show_number(_mean(angles), 1)} degrees"
        for method, angles in list(finite.items())[:12]
    )
    return draw("angles", text, 60 + 105 * len(finite), paint)


def _mark_end(axes: Axes, last: RoundPoint) -> None:
    axes.plot(last.round, last.main, "o", color=BLUE, clip_on=False)
    if last.backdoor is not None:
        axes.plot(last.round, last.backdoor, "s", color=VERMILLION, clip_on=False)


def _mark_forgetting(
    axes: Axes, number: int, forgotten: Sequence[tuple[int, str]]
) -> None:
    names = [name for at, name in forgotten if at == number]
    who = (
        shorten(names[0], _LABEL_COLUMNS)
        if len(names) == 1
        else f"{len(names)} clients"
    )
    axes.axvline(number, color=INK, linewidth=1.2, linestyle=":")
    if len({at for at, _ in forgotten}) <= 3:
        axes.annotate(
            f"{who} forgotten",
            (number, 0.5),
            (-4, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="center",
            fontsize=10,
        )


def _add_bars(axes: Axes, rows: Sequence[Row], kind: str, shift: float) -> None:
    main = kind == RIGHT
    places, values, ends = [], [], []
    for place, row in enumerate(rows, 1):
        value = row.main if main else row.backdoor
        interval = row.main_interval if main else row.backdoor_interval
        if value is None or not math.isfinite(value):
            continue
        places.append(place + shift)
        values.append(value)
        ends.append(value)
        if interval is not None and all(map(math.isfinite, interval)):
            axes.plot(interval, [place + shift] * 2, color=INK, linewidth=1.2)
            ends[-1] = max(value, interval[1])
    colour, hatch = (BLUE, None) if main else (VERMILLION, "////")
    axes.barh(
        places,
        values,
        0.38,
        label=kind,
        color=colour,
        hatch=hatch,
        edgecolor="white",
        linewidth=0,
    )
    for at, value, end in zip(places, values, ends, strict=True):
        axes.text(end + 0.02, at, show_share(value), va="center", fontsize=10)


def _mark_mean(axes: Axes, angles: Floats) -> None:
    mean = _mean(angles)
    if mean is None:
        return
    axes.axvline(mean, color=VERMILLION, linewidth=1.6)
    axes.text(
        1,
        1.04,
        f"mean {mean:.1f}°",
        transform=axes.transAxes,
        ha="right",
        color=VERMILLION,
        fontsize=10.5,
    )


def _mean(angles: Floats) -> float | None:
    return float(angles.mean()) if angles.size else None
