"""A damping for each coordinate, learned from the history: no data, no training.

The paper damps all coordinates of the difference alike. But training pulls some of
them back quickly and others hardly at all, and part of what a client did every client
does. Both can be seen in the history:

- spread f, the variance of the staying clients' updates, share-weighted within a round
  and averaged over rounds. It stands in for curvature.
- persistence P, the mean square over the staying clients of what each accumulated
  beyond its share of the steps: the deviation of an ordinary client.

With D0 the sum of the gammas and f' = f / mean(f), the difference is

    exp(-c f') * D0^2 / (D0^2 + k P) * D0

Running sums keep the shares of the original participants. After earlier requests the
shares of those who are left were larger, by a factor that may differ from round to
round: P is scaled by its mean, which is exact where it is the same in every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.history.arrays import BLOCK_VALUES
from fastfedul.history.ledger import Ledger
from fastfedul.params import Array, Flat
from fastfedul.records import ClientId, RoundEntry
from fastfedul.unlearn.cleaning import CleanedStep, cleaned_steps
from fastfedul.unlearn.tracing import Leaving, trace

_BYTES_AT_ONCE = 128 << 20
_ROUNDING = 1e-5
"""Below this part of the squares it is the difference of, a spread is rounding."""


@dataclass(frozen=True, slots=True)
class CoordinateTerms:
    """What the history says about each coordinate.

    Attributes:
        removed: D0, the undamped difference.
        spread: f, not negative.
        persistence: P.
        clipped: Share of the coordinates whose spread came out negative, by rounding
            or because updates of the forgotten clients were not kept, and is taken
            as 0.
        gamma_norms: How far each round would have gone elsewhere.
        num_unseen: Updates of staying clients that the server never had.
        movement: How far training has moved the model.
        approximations: What else is not exact, in words.
    """

    removed: Flat
    spread: Flat
    persistence: Flat
    clipped: float
    gamma_norms: tuple[float, ...]
    num_unseen: int
    movement: Flat
    approximations: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not exact, in words."""
        said = list(self.approximations)
        if self.num_unseen:
            said.append(
                f"{self.num_unseen} updates of clients that stay were never seen, so "
                "the spread is an estimate"
            )
        if self.clipped > 0.01:
            said.append(
                f"the spread of {self.clipped:.0%} of the coordinates came out "
                "negative and was taken as 0"
            )
        return tuple(said)

    @property
    def relative_spread(self) -> Flat:
        """The spread over its mean, f'; 0 where clients never differ."""
        mean = float(self.spread.mean(dtype=np.float64))
        return self.spread / np.float32(mean) if mean > 0 else self.spread

    def own(self, persistence: float) -> Flat:
        """Return for each coordinate how much of the difference is the leaver's own.

        Args:
            persistence: k, how strongly it is held against what any client does.
        """
        squared = np.square(self.removed)
        ordinary = squared + np.float32(persistence) * self.persistence
        # Where nothing was removed nothing is; there the ratio would be 0 / 0.
        part = np.zeros_like(squared)
        np.divide(squared, ordinary, out=part, where=squared > 0)
        return part


def coordinate_terms(
    ledger: Ledger, removal: Leaving, rounds: Sequence[RoundEntry]
) -> CoordinateTerms:
    """Return what the history says about each coordinate, in passes over it.

    Args:
        ledger: The history, of weighted means.
        removal: Who leaves which round.
        rounds: All rounds.
    """
    traced = trace(ledger, removal, np.ones((1, len(rounds))))
    cleaned = cleaned_steps(ledger, removal, rounds)
    stayers = _stayers(ledger, removal)
    total = float(sum(step.left for step in cleaned))
    before = float(np.mean([step.before for step in cleaned])) if cleaned else 1.0
    of_steps = _sum_of_squares(ledger, cleaned)
    squares = np.zeros_like(of_steps)
    persistence = np.zeros_like(of_steps)
    num_unseen = 0
    for names in _groups(stayers, squares.nbytes):
        expected = _expected(ledger, cleaned, [stayers[name] for name in names])
        for name, own in zip(names, expected, strict=True):
            sums = ledger.running_sums(name)
            squares += sums.squared
            persistence += np.square(sums.weighted - own)
            num_unseen += sums.num_unseen
    if all(step.num_left <= 1 for step in cleaned):
        # A client alone does not differ from anybody; what is left is rounding.
        of_steps, persistence = squares, np.zeros_like(persistence)
    spread, clipped = difference_of(squares, of_steps)
    spread /= np.float32(total or 1.0)
    persistence /= np.float32(max(1, len(stayers)) * before**2)
    return CoordinateTerms(
        removed=traced.sums[0],
        spread=spread,
        persistence=persistence,
        clipped=clipped,
        gamma_norms=traced.gamma_norms,
        num_unseen=num_unseen,
        movement=ledger.final.params.flat - ledger.initial.params.flat,
    )


def difference_of(squares: Flat, others: Flat) -> tuple[Flat, float]:
    """Return a spread, and the share of its values that came out negative.

    Both vectors are used up: they are as large as the model.

    Args:
        squares: A sum of squares.
        others: The part of it that is no spread.
    """
    found = np.subtract(squares, others, out=others)
    squares *= np.float32(_ROUNDING)
    found[(found <= squares) & (found >= -squares)] = 0
    clipped = float(np.mean(found < 0))
    return np.maximum(found, 0, out=found), clipped


def _stayers(ledger: Ledger, removal: Leaving) -> dict[ClientId, dict[int, float]]:
    """Return the share of every client that stays, by round."""
    asked = {update.client for update in removal.asked}
    return {
        name: {update.round: update.share for update in ledger.updates_of(name)}
        for name, entry in ledger.clients().items()
        if entry.state == "active" and name not in asked
    }


def _sum_of_squares(ledger: Ledger, cleaned: Sequence[CleanedStep]) -> Flat:
    """Return the sum over rounds of what stays times the squared step, per value."""
    size = ledger.settings.layout.size
    found = np.zeros(size, np.float32)
    for block in range(-(-size // BLOCK_VALUES)):
        part = found[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        for step in cleaned:
            rows = ledger.columns(step.refs, block)
            row = np.array(step.factors, np.float32) @ rows
            part += np.float32(step.left) * np.square(row)
    return found


def _groups(
    stayers: Mapping[ClientId, object], vector_bytes: int
) -> list[list[ClientId]]:
    """Return the clients in groups whose vectors fit into bounded memory."""
    names = sorted(stayers)
    count = max(1, _BYTES_AT_ONCE // max(1, vector_bytes))
    return [names[first : first + count] for first in range(0, len(names), count)]


def _expected(
    ledger: Ledger,
    cleaned: Sequence[CleanedStep],
    shares: Sequence[Mapping[int, float]],
) -> Array:
    """Return each client's share of the cleaned steps of its rounds, added up."""
    refs = [ref for step in cleaned for ref in step.refs]
    if not refs:
        return np.zeros((len(shares), ledger.settings.layout.size), np.float32)
    rows = [
        [
            own.get(step.index, 0.0) * factor
            for step in cleaned
            for factor in step.factors
        ]
        for own in shares
    ]
    return ledger.combine(refs, np.array(rows)).sums
