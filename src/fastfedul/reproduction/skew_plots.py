"""Trade-off curves: main accuracy against the backdoor as a constant varies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastfedul.report.drawing import FAINT, INK
from fastfedul.reproduction.cells import BEFORE, RETRAINED
from fastfedul.reproduction.plot_style import COLOURS, label_percent, render
from fastfedul.reproduction.skew_cells import AUTO, CURVES, DIRECTED, VALIDATED
from fastfedul.reproduction.skew_summary import Judged, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 2
_POINTS = {
    BEFORE: (FAINT, "x"),
    RETRAINED: (INK, "*"),
    AUTO: (COLOURS[1], "o"),
    VALIDATED: (COLOURS[3], "D"),
    DIRECTED: (COLOURS[5], "P"),
}


def skew_plots(name: str, runs: Sequence[Judged]) -> dict[str, str]:
    """Return a plot for each data set with attacked runs, by the stem of its file."""
    found = {}
    attacked = [run for run in runs if run.attack != "none"]
    for data in dict.fromkeys(run.data for run in attacked):
        own = [run for run in attacked if run.data == data]
        stem = f"{name}-{data}"
        found[stem] = _draw(stem, f"Forgetting: the whole trade-off, {data}", own)
    return found


def _draw(stem: str, title: str, runs: Sequence[Judged]) -> str:
    settings = list(dict.fromkeys(run.setting for run in runs))
    num_rows = math.ceil(len(settings) / _COLUMNS)

    def paint(figure: Figure) -> None:
        grid = figure.subplots(num_rows, _COLUMNS, squeeze=False)
        panels = [axes for row in grid for axes in row]
        for axes, setting in zip(panels, settings, strict=False):
            _panel(axes, setting, [run for run in runs if run.setting == setting])
        for axes in panels[len(settings) :]:
            axes.set_axis_off()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)

    return render(stem, title, 0.8 + 2.6 * num_rows, paint)


def _panel(axes: Axes, setting: str, runs: Sequence[Judged]) -> None:
    for number, family in enumerate(CURVES):
        if family not in runs[0].curves:
            continue
        places = range(len(runs[0].curves[family]))
        main = [mean(run.curves[family][i][1] for run in runs) for i in places]
        left = [mean(run.curves[family][i][2] or 0.0 for run in runs) for i in places]
        axes.plot(
            left,
            main,
            label=family,
            color=(COLOURS[0], COLOURS[2], COLOURS[4], COLOURS[5])[number],
            marker=".",
            linestyle=("-", "-", "--", "-")[number],
        )
    for label, (colour, marker) in _POINTS.items():
        if label not in runs[0].scores:
            continue
        axes.plot(
            [mean(run.scores[label].backdoor or 0.0 for run in runs)],
            [mean(run.scores[label].main for run in runs)],
            label=label,
            color=colour,
            marker=marker,
            linestyle="",
            markersize=9,
            zorder=4,
        )
    axes.set_title(setting, fontsize=9)
    axes.set_xlabel("backdoor")
    axes.set_ylabel("main")
    label_percent(axes.xaxis)
    label_percent(axes.yaxis)
    axes.grid()
