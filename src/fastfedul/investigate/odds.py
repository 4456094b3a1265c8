"""The odds of answers: how much surer a model is of a class than of all others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastfedul.evaluate.metrics import Floats, checked_labels, checked_logits
from fastfedul.federation.trainer import Inputs, Labels, Logits
from fastfedul.params import Array
from fastfedul.records import ClientId, Model

Predict = Callable[[Model, Inputs], Logits]

_SURE = 50.0
"""Log odds beyond which a model is simply sure; a diverged model is not surer."""

NUM_PERMUTATIONS = 999


def log_odds(logits: Array, answers: Array) -> Floats:
    """Return for each row the log odds of an answer against all other classes.

    Unlike the log of the probability, the log odds still tell sure answers apart.

    >>> log_odds(np.array([[2.0, 0.0], [0.0, 900.0]]), np.array([0, 1]))
    array([ 2., 50.])
    """
    scores = checked_logits(logits)
    column = checked_labels(answers, scores)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        own = np.take_along_axis(scores, column, axis=1)[:, 0]
        np.put_along_axis(scores, column, -np.inf, axis=1)
        best = scores.max(axis=1)
        rest = best + np.log(np.exp(scores - best[:, None]).sum(axis=1))
        found: Floats = own - rest
    return np.nan_to_num(found, nan=-_SURE, posinf=_SURE, neginf=-_SURE).clip(
        -_SURE, _SURE
    )


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Unwanted answers, and right answers of the same classes to compare them with.

    Attributes:
        bad: Inputs with an unwanted answer.
        answers: The unwanted answer of each.
        clean: Clean inputs that the model answers rightly.
        clean_answers: Their answers.
        predict: Gives the logits of a model.
    """

    bad: Inputs
    answers: Labels
    clean: Inputs
    clean_answers: Labels
    predict: Predict

    @property
    def compares(self) -> bool:
        """Whether there is a clean input to compare with for every unwanted answer."""
        return bool(np.isin(self.answers, self.clean_answers).all())

    def odds(self, model: Model) -> Odds:
        """Return a model's log odds of the answers."""
        both = np.concatenate([self.bad, self.clean])
        answers = np.concatenate([self.answers, self.clean_answers])
        found = log_odds(self.predict(model, both), answers)
        return Odds(found[: len(self.bad)], found[len(self.bad) :])

    def excess(self, drop: Odds) -> Floats:
        """Return how much more each unwanted answer lost than clean ones of its class.

        If clean answers gain, this is the loss itself: a client that works against a
        class does not teach it. Without clean inputs of all the classes, too.
        """
        if not self.compares:
            return drop.bad
        usual = np.empty(len(self.answers))
        for answer in np.unique(self.answers):
            clean = drop.clean[self.clean_answers == answer]
            usual[self.answers == answer] = max(0.0, clean.mean())
        return drop.bad - usual

    def error(self, drop: Odds) -> float:
        """Return the standard error of a mean excess, by the scatter of clean answers.

        0 without clean inputs of all the classes.
        """
        if not self.compares:
            return 0.0
        total = math.fsum(
            np.count_nonzero(self.answers == answer)
            * float(drop.clean[self.clean_answers == answer].var())
            for answer in np.unique(self.answers)
        )
        return math.sqrt(total) / len(self.answers)


@dataclass(frozen=True, slots=True, eq=False)
class Odds:
    """Log odds, or how far they fell, of the unwanted and of the clean answers."""

    bad: Floats
    clean: Floats

    def fell_to(self, after: Odds) -> Odds:
        """Return how far the odds fell from here to another model."""
        return Odds(self.bad - after.bad, self.clean - after.clean)


def p_values(
    evidence: Evidence, drops: dict[ClientId, Odds], rng: np.random.Generator
) -> dict[ClientId, float | None]:
    """Return by client the chance that clean inputs would accuse somebody as much.

    The test exchanges bad inputs for clean ones of the same answer. It compares a
    client's excess with the largest excess of any client, so the chance holds for all
    clients together (Westfall and Young, "Resampling-based multiple testing", 1993).
    None without clean inputs of all the answers.
    """
    if not evidence.compares or not drops:
        return dict.fromkeys(drops)
    names = list(drops)
    largest = np.zeros((NUM_PERMUTATIONS, len(names)))
    observed = np.array([evidence.excess(drops[name]).mean() for name in names])
    for answer in np.unique(evidence.answers):
        bad, clean = evidence.answers == answer, evidence.clean_answers == answer
        pool = np.array(
            [
                np.concatenate([drops[name].bad[bad], drops[name].clean[clean]])
                for name in names
            ]
        )
        many, size = int(bad.sum()), pool.shape[1]
        for turn in range(NUM_PERMUTATIONS):
            chosen = rng.permutation(size)[:many]
            taken = pool[:, chosen].sum(axis=1)
            others = (pool.sum(axis=1) - taken) / (size - many)
            largest[turn] += taken - many * np.maximum(0.0, others)
    most = largest.max(axis=1) / len(evidence.answers)
    # Rounding must not tell an arrangement from itself.
    reached = most[:, None] >= observed - 1e-9
    found = (1 + reached.sum(axis=0)) / (NUM_PERMUTATIONS + 1)
    return dict(zip(names, map(float, found), strict=True))
