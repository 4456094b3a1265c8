"""The pages on our dampings: verdicts, every setting, and every loss."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version

from fastfedul.evaluate.intervals import Mean, mean_interval
from fastfedul.report.wording import NOTHING, tidy
from fastfedul.reproduction.cells import BEFORE, RETRAINED
from fastfedul.reproduction.settings import Scale
from fastfedul.reproduction.skew_cells import AUTO, DIRECTED, SCALAR, VALIDATED
from fastfedul.reproduction.skew_summary import (
    BY_HAND,
    PAPER,
    Judged,
    mean,
    verdicts,
    ways,
)

_TITLES = {"skew": "Skew per coordinate", "direction": "Skew per direction"}
_ABOUT = {
    "skew": "The difference is damped per coordinate, as strongly as the history says "
    "(`auto`) or as the server's own clean images say (`validated`), beside the "
    "paper's scalar.",
    "direction": "The difference is damped along the directions in which the staying "
    "clients' updates differ, with nothing to choose (`direction, as it is`), beside "
    "skew per coordinate (`auto`, `validated`) and the paper's scalar.",
}
_HOW = (
    "`best by hand` is the constant of each run's curve that comes nearest to "
    "retraining: nobody can choose it without knowing the answer. Gaps are in points "
    "of a hundred: main accuracy below retraining, backdoor above it. The runs were "
    "drawn before any was scored: [protocol]({name}-protocol.md)."
)


def skew_markdown(
    name: str,
    scale: Scale,
    num_seeds: int,
    runs: Sequence[Judged],
    left_out: Sequence[str],
    pictures: Sequence[str],
) -> str:
    """Return the page."""
    command = (
        f"fastfedul reproduce {name} --scale {scale} --seeds {num_seeds} --out DIR"
    )
    about = f"{_ABOUT[name]} {_HOW.format(name=name)} `{command}` gives this page."
    parts = [f"# {_TITLES[name]}", about]
    if not runs:
        return "\n\n".join([*parts, "No run has all its results yet."]) + "\n"
    parts += [f"## All {len(runs)} runs", _verdict_table(runs), _honest(runs)]
    for data in dict.fromkeys(run.data for run in runs):
        own = [run for run in runs if run.data == data]
        parts += [f"## {data}", _verdict_table(own), _setting_table(own)]
        parts += [f"![{file}]({file})" for file in pictures if data in file]
    parts += ["## Where it loses", _losses(runs)]
    if left_out:
        parts += ["## Runs that could not be made", _list(left_out)]
    return "\n\n".join(part for part in parts if part) + "\n"


def skew_csv(runs: Sequence[Judged]) -> str:
    """Return a line per run and way to forget; shares from 0 to 1."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["data", "setting", "seed", "model", "main", "backdoor", "mia_auc", "spread"]
    )
    for run in runs:
        for label, score in run.scores.items():
            chosen = run.chosen if label == AUTO else None
            measured = (score.main, score.backdoor, score.mia_auc, chosen)
            writer.writerow([run.data, run.setting, run.seed, label, *measured])
    return text.getvalue()


def skew_json(name: str, scale: Scale, num_seeds: int, runs: Sequence[Judged]) -> str:
    """Return everything as JSON."""
    facts = {
        "name": name,
        "scale": scale,
        "seeds": num_seeds,
        "software": version("fastfedul"),
        "verdicts": [asdict(verdict) for verdict in verdicts(runs)],
        "runs": [asdict(run) for run in runs],
    }
    return json.dumps(facts, indent=1, allow_nan=False) + "\n"


def _verdict_table(runs: Sequence[Judged]) -> str:
    head = (
        "main gap, mean",
        "worst",
        "backdoor gap, mean",
        "worst",
        "both, mean",
        "as near as scalar by hand",
    )
    rows = [
        [
            verdict.label,
            _points(verdict.main_mean),
            _points(verdict.main_worst),
            _points(verdict.backdoor_mean),
            _points(verdict.backdoor_worst),
            _points(verdict.distance),
            f"{verdict.num_won} of {verdict.num_runs}",
        ]
        for verdict in verdicts(runs)
    ]
    return _table(("", *head), rows)


def _setting_table(runs: Sequence[Judged]) -> str:
    known = ways(runs)
    ours = [label for label in (DIRECTED, AUTO, VALIDATED) if label in known]
    shown = (BEFORE, RETRAINED, *ours, PAPER, BY_HAND[SCALAR])
    rows = []
    for setting in dict.fromkeys(run.setting for run in runs):
        own = [run for run in runs if run.setting == setting]
        rows.append([setting, f"{len(own)}", *(_both(own, label) for label in shown)])
    note = "Main / backdoor accuracy in percent, means over the seeds."
    return _table(("setting", "seeds", *shown), rows) + f"\n\n{note}"


def _honest(runs: Sequence[Judged]) -> str:
    """Return what honest leavers say: accuracy and membership, with intervals."""
    honest = [run for run in runs if run.attack == "none"]
    if not honest:
        return ""
    said = []
    for label in ways(honest):
        if label not in (DIRECTED, AUTO, VALIDATED):
            continue
        gaps = _over_settings(honest, [run.main_gap(label) for run in honest])
        member = _over_settings(honest, [_auc_gap(run, label) for run in honest])
        assert gaps is not None
        said.append(
            f"`{label}`: main accuracy {_with_interval(gaps)} points below retraining"
            + (
                f", AUC of membership inference {_with_interval(member)} points above"
                if member
                else ""
            )
        )
    num_settings = len({(run.data, run.setting) for run in honest})
    head = (
        f"Honest leavers ({len(honest)} runs, {num_settings} "
        f"setting{'s' * (num_settings > 1)}; mean of the settings' means"
        f"{', with its 95 % interval over the settings' * (num_settings > 1)}): "
    )
    return head + "; ".join(said) + "."


def _over_settings(
    runs: Sequence[Judged], values: Sequence[float | None]
) -> Mean | None:
    """Return the mean over the settings of their means; None without values.

    The seeds of a setting differ less from each other than settings do, so an interval
    over single runs would be too narrow for a setting that is not among them.
    """
    by_setting: dict[tuple[str, str], list[float]] = {}
    for run, value in zip(runs, values, strict=True):
        if value is not None:
            by_setting.setdefault((run.data, run.setting), []).append(value)
    if not by_setting:
        return None
    return mean_interval([mean(own) for own in by_setting.values()])


def _auc_gap(run: Judged, label: str) -> float | None:
    """Return how much the AUC of membership is above retraining, in points."""
    own, again = run.scores[label].mia_auc, run.scores[RETRAINED].mia_auc
    return None if own is None or again is None else 100 * (own - again)


def _with_interval(found: Mean) -> str:
    shown = _points(found.value)
    if found.interval is None:
        return shown
    low, high = found.interval
    return f"{shown} [{_points(low)} to {_points(high)}]"


def _losses(runs: Sequence[Judged]) -> str:
    lost = sorted(
        (run for run in runs if not run.won),
        key=lambda run: run.distance(BY_HAND[SCALAR]) - run.distance(run.lead),
    )
    if not lost:
        lead = runs[0].lead
        return f"Nowhere: `{lead}` is always as near as the paper's best damping."
    said = [
        f"{run.data}, {run.setting}, seed {run.seed}: {_reason(run)} "
        f"(together {run.distance(run.lead):.1f} points, scalar by hand "
        f"{run.distance(BY_HAND[SCALAR]):.1f})"
        for run in lost
    ]
    return _list(said)


def _reason(run: Judged) -> str:
    main, backdoor = run.main_gap(run.lead), run.backdoor_gap(run.lead) or 0.0
    spread = "it"
    if run.lead == AUTO:
        spread = f"spread {run.chosen:g}" if run.chosen is not None else "the spread"
    if abs(main) >= abs(backdoor):
        side = "costs" if main > 0 else "keeps more accuracy than retraining:"
        return f"{spread} {side} {abs(main):.1f} points of main accuracy"
    side = "leaves" if backdoor > 0 else "removes more than retraining:"
    return f"{spread} {side} {abs(backdoor):.1f} points of the backdoor"


def _both(runs: Sequence[Judged], label: str) -> str:
    main = 100 * mean(run.scores[label].main for run in runs)
    backdoors = [b for run in runs if (b := run.scores[label].backdoor) is not None]
    second = f"{100 * mean(backdoors):.1f}" if backdoors else NOTHING
    return f"{main:.1f} / {second}"


def _points(value: float | None) -> str:
    return NOTHING if value is None else f"{value + 0.0:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _list(texts: Sequence[str]) -> str:
    return "\n".join(f"- {tidy(' '.join(text.split()))}" for text in texts)
