"""The figure of the board: every run's gap to retraining, a row of dots per method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.report.drawing import BLUE, EMPTY, FAINT, GREEN, INK, VERMILLION
from fastfedul.rng import name_key, stream
from paper.board import rows
from paper.board.summary import BACKDOOR, MAIN, SHOWN, Gaps, Judged, Metric, gaps
from paper.plot_style import ORANGE, PURPLE, SKY, YELLOW, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLIP = 10.0
"""Points beyond which a gap is drawn at the edge, so that no method hides the rest."""

COLOURS = {
    rows.BEFORE: FAINT,
    rows.KRONECKER_ALL: SKY,
    rows.KRONECKER_64: BLUE,
    rows.KRONECKER_SUMS: "#004c7a",
    rows.SCALAR: ORANGE,
    rows.SCALAR_BEST: YELLOW,
    rows.AUTO: GREEN,
    rows.DIRECTION: PURPLE,
    rows.FEDERASER: VERMILLION,
    rows.FEDRECOVER: "#8c510a",
    rows.KD: "#7a5195",
    rows.MEASURED: "#5b7f00",
}
_JITTER = 0.28
_TITLES = {MAIN: "main accuracy", BACKDOOR: "backdoor"}


def draw_gaps(runs: Sequence[Judged]) -> str:
    """Return the figure as the text of an SVG file."""
    shown = [m for m in SHOWN if any(run.gap(m, MAIN) is not None for run in runs)]

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for metric, axes in zip((MAIN, BACKDOOR), panels, strict=True):
            _paint_panel(axes, runs, shown, metric)

    title = f"Gap to the mean of three retrainings, {len(runs)} runs"
    return render("board", title, 1.4 + 0.42 * max(len(shown), 4), paint)


def _paint_panel(
    axes: Axes, runs: Sequence[Judged], shown: Sequence[str], metric: Metric
) -> None:
    floors = [floor for run in runs if (floor := run.floor(metric)) is not None]
    if floors:
        half = sum(floors) / len(floors)
        axes.axvspan(-half, half, color=EMPTY, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, method in enumerate(shown):
        found = [gap for run in runs if (gap := run.gap(method, metric)) is not None]
        if found:
            _paint_dots(axes, place, method, np.array(found))
        own = gaps(runs, method, metric)
        if own is not None:
            _paint_mean(axes, place, own)
    axes.set_yticks(range(len(shown)), shown)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(-CLIP * 1.25, CLIP * 1.25)
    axes.set_xticks([-CLIP, -CLIP / 2, 0, CLIP / 2, CLIP])
    axes.set_title(_TITLES[metric])
    axes.set_xlabel("points above retraining")
    axes.grid(axis="x")


def _paint_dots(
    axes: Axes,
    place: int,
    method: str,
    found: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> None:
    shifts = stream(0, "board dots", name_key(method)).uniform(-1, 1, len(found))
    axes.scatter(
        np.clip(found, -CLIP, CLIP),
        place + _JITTER * shifts,
        s=9,
        color=COLOURS[method],
        alpha=0.6,
        linewidths=0,
    )
    for sign, side in ((-1, "right"), (1, "left")):
        beyond = int((sign * found > CLIP).sum())
        if beyond:
            axes.text(
                sign * CLIP * 1.04,
                place,
                f"{beyond}",
                ha=side,
                va="center",
                fontsize=8,
                color=COLOURS[method],
            )


def _paint_mean(axes: Axes, place: int, own: Gaps) -> None:
    low, high = own.signed.interval or (own.signed.value, own.signed.value)
    edges = [min(max(x, -CLIP), CLIP) for x in (low, high, own.signed.value)]
    axes.plot(edges[:2], [place, place], color=INK, linewidth=1.6, zorder=3)
    axes.plot([edges[2]] * 2, [place - 0.3, place + 0.3], color=INK, zorder=3)
