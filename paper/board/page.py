"""The page of the board and its figure, made from the file of results alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from fastfedul.evaluate.intervals import Mean
from fastfedul.files import write_whole
from fastfedul.report.wording import NOTHING, tidy
from paper.board.figure import CLIP, draw_gaps
from paper.board.rows import BEFORE, KRONECKER, KRONECKER_64, RIVALS, TRAINING_FREE
from paper.board.runs import all_runs
from paper.board.store import Line, read_lines
from paper.board.summary import (
    AUC,
    BACKDOOR,
    MAIN,
    SHOWN,
    Gaps,
    Judged,
    Stratum,
    farthest,
    gaps,
    judged_runs,
    lost_strata,
    mean_distances,
    refused_runs,
    strata,
    wishes,
)

PAGE, FIGURE = "board.md", "board.svg"
JUDGED = KRONECKER_64
"""The method of the answer; the others of its kind have tables of their own."""

_NUM_FARTHEST = 10
_HEAD = (
    *("method", "n", "main: mean", "mean abs", "× floor", "worst"),
    *("n", "backdoor: mean", "mean abs", "× floor", "worst"),
)
_HOW = """\
Gaps are in points of a hundred: a method's score less the mean of three retrainings
that differ only in the order of batches.
Main accuracy is measured on clean test images, the backdoor on images that carry the
attack; honest leavers have no backdoor.
The floor of a run is the mean distance of a retraining from the mean of the other two.
A method as good as a fourth retraining would come to about 0.94 times the floor.
"× floor" is the mean absolute gap over the mean floor; the floor's worst is the largest
floor of a run.
Intervals are 95 % by Student's t over runs.
"Near" means the absolute gaps of main accuracy and backdoor added up.
`scalar-best` knows the answer: it is the damping of each run that comes nearest.
The [protocol](board-protocol.md) was written before any run was scored."""


def write_page(results: Path, out: Path) -> tuple[Path, Path]:
    """Write the page and its figure into a folder; return their paths."""
    lines = read_lines(results)
    runs = judged_runs(lines)
    paths = out / PAGE, out / FIGURE
    out.mkdir(parents=True, exist_ok=True)
    write_whole(paths[1], draw_gaps(runs))
    write_whole(paths[0], page_text(lines, len(all_runs())))
    return paths


def page_text(lines: Sequence[Line], num_listed: int) -> str:
    """Return the page in Markdown.

    Args:
        lines: All lines of the results.
        num_listed: How many runs the list has.
    """
    runs, refused = judged_runs(lines), refused_runs(lines)
    parts = ["# How near forgetting comes to retraining"]
    parts.append(_answer(runs, len(refused), num_listed))
    if not runs:
        return "\n\n".join(parts) + "\n"
    parts += [
        f"![Gaps of every method to retraining]({FIGURE})",
        f"Each dot is a run, the bar is the mean with its interval, and the grey band "
        f"is the mean floor.\nGaps beyond {CLIP:g} points are drawn at the edge and "
        "counted there.",
        "## What do the numbers mean?",
        _HOW,
        "## Is it as good as it was wanted to be?",
        *(_wish_table(runs, method) for method in KRONECKER),
        "## How do the methods compare over all runs?",
        _floor_line(runs),
        _gap_table(runs),
        "## How do they compare with methods that train?",
        _rival_table(runs),
        "## Can the loss tell whose examples were forgotten?",
        _membership(runs),
        f"## Where is {JUDGED} not the nearest?",
        _lost(runs),
        f"## On which runs is {JUDGED} farthest?",
        _farthest_table(runs),
    ]
    for factor in dict.fromkeys(stratum.factor for stratum in strata(runs)):
        parts.append(f"## By {factor}")
        for stratum in strata(runs):
            if stratum.factor == factor:
                parts += [_stratum_title(stratum), _gap_table(stratum.runs)]
    parts += ["## What could not be done?", _refusals(runs, refused)]
    parts += ["## Which code was it?", _commits(lines)]
    return "\n\n".join(parts) + "\n"


def _answer(runs: Sequence[Judged], num_refused: int, num_listed: int) -> str:
    done = len(runs) + num_refused
    all_done = done == num_listed
    far = f"All {done} runs are done" if all_done else f"So far {done} of {num_listed}"
    rest = "" if all_done else " runs are done"
    could = f", of which {num_refused} could not be made" if num_refused else ""
    first = f"{far}{rest}{could}."
    main, backdoor = (gaps(runs, JUDGED, metric) for metric in (MAIN, BACKDOOR))
    if main is None:
        return f"{first}\nNone of them has a result of `{JUDGED}` yet."
    second = (
        f"`{JUDGED}` is {_said(main)} points from retraining in main accuracy on "
        f"average (mean absolute gap {_over(main)}, n = {main.num_runs})"
    )
    if backdoor is not None:
        second += (
            f" and {_said(backdoor)} points in the backdoor (mean absolute gap "
            f"{_over(backdoor)}, n = {backdoor.num_runs})"
        )
    found = wishes(runs, JUDGED)
    told = [wish for wish in found if wish.met is not None]
    num_met = sum(wish.met is True for wish in told)
    missed = [wish.what for wish in told if not wish.met]
    third = f"It meets {num_met} of the {len(told)} wanted figures that can be told"
    third += f"; it misses: {'; '.join(missed)}." if missed else "."
    return f"{first}\n{second}.\n{third}"


def _said(own: Gaps) -> str:
    return f"{own.signed.value:+.2f}"


def _over(own: Gaps) -> str:
    return f"{own.absolute:.2f}, {_times(own)} × the noise of retraining"


def _times(own: Gaps) -> str:
    return NOTHING if own.times_floor is None else f"{own.times_floor:.2f}"


def _wish_table(runs: Sequence[Judged], method: str) -> str:
    rows = [
        [wish.what, wish.found, _verdict(wish.met), f"{wish.num_runs}"]
        for wish in wishes(runs, method)
    ]
    return f"`{method}`:\n\n" + _table(("wanted", "found", "met", "n"), rows)


def _verdict(met: bool | None) -> str:
    return NOTHING if met is None else "yes" if met else "**no**"


def _floor_line(runs: Sequence[Judged]) -> str:
    said = []
    for metric in (MAIN, BACKDOOR):
        floors = [floor for run in runs if (floor := run.floor(metric)) is not None]
        if floors:
            mean = sum(floors) / len(floors)
            said.append(
                f"{metric} {mean:.2f} (worst {max(floors):.2f}, n = {len(floors)})"
            )
    return f"Noise floor: {', '.join(said) or 'not known yet'}."


def _gap_table(runs: Sequence[Judged]) -> str:
    rows = []
    for method in SHOWN:
        both = [gaps(runs, method, metric) for metric in (MAIN, BACKDOOR)]
        if any(both):
            cells = [cell for own in both for cell in _gap_cells(own)]
            rows.append([f"`{method}`", *cells])
    return _table(_HEAD, rows)


def _gap_cells(own: Gaps | None) -> list[str]:
    if own is None:
        return ["0", *[NOTHING] * 4]
    return [
        f"{own.num_runs}",
        _with_interval(own.signed),
        f"{own.absolute:.2f}",
        _times(own),
        f"{own.worst:+.2f}",
    ]


def _with_interval(mean: Mean) -> str:
    if mean.interval is None:
        return f"{mean.value:+.2f}"
    low, high = mean.interval
    return f"{mean.value:+.2f} [{low:+.2f}, {high:+.2f}]"


def _rival_table(runs: Sequence[Judged]) -> str:
    """Return each rival beside the judged method, on the runs that have both."""
    rows = []
    for rival in (*TRAINING_FREE, *RIVALS):
        means, number = mean_distances(runs, JUDGED, rival)
        if means:
            nearer = "yes" if means[0] <= means[1] else "**no**"
            values = [f"{mean:.2f}" for mean in means]
            rows.append([f"`{rival}`", f"{number}", *values, nearer])
    head = ("rival", "n", f"`{JUDGED}`", "the rival", "at least as near")
    note = "Mean of both absolute gaps together, on the runs that have both methods."
    return f"{note}\n\n" + _table(head, rows)


def _membership(runs: Sequence[Judged]) -> str:
    rows = []
    for method in SHOWN:
        own = gaps(runs, method, AUC)
        if own is not None:
            rows.append([f"`{method}`", *_gap_cells(own)])
    if not rows:
        return "No run with honest leavers is done yet."
    note = (
        "AUC of membership inference by loss, honest leavers only: 100 times the gap "
        "to retraining."
    )
    head = ("method", "n", "mean", "mean abs", "× floor", "worst")
    return f"{note}\n\n" + _table(head, rows)


def _lost(runs: Sequence[Judged]) -> str:
    lost = lost_strata(runs, JUDGED)
    if not lost:
        return "Nowhere: it is nearer than every method without training."
    rows = []
    for stratum, rival in lost:
        means, number = mean_distances(stratum.runs, JUDGED, rival)
        where = f"{stratum.factor}: {stratum.level}"
        values = [f"{mean:.2f}" for mean in means]
        rows.append([where, f"`{rival}`", f"{number}", *values])
    return _table(("stratum", "nearer", "n", f"`{JUDGED}`", "the other"), rows)


def _farthest_table(runs: Sequence[Judged]) -> str:
    rows = []
    for run in farthest(runs, JUDGED, _NUM_FARTHEST):
        shown = [run.gap(JUDGED, metric) for metric in (MAIN, BACKDOOR)]
        floors = [run.floor(metric) for metric in (MAIN, BACKDOOR)]
        shown += [run.gap(BEFORE, BACKDOOR)]
        values = [*(_signed(gap) for gap in shown), *(_plain(f) for f in floors)]
        rows.append([run.key, _about(run.facts), *values])
    head = (
        *("run", "what it is", "main gap", "backdoor gap", "backdoor gap before"),
        *("main floor", "backdoor floor"),
    )
    return _table(head, rows)


def _about(facts: Line) -> str:
    drawn = "half" if facts["half"] else "all"
    return (
        f"{facts['attack']}, {facts['split']}, {drawn}, {facts['leavers']} of "
        f"{facts['clients']}, {facts['training']}, {facts['network']}"
    )


def _stratum_title(stratum: Stratum) -> str:
    return f"### {stratum.level}\n\n{_floor_line(stratum.runs)}"


def _refusals(runs: Sequence[Judged], refused: Sequence[Line]) -> str:
    said = [f"{line['run']}: {line['refused']}" for line in refused]
    counted = Counter(
        (method, reason) for run in runs for method, reason in run.refused.items()
    )
    said += [
        f"`{method}` on {number} runs: {reason}"
        for (method, reason), number in sorted(counted.items())
    ]
    return _list(said) if said else "Every run and every method gave a result."


def _commits(lines: Sequence[Line]) -> str:
    runs = {line["run"]: line["commit"] for line in lines}
    counted = Counter(runs.values())
    note = "Commits the runs were made at; a plus says that files had been changed."
    rows = [[f"`{commit}`", f"{number}"] for commit, number in sorted(counted.items())]
    return f"{note}\n\n" + _table(("commit", "runs"), rows)


def _signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.2f}"


def _plain(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {tidy(' '.join(text.split()))}" for text in texts)
