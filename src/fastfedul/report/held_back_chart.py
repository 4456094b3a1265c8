"""How much of a difference was removed in each layer, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastfedul.report.drawing import EMPTY, GREEN, draw, label_percent
from fastfedul.report.wording import tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LAYERS = 24
"""More arrays do not fit; the first and the last ones are shown."""

_LONGEST_NAME = 18


def draw_held_back(removed_by_layer: Sequence[tuple[str, float | None]]) -> str:
    """Return a bar for each array: what was removed, and what was held back.

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
        axes.set_yticks(places, [_short(name) for name, _ in shown])
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

    text = "Bar chart of what was removed in each layer. " + "; ".join(
        f"{tidy(name)}: {part:.0%}"
        for (name, _), part in list(zip(shown, parts, strict=True))[:12]
    )
    return draw("heldback", text, 70 + 18 * len(shown), paint)


def _short(name: str) -> str:
    """Return a name that leaves room for the bars; its end tells layers apart."""
    name = tidy(name)
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]
