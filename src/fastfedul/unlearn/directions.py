"""A damping for each direction in which the staying clients' updates differ.

A damping for each coordinate takes curvature to be diagonal. It is not: what one class
of data pulls back it pulls back along a direction that runs through all of the model.
Such directions show in the history. With V the matrix of the staying clients' kept
updates, each minus its round's step without the leavers and times the root of its
weight, the scatter V^T V is the covariance of gradients, which stands in for curvature;
its diagonal is the spread of `skew.py`. In the directions of V the others'
training takes most of the undamped difference D0 back, the more the larger the
eigenvalue s there, relative to the mean eigenvalue; across them it does little. So

    x = D0 - V^T Q diag((1 - r) / s) Q^T V D0,    r = held / sqrt(1 + s / mean(s))

with Q the eigenvectors of V V^T: across V all of D0, along its directions the part r.
The directions that V shows are those of a few hundred updates; for the others there is
the diagonal again, but weaker, exp(-c sqrt f') of `fast_fedul.py`.

V has a row for each kept update, up to a limit; beyond it, rows with random signs are
added up in so many groups, which keeps the directions that matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.history.arrays import BLOCK_VALUES
from fastfedul.history.ledger import Ledger
from fastfedul.params import Array, Flat
from fastfedul.records import RoundEntry, UpdateEntry, VectorRef
from fastfedul.rng import stream
from fastfedul.unlearn.cleaning import CleanedStep, cleaned_steps
from fastfedul.unlearn.tracing import Leaving

HELD = 0.32
"""What is left of the difference along a direction of little scatter."""

DIRECTED_SPREAD = 0.2
MAX_ROWS = 512
_READ_AT_ONCE = 64
_LEAST = 1e-6
_ROUNDING = 1e-10
"""Below this part of the updates' own squares, what they differ by is rounding."""
"""Smallest eigenvalue that counts, relative to the largest; below it is rounding."""


@dataclass(frozen=True, slots=True)
class _Round:
    """The staying clients' part in a round.

    Attributes:
        step: The round's step without everybody who left.
        updates: Kept updates of those who stay.
        scales: Root of each one's weight, with a sign.
        rows: The row of V each belongs to.
    """

    step: CleanedStep
    updates: tuple[UpdateEntry, ...]
    scales: Array
    rows: Array


@dataclass(frozen=True, slots=True, eq=False)
class Directed:
    """The difference without what the others would have pulled back.

    Attributes:
        difference: x of the formula.
        num_updates: Updates of staying clients whose directions were seen.
        num_directions: How many directions they, or sums of them, span.
    """

    difference: Flat
    num_updates: int
    num_directions: int

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not exact, in words."""
        if self.num_updates <= MAX_ROWS:
            return ()
        return (
            f"{MAX_ROWS} sums stand in for the directions of {self.num_updates} "
            "updates of clients that stay",
        )


def directed_difference(
    ledger: Ledger,
    removal: Leaving,
    rounds: Sequence[RoundEntry],
    removed: Flat,
    max_rows: int = MAX_ROWS,
) -> Directed:
    """Return the difference damped along the directions of the staying clients.

    It takes two passes over every kept update, in bounded memory.

    Args:
        ledger: The history, of weighted means, in rounds.
        removal: Who leaves which round.
        rounds: All rounds.
        removed: D0, the undamped difference.
        max_rows: How many rows V may have.
    """
    parts = _parts(ledger, cleaned_steps(ledger, removal, rounds), removal, max_rows)
    num_updates = sum(len(part.updates) for part in parts)
    gram, products = _products(ledger, parts, removed, min(max_rows, num_updates))
    found, vectors = np.linalg.eigh(gram)
    longest = sum(u.weight * u.norm**2 for part in parts for u in part.updates)
    kept = found > max(_LEAST * found.max(initial=0.0), _ROUNDING * longest)
    if not kept.any():
        return Directed(removed, num_updates, 0)
    values, vectors = found[kept], vectors[:, kept]
    held = HELD / np.sqrt(1 + values / values.mean())
    along = vectors.T @ products
    taken_back = vectors @ ((1 - held) / values * along)
    difference = removed - _combined(ledger, parts, taken_back)
    return Directed(difference, num_updates, len(values))


def _parts(
    ledger: Ledger,
    cleaned: Sequence[CleanedStep],
    removal: Leaving,
    max_rows: int,
) -> list[_Round]:
    """Return who stays in each round, and the row of V each update belongs to."""
    asked = {update.client for update in removal.asked}
    stay = {
        name
        for name, entry in ledger.clients().items()
        if entry.state == "active" and name not in asked
    }
    by_round = [
        (
            step,
            [u for u in ledger.updates_in(step.index) if u.kept and u.client in stay],
        )
        for step in cleaned
        if step.num_left > 1  # A client alone does not differ from anybody.
    ]
    count = sum(len(updates) for _, updates in by_round)
    rows, signs = np.arange(count), np.ones(count)
    if count > max_rows:
        # The same for the same history, so that a result can be computed again.
        rng = stream(0, "directions")
        rows, signs = rng.permutation(count) % max_rows, rng.choice((-1.0, 1.0), count)
    found, first = [], 0
    for step, updates in by_round:
        span = slice(first, first := first + len(updates))
        scales = np.sqrt([update.weight for update in updates]) * signs[span]
        found.append(_Round(step, tuple(updates), scales, rows[span]))
    return found


def _products(
    ledger: Ledger, parts: Sequence[_Round], removed: Flat, num_rows: int
) -> tuple[Array, Array]:
    """Return V V^T and V D0, block by block."""
    gram, products = np.zeros((num_rows, num_rows)), np.zeros(num_rows)
    for block in range(-(-len(removed) // BLOCK_VALUES)):
        target = removed[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        deviations = np.zeros((num_rows, len(target)), np.float32)
        for part in parts:
            step = np.array(part.step.factors, np.float32) @ ledger.columns(
                part.step.refs, block
            )
            for first in range(0, len(part.updates), _READ_AT_ONCE):
                span = slice(first, first + _READ_AT_ONCE)
                refs = [VectorRef(u.round, u.client) for u in part.updates[span]]
                for row, scale, update in zip(
                    part.rows[span],
                    part.scales[span],
                    ledger.columns(refs, block),
                    strict=True,
                ):
                    deviations[row] += np.float32(scale) * (update - step)
        gram += deviations @ deviations.T
        products += deviations @ target
    return gram, products


def _combined(ledger: Ledger, parts: Sequence[_Round], of_rows: Array) -> Flat:
    """Return the combination of the rows of V, in one pass over what they are of."""
    refs: list[VectorRef] = []
    factors: list[float] = []
    for part in parts:
        own = part.scales * of_rows[part.rows]
        refs += [VectorRef(update.round, update.client) for update in part.updates]
        factors += own.tolist()
        refs += part.step.refs
        factors += [-float(own.sum()) * factor for factor in part.step.factors]
    found: Flat = ledger.combine(refs, np.array([factors])).sums[0]
    return found
