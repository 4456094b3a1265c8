"""The lineage of a ledger's model as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfedul.errors import InvalidInputError, require_extra
from fastfedul.records import ModelEntry, ModelOrigin
from fastfedul.report.drawing import BLUE, FAINT, GREEN, LOOK, VERMILLION

_COLOURS: dict[ModelOrigin, str] = {
    "initial": GREEN,
    "round": BLUE,
    "forgetting": VERMILLION,
}
_WIDTH, _HEIGHT, _DIGITS = 3.2, 0.75, 16
"""Inches of a box with its arrow, and digits of a digest that are shown."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Models that follow each other and were made alike: one box of the picture.

    Attributes:
        first: The first of them.
        last: The last of them.
    """

    first: ModelEntry
    last: ModelEntry

    @property
    def title(self) -> str:
        """What was done, in words."""
        if self.first.origin == "initial":
            return "initial model"
        if self.first.origin == "forgetting":
            return f"forgetting, entry {self.first.at}"
        if self.first is self.last:
            return f"round {self.first.at}"
        return f"rounds {self.first.at} to {self.last.at}"


def stages_of(lineage: Sequence[ModelEntry]) -> tuple[Stage, ...]:
    """Return the lineage with rounds that follow each other taken together."""
    found = []
    for origin, group in itertools.groupby(lineage, key=lambda model: model.origin):
        models = list(group)
        if origin == "round":
            found.append(Stage(models[0], models[-1]))
        else:
            found += [Stage(model, model) for model in models]
    return tuple(found)


def draw_lineage(lineage: Sequence[ModelEntry], path: Path) -> None:
    """Write the picture of a lineage to a file, whose ending says which kind.

    Raises:
        InvalidInputError: If the file cannot be written.
    """
    with require_extra("report", "pictures need matplotlib"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
    stages = stages_of(lineage)
    places = [(0.0, float(line)) for line in range(len(stages))]
    style: Any = {**LOOK, "font.size": 9}
    with mpl.rc_context(style):
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(stages)))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(-1, 1)
        axes.set_ylim(len(stages) - 0.5, -0.5)
        arrow = {"arrowstyle": "->", "color": FAINT, "shrinkA": 17, "shrinkB": 17}
        for place, following in itertools.pairwise(places):
            axes.annotate("", xy=following, xytext=place, arrowprops=arrow)
        for stage, place in zip(stages, places, strict=True):
            axes.text(
                *place,
                f"{stage.title}\n{stage.last.digest[:_DIGITS]}",
                ha="center",
                va="center",
                bbox={
                    "boxstyle": "round",
                    "facecolor": "white",
                    "edgecolor": _COLOURS[stage.first.origin],
                },
            )
        try:
            figure.savefig(path, metadata={"Date": None} if _is_svg(path) else None)
        except (OSError, ValueError) as error:
            text = str(error).splitlines()[0]
            raise InvalidInputError(
                f"cannot write {path}: {text}; name a file such as lineage.svg"
            ) from None


def _is_svg(path: Path) -> bool:
    return path.suffix.lower() == ".svg"
