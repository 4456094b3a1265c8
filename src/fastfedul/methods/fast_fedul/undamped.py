"""The difference that forgetting would make if nobody had reacted to the leavers.

It comes from the rounds, or from a ledger that keeps sums. A ledger of sums has for
each client the difference that forgetting that client alone makes. For several clients
the differences are added up, each times a factor that depends on shares alone. Where
shares vary from round to round the mean of the factors stands in, and the norms that
the ledger has say how far off the result can be at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastfedul.errors import UnlearnRefusedError
from fastfedul.ledger.participation import (
    Factor,
    joint_factors,
    participation,
)
from fastfedul.ledger.protocol import Ledger
from fastfedul.methods.fast_fedul.cleaning import cleaned_steps
from fastfedul.methods.fast_fedul.columns import Columns, rows_of
from fastfedul.methods.fast_fedul.deviations import (
    Drawn,
    OwnedDeviations,
    draw,
    drawn_deviations,
    longest_that_counts,
    paired_deviations,
)
from fastfedul.methods.fast_fedul.kronecker import UNKNOWN_PULL
from fastfedul.methods.fast_fedul.marks import HeldMarks, OneMark, StackedMarks
from fastfedul.methods.fast_fedul.remainder import Ages
from fastfedul.methods.fast_fedul.second_server import ScaledDeviations, two_servers
from fastfedul.methods.fast_fedul.tracing import (
    GammaTerms,
    Leaving,
    fill_untold,
    lengths_alone,
    trace,
)
from fastfedul.params import Array, Flat, norm
from fastfedul.records import ClientId, RoundEntry, ServerState

AGE_CLASSES = (0.0, 1 / 8, 1 / 2)
"""Oldest of each class of ages, in parts of the training; the rest is the last class.

On 36 development runs these four classes came as near to retraining as a class for
every round.
"""

_WORTH_SAYING = 1e-4
_TOO_FAR = 0.25
"""Part of a difference by which it may be off before forgetting is refused."""


_HELD_BYTES = 64 << 20
"""Marks that take no more than this are held; else they are read layer by layer."""


@dataclass(frozen=True, slots=True)
class Undamped:
    """The undamped difference, and how the clients that stay train.

    Attributes:
        marks: Sums of the vectors that the rounds would have added: a row for rounds
            of like age, or one row for all of them.
        ages: How old each row is.
        gamma_norms: How far each round would have gone elsewhere.
        deviations: How the staying clients' updates differ.
        scale: sqrt(T b) / g of `kronecker.py`.
        num_unknown: Rounds whose local training is not known.
        notes: Inexact parts of the answer, in words.
        size: Number of values of the model.
        server: State of the server optimizer without the leavers, if there is one.
    """

    marks: Columns
    ages: tuple[Ages, ...]
    gamma_norms: Array
    deviations: OwnedDeviations
    scale: float
    num_unknown: int
    notes: tuple[str, ...]
    size: int
    server: ServerState | None = None

    @property
    def difference(self) -> Flat:
        """Sum of the marks of all ages."""
        found: Flat = rows_of(OneMark(self.marks), 0, self.size).sum(axis=0)
        return found

    def without_ages(self) -> Undamped:
        """Return the same with one mark for all rounds, as a ledger of sums has it."""
        ages = ages_of(self.gamma_norms)
        return replace(self, marks=OneMark(self.marks), ages=(ages,))


def undamped(
    ledger: Ledger,
    removal: Leaving,
    rounds: Sequence[RoundEntry],
    num_updates: int | None,
) -> Undamped:
    """Return the undamped difference, and how the clients that stay train.

    Args:
        ledger: The ledger, of weighted means.
        removal: Clients that leave, by round.
        rounds: All rounds.
        num_updates: How many updates of the clients that stay to draw; None for all.

    Raises:
        UnlearnRefusedError: If sums do not hold the answer.
    """
    asked = frozenset(update.client for update in removal.asked)
    if ledger.settings.history == "sums":
        return _from_sums(ledger, removal, rounds, asked)
    if ledger.settings.optimizer is not None:
        return _from_servers(ledger, removal, rounds, num_updates)
    marks, ages, gamma_norms, step_norms = _marks(ledger, removal, len(rounds))
    stay = _Staying.of(ledger, removal, rounds)
    drawn = draw(ledger, removal.gone, stay.num_kept, num_updates)
    own = [rounds[index] for index in drawn.updates]
    squares = _squared_steps(ledger, removal, rounds, step_norms, drawn)
    squares[stay.left == 0] = 0.0
    return Undamped(
        marks,
        ages,
        gamma_norms,
        drawn_deviations(ledger, cleaned_steps(removal, own), drawn),
        scale_of(rounds, stay.left, no_longer(squares, drawn.longest)),
        *_unknown(rounds),
        ledger.settings.layout.size,
    )


def _from_servers(
    ledger: Ledger,
    removal: Leaving,
    rounds: Sequence[RoundEntry],
    num_updates: int | None,
) -> Undamped:
    """Return the undamped difference of two servers that run side by side.

    A mark is the difference that a round added to the model. Deviations and means count
    as the second server scales them in their round, so that their variances and lengths
    are lengths of the model. The pull of local training counts as it is: divided by the
    server's gain, main accuracy fell and, with large gains, less backdoor stayed.
    """
    servers = two_servers(ledger, removal, rounds)
    found = servers.run(classes=age_classes(len(rounds)))
    moved = found.lengths > 0
    classes = np.where(moved, age_classes(len(rounds)), -1)
    present = np.unique(classes[moved])
    members = np.equal.outer(present, classes)
    stay = _Staying.of(ledger, removal, rounds)
    drawn = draw(ledger, removal.gone, stay.num_kept, num_updates)
    own = [rounds[index] for index in drawn.updates]
    squares = np.square(found.mean_lengths)
    # A step that is too long counts as much less as its mean is shortened.
    counted = np.divide(
        no_longer(squares, drawn.longest),
        squares,
        out=np.ones(len(rounds)),
        where=squares > 0,
    )
    scaled = np.square(found.scaled_lengths) * counted
    return Undamped(
        HeldMarks(found.marks[present]),
        tuple(ages_of(found.lengths, own) for own in members),
        found.lengths,
        ScaledDeviations.of(
            drawn_deviations(ledger, cleaned_steps(removal, own), drawn), servers
        ),
        scale_of(rounds, stay.left, scaled),
        *_unknown(rounds),
        ledger.settings.layout.size,
        found.state,
    )


def _marks(
    ledger: Ledger, removal: Leaving, num_rounds: int
) -> tuple[Columns, tuple[Ages, ...], Array, Array]:
    """Return the marks, their ages, and the lengths of the gammas and cleaned steps."""
    touched = np.zeros(num_rounds, bool)
    touched[[round_.index for round_ in removal.rounds]] = True
    classes = np.where(touched, age_classes(num_rounds), -1)
    present = np.unique(classes[touched])
    members = np.equal.outer(present, classes)
    marks: Columns
    if 4 * len(present) * ledger.settings.layout.size <= _HELD_BYTES:
        traced = trace(ledger, removal, members.astype(np.float64))
        marks = HeldMarks(traced.sums)
        gammas, steps = traced.gamma_norms, traced.step_norms
    else:
        terms = GammaTerms.of(removal.rounds, removal.asked, removal.earlier)
        marks = StackedMarks.of(ledger, terms, members)
        gammas, steps = lengths_alone(ledger, terms, num_rounds)
    return marks, tuple(ages_of(gammas, own) for own in members), gammas, steps


@dataclass(frozen=True, slots=True)
class _Staying:
    """Clients that stay in each round, in numbers.

    Attributes:
        left: Share that stays; 0 if nobody does.
        num_kept: Kept updates of the clients that stay.
    """

    left: Array
    num_kept: Array

    @classmethod
    def of(
        cls, ledger: Ledger, removal: Leaving, rounds: Sequence[RoundEntry]
    ) -> _Staying:
        count = len(rounds)
        before = [u for own in removal.earlier.values() for u in own]
        gone = [*removal.asked, *before]
        index = np.array([u.round for u in gone], np.int64)
        shares = np.bincount(index, [u.share for u in gone], count)
        kept = np.bincount(index, [u.kept for u in gone], count).astype(np.int64)
        there = np.array([r.num_updates for r in rounds], np.int64)
        nobody = there == np.bincount(index, minlength=count)
        # Without a count of kept updates, every participant has to be looked at.
        stored = [
            sum(u.kept for u in ledger.updates_in(r.index))
            if r.num_kept is None
            else r.num_kept
            for r in rounds
        ]
        return cls(
            np.where(nobody, 0.0, 1 - shares),
            np.array(stored, np.int64) - kept,
        )


def _squared_steps(
    ledger: Ledger,
    removal: Leaving,
    rounds: Sequence[RoundEntry],
    step_norms: Array,
    drawn: Drawn,
) -> Array:
    """Return the squared length of each round's step without everybody who left.

    NaN where only the vectors of a round that was not drawn would tell it.

    Args:
        ledger: The history.
        removal: Clients that leave, by round.
        rounds: All rounds.
        step_norms: The lengths, of rounds in which somebody of the request took part.
        drawn: The draw.
    """
    squares: Array = np.square([round_.step_norm for round_ in rounds])
    known = ~np.isnan(step_norms)
    squares[known] = np.square(step_norms[known])
    only_before = [i for i in sorted(removal.earlier) if not known[i]]
    terms = GammaTerms.of([rounds[i] for i in only_before], (), removal.earlier)
    lengths = terms.lengths([np.nan] * len(terms.unknown))
    squares[terms.indices] = np.square(lengths[1])
    untold = [i for i in only_before if np.isnan(squares[i]) and i in drawn.updates]
    terms = GammaTerms.of([rounds[i] for i in untold], (), removal.earlier)
    lengths = np.full((2, len(untold)), np.nan)
    fill_untold(ledger, terms, lengths)
    squares[terms.indices] = np.square(lengths[1])
    return squares


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


def no_longer(squares: Array, longest: Mapping[int, float]) -> Array:
    """Return squared lengths of steps, none longer than an update may be.

    How long that is comes from the nearest round that was drawn.

    >>> no_longer(np.array([9.0, 9.0, 9.0, 9.0]), {0: 1.0, 3: 2.0})
    array([1., 1., 4., 4.])
    """
    if not longest:
        return squares
    drawn = np.array(sorted(longest))
    caps = np.square([longest[index] for index in drawn.tolist()])
    middles = (drawn[:-1] + drawn[1:]) / 2
    nearest = np.searchsorted(middles, np.arange(len(squares)))
    found: Array = np.where(squares > caps[nearest], caps[nearest], squares)
    return found


def scale_of(rounds: Sequence[RoundEntry], left: Array, squares: Array) -> float:
    """Return sqrt(T b) / g: how a variance becomes a strength of pulling back.

    Args:
        rounds: All rounds.
        left: Share of each round that stays.
        squares: Squared length of each round's step without everybody who left; NaN
            where it is not known.
    """
    pull = math.fsum(UNKNOWN_PULL if r.local is None else r.local.pull for r in rounds)
    known = ~np.isnan(squares)
    mean = math.fsum(left[known] * squares[known]) / (math.fsum(left[known]) or 1.0)
    return math.sqrt(pull / mean) if mean > 0 else math.inf


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
    clients = ledger.clients()
    earlier = frozenset(n for n, entry in clients.items() if entry.state == "forgotten")
    gone = asked | earlier
    after, before = joint_factors(here, gone), joint_factors(here, earlier)
    removed = np.zeros(ledger.settings.layout.size, np.float32)
    off = 0.0
    for name in sorted(gone):
        again = before.get(name, Factor(0.0, 0.0))
        factor = after[name].value - again.value
        if factor or after[name].off or again.off:
            own = ledger.own_difference(name)
            removed += np.float32(factor) * own
        off += after[name].off + again.off
    length = norm(removed) or 1.0
    left = [
        1 - here.share_of(gone, r.index) if here.places[r.index] else 0.0
        for r in rounds
    ]
    squares = [here.step_square(gone, index) for index in sorted(here.places)]
    longest = {
        index: longest_that_counts(
            [place.update for name, place in places.items() if name not in gone]
        )
        for index, places in here.places.items()
    }
    unknown, notes = _unknown(rounds)
    reach = [here.reach_of(asked, r.index) if asked else 0.0 for r in rounds]
    return Undamped(
        HeldMarks(removed[None]),
        (ages_of(np.array(reach)),),
        np.array(reach),
        paired_deviations(ledger, here, gone),
        scale_of(rounds, np.array(left), no_longer(np.array(squares), longest)),
        unknown,
        (*notes, *_how_far_off(off / length)),
        len(removed),
    )


def _how_far_off(off: float) -> tuple[str, ...]:
    """Return a warning if the difference may be far off."""
    # In this form the condition refuses NaN, too.
    if not off <= _TOO_FAR:
        raise UnlearnRefusedError(
            "shares vary from round to round and this ledger has sums only: with the "
            f"clients that left before, the removed part may be off by {off:.0%}; "
            "forget fewer clients at once, or retrain without them"
        )
    if off < _WORTH_SAYING:
        return ()
    return (
        f"the removed part may be off by {off:.2%}, because shares vary between rounds",
    )
