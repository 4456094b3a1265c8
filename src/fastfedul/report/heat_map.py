"""Who contributed how much when: a map of clients by rounds, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.report.content import Contributions, Floats
from fastfedul.report.drawing import EMPTY, VERMILLION, draw, use_whole_numbers
from fastfedul.report.wording import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MAX_CLIENTS = 30
_LABEL_COLUMNS = 14


def draw_contributions(
    contributions: Contributions, forgotten: Sequence[tuple[int, str]] = ()
) -> str:
    """Return the map; of many clients, those forgotten and the largest contributors.

    Grey is a client that took no part; a bar marks where a client was forgotten.
    """
    places = _chosen(contributions, {name for _, name in forgotten})
    clients = [contributions.clients[place] for place in places]
    values = np.asarray(contributions.values, np.float64)[places]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        picture = _add_fields(axes, values)
        names = [shorten(client, _LABEL_COLUMNS) for client in clients]
        axes.set_yticks(range(len(clients)), names)
        axes.tick_params(axis="y", length=0)
        use_whole_numbers(axes.xaxis)
        axes.set_xlabel("round of training")
        _mark_forgotten(axes, clients, forgotten)
        bar = figure.colorbar(picture, location="top", aspect=40, pad=0.02)
        bar.set_label("size of the contribution")
        bar.outline.set_visible(False)

    text = (
        f"Heat map of the contributions of {len(clients)} of "
        f"{len(contributions.clients)} clients over {values.shape[1]} rounds."
    )
    return draw("contributions", text, 110 + 17 * len(clients), paint)


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


def _chosen(contributions: Contributions, forgotten: set[str]) -> list[int]:
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
