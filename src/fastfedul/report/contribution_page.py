"""The page of contributions: a chart and a table of what each client is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastfedul.investigate.contribution import Contribution, Worth
from fastfedul.report.drawing import BLUE, VERMILLION, draw
from fastfedul.report.page import environment, write_text
from fastfedul.report.wording import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BARS = 40
_ROW = 20


def write_contribution(path: Path, name: str, found: Contribution) -> None:
    """Write the page to a file, whole or not at all.

    Args:
        path: The file.
        name: Name of the run.
        found: The contributions.

    Raises:
        InvalidInputError: If the file cannot be written, or a package of the extra
            `report` is missing.
    """
    template = environment().get_template("contribution.html.j2")
    chart = _chart(found.clients)
    write_text(path, template.render(name=name, found=found, chart=chart))


def _chart(clients: Sequence[Worth]) -> str:
    shown = clients[:_BARS]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        values = [own.loss for own in shown]
        reach = [own.loss_interval[1] - own.loss for own in shown]
        axes.barh(
            range(len(shown)),
            values,
            xerr=reach,
            color=[BLUE if value >= 0 else VERMILLION for value in values],
            height=0.7,
        )
        labels = [shorten(own.client, 24) for own in shown]
        axes.set_yticks(list(range(len(shown))), labels=labels)
        axes.invert_yaxis()
        axes.set_xlabel("loss spared, nats")
        axes.grid(axis="x")

    said = "Loss that each client spares the model: " + ", ".join(
        f"{own.client} {own.loss:.3f}" for own in shown[:5]
    )
    return draw("worth", said, 60 + _ROW * len(shown), paint)
