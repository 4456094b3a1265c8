"""The page of a trace: the ranking, the inputs, and the answers without suspects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastfedul.investigate.trace import Suspect, Trace
from fastfedul.report.content import Images
from fastfedul.report.drawing import FAINT, VERMILLION, draw
from fastfedul.report.page import environment, write_text
from fastfedul.report.wording import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = 8
_BARS = 20
_ROW = 20
"""Units of a bar's height in the chart."""


def render_trace(name: str, found: Trace) -> str:
    """Return the whole page; it makes no request and runs no script.

    Args:
        name: Name of the run.
        found: The trace.
    """
    pictures: list[tuple[Images, list[tuple[str, str]]]] = []
    if found.examples.ndim == 4:
        for place in range(min(_PICTURES, len(found.answers))):
            said = [
                (
                    "now" if not own.without else f"without {_names(own.without)}",
                    f"{own.classes[place]} ({own.unwanted[place]:.1%} for "
                    f"{found.answers[place]})",
                )
                for own in found.answered
            ]
            pictures.append((found.examples[place], said))
    return (
        environment()
        .get_template("trace.html.j2")
        .render(
            name=name,
            found=found,
            chart=_chart(found.clients, found.culprits),
            pictures=pictures,
            names=_names,
        )
    )


def write_trace(path: Path, name: str, found: Trace) -> None:
    """Write the page to a file, whole or not at all.

    Raises:
        InvalidInputError: If the file cannot be written, or a package of the extra
            `report` is missing.
    """
    write_text(path, render_trace(name, found))


def _names(clients: Sequence[str]) -> str:
    return ", ".join(shorten(name, 40) for name in clients)


def _chart(clients: Sequence[Suspect], culprits: Sequence[str]) -> str:
    shown = clients[:_BARS]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = range(len(shown))
        colours = [VERMILLION if own.client in culprits else FAINT for own in shown]
        axes.barh(places, [own.score for own in shown], color=colours, height=0.7)
        labels = [shorten(own.client, 24) for own in shown]
        axes.set_yticks(list(places), labels=labels)
        axes.invert_yaxis()
        axes.set_xlabel("fall of the log odds, nats")
        axes.grid(axis="x")

    said = "Blame of the clients: " + ", ".join(
        f"{own.client} {own.score:.2f}" for own in shown[:5]
    )
    return draw("blame", said, 60 + _ROW * len(shown), paint)
