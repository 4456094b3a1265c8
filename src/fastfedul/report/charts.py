"""The charts of a report, each as SVG text that reads well on a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.report.content import Contributions, Floats, RoundPoint, Row
from fastfedul.report.drawing import (
    ACCURACY,
    ATTACK,
    BLUE,
    EMPTY,
    GREEN,
    INK,
    VERMILLION,
    add_legend,
    draw,
    label_percent,
    make_figure,
    plot_shares,
    use_whole_numbers,
)
from fastfedul.report.wording import (
    describe_shares,
    shorten,
    show_number,
    show_share,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MAX_CLIENTS = 30
"""More clients do not fit; forgotten clients and the largest contributors are shown."""
MAX_LAYERS = 24
"""More arrays do not fit; the first and the last ones are shown."""

_LABEL_COLUMNS = 18
_CLIENT_COLUMNS = 14
_LAYER_COLUMNS = 18
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
        axes.set_xlabel("rounds done")
        add_legend(figure)

    first, last = rounds[0], rounds[-1]
    text = (
        f"Line chart by rounds done. {first.round}: "
        f"{describe_shares(first.main, first.backdoor)}; {last.round}: "
        f"{describe_shares(last.main, last.backdoor)}"
    )
    return draw("rounds", text, 250, paint)


def draw_bars(rows: Sequence[Row]) -> str:
    """Return bars for every model: accuracy and attack success."""
    text = "Bar chart. " + "; ".join(
        f"{shorten(row.method)}: {describe_shares(row.main, row.backdoor)}"
        for row in rows[:12]
    )
    return draw("bars", text, _bars_height(rows), lambda f: _paint_bars(f, rows))


def plot_bars(rows: Sequence[Row]) -> Figure:
    """Return the bars as a figure that notebooks show."""
    return make_figure(_bars_height(rows), lambda f: _paint_bars(f, rows))


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


def draw_contributions(
    contributions: Contributions, forgotten: Sequence[tuple[int, str]] = ()
) -> str:
    """Return a map of clients by rounds: who contributed how much when.

    Grey is a client that took no part; a bar marks where a client was forgotten.
    """
    places = _choose_clients(contributions, {name for _, name in forgotten})
    clients = [contributions.clients[place] for place in places]
    values = np.asarray(contributions.values, np.float64)[places]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        picture = _add_fields(axes, values)
        names = [shorten(client, _CLIENT_COLUMNS) for client in clients]
        axes.set_yticks(range(len(clients)), names)
        axes.tick_params(axis="y", length=0)
        use_whole_numbers(axes.xaxis)
        axes.set_xlabel("number of the round, from 0")
        _mark_forgotten(axes, clients, forgotten)
        bar = figure.colorbar(picture, location="top", aspect=40, pad=0.02)
        bar.set_label("size of the contribution")
        bar.outline.set_visible(False)

    text = (
        f"Heat map of the contributions of {len(clients)} of "
        f"{len(contributions.clients)} clients over {values.shape[1]} rounds."
    )
    return draw("contributions", text, 110 + 17 * len(clients), paint)


def draw_held_back(removed_by_layer: Sequence[tuple[str, float | None]]) -> str:
    """Return a bar for each array: the removed part, and the part held back.

    Args:
        removed_by_layer: Name of each array and the part of the difference that was
            removed, None where there was no difference. A part may be a little below 0
            or above 1, because directions cross layers.
    """
    told = [(name, kept) for name, kept in removed_by_layer if kept is not None]
    shown = told
    if len(told) > MAX_LAYERS:
        half = MAX_LAYERS // 2
        shown = [*told[:half], *told[-half:]]
    parts = [min(1.0, max(0.0, kept)) for _, kept in shown]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = range(len(shown))
        axes.barh(places, [1.0] * len(shown), color=EMPTY, label="held back")
        axes.barh(places, parts, color=GREEN, label="removed")
        axes.set_yticks(places, [_keep_end(name) for name, _ in shown])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        label_percent(axes.xaxis)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles[::-1],
            labels[::-1],
            loc="outside upper left",
            ncols=2,
            borderpad=0.1,
        )

    text = "Bar chart of the part removed in each layer. " + "; ".join(
        f"{tidy(name)}: {part:.0%}"
        for (name, _), part in list(zip(shown, parts, strict=True))[:12]
    )
    return draw("heldback", text, 70 + 18 * len(shown), paint)


def _bars_height(rows: Sequence[Row]) -> float:
    attacked = any(row.backdoor is not None for row in rows)
    return 62 + (46 if attacked else 30) * len(rows)


def _paint_bars(figure: Figure, rows: Sequence[Row]) -> None:
    attacked = any(row.backdoor is not None for row in rows)
    axes = figure.add_subplot()
    _add_bars(axes, rows, ACCURACY, -0.2 if attacked else 0.0)
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
    main = kind == ACCURACY
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


def _add_fields(axes: Axes, values: Floats) -> AxesImage:
    from matplotlib import colormaps

    known = values[np.isfinite(values)]
    return axes.imshow(
        np.ma.masked_invalid(values),
        colormaps["Blues"].with_extremes(bad=EMPTY),
        aspect="auto",
        interpolation="none",
        extent=(0.5, values.shape[1] + 0.5, len(values) - 0.5, -0.5),
        vmin=min(0.0, float(known.min(initial=0))),
        vmax=float(known.max(initial=0)) or 1.0,
    )


def _choose_clients(contributions: Contributions, forgotten: set[str]) -> list[int]:
    """Return the rows to show, in their own order."""
    if len(contributions.clients) <= MAX_CLIENTS:
        return list(range(len(contributions.clients)))
    sizes = np.abs(np.nan_to_num(contributions.values, nan=0, posinf=0, neginf=0))
    total = sizes.sum(axis=1, dtype=np.float64)
    first = np.array([name not in forgotten for name in contributions.clients])
    order = np.lexsort((-total, first))
    return sorted(order[:MAX_CLIENTS].tolist())


def _mark_forgotten(
    axes: Axes, clients: Sequence[str], forgotten: Sequence[tuple[int, str]]
) -> None:
    rows = {name: place for place, name in enumerate(clients)}
    labels = axes.get_yticklabels()
    for number, name in forgotten:
        if name in rows:
            place = rows[name]
            labels[place].set(color=VERMILLION, fontweight="bold")
            ends = (place - 0.45, place + 0.45)
            at = (number + 0.5, number + 0.5)
            axes.plot(at, ends, color=VERMILLION, linewidth=4, clip_on=False)


def _keep_end(name: str) -> str:
    """Return a name that leaves room for the bars; its end tells layers apart."""
    name = tidy(name)
    return name if len(name) <= _LAYER_COLUMNS else "…" + name[1 - _LAYER_COLUMNS :]
