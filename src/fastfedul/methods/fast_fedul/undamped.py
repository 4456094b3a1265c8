"""The difference that forgetting would make if nobody had reacted to the leavers.

It comes from the rounds, or from a ledger that keeps sums. A ledger of sums has for
each client the difference that forgetting that client alone makes. For several clients
the differences are added up, each times a factor that depends on shares alone. Where
shares vary from round to round the mean of the factors stands in, and the norms that
the ledger has say how far off the result can be at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastfedul.errors import UnlearnRefusedError
from fastfedul.ledger.participation import (
    Factor,
    joint_factors,
    participation,
)
from fastfedul.ledger.protocol import Ledger
from fastfedul.methods.fast_fedul.cleaning import CleanedStep, cleaned_steps
from fastfedul.methods.fast_fedul.deviations import (
    Deviations,
    drawn_deviations,
    longest_that_counts,
    paired_deviations,
)
from fastfedul.methods.fast_fedul.kronecker import UNKNOWN_PULL, Ages
from fastfedul.methods.fast_fedul.tracing import Leaving, Traced, trace
from fastfedul.params import Array, Flat, norm
from fastfedul.records import ClientId, RoundEntry, UpdateEntry

AGE_CLASSES = (0.0, 1 / 8, 1 / 2)
"""Oldest of each class of ages, in parts of the training; the rest is the last class.

On 36 development runs these four classes came as near to retraining as a class for
every round.
"""

_WORTH_SAYING = 1e-4
_TOO_FAR = 0.25
"""Part of a difference by which it may be off before forgetting is refused."""


@dataclass(frozen=True, slots=True)
class Undamped:
    """The undamped difference, and how the clients that stay train.

    Attributes:
        marks: What the rounds would have added otherwise, added up: a row for rounds
            of like age, or one row for all of them.
        ages: How old each row is.
        gamma_norms: How far each round would have gone elsewhere.
        deviations: How the staying clients' updates differ.
        scale: sqrt(T b) / g of `kronecker.py`.
        num_unknown: Rounds whose local training is not known.
        notes: What is not exact, in words.
    """

    marks: Array
    ages: tuple[Ages, ...]
    gamma_norms: tuple[float, ...]
    deviations: Deviations
    scale: float
    num_unknown: int
    notes: tuple[str, ...]

    @property
    def difference(self) -> Flat:
        """Sum of the marks of all ages."""
        found: Flat = self.marks.sum(axis=0)
        return found

    def without_ages(self) -> Undamped:
        """Return the same with one mark for all rounds, as a ledger of sums has it."""
        ages = ages_of(np.array(self.gamma_norms))
        return replace(self, marks=self.difference[None], ages=(ages,))


def undamped(
    ledger: Ledger,
    removal: Leaving,
    rounds: Sequence[RoundEntry],
    num_updates: int | None,
) -> Undamped:
    """Return the undamped difference, and how the clients that stay train.

    Args:
        ledger: The ledger, of weighted means.
        removal: Who leaves which round.
        rounds: All rounds.
        num_updates: How many updates of the clients that stay to draw; None for all.

    Raises:
        UnlearnRefusedError: If sums do not say what is asked.
    """
    clients = ledger.clients()
    asked = frozenset(update.client for update in removal.asked)
    stayers = frozenset(
        name
        for name, entry in clients.items()
        if entry.state == "active" and name not in asked
    )
    if ledger.settings.history == "sums":
        return _from_sums(ledger, removal, rounds, asked)
    classes = age_classes(len(rounds))
    members = np.equal.outer(np.arange(len(AGE_CLASSES) + 1), classes)
    traced = trace(ledger, removal, members.astype(np.float64))
    cleaned = cleaned_steps(ledger, removal, rounds)
    staying = {
        step.index: [u for u in ledger.updates_in(step.index) if u.client in stayers]
        for step in cleaned
    }
    squares = [
        _no_longer(_squared_step(ledger, step, round_, traced), staying[step.index])
        for step, round_ in zip(cleaned, rounds, strict=True)
    ]
    return Undamped(
        traced.sums,
        tuple(ages_of(np.array(traced.gamma_norms), own) for own in members),
        traced.gamma_norms,
        drawn_deviations(ledger, cleaned, staying, num_updates),
        scale_of(rounds, [step.left for step in cleaned], squares),
        *_unknown(rounds),
    )


def age_classes(num_rounds: int) -> Array:
    """Return the class of each round's age: how much training came after it.

    >>> age_classes(10).tolist()
    [3, 3, 3, 3, 2, 2, 2, 2, 1, 0]
    """
    return np.digitize(_ages(num_rounds), AGE_CLASSES, right=True)


def ages_of(lengths: Array, members: Array | None = None) -> Ages:
    """Return how old a sum over rounds is: the mean age of each class.

    Args:
        lengths: How much each round contributed to the sum. If that is not known, or
            too small for float32, each counts alike.
        members: Whether each round is in the sum; None for all.
    """
    inside = np.ones(len(lengths), bool) if members is None else members
    weights = np.where(inside, lengths, 0.0)
    if not 0 < float(np.sum(weights)) < math.inf:
        weights = inside.astype(np.float64)
    ages, classes = _ages(len(lengths)), age_classes(len(lengths))
    total = float(np.sum(weights))
    found = []
    for number in range(len(AGE_CLASSES) + 1):
        own = np.where(classes == number, weights, 0.0)
        weight = float(np.sum(own))
        if weight > 0:
            found.append((float(ages @ own) / weight, weight / total))
    return tuple(found)


def _ages(num_rounds: int) -> Array:
    """Return the part of the training that came after each round."""
    return np.arange(num_rounds)[::-1] / max(1, num_rounds)


def _no_longer(square: float, staying: Sequence[UpdateEntry]) -> float:
    """Return the squared length of a step, as long as its updates may count."""
    return min(square, longest_that_counts(staying) ** 2)


def scale_of(
    rounds: Sequence[RoundEntry], left: Sequence[float], squares: Sequence[float]
) -> float:
    """Return sqrt(T b) / g: how a variance becomes a strength of pulling back.

    Args:
        rounds: All rounds.
        left: Share of each round that stays.
        squares: Squared length of each round's step without everybody who left.
    """
    pull = math.fsum(UNKNOWN_PULL if r.local is None else r.local.pull for r in rounds)
    known = [(a, b) for a, b in zip(left, squares, strict=True) if not math.isnan(b)]
    weighed = math.fsum(a * b for a, b in known)
    mean = weighed / (math.fsum(a for a, _ in known) or 1.0)
    return math.sqrt(pull / mean) if mean > 0 else math.inf


def _squared_step(
    ledger: Ledger, step: CleanedStep, round_: RoundEntry, traced: Traced
) -> float:
    """Return the squared length of a round's step without everybody who left."""
    if step.left == 0:
        return 0.0
    if step.index in traced.step_norms:
        return traced.step_norms[step.index] ** 2
    if len(step.refs) == 1:
        return (step.factors[0] * round_.step_norm) ** 2
    return norm(ledger.combine(step.refs, [step.factors]).sums[0]) ** 2


def _unknown(rounds: Sequence[RoundEntry]) -> tuple[int, tuple[str, ...]]:
    unknown = sum(round_.local is None for round_ in rounds)
    if not unknown:
        return 0, ()
    many = "" if unknown == len(rounds) else f" in {unknown} of {len(rounds)} rounds"
    return unknown, (
        f"how clients train is not recorded{many} (learning rate, momentum, batch size "
        "and epochs), so a usual value stands in for it; record it with "
        "Round(local=...), or in the train config of Flower",
    )


def _from_sums(
    ledger: Ledger,
    removal: Leaving,
    rounds: Sequence[RoundEntry],
    asked: frozenset[ClientId],
) -> Undamped:
    here = participation(ledger)
    earlier = frozenset(
        name for name, entry in ledger.clients().items() if entry.state == "forgotten"
    )
    gone = asked | earlier
    after, before = joint_factors(here, gone), joint_factors(here, earlier)
    removed = np.zeros(ledger.settings.layout.size, np.float32)
    off = 0.0
    for name in sorted(gone):
        again = before.get(name, Factor(0.0, 0.0))
        factor = after[name].value - again.value
        if factor or after[name].off or again.off:
            removed += np.float32(factor) * ledger.own_difference(name)
        off += after[name].off + again.off
    left = [(1 - r.removed_share) * (1 - here.share_of(gone, r.index)) for r in rounds]
    squares = [
        _no_longer(
            here.step_square(gone, index),
            [place.update for name, place in places.items() if name not in gone],
        )
        for index, places in sorted(here.places.items())
    ]
    unknown, notes = _unknown(rounds)
    reach = tuple(here.reach_of(asked, r.index) if asked else 0.0 for r in rounds)
    return Undamped(
        removed[None],
        (ages_of(np.array(reach)),),
        reach,
        paired_deviations(ledger, here, gone),
        scale_of(rounds, left, squares),
        unknown,
        (*notes, *_how_far_off(ledger, off / (norm(removed) or 1.0))),
    )


def _how_far_off(ledger: Ledger, off: float) -> tuple[str, ...]:
    """Return how far off the difference may be, by this request and by earlier ones."""
    erased = [event.details.get("sums_off") for event in ledger.events()]
    worst = math.fsum(part for part in erased if isinstance(part, float))
    # Written such that NaN is refused, too.
    if not off + worst <= _TOO_FAR:
        raise UnlearnRefusedError(
            "shares vary from round to round and this ledger has sums only: with who "
            f"left before, what it would remove may be off by {off + worst:.0%}; "
            "forget fewer clients at once, or retrain without them"
        )
    return (
        *_say("what is removed", off),
        *_say("a client's sum, after those erased from it,", worst),
    )


def _say(what: str, off: float) -> tuple[str, ...]:
    if off < _WORTH_SAYING:
        return ()
    return (f"{what} may be off by {off:.2%}, because shares vary between rounds",)
