"""The paper's five criteria for each method, measured and declared, beside its marks.

The paper marks them without saying how. Here: C1 and C2 are measured on runs with all
clients in every round, C3 on runs with half of them. C4 and C5 follow from the needs
that a method declares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastfedul.methods.registry import find_method
from fastfedul.report.wording import NOTHING
from paper import published
from paper.cells import RETRAINED
from paper.experiments import HALF
from paper.summary import Summary, by_table

MAIN_POINTS = 2.0
BACKDOOR_POINTS = 5.0

ABOUT = (
    f"C1, removal and utility: main accuracy is at most {MAIN_POINTS:g} points below "
    f"retraining, and the backdoor works at most {BACKDOOR_POINTS:g} points more "
    "often.",
    f"C2, the leaver's influence on the others goes too: the backdoor works at most "
    f"{BACKDOOR_POINTS:g} points more often than after retraining.",
    "Both are judged by the worst of the tables below in which every client takes part "
    "in every round.",
    "C3, chance: C1 holds also where the server draws only half of the clients for a "
    "round.",
    "C4, privacy: the method needs no data at the server.",
    "C5, efficiency: the method asks no client to compute.",
    "The measured points stand in brackets, main accuracy first.",
    "The paper's mark, where it has one, stands after the stroke.",
)
"""The meaning of each criterion, sentence by sentence."""


def criteria_table(summaries: Sequence[Summary]) -> str:
    """Return a Markdown table with a line per method."""
    methods = dict.fromkeys(line.method for line in summaries)
    head = "| method | C1 | C2 | C3 | C4 | C5 |\n|---|---|---|---|---|---|"
    rows = [_row(method, summaries) for method in methods if method != "before"]
    return "\n".join([head, *rows])


def _row(method: str, summaries: Sequence[Summary]) -> str:
    name = "retrain" if method == RETRAINED else method
    needs = find_method(name).needs
    main, backdoor = _gaps(method, summaries, half=False)
    half_main, half_backdoor = _gaps(method, summaries, half=True)
    ours = (
        _both(main, backdoor),
        _limited(backdoor, BACKDOOR_POINTS),
        _both(half_main, half_backdoor),
        not needs.server_data,
        not (needs.target or needs.others),
    )
    said = (
        _points(main, backdoor),
        _points(backdoor),
        _points(half_main, half_backdoor),
        "",
        "",
    )
    papers = published.CRITERIA.get(name, (None,) * 5)
    cells = [
        f"{_mark(own)}{text} / {_mark(theirs)}"
        for own, text, theirs in zip(ours, said, papers, strict=True)
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def _gaps(
    method: str, summaries: Sequence[Summary], *, half: bool
) -> tuple[float | None, float | None]:
    """Return how far a method is from retraining at worst: main lost, backdoor left.

    Both are None until the method has as many seeds as retraining in every table.
    """
    main, backdoor = [], []
    for (_, _, split), lines in by_table(summaries).items():
        if (split == HALF) != half:
            continue
        found = {line.method: line for line in lines}
        own, again = found.get(method), found.get(RETRAINED)
        if own is None or again is None or own.num_measured != again.num_measured:
            return None, None
        if own.main and again.main and own.backdoor and again.backdoor:
            main.append(100 * (again.main.value - own.main.value))
            backdoor.append(100 * (own.backdoor.value - again.backdoor.value))
    return _worst(main), _worst(backdoor)


def _worst(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _both(main: float | None, backdoor: float | None) -> bool | None:
    """Return whether a method keeps the utility and removes the client."""
    utility = _limited(main, MAIN_POINTS)
    removal = _limited(backdoor, BACKDOOR_POINTS)
    return None if utility is None or removal is None else utility and removal


def _limited(value: float | None, limit: float) -> bool | None:
    return None if value is None else value <= limit


def _mark(value: bool | None) -> str:
    return NOTHING if value is None else "yes" if value else "no"


def _points(*values: float | None) -> str:
    if any(value is None for value in values):
        return ""
    return f" ({', '.join(map(_number, values))})"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value + 0.0:.1f}"
