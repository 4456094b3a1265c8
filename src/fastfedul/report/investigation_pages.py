"""The pages of a trace and of contributions: clients beside each other, in bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastfedul.investigate.contribution import Contribution
from fastfedul.investigate.trace import Trace
from fastfedul.records import ClientId
from fastfedul.report.content import Images
from fastfedul.report.drawing import BLUE, FAINT, VERMILLION, draw
from fastfedul.report.page import environment
from fastfedul.report.wording import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = 8
_ROW = 20
"""Units of a bar's height in the chart."""


def render_trace(name: str, found: Trace) -> str:
    """Return the whole page of a trace; it makes no request and runs no script.

    Args:
        name: Name of the run.
        found: The trace.

    Raises:
        MissingPackageError: If a package of the extra `report` is missing.
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
    shown = found.clients[:20]
    chart = _bars(
        "Blame of the clients",
        "fall of the log odds, nats",
        [own.client for own in shown],
        [own.score for own in shown],
        [VERMILLION if own.client in found.culprits else FAINT for own in shown],
    )
    template = environment().get_template("trace.html.j2")
    return template.render(
        name=name, found=found, chart=chart, pictures=pictures, names=_names
    )


def render_contribution(name: str, found: Contribution) -> str:
    """Return the whole page of contributions, as `render_trace` does."""
    shown = found.clients[:40]
    chart = _bars(
        "Loss that each client spares the model",
        "loss spared, nats",
        [own.client for own in shown],
        [own.loss for own in shown],
        [BLUE if own.loss >= 0 else VERMILLION for own in shown],
        xerr=[own.loss_interval[1] - own.loss for own in shown],
    )
    template = environment().get_template("contribution.html.j2")
    return template.render(name=name, found=found, chart=chart)


def _names(clients: Sequence[str]) -> str:
    return ", ".join(shorten(name, 40) for name in clients)


def _bars(
    title: str,
    axis: str,
    clients: Sequence[ClientId],
    values: Sequence[float],
    colours: Sequence[str],
    **more: Any,
) -> str:
    """Return a chart with a bar for each client, the first on top."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = range(len(clients))
        axes.barh(places, values, color=colours, height=0.7, **more)
        labels = [shorten(name, 24) for name in clients]
        axes.set_yticks(list(places), labels=labels)
        axes.invert_yaxis()
        axes.set_xlabel(axis)
        axes.grid(axis="x")

    first = zip(clients[:5], values, strict=False)
    said = ", ".join(f"{name} {value:.3g}" for name, value in first)
    return draw("clients", f"{title}: {said}", 60 + _ROW * len(clients), paint)
