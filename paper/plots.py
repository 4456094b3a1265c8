"""The plots of each of the paper's tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paper.bar_plots import draw_accuracies, draw_angles, draw_costs
from paper.cells import BEFORE, RETRAINED
from paper.columns import Group
from paper.line_plots import (
    draw_budgets,
    draw_epochs,
    draw_history,
    draw_iterations,
    draw_levels,
)
from paper.summary import Summary

Draw = Callable[[str, str, Group], str]
DRAWN: dict[str, tuple[Draw, str]] = {
    "edge-case": (draw_accuracies, "Accuracy after forgetting"),
    "pixel": (draw_accuracies, "Accuracy after forgetting"),
    "ablation": (draw_accuracies, "Variants of Fast-FedUL"),
    "non-iid": (draw_levels, "Forgetting with skewed data"),
    "damping": (draw_iterations, "Fast-FedUL, iteration by iteration"),
    "deviation": (draw_angles, "Angles to the retrained model"),
    "cost": (draw_costs, "Cost of forgetting"),
    "history": (draw_history, "Forgetting from less history"),
    "sign": (draw_accuracies, "The sign of α"),
    "epochs": (draw_epochs, "The worth of the skew, by local epochs"),
    "sampling": (draw_budgets, "Fast-FedUL with fewer updates kept"),
}


def plots_of(name: str, summaries: Sequence[Summary]) -> dict[str, str]:
    """Return the plots as SVG text by the stem of their files.

    There is one for each attack and data set, of `epochs` one for each data set;
    without a single result there is none.

    Raises:
        InvalidInputError: If matplotlib is not installed.
    """
    if name not in DRAWN:
        return {}
    draw, about = DRAWN[name]
    found = {}
    for (attack, source), group in _by_plot(name, summaries).items():
        if any(line.num_measured for line in group):
            parts = dict.fromkeys(part for part in (name, attack, source) if part)
            stem = "-".join(parts)
            of = f"{attack} backdoor, " if attack else ""
            found[stem] = draw(stem, f"{about}: {of}{group[0].data_name}", group)
    return found


def _by_plot(
    name: str, summaries: Sequence[Summary]
) -> dict[tuple[str, str], list[Summary]]:
    found: dict[tuple[str, str], list[Summary]] = {}
    for line in summaries:
        if name == "deviation" and line.label in (BEFORE, RETRAINED):
            continue
        attack = "" if name == "epochs" else line.attack
        found.setdefault((attack, line.source), []).append(line)
    return found
