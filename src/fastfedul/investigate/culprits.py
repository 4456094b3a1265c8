"""The search for culprits: who added the unwanted answers to the model.

Attackers who hold the same backdoor cover for each other: without one of them, the
answer stays. So the search does not forget each client in turn. It takes away half of
what a client added, as if nobody had reacted to it, and asks how far the odds of the
unwanted answers fall. Then it takes away half of all suspects and looks again. In the
end it forgets the suspects once, and accuses them only if the unwanted answers lose far
more than right answers of the same class. It also forgets the first few clients one by
one, for among many clients half of an attacker may change little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.investigate.leave_one_out import LeaveOut
from fastfedul.investigate.odds import Evidence, Odds, p_values
from fastfedul.records import ClientId

PART = 0.5
"""Part of what a client added that is taken away.

All of it leads far away from the model, where honest clients came first by chance.
"""

MOST_LOOKS = 4

FIRST = (2.0, 3.0)
"""Score of the first suspect among ten clients: nats, and nats more for few inputs.

This second part, and those below, shrink with the root of the number of inputs. All
thresholds were chosen on development runs (digits, seeds 100 to 199).
"""

NEXT = (0.05, 0.15)
"""Part of the first suspect's score that other suspects must have."""

LEAST = 0.3
"""Nats that every suspect among ten clients must have."""

USUAL_CLIENTS = 10
"""Among more clients each adds less, and these two thresholds shrink as shares do."""

STANDARD_ERRORS = 2.0
"""Standard errors, by the scatter of right answers, that every suspect must have."""

FORGOTTEN = (2.5, 2.5)
"""Fall in nats beyond right answers when the server forgets suspects, or one client."""

MOST_ALONE = 5
"""Clients that are forgotten one by one: the first, at most half of all."""

SIGNIFICANT = 0.05
"""Chance by permutation above which nobody is accused."""

Tell = Callable[[str, int, int], None]
"""Called with the name of a stage, the work done, and the work in all."""


@dataclass(frozen=True, slots=True)
class Step:
    """One suspect of the search.

    Attributes:
        client: The client.
        look: Number of the look that made it a suspect, from 1.
        score: Its score in that look, in nats.
    """

    client: ClientId
    look: int
    score: float


@dataclass(frozen=True, slots=True)
class Search:
    """The suspects, and what forgetting them would do.

    Attributes:
        steps: The suspects, in the order in which they were found.
        fall: Fall of the unwanted answers' odds without all suspects, beyond that of
            right answers; None if there is no suspect.
        wanted: Fall that accuses them.
        alone: Clients that can be accused without the others, with the fall that
            forgetting each alone brings.
    """

    steps: tuple[Step, ...]
    fall: float | None
    wanted: float
    alone: Mapping[ClientId, float]

    @property
    def culprits(self) -> tuple[ClientId, ...]:
        """The accused; nobody if nobody stands out.

        A group must do more than each client alone; otherwise it has honest members.
        """
        together = 0.0
        if self.fall is not None and self.fall >= self.wanted:
            together = self.fall
        if max(self.alone.values(), default=0.0) > together:
            return tuple(self.alone)
        return tuple(step.client for step in self.steps) if together else ()


def threshold(parts: tuple[float, float], num_inputs: int) -> float:
    """Return a threshold that is higher for few inputs.

    >>> threshold(FIRST, 1), threshold(FIRST, 100)
    (5.0, 2.3)
    """
    return parts[0] + parts[1] / math.sqrt(num_inputs)


def wanted_scores(num_inputs: int, num_clients: int) -> tuple[float, float]:
    """Return the scores that the first suspect, and every suspect, must have.

    >>> wanted_scores(1, 10), wanted_scores(1, 50)
    ((5.0, 0.3), (1.0, 0.06))
    """
    part = min(1.0, USUAL_CLIENTS / num_clients)
    return threshold(FIRST, num_inputs) * part, LEAST * part


def look(
    leave: LeaveOut, evidence: Evidence, gone: Sequence[ClientId], tell: Tell
) -> dict[ClientId, Odds]:
    """Return how far the odds fall without a part of what each client added.

    Args:
        leave: Models without clients.
        evidence: The unwanted answers.
        gone: Suspects: the look starts half way to the model without them.
        tell: Told how far it is.
    """
    final = leave.ledger.final
    start = PART * (leave.exact(gone).params.flat - final.params.flat)
    now = evidence.odds(leave.moved(start))
    total = len(leave.clients) - len(gone)
    drops: dict[ClientId, Odds] = {}
    for name in leave.clients:
        if name not in gone:
            model = leave.moved(start + PART * leave.added(name))
            drops[name] = now.fell_to(evidence.odds(model))
            tell(f"looking beside {len(gone)} suspects", len(drops), total)
    return drops


def ranked(
    evidence: Evidence, drops: Mapping[ClientId, Odds]
) -> list[tuple[ClientId, float]]:
    """Return clients with their scores, from the most to the least suspected."""
    scores = {n: float(evidence.excess(own).mean()) for n, own in drops.items()}
    return sorted(scores.items(), key=lambda one: (-one[1], one[0]))


def search(
    leave: LeaveOut,
    evidence: Evidence,
    first: Mapping[ClientId, Odds],
    chances: Mapping[ClientId, float | None],
    rng: np.random.Generator,
    tell: Tell,
) -> Search:
    """Return the suspects, and what forgetting them would do.

    Args:
        leave: Models without clients.
        evidence: The unwanted answers.
        first: How far the odds fall in the first look.
        chances: Chance by permutation of each client's score.
        rng: Draws permutations.
        tell: Told how far it is.
    """
    wanted = threshold(FORGOTTEN, len(evidence.answers))
    steps = _suspects(leave, evidence, first, chances, tell)
    fall = None
    if steps and 2 * len(steps) <= len(leave.clients):
        gone = _forgotten(leave, evidence, [step.client for step in steps])
        fall = float(evidence.excess(gone).mean())
        if len(steps) == 1 and fall >= wanted:
            return Search(steps, fall, wanted, {})
    if not evidence.compares:
        return Search(steps, fall, wanted, {})
    names = [name for name, _ in ranked(evidence, first)]
    names = names[: min(MOST_ALONE, len(names) // 2)]
    drops: dict[ClientId, Odds] = {}
    for name in names:
        drops[name] = _forgotten(leave, evidence, [name])
        tell("forgetting the first one by one", len(drops), len(names))
    chances = p_values(evidence, drops, rng)
    alone = {
        name: score
        for name, score in ranked(evidence, drops)
        if score >= wanted and _unlikely(chances[name])
    }
    return Search(steps, fall, wanted, alone)


def _forgotten(
    leave: LeaveOut, evidence: Evidence, clients: Sequence[ClientId]
) -> Odds:
    """Return how far the odds fall if the server forgets clients."""
    now = evidence.odds(leave.ledger.final)
    return now.fell_to(evidence.odds(leave.exact(clients)))


def _unlikely(chance: float | None) -> bool:
    return chance is None or chance <= SIGNIFICANT


def _suspects(
    leave: LeaveOut,
    evidence: Evidence,
    first: Mapping[ClientId, Odds],
    chances: Mapping[ClientId, float | None],
    tell: Tell,
) -> tuple[Step, ...]:
    """Return the suspects, in the order in which they are found."""
    number = len(evidence.answers)
    name, top = ranked(evidence, first)[0]
    first_wanted, least = wanted_scores(number, len(leave.clients))
    if top < first_wanted or not _unlikely(chances[name]):
        return ()
    steps = [Step(name, 1, top)]
    least = max(least, threshold(NEXT, number) * top)
    drops = dict(first)
    # Without right answers nobody knows how far honest clients reach.
    for count in range(1, MOST_LOOKS + 1 if evidence.compares else 1):
        known = {step.client for step in steps}
        new = [
            Step(name, count, score)
            for name, score in ranked(evidence, drops)
            if name not in known
            and score >= least
            and score >= STANDARD_ERRORS * evidence.error(drops[name])
        ]
        steps += new
        if (count > 1 and not new) or 2 * len(steps) > len(leave.clients):
            break
        if count < MOST_LOOKS:
            drops = look(leave, evidence, [step.client for step in steps], tell)
    return tuple(steps)
