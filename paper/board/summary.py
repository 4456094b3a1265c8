"""Arithmetic of the board: gaps to retraining, beside the noise of retraining itself.

All numbers are points of a hundred. The gap of a method on a run is its score less the
mean of the run's three retrainings. The floor of a run is the mean, over the three, of
the distance of a retraining from the mean of the other two. A method as good as a
fourth retraining would have gaps of about 0.94 of that, since it is compared with a
mean of three and not of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fastfedul.evaluate.intervals import Mean, mean_interval
from paper.board.rows import (
    BEFORE,
    FEDRECOVER,
    KD,
    METHODS,
    RETRAINED,
    TRAINING_FREE,
    WHOLE_RUN,
)
from paper.board.runs import HONEST, USUAL
from paper.board.store import Line

Metric = Literal["main", "backdoor", "auc"]
MAIN: Metric = "main"
BACKDOOR: Metric = "backdoor"
AUC: Metric = "auc"
SHOWN = (BEFORE, *METHODS)

SIGNED_MEAN = {MAIN: 0.2, BACKDOOR: 0.7}
"""Wanted: a signed mean gap within these many points."""
TIMES_FLOOR = {MAIN: 1.0, BACKDOOR: 1.3}
"""Wanted: a mean absolute gap of at most so many times the floor."""
WORKED = 10.0
"""An attack worked if the trained model's backdoor is so many points too high."""
ABOVE_WORST = 1.0
"""Wanted: a worst gap at most so many points above the floor's worst."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A run that was made.

    Attributes:
        key: Its name.
        facts: Its first line, which has its fields.
        scores: Scores by method and metric, in points; missing ones are left out.
        refused: Why a method gave no model, by method.
    """

    key: str
    facts: Line
    scores: dict[str, dict[Metric, float]]
    refused: dict[str, str] = field(default_factory=dict)

    def wanted(self, metric: Metric) -> float | None:
        """Return the mean of the retrainings; None without such a score."""
        found = self._retrained(metric)
        return float(np.mean(found)) if found else None

    def gap(self, method: str, metric: Metric) -> float | None:
        """Return how far a method is above the mean of the retrainings."""
        wanted, own = self.wanted(metric), self.scores.get(method, {}).get(metric)
        return None if wanted is None or own is None else own - wanted

    def distance(self, method: str) -> float | None:
        """Return both gaps together, without signs."""
        main, backdoor = self.gap(method, MAIN), self.gap(method, BACKDOOR)
        return None if main is None else abs(main) + abs(backdoor or 0.0)

    def floor(self, metric: Metric) -> float | None:
        """Return how far a retraining is from the mean of the others, on average."""
        found = self._retrained(metric)
        if len(found) < 2:
            return None
        total = sum(found)
        others = [(total - own) / (len(found) - 1) for own in found]
        return float(np.mean(np.abs(np.subtract(found, others))))

    def _retrained(self, metric: Metric) -> list[float]:
        scores = [self.scores.get(name, {}) for name in RETRAINED]
        return [own[metric] for own in scores if metric in own]


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps of a method over some runs.

    Attributes:
        signed: Their mean, with its 95 % interval.
        absolute: The mean of their sizes.
        worst: The one farthest from 0, with its sign.
        floor: The mean of the runs' floors.
        floor_worst: The largest of the runs' floors.
        num_runs: How many runs have one.
    """

    signed: Mean
    absolute: float
    worst: float
    floor: float
    floor_worst: float
    num_runs: int

    @property
    def times_floor(self) -> float | None:
        """The mean of the sizes over the mean floor; None if that is 0."""
        return self.absolute / self.floor if self.floor else None


@dataclass(frozen=True, slots=True)
class Wish:
    """A wish for the judged method, and its finding.

    Attributes:
        what: What is wanted.
        found: The finding.
        met: Whether it is met; None if no run tells.
        num_runs: How many runs tell.
    """

    what: str
    found: str
    met: bool | None
    num_runs: int


@dataclass(frozen=True, slots=True)
class Stratum:
    """Runs that are alike in one way."""

    factor: str
    level: str
    runs: tuple[Judged, ...]


def judged_runs(lines: Sequence[Line]) -> tuple[Judged, ...]:
    """Return the runs that were made, from the lines of the results."""
    by_run: dict[str, list[Line]] = {}
    for line in lines:
        if line["method"] != WHOLE_RUN:
            by_run.setdefault(line["run"], []).append(line)
    return tuple(
        Judged(
            key,
            own[0],
            {line["method"]: _scores(line) for line in own if not line["refused"]},
            {line["method"]: line["refused"] for line in own if line["refused"]},
        )
        for key, own in by_run.items()
    )


def refused_runs(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Return the lines of runs that could not be made."""
    return tuple(line for line in lines if line["method"] == WHOLE_RUN)


def gaps(runs: Iterable[Judged], method: str, metric: Metric) -> Gaps | None:
    """Return the gaps of a method over some runs; None if no run has one."""
    found = [
        (gap, floor)
        for run in runs
        if (gap := run.gap(method, metric)) is not None
        and (floor := run.floor(metric)) is not None
    ]
    if not found:
        return None
    own = np.array([gap for gap, _ in found])
    floors = np.array([floor for _, floor in found])
    return Gaps(
        signed=mean_interval(own.tolist()),
        absolute=float(np.abs(own).mean()),
        worst=float(own[np.abs(own).argmax()]),
        floor=float(floors.mean()),
        floor_worst=float(floors.max()),
        num_runs=len(found),
    )


def strata(runs: Sequence[Judged]) -> tuple[Stratum, ...]:
    """Return the runs by every factor and level, in the order of the page."""
    found = []
    for factor, level_of in _FACTORS.items():
        by_level: dict[str, list[Judged]] = {}
        for run in runs:
            by_level.setdefault(level_of(run), []).append(run)
        found += [
            Stratum(factor, level, tuple(by_level[level])) for level in sorted(by_level)
        ]
    return tuple(found)


def farthest(runs: Iterable[Judged], method: str, number: int) -> list[Judged]:
    """Return the runs on which a method is farthest from retraining."""
    told = [(run.distance(method), run) for run in runs]
    known = [(far, run) for far, run in told if far is not None]
    return [run for _, run in sorted(known, key=lambda at: -at[0])[:number]]


def mean_distances(runs: Iterable[Judged], *methods: str) -> tuple[list[float], int]:
    """Return the mean distance of each method over the runs that have all of them."""
    found = [[run.distance(method) for method in methods] for run in runs]
    whole = [row for row in found if None not in row]
    if not whole:
        return [], 0
    return np.mean(np.array(whole, np.float64), axis=0).tolist(), len(whole)


def lost_strata(runs: Sequence[Judged], method: str) -> list[tuple[Stratum, str]]:
    """Return the strata in which a rival without training is nearer, and the rival."""
    lost = []
    for stratum in strata(runs):
        for rival in TRAINING_FREE:
            means, _ = mean_distances(stratum.runs, method, rival)
            if means and means[0] >= means[1]:
                lost.append((stratum, rival))
    return lost


def wishes(runs: Sequence[Judged], method: str) -> list[Wish]:
    """Return the wishes for a method, each with its finding."""
    found = []
    for metric in (MAIN, BACKDOOR):
        own = gaps(runs, method, metric)
        found += _wishes_of(metric, own)
    compared = [mean_distances(runs, method, rival) for rival in TRAINING_FREE]
    lost = lost_strata(runs, method)
    num_runs = max((number for _, number in compared), default=0)
    places = dict.fromkeys(f"{s.factor}: {s.level}" for s, _ in lost)
    found.append(
        Wish(
            f"nearer than {', '.join(TRAINING_FREE)} in every stratum",
            f"not in {len(places)} of {len(strata(runs))}" if lost else "in every one",
            None if not num_runs else not lost,
            num_runs,
        )
    )
    for rival in (FEDRECOVER, KD):
        means, number = mean_distances(runs, method, rival)
        said = f"{means[0]:.2f} and {means[1]:.2f}" if means else "no run yet"
        met = means[0] <= means[1] if means else None
        found.append(Wish(f"at least as near as {rival} overall", said, met, number))
    return found


def _wishes_of(metric: Metric, own: Gaps | None) -> list[Wish]:
    signed, times = SIGNED_MEAN[metric], TIMES_FLOOR[metric]
    texts = (
        f"{metric}: signed mean within ± {signed} points",
        f"{metric}: mean absolute gap at most {times} × floor",
        f"{metric}: worst gap at most the floor's worst + {ABOVE_WORST:g}",
    )
    if own is None:
        return [Wish(text, "no run yet", None, 0) for text in texts]
    limit = own.floor_worst + ABOVE_WORST
    ratio = own.times_floor
    said = (
        f"{own.signed.value:+.2f}",
        f"{own.absolute:.2f}, floor {own.floor:.2f}",
        f"{own.worst:+.2f}, floor's worst {own.floor_worst:.2f}",
    )
    met = (
        abs(own.signed.value) <= signed,
        own.absolute == 0 if ratio is None else ratio <= times,
        abs(own.worst) <= limit,
    )
    return [Wish(*whole, own.num_runs) for whole in zip(texts, said, met, strict=True)]


def _scores(line: Line) -> dict[Metric, float]:
    found = {MAIN: 100 * line["main_correct"] / line["main_total"]}
    if line["backdoor_total"]:
        found[BACKDOOR] = 100 * line["backdoor_hits"] / line["backdoor_total"]
    if line["mia_auc"] is not None:
        found[AUC] = 100 * line["mia_auc"]
    return found


def _attack_level(run: Judged) -> str:
    gap = run.gap(BEFORE, BACKDOOR)
    if gap is None:
        return "no attack"
    return "worked" if gap >= WORKED else "did not work"


_FACTORS: dict[str, Callable[[Judged], str]] = {
    "data": lambda run: str(run.facts["data"]),
    "split": lambda run: str(run.facts["split"]),
    "clients of a round": lambda run: "half" if run.facts["half"] else "all",
    "who leaves": lambda run: (
        "honest" if run.facts["attack"] == HONEST else str(run.facts["attack"])
    ),
    "attack before forgetting": _attack_level,
    "how many leave": lambda run: f"{run.facts['leavers']} of {run.facts['clients']}",
    "training": lambda run: USUAL if run.facts["training"] == USUAL else "stressed",
    "network": lambda run: str(run.facts["network"]),
}
