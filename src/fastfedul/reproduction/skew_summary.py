"""What the runs say about our dampings: how near to retraining each comes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastfedul.reproduction.cells import BEFORE, RETRAINED, CellStore
from fastfedul.reproduction.experiments import Line
from fastfedul.reproduction.skew_cells import (
    AUTO,
    COORDINATE,
    CURVES,
    DIRECTED,
    DIRECTION,
    RECURSION,
    SCALAR,
    VALIDATED,
)
from fastfedul.unlearn.fast_fedul import PAPERS_DAMPING

BY_HAND = {
    SCALAR: "scalar, best by hand",
    COORDINATE: "coordinate, best by hand",
    RECURSION: "recursion, best by hand",
    DIRECTION: "direction, best by hand",
}
PAPER = f"scalar {PAPERS_DAMPING:g}"


@dataclass(frozen=True, slots=True)
class Score:
    """How a model does; the backdoor is None where nobody attacked."""

    main: float
    backdoor: float | None
    mia_auc: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One run, with everything that was scored on it.

    Attributes:
        data: The data set that was really trained on.
        setting: Attack, split, participation and leavers, in words.
        attack: The attack.
        seed: Of the run.
        scores: Scores by what a table calls the model.
        curves: For each family, triples of constant, main and backdoor accuracy.
        chosen: The spread that was chosen from the history.
    """

    data: str
    setting: str
    attack: str
    seed: int
    scores: Mapping[str, Score]
    curves: Mapping[str, tuple[tuple[float, float, float | None], ...]]
    chosen: float | None

    def main_gap(self, label: str) -> float:
        """Return how much main accuracy is below retraining, in points."""
        return 100 * (self.scores[RETRAINED].main - self.scores[label].main)

    def backdoor_gap(self, label: str) -> float | None:
        """Return how much the backdoor is above retraining, in points."""
        own, again = self.scores[label].backdoor, self.scores[RETRAINED].backdoor
        return None if own is None or again is None else 100 * (own - again)

    def distance(self, label: str) -> float:
        """Return both gaps together, each without its sign."""
        return abs(self.main_gap(label)) + abs(self.backdoor_gap(label) or 0.0)

    @property
    def lead(self) -> str:
        """Which way to forget is judged."""
        return DIRECTED if DIRECTED in self.scores else AUTO

    @property
    def won(self) -> bool:
        """Whether it is at least as near as the paper's best damping."""
        # What is equal in counts may differ in the last bit.
        return self.distance(self.lead) <= self.distance(BY_HAND[SCALAR]) + 1e-9


def judge(lines: Sequence[Line], store: CellStore) -> tuple[Judged, ...]:
    """Return every run all of whose cells have a result."""
    by_setting: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        by_setting.setdefault((line.data, line.partition), []).append(line)
    found = []
    for group in by_setting.values():
        for place, cell in enumerate(group[0].cells):
            results = {line.label: store.read(line.cells[place]) for line in group}
            known = {k: v for k, v in results.items() if v and "refused" not in v}
            if len(known) == len(group):
                found.append(_judged(group[0], cell.run.seed, cell.run.data, known))
    return tuple(found)


def impossible(lines: Sequence[Line], store: CellStore) -> tuple[str, ...]:
    """Return the runs that could not be made, and why."""
    said = {}
    for line in lines:
        for cell in line.cells:
            result = store.read(cell)
            if result and "refused" in result:
                key = f"{cell.run.data}, {line.partition}, seed {cell.run.seed}"
                said[key] = f"{key}: {result['refused']}"
    return tuple(said.values())


def _judged(
    line: Line, seed: int, data: str, results: Mapping[str, Mapping[str, Any]]
) -> Judged:
    curves = {
        family: tuple(
            zip(
                results[family]["values"],
                results[family]["main"],
                results[family]["backdoor"],
                strict=True,
            )
        )
        for family in CURVES
        if family in results
    }
    scores = {
        label: Score(
            results[label]["main"],
            results[label]["backdoor"],
            results[label]["mia_auc"],
        )
        for label in (BEFORE, RETRAINED, AUTO, VALIDATED, DIRECTED)
        if label in results
    }
    again = scores[RETRAINED]
    for family, points in curves.items():
        scores[BY_HAND[family]] = min(
            (Score(main, backdoor) for _, main, backdoor in points),
            key=lambda score: _apart(score, again),
        )
    [(_, main, backdoor)] = [p for p in curves[SCALAR] if p[0] == PAPERS_DAMPING]
    scores[PAPER] = Score(main, backdoor)
    choice = results[AUTO].get("choice") or {}
    return Judged(
        data=data,
        setting=line.partition,
        attack=line.attack,
        seed=seed,
        scores=scores,
        curves=curves,
        chosen=choice.get("value"),
    )


def _apart(score: Score, again: Score) -> float:
    gap = abs(score.main - again.main)
    if score.backdoor is None or again.backdoor is None:
        return gap
    return gap + abs(score.backdoor - again.backdoor)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gaps of one way to forget over some runs, in points.

    Attributes:
        label: What a table calls it.
        num_runs: How many runs.
        main_mean: Mean main accuracy below retraining.
        main_worst: The most.
        backdoor_mean: Mean backdoor above retraining, of attacked runs; None without.
        backdoor_worst: The most.
        distance: Mean of both gaps together, without signs.
        num_won: Runs at least as near to retraining as the paper's best damping.
    """

    label: str
    num_runs: int
    main_mean: float
    main_worst: float
    backdoor_mean: float | None
    backdoor_worst: float | None
    distance: float
    num_won: int


def ways(runs: Sequence[Judged]) -> tuple[str, ...]:
    """Return the ways to forget that were scored on all runs; none without runs."""
    known = (DIRECTED, AUTO, VALIDATED, PAPER, *BY_HAND.values())
    return tuple(
        label for label in known if runs and all(label in run.scores for run in runs)
    )


def verdicts(runs: Sequence[Judged]) -> tuple[Verdict, ...]:
    """Return a verdict on each way to forget; none without runs."""
    return tuple(_verdict(label, runs) for label in ways(runs))


def _verdict(label: str, runs: Sequence[Judged]) -> Verdict:
    main = [run.main_gap(label) for run in runs]
    backdoor = [gap for run in runs if (gap := run.backdoor_gap(label)) is not None]
    best = BY_HAND[SCALAR]
    return Verdict(
        label=label,
        num_runs=len(runs),
        main_mean=mean(main),
        main_worst=max(main),
        backdoor_mean=mean(backdoor) if backdoor else None,
        backdoor_worst=max(backdoor) if backdoor else None,
        distance=mean([run.distance(label) for run in runs]),
        num_won=sum(run.distance(label) <= run.distance(best) + 1e-9 for run in runs),
    )


def mean(values: Iterable[float]) -> float:
    """Return the mean of some numbers."""
    known = list(values)
    return math.fsum(known) / len(known)
