"""Plots of lines: main and backdoor accuracy side by side, against a parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastfedul.report.drawing import FAINT, INK
from paper.cells import BEFORE, RETRAINED
from paper.columns import Group
from paper.experiments import DEFAULT, PAPER
from paper.plot_style import (
    BACKDOOR,
    COLOURS,
    MAIN,
    MARKERS,
    label_percent,
    legend_below,
    mean_and_interval,
    render,
    value_of,
    whiskers,
)
from paper.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT = 4.0
_DODGE = 0.04
_POINTS_SHOWN = 0.08
"""How far below the retrained model an axis of main accuracy goes, if it is cut."""
_SUMS = f"{DEFAULT.name}, sums"
_REFERENCES = {BEFORE: (FAINT, ":"), RETRAINED: (INK, "--")}


def draw_levels(stem: str, title: str, group: Group) -> str:
    """Return a line per method against the ratio of classes, of Dirichlet splits.

    The axis of main accuracy ends below the retrained model by a few points, so that
    the good methods can be told apart; a mark at its lower end stands for any method
    below it.
    """
    shown = [line for line in group if not line.partition.startswith("level")]
    label = "ratio of classes (1: even split)"
    return _draw_parameters(stem, title, shown, label, least=_least(shown))


def draw_epochs(stem: str, title: str, group: Group) -> str:
    """Return main accuracy lost against retraining, by the local epochs of a round.

    There is a panel per attack and a line per method, on a logarithmic axis of epochs.
    """
    from matplotlib.ticker import NullLocator

    attacks = dict.fromkeys(line.attack for line in group)
    again = {
        (line.attack, line.parameter): line.main.value
        for line in group
        if line.label == RETRAINED and line.main
    }
    methods = [
        label
        for label in dict.fromkeys(line.label for line in group)
        if label not in _REFERENCES
    ]
    ticks = sorted({line.parameter for line in group if line.parameter is not None})

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, len(attacks), sharey=True, squeeze=False)[0]
        for axes, attack in zip(panels, attacks, strict=True):
            for number, method in enumerate(methods):
                lost = [
                    (line.parameter, 100 * (again[key] - line.main.value))
                    for line in group
                    if (line.label, line.attack) == (method, attack)
                    and line.main
                    and (key := (line.attack, line.parameter)) in again
                ]
                if lost:
                    axes.plot(
                        *zip(*lost, strict=True), label=method, **_look("", number)
                    )
            axes.set_title(f"{attack} backdoor")
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("local epochs a round")
            axes.axhline(0, color=INK, linewidth=1)
            axes.grid(axis="y")
        panels[0].set_ylabel("main accuracy lost against\nretraining, in points")
        legend_below(figure, panels[0])

    return render(stem, title, _HEIGHT, paint)


def draw_budgets(stem: str, title: str, group: Group) -> str:
    """Return a line per policy against the budget; without a budget it is level."""
    return _draw_parameters(stem, title, group, "updates kept a round (m)")


def draw_iterations(stem: str, title: str, group: Group) -> str:
    """Return a line per damping against the unlearning iteration."""

    def paint(figure: Figure) -> None:
        panels = _panels(figure, "unlearning iteration")
        for name, axes in panels.items():
            for number, line in enumerate(group):
                course = _course(line, name)
                if not course:
                    _add_across(axes, line, name)
                    continue
                axes.plot(
                    range(1, len(course) + 1),
                    course,
                    label=line.label,
                    **_look(line.label, number, max(len(course) // 8, 1)),
                )
        legend_below(figure, panels[MAIN])

    return render(stem, title, _HEIGHT, paint)


def draw_history(stem: str, title: str, group: Group) -> str:
    """Return a line per method and dtype against the bytes of history it keeps."""
    series: dict[str, list[Summary]] = {}
    for line in group:
        if line.stored_bytes:
            name = _SUMS if ", sums" in line.label else line.label
            series.setdefault(name, []).append(line)
    across = [line for line in group if line.label in _REFERENCES]

    def paint(figure: Figure) -> None:
        panels = _panels(figure, "history kept (MB)")
        for name, axes in panels.items():
            for method, lines in series.items():
                ordered = sorted(lines, key=lambda line: line.stored_bytes or 0)
                axes.plot(
                    [(line.stored_bytes or 0) / 1e6 for line in ordered],
                    _gaps([value_of(line, name) for line in ordered]),
                    label=method,
                    **_history_look(method, list(series)),
                )
            if series:
                _make_logarithmic(axes)
            for line in across:
                _add_across(axes, line, name)
        legend_below(figure, panels[MAIN])

    return render(stem, title, _HEIGHT + 0.2 * (len(series) // 3), paint)


def _history_look(method: str, methods: Sequence[str]) -> dict[str, Any]:
    """Return a colour for each dtype, and dots for the paper's method."""
    kind, _, dtype = method.partition(", ")
    dtypes = list(dict.fromkeys(m.partition(", ")[2] for m in methods))
    ours = kind in (PAPER.name, DEFAULT.name)
    return {
        "color": COLOURS[dtypes.index(dtype) % len(COLOURS)] if ours else INK,
        "linestyle": ":" if kind == PAPER.name else "-",
        "marker": {PAPER.name: "s", DEFAULT.name: "o", "kd": "X"}.get(kind, "P"),
    }


def _make_logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _least(group: Group) -> float | None:
    """Return the lower end of an axis of main accuracy; None if nobody is below it."""
    known = [line.main.value for line in group if line.main]
    again = [line.main.value for line in group if line.main and line.label == RETRAINED]
    if not again:
        return None
    least = min(again) - _POINTS_SHOWN
    return least if min(known) < least else None


def _draw_parameters(
    stem: str, title: str, group: Group, label: str, *, least: float | None = None
) -> str:
    series: dict[str, list[Summary]] = {}
    for line in group:
        if line.parameter is not None and line.num_measured:
            series.setdefault(line.label.partition(":")[0], []).append(line)
    ticks = sorted({line.parameter for line in group if line.parameter is not None})
    across = [line for line in group if line.parameter is None]
    own = [method for method in series if method not in _REFERENCES]
    places = {method: place for place, method in enumerate(own)}

    def paint(figure: Figure) -> None:
        panels = _panels(figure, label)
        for name, axes in panels.items():
            for place, (method, lines) in enumerate(series.items()):
                shift = (place - (len(series) - 1) / 2) * _DODGE
                _add_line(axes, method, lines, name, places.get(method, 0), shift)
            axes.set_title(f"{name} ({mean_and_interval(group)})")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            for line in across:
                _add_across(axes, line, name)
        if least is not None:
            _cut_below(panels[MAIN], series, least)
        legend_below(figure, panels[MAIN])

    return render(stem, title, _HEIGHT + 0.2 * (len(series) // 3), paint)


def _cut_below(
    axes: Axes, series: Mapping[str, Sequence[Summary]], least: float
) -> None:
    """End the axis at a value, and name the methods that lie below it."""
    axes.set_ylim(least, min(axes.get_ylim()[1], 1.01))
    said = []
    for method, lines in series.items():
        low = [s.main.value for s in lines if s.main and s.main.value < least]
        if low:
            said.append(f"{method}: down to {min(low) * 100:.0f} %")
    axes.annotate(
        "\n".join(said), (0.03, 0.03), xycoords="axes fraction", fontsize=8, color=FAINT
    )


def _panels(figure: Figure, label: str) -> dict[str, Axes]:
    """Return two axes, of main and of backdoor accuracy."""
    from matplotlib.ticker import MaxNLocator

    found = dict(zip((MAIN, BACKDOOR), figure.subplots(1, 2), strict=True))
    for name, axes in found.items():
        axes.set_title(name)
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        label_percent(axes.yaxis)
        axes.grid(axis="y")
    found[BACKDOOR].set_ylim(-0.03, 1.03)
    return found


def _add_line(
    axes: Axes,
    method: str,
    lines: Sequence[Summary],
    name: str,
    number: int,
    shift: float,
) -> None:
    values = [value_of(line, name) for line in lines]
    at = [(line.parameter or 0) + shift for line in lines]
    below, above = zip(*whiskers(lines, name), strict=True)
    axes.errorbar(
        at,
        _gaps(values),
        yerr=[below, above],
        label=method,
        elinewidth=0.8,
        **_look(method, number),
    )


def _add_across(axes: Axes, line: Summary, name: str) -> None:
    value = value_of(line, name)
    if value is None:
        return
    colour, dashes = _REFERENCES.get(line.label, (INK, "-."))
    axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.4, label=line.label)


def _look(method: str, number: int, every: int = 1) -> dict[str, Any]:
    """Return colour, dashes and marker of a line."""
    if method in _REFERENCES:
        colour, dashes = _REFERENCES[method]
        return {"color": colour, "linestyle": dashes, "marker": "", "zorder": 3}
    again, place = divmod(number, len(COLOURS))
    return {
        "color": COLOURS[place],
        # More lines than colours: the next ones are dashed and hollow.
        "linestyle": "--" if again else "-",
        "markerfacecolor": "white" if again else COLOURS[place],
        "marker": MARKERS[place],
        "markevery": every,
    }


def _course(line: Summary, name: str) -> list[float]:
    return _gaps(line.main_iterations if name == MAIN else line.backdoor_iterations)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
