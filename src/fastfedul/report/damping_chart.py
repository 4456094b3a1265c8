"""What damping does to a removal, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastfedul.report.content import BEFORE, RETRAINED, Row, SweepPoint, find_row
from fastfedul.report.drawing import (
    FAINT,
    GREEN,
    INK,
    add_legend,
    draw,
    label_percent,
    plot_shares,
)
from fastfedul.report.wording import describe_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_sweep(sweep: Sequence[SweepPoint], rows: Sequence[Row] = ()) -> str:
    """Return what damping does, and the trade-off it leaves to choose from.

    The second picture needs an attack; it marks the models before forgetting and
    retrained, if they are among the rows.
    """
    points = sorted(sweep, key=lambda point: point.damping)
    attacked = any(point.backdoor is not None for point in points)

    def paint(figure: Figure) -> None:
        panels = figure.subplots(2 if attacked else 1, 1, squeeze=False)[:, 0]
        damping = [point.damping for point in points]
        plot_shares(panels[0], damping, points, markers=("o", "s"))
        _scale_damping(panels[0], damping)
        panels[0].set_xlabel("damping")
        add_legend(figure)
        if attacked:
            panels[1].set_title("trade-off: best is top left", loc="left", fontsize=11)
            _plot_trade_off(panels[1], points, tuple(rows))

    text = "Line chart of damping. " + "; ".join(
        f"{point.damping:g}: {describe_shares(point.main, point.backdoor)}"
        for point in points[:12]
    )
    return draw("sweep", text, 470 if attacked else 240, paint)


def _scale_damping(axes: Axes, damping: Sequence[float]) -> None:
    """Spread small values apart when they span orders of magnitude."""
    positive = [value for value in damping if value > 0]
    if positive and max(positive) / min(positive) > 20:
        axes.set_xscale("symlog", linthresh=min(positive), linscale=0.5)
        axes.set_xlim(damping[0] - min(positive) / 3, damping[-1] * 1.25)
    step = math.ceil(len(damping) / 7)
    chosen = list(damping)[::step]
    axes.set_xticks(chosen, [f"{value:g}" for value in chosen])
    axes.set_xticks([], minor=True)


def _plot_trade_off(
    axes: Axes, points: Sequence[SweepPoint], rows: tuple[Row, ...]
) -> None:
    both = [(p.backdoor, p.main, p.damping) for p in points if p.backdoor is not None]
    across, up, damping = zip(*both, strict=True)
    axes.plot(across, up, color=GREEN, marker="o", label="cleaned, by damping")
    for place in sorted({0, len(both) - 1}):
        axes.annotate(
            f"{damping[place]:g}",
            (across[place], up[place]),
            (4, -13),
            textcoords="offset points",
            color=GREEN,
            fontsize=10,
        )
    marked = [find_row(rows, method) for method in (BEFORE, RETRAINED)]
    looks = (("X", FAINT), ("*", INK))
    for row, (marker, colour) in zip(marked, looks, strict=True):
        if row is not None and row.backdoor is not None:
            at = row.backdoor, row.main
            axes.plot(*at, marker, color=colour, markersize=11, label=row.method)
    _frame_trade_off(axes, [*up, *(row.main for row in marked if row is not None)])


def _frame_trade_off(axes: Axes, shares: Sequence[float]) -> None:
    """Label both axes; right answers start where the points do."""
    lowest = min(filter(math.isfinite, shares), default=0.0)
    low = max(start for start in (0.0, 0.5, 0.75, 0.9) if start <= max(lowest, 0.0))
    label_percent(axes.xaxis)
    label_percent(axes.yaxis, low, 5)
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(1 - 1.06 * (1 - low), 1 + 0.04 * (1 - low))
    axes.set_xlabel("attack works")
    axes.set_ylabel("right answers")
    axes.grid()
    axes.legend(loc="lower right")
