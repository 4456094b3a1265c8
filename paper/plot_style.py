"""How the plots look, and how a painted figure becomes the text of an SVG file."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastfedul.errors import MissingPackageError
from fastfedul.report.drawing import BLUE, GREEN, LOOK, VERMILLION
from paper.columns import cut
from paper.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# The rest of Okabe and Ito's colours; the yellow is darker, to be seen on white, and a
# brown stands in for their black, which is the colour of retraining.
ORANGE, SKY, PURPLE, YELLOW = "#e69f00", "#56b4e9", "#cc79a7", "#b3a400"
BROWN = "#7f4f24"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, YELLOW, BROWN)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MAIN, BACKDOOR = "main accuracy", "backdoor accuracy"
WIDTH = 7.6
"""Of every plot, in inches."""

_STYLE: dict[str, Any] = {
    **LOOK,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def render(
    stem: str, title: str, height: float, paint: Callable[[Figure], None]
) -> str:
    """Return a figure as the text of an SVG file, the same for the same input.

    Args:
        stem: Name of the file, from which identifiers are made.
        title: Title of the plot and of its file.
        height: In inches.
        paint: Draws into an empty figure.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    if not can_plot():
        raise MissingPackageError("report", "plots need matplotlib")
    from matplotlib import style
    from matplotlib.figure import Figure

    text = io.StringIO()
    with style.context(["default", _STYLE | {"svg.hashsalt": stem}]):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11.5)
        with warnings.catch_warnings():
            # A name may hold letters that only the reader's device can draw.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            paint(figure)
            unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(text, format="svg", metadata={**unsigned, "Title": title})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def label_percent(axis: Axis) -> None:
    """Label an axis of shares with percentages."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:g} %"))


def whiskers(lines: Sequence[Summary], name: str) -> list[tuple[float, float]]:
    """Return how far the interval goes below and above each mean; 0 without one."""
    found = []
    for line in lines:
        mean = line.main if name == MAIN else line.backdoor
        ends = cut(mean.interval) if mean else None
        if mean is None or ends is None:
            found.append((0.0, 0.0))
        else:
            found.append((max(mean.value - ends[0], 0), max(ends[1] - mean.value, 0)))
    return found


def value_of(line: Summary, name: str) -> float | None:
    """Return a mean over seeds: main or backdoor accuracy."""
    mean = line.main if name == MAIN else line.backdoor
    return mean.value if mean else None


def mean_and_interval(lines: Sequence[Summary]) -> str:
    """Return the meaning of the marks over seeds, in words."""
    if max((line.num_measured for line in lines), default=0) < 2:
        return "one seed"
    return "mean, 95 % interval"


def legend_below(figure: Figure, *panels: Axes, columns: int = 3) -> None:
    """Put the legend of some axes below everything, bars before marks."""
    handles: list[Any] = []
    labels: list[str] = []
    for axes in panels:
        found, names = axes.get_legend_handles_labels()
        order = sorted(range(len(found)), key=lambda at: not _is_bars(found[at]))
        handles += [found[at] for at in order]
        labels += [names[at] for at in order]
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _is_bars(handle: object) -> bool:
    from matplotlib.container import BarContainer

    return isinstance(handle, BarContainer)
