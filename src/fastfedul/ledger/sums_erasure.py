"""What the sums of those who stay become when clients are erased from them.

Without the erased clients R, whose share of a round is r, a client of share a would
have deviated from another step. With its own difference D and R's joint difference E
the new one is, round by round, D (1 - a) / (1 - a - r) + E a / (1 - a - r). Sums have
lost the rounds, so each factor is replaced by its mean: exact where shares are the same
in every round, else off by at most what the factors' deviations come to.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from fastfedul.errors import UnlearnRefusedError
from fastfedul.ledger.participation import Factor, Participation, mean_factor
from fastfedul.records import ClientId


@dataclass(frozen=True, slots=True)
class Correction:
    """How one client's sums change.

    Attributes:
        of_own: Factor of its difference.
        of_joint: Factor of the erased clients' joint difference, to be added.
    """

    of_own: Factor
    of_joint: Factor

    @property
    def is_none(self) -> bool:
        """Whether the client never met those who are erased."""
        return self.of_own == Factor(1.0, 0.0) and self.of_joint == Factor(0.0, 0.0)


def correction(
    here: Participation, gone: Set[ClientId], client: ClientId
) -> Correction:
    """Return how a client's sums change when others are erased.

    Raises:
        UnlearnRefusedError: If it would have been alone in a round: what it did there
            would have been the step, which is not kept.
    """
    own, joint = [], []
    for index, places in here.places.items():
        away = here.share_of(gone, index)
        place = places.get(client)
        if away and len(set(places) - gone) == 1 and place is not None:
            raise UnlearnRefusedError(
                f"without them client {client!r:.80} would have been alone in round "
                f"{index}, and this ledger keeps sums, not what it sent; they can be "
                "forgotten, but not erased"
            )
        if away:
            factor = place.share / (1 - place.share - away) if place else 0.0
            joint.append((factor, here.reach_of(gone, index)))
        if place is not None:
            ratio = (1 - place.share) / (1 - place.share - away) if away else 1.0
            own.append((ratio, place.reach))
    return Correction(mean_factor(own), mean_factor(joint))
