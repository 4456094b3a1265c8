"""Made-up lines of results."""

from __future__ import annotations

from collections.abc import Mapping

from paper.board.rows import RETRAINED
from paper.board.runs import Run, all_runs
from paper.board.store import Line

Scores = tuple[int, int | None]
"""Right answers of 1,000 and attacks that work of 100, None for honest leavers."""


def lines_of(
    run: Run, retrained: tuple[Scores, Scores, Scores], methods: Mapping[str, Scores]
) -> list[Line]:
    """Return the lines of a run with these scores."""
    scores = {**dict(zip(RETRAINED, retrained, strict=True)), **methods}
    return [
        {
            **run.facts,
            "run": run.key,
            "key": f"{run.key}/{method}",
            "method": method,
            "commit": "0" * 40,
            "main_correct": main,
            "main_total": 1000,
            "backdoor_hits": hits,
            "backdoor_total": None if hits is None else 100,
            "mia_auc": main / 1000 if hits is None else None,
            "refused": None,
        }
        for method, (main, hits) in scores.items()
    ]


def made_up() -> list[Line]:
    """Return the lines of three runs: two with an attack, one with honest leavers."""
    runs = all_runs()
    attacked = [run for run in runs if run.attack == "pixel"][:2]
    honest = next(run for run in runs if run.attack == "none")
    return [
        *lines_of(
            attacked[0],
            ((900, 0), (910, 3), (920, 6)),
            {"before": (930, 90), "kronecker-64": (912, 4), "auto": (880, 3)},
        ),
        *lines_of(
            attacked[1],
            ((800, 10), (800, 10), (800, 10)),
            {"before": (820, 80), "kronecker-64": (790, 8), "auto": (700, 30)},
        ),
        *lines_of(
            honest,
            ((700, None), (700, None), (730, None)),
            {"before": (740, None), "kronecker-64": (713, None), "auto": (650, None)},
        ),
    ]
