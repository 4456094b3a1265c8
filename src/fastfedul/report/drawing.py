"""Figures as SVG text that stands in a page beside others, in its colours."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastfedul.errors import require_extra
from fastfedul.report.content import RoundPoint
from fastfedul.report.wording import tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart also by people who are colour-blind.
BLUE, VERMILLION, GREEN = "#0072b2", "#d55e00", "#009e73"
INK, FAINT, EMPTY, GRID = "#1f2933", "#667380", "#d5dae0", "#e4e8ec"
_WHITE = "#ffffff"
_PAGE_COLOURS = {
    **{BLUE: "accent", VERMILLION: "mark", GREEN: "good"},
    **{INK: "ink", FAINT: "soft", EMPTY: "empty", GRID: "line", _WHITE: "card"},
}
"""Names that the page's style gives to colours; they change where it is dark."""

ACCURACY, ATTACK = "accuracy", "attack success"

WIDTH = 340  # units of the picture; on a phone about one pixel each
_POINTS_PER_INCH = 72
LOOK: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
"""Settings of matplotlib for all pictures."""

_STYLE: dict[str, Any] = {
    **LOOK,
    "font.size": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.fontsize": 10.5,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "figure.constrained_layout.hspace": 0.08,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.image_inline": True,
}
_COLOUR = re.compile(r": (#[0-9a-f]{6})\b")
_SHEET = re.compile(r'<defs>\s*<style type="text/css">[^<]*</style>\s*</defs>')


def draw(
    name: str, description: str, height: float, paint: Callable[[Figure], None]
) -> str:
    """Return a chart as SVG text, the same for the same input.

    Letters stay letters, so that the reader's device draws them in its own font; the
    room for them is measured with a wide one.

    Args:
        name: Short word that makes the identifiers unique in a page.
        description: Text of the chart, for people who cannot see it.
        height: In units of which the chart is `WIDTH` wide.
        paint: Puts axes and marks into an empty figure.

    Raises:
        InvalidInputError: If matplotlib is not installed.
    """
    _require_matplotlib()
    from matplotlib import style

    text = io.StringIO()
    with style.context(["default", _STYLE | {"svg.hashsalt": name}]), _any_letters():
        figure = _painted(height, paint)
        unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=unsigned)
    return _embeddable(text.getvalue(), name, description)


def make_figure(height: float, paint: Callable[[Figure], None]) -> Figure:
    """Return a chart as a figure on white; a notebook shows it as it is.

    Args:
        height: In units of which the chart is `WIDTH` wide.
        paint: Puts axes and marks into an empty figure.

    Raises:
        InvalidInputError: If matplotlib is not installed.
    """
    _require_matplotlib()
    from matplotlib import style

    with style.context(["default", _STYLE | {"figure.facecolor": _WHITE}]):
        figure = _painted(height, paint)

    def png() -> bytes:
        file = io.BytesIO()
        with _any_letters():
            figure.savefig(file, format="png", dpi=144, facecolor=_WHITE)
        return file.getvalue()

    # Notebooks show figures of pyplot alone, which would keep this one for ever.
    figure._repr_png_ = png  # type: ignore[attr-defined]
    return figure


def _require_matplotlib() -> None:
    with require_extra("report", "charts need matplotlib"):
        import matplotlib.figure  # noqa: F401


def _painted(height: float, paint: Callable[[Figure], None]) -> Figure:
    from matplotlib.figure import Figure

    size = (WIDTH / _POINTS_PER_INCH, height / _POINTS_PER_INCH)
    figure = Figure(figsize=size, layout="constrained")
    paint(figure)
    return figure


@contextmanager
def _any_letters() -> Iterator[None]:
    """Draw without a warning of letters that only the reader's device can draw."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def label_percent(axis: Axis, low: float = 0.0, num_steps: int = 4) -> None:
    """Label an axis of shares with percentages, up to 100 % in equal steps."""
    ticks = [low + (1 - low) * step / num_steps for step in range(num_steps + 1)]
    axis.set_ticks(ticks, labels=[f"{tick * 100:.0f} %" for tick in ticks])


def use_whole_numbers(axis: Axis, most: int = 8) -> None:
    """Let an axis have ticks at whole numbers only, and not too many."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True))


def plot_shares(
    axes: Axes,
    at: Sequence[float],
    points: Sequence[RoundPoint],
    *,
    markers: tuple[str, str] = ("", ""),
) -> None:
    """Plot the accuracy, and the attack success if there is an attack, in percent."""
    main = [point.main for point in points]
    axes.plot(at, main, marker=markers[0], color=BLUE, linestyle="-", label=ACCURACY)
    attack = [math.nan if p.backdoor is None else p.backdoor for p in points]
    if not all(map(math.isnan, attack)):
        dashes = (0, (4, 1.5))
        axes.plot(
            at,
            attack,
            marker=markers[1],
            color=VERMILLION,
            linestyle=dashes,
            label=ATTACK,
        )
    label_percent(axes.yaxis)
    axes.set_ylim(-0.03, 1.03)
    axes.grid(axis="y")


def add_legend(figure: Figure) -> None:
    """Put the names of the lines of the first axes above everything."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, borderpad=0.1)


def _embeddable(svg: str, name: str, description: str) -> str:
    """Drop the file's preamble, make identifiers unique, add the description."""
    body = _SHEET.sub("", svg[svg.index("<svg") :])
    # Only inside tags: matplotlib escapes every < and > of the text between them.
    named = re.sub(r"<[^<>]+>", lambda tag: _with_names(tag[0], name), body)
    label = html.escape(tidy(description))
    attributes = f'role="img" aria-label="{label}" stroke-linejoin="round"'
    return named.replace("<svg ", f"<svg {attributes} ", 1).strip()


def _with_names(tag: str, name: str) -> str:
    tag = re.sub(r'(?<= )id="(?:[a-z]+[0-9.]*_)+[0-9]+"', "", tag)
    tag = _COLOUR.sub(lambda found: _with_page_colour(found[1]), tag)
    return re.sub(r'((?<= )id="|url\(#|href="#)', rf"\g<1>{name}-", tag)


def _with_page_colour(colour: str) -> str:
    """Return the colour as the page names it; outside a page, as it is."""
    name = _PAGE_COLOURS.get(colour)
    return f": var(--{name}, {colour})" if name else f": {colour}"
