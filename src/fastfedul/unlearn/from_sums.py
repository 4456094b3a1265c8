"""Skew per coordinate from a history of sums: a few vectors, and no rounds.

A ledger of sums has for each client the difference D that forgetting it alone makes
and its scatter B, and the scatter F of everybody (`history/own_sums.py`). With `R` the
clients that go, and those that went before with their sums kept,

- the difference is the sum over `R` of D, each times a factor that depends on shares
  alone and is 1 for a single client;
- the spread is F minus the sum over `R` of B, likewise;
- what an ordinary client i accumulated beyond its share of the cleaned steps is
  -(k D_i + s D_R), with k the mean of 1 - share over its rounds, s its mean share in
  the rounds of `R`.

Difference and spread are exact for a single client, whatever its shares and rounds, and
persistence where shares are the same in every round. Elsewhere a mean stands in for
factors that vary from round to round; how far off that may be follows from norms that
the ledger has, and is said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastfedul.errors import UnlearnRefusedError
from fastfedul.history.ledger import Ledger
from fastfedul.history.participation import (
    Factor,
    Participation,
    joint_factors,
    mean_factor,
    participation,
    scatter_factors,
)
from fastfedul.params import Flat, norm
from fastfedul.records import ClientId, RoundEntry
from fastfedul.unlearn.skew import CoordinateTerms, coordinate_terms, difference_of
from fastfedul.unlearn.tracing import Leaving

_WORTH_SAYING = 1e-4
_TOO_FAR = 0.25


def terms_of(
    ledger: Ledger, removal: Leaving, rounds: Sequence[RoundEntry]
) -> CoordinateTerms:
    """Return what the history says about each coordinate, in whatever form it is.

    Args:
        ledger: The history, of weighted means.
        removal: Who leaves which round.
        rounds: All rounds.

    Raises:
        UnlearnRefusedError: If sums do not say what is asked.
    """
    if ledger.settings.history == "rounds":
        return coordinate_terms(ledger, removal, rounds)
    here = participation(ledger)
    earlier = frozenset(
        name for name, entry in ledger.clients().items() if entry.state == "forgotten"
    )
    asked = frozenset(update.client for update in removal.asked)
    gone = asked | earlier
    after, before = joint_factors(here, gone), joint_factors(here, earlier)
    of_scatter = scatter_factors(here, gone)
    size = ledger.settings.layout.size
    joint, removed = np.zeros(size, np.float32), np.zeros(size, np.float32)
    scatter = ledger.scatter()
    of_gone = np.zeros_like(scatter)
    off = 0.0
    for name in sorted(gone):
        sums = ledger.own_sums(name)
        again = before.get(name, Factor(0.0, 0.0))
        joint += np.float32(after[name].value) * sums.difference
        removed += np.float32(after[name].value - again.value) * sums.difference
        of_gone += np.float32(of_scatter[name].value) * sums.scatter
        off += after[name].off + again.off
    notes = _notes(ledger, off / (norm(removed) or 1.0), several=len(gone) > 1)
    persistence, off = _persistence(ledger, here, earlier, gone, joint)
    notes += _say("what an ordinary client accumulates", off)
    left = math.fsum(
        (1 - r.removed_share) * (1 - here.share_of(gone, r.index)) for r in rounds
    )
    if all(len(set(places) - gone) <= 1 for places in here.places.values()):
        # A client alone does not differ from anybody; what is left is rounding.
        of_gone, persistence = scatter, np.zeros_like(persistence)
    spread, clipped = difference_of(scatter, of_gone)
    spread /= np.float32(left or 1.0)
    return CoordinateTerms(
        removed=removed,
        clipped=clipped,
        spread=spread,
        persistence=persistence,
        gamma_norms=tuple(
            here.reach_of(asked, r.index) if asked else 0.0 for r in rounds
        ),
        num_unseen=0,
        movement=ledger.final.params.flat - ledger.initial.params.flat,
        approximations=notes,
    )


def _persistence(
    ledger: Ledger,
    here: Participation,
    earlier: frozenset[ClientId],
    gone: frozenset[ClientId],
    joint: Flat,
) -> tuple[Flat, float]:
    """Return persistence, and how far off the deviations in it are, relatively."""
    stayers = [
        name
        for name, entry in sorted(ledger.clients().items())
        if entry.state == "active" and name not in gone
    ]
    found = np.zeros_like(joint)
    squared_off = squared = 0.0
    for name in stayers:
        places = here.places_of(name)
        own = mean_factor((1 - place.share, place.reach) for place in places.values())
        met = mean_factor(
            (places[index].share if index in places else 0.0, reach)
            for index in here.places
            if (reach := here.reach_of(gone, index)) > 0
        )
        away = np.float32(own.value) * ledger.own_sums(name).difference
        away += np.float32(met.value) * joint
        found += np.square(away)
        squared_off += (own.off + met.off) ** 2
        squared += norm(away) ** 2
    shares = [1 - here.share_of(earlier, round_.index) for round_ in here.rounds]
    scale = float(np.mean(shares)) ** 2 if shares else 1.0
    found /= np.float32(max(1, len(stayers)) * scale)
    return found, math.sqrt(squared_off / squared) if squared else 0.0


def _notes(ledger: Ledger, off: float, *, several: bool) -> tuple[str, ...]:
    """Return how far off the difference may be, by this request and by earlier ones."""
    if off > _TOO_FAR:
        raise UnlearnRefusedError(
            "the shares of these clients vary from round to round and this ledger has "
            f"sums only: what it would remove may be off by {off:.0%}; forget one of "
            "them, or retrain without them"
        )
    erased = [event.details.get("sums_off") for event in ledger.events()]
    worst = math.fsum(part for part in erased if isinstance(part, float))
    together = "what several clients have in common in a round is in none of their sums"
    return (
        *((f"{together}, so the spread is an estimate",) if several else ()),
        *_say("what is removed", off),
        *_say("a client's sums, after those erased from them,", worst),
    )


def _say(what: str, off: float) -> tuple[str, ...]:
    if off < _WORTH_SAYING:
        return ()
    return (
        f"shares vary and only sums were kept: {what} may be off by up to {off:.1%}",
    )
