"""The step of each round as it would have been without everybody who left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastfedul.ledger.erasure import leave_whole, without
from fastfedul.methods.fast_fedul.tracing import Leaving
from fastfedul.records import RoundEntry, UpdateEntry, VectorRef


@dataclass(frozen=True, slots=True)
class CleanedStep:
    """A round's step without everybody who left, as a combination of vectors.

    Attributes:
        index: Number of the round.
        refs: The step, then the updates that are taken out.
        factors: Their factors.
        left: Share that stays; 0 if nobody does.
        num_left: How many clients stay.
        exact: Whether the leavers are wholly out of the step: every update of theirs
            was kept. Of a sample they are out on average only.
        of_sample: Whether only the kept updates went into the step.
    """

    index: int
    refs: tuple[VectorRef, ...]
    factors: tuple[float, ...]
    left: float
    num_left: int
    exact: bool
    of_sample: bool

    def part_of(self, update: UpdateEntry) -> float:
        """Return the factor of a staying client's update, where everybody entered."""
        return update.share / self.left


def cleaned_steps(removal: Leaving, rounds: Sequence[RoundEntry]) -> list[CleanedStep]:
    """Return the cleaned step of some rounds, of weighted means.

    Args:
        removal: Clients that leave, by round.
        rounds: The rounds.
    """
    asked = removal.by_round()
    return [
        _cleaned(
            round_,
            asked.get(round_.index, []),
            removal.earlier.get(round_.index, ()),
        )
        for round_ in rounds
    ]


def _cleaned(
    round_: RoundEntry, asked: Sequence[UpdateEntry], earlier: Sequence[UpdateEntry]
) -> CleanedStep:
    gone = [*asked, *earlier]
    before = 1 - sum(update.share for update in earlier)
    of_step, of_updates = without(round_, gone)
    kept = [(u, f) for u, f in zip(gone, of_updates, strict=True) if u.kept]
    left = before - sum(update.share for update in asked)
    num_left = round_.num_updates - len(gone)
    return CleanedStep(
        round_.index,
        (
            VectorRef(round_.index),
            *(VectorRef(round_.index, u.client) for u, _ in kept),
        ),
        (of_step, *(factor for _, factor in kept)),
        left if num_left > 0 else 0.0,
        num_left,
        leave_whole(round_, gone),
        round_.use == "aggregate",
    )
