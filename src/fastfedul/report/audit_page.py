"""The page of an audit: what an auditor may conclude, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastfedul.investigate.audit.findings import MEASURES, Audit, Row
from fastfedul.report.drawing import (
    BLUE,
    FAINT,
    GREEN,
    VERMILLION,
    add_legend,
    draw,
    label_percent,
    use_whole_numbers,
)
from fastfedul.report.page import environment
from fastfedul.report.wording import shorten
from fastfedul.runs.afterwards import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT = 250
_COLOURS = (FAINT, BLUE, VERMILLION, GREEN)


def render_audit(name: str, found: Audit) -> str:
    """Return the whole page; it makes no request and runs no script.

    Args:
        name: Name of the run.
        found: The audit.
    """
    checked = [row for row in found.rows if row.whole is not None]
    return (
        environment()
        .get_template("audit.html.j2")
        .render(
            name=name,
            found=found,
            measures=MEASURES,
            checked=checked,
            attacked=any(row.whole and row.whole.point.backdoor for row in checked),
            shadowed=[row for row in found.rows if row.attack and row.klom],
            relearn=_courses(found, checked, "relearn"),
            relapse=_courses(found, checked, "relapse"),
        )
    )


def draw_courses(
    name: str, courses: Sequence[tuple[str, Sequence[Point]]], *, by_backdoor: bool
) -> str:
    """Return lines over further rounds: attack success, else the client's loss.

    Args:
        name: Short word that makes the identifiers unique in a page.
        courses: Names of the models with their points.
        by_backdoor: Whether the attack success is shown, and not the loss.
    """
    what = "attack success" if by_backdoor else "loss on the client's examples"

    def value(point: Point) -> float:
        if by_backdoor and point.backdoor is not None:
            return point.backdoor.value or 0.0
        return point.loss

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for at, (model, points) in enumerate(courses):
            axes.plot(
                [point.rounds for point in points],
                [value(point) for point in points],
                marker="o",
                color=_COLOURS[at % len(_COLOURS)],
                linestyle="-" if at < len(_COLOURS) else "--",
                label=shorten(model, 24),
            )
        if by_backdoor:
            label_percent(axes.yaxis)
            axes.set_ylim(-0.03, 1.03)
        else:
            axes.set_ylabel("nats")
        axes.grid(axis="y")
        use_whole_numbers(axes.xaxis)
        axes.set_xlabel("further rounds")
        add_legend(figure)

    said = f"Line chart of {what}. " + "; ".join(
        f"{model}: {value(points[0]):.3f}, then {value(points[-1]):.3f}"
        for model, points in courses
    )
    return draw(name, said, _HEIGHT, paint)


def _courses(found: Audit, rows: Sequence[Row], which: str) -> str:
    courses = [
        (row.name, getattr(row.whole, which).points)
        for row in rows
        if row.name != "before"
    ]
    return draw_courses(which, courses, by_backdoor=found.by_backdoor)
