"""Skews: the reaction of the other clients' training to the leavers.

A leaver pushed the model somewhere in every round, and the others' training pulled part
of that back. The part pulled back must not be removed again; a skew says how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN
from fastfedul.ledger.protocol import Ledger
from fastfedul.limits import require_choice, require_number, show
from fastfedul.methods.fast_fedul.kronecker import (
    LEAST,
    LEAST_IN_INT8,
    HeldBack,
    hold_back,
)
from fastfedul.methods.fast_fedul.second_server import two_servers
from fastfedul.methods.fast_fedul.tracing import Leaving, trace
from fastfedul.methods.fast_fedul.undamped import Undamped, undamped
from fastfedul.params import Array, Flat, norm
from fastfedul.records import RoundEntry, ServerState

PAPERS_DAMPING = 0.07
"""The damping that the paper recommends: minus its alpha."""

_CANCELLING = (
    "what the rounds would have added otherwise nearly cancels, as when a client that "
    "stays sends huge updates to and fro; the age of marks was left out, so measure "
    "the result"
)
_NOBODY_TO_LEARN_FROM = (
    "nothing was held back, because no two clients that stay took part in the same "
    "round; the model may lose much of what it knows, so measure the result"
)

_PRINTED_SIGN = (
    "a damping below 0 is the paper's formula as printed: the difference grows in "
    "every round instead of fading, and there is no bound; measure the result"
)

_ROUNDING = 1e-6
"""Part by which the lengths of two equal vectors may differ."""

USUAL_UPDATES = 64
FEWEST_UPDATES = 32
USUAL_SIZE = 20_000_000
"""Values of a model from which on fewer updates are drawn, in inverse proportion."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """The evidence of the staying clients' updates about their reaction.

    Attributes:
        num_updates: Updates of staying clients, or differences of two, that were used.
        num_directions: Directions along which they differ.
        scale: sqrt(T b) / g of `kronecker.py`.
        num_unknown: Rounds whose local training is not recorded.
        removed_by_layer: Part of the undamped difference that is not held back, by
            name of the array; None where there was no difference.
    """

    num_updates: int
    num_directions: int
    scale: float
    num_unknown: int
    removed_by_layer: tuple[tuple[str, float | None], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """The difference that forgetting adds to the model, by one skew.

    Attributes:
        vector: The difference.
        gamma_norms: How far each round would have gone elsewhere.
        damping: Part of the difference that is pulled back in each round.
        held_back: Length of the part that is also held back, at the end.
        skew: The skew with every setting filled in.
        reaction: Evidence of a skew that learns from the ledger.
        notes: Inexact parts of the answer, in words.
        server: State of the server optimizer without the leavers, if there is one.
    """

    vector: Flat
    gamma_norms: tuple[float, ...]
    damping: tuple[float, ...]
    held_back: float
    skew: Skew
    reaction: Reaction | None = None
    notes: tuple[str, ...] = ()
    server: ServerState | None = None


class Skew(Protocol):
    """A way to take the others' reaction into account."""

    name: ClassVar[str]

    def settings(self) -> dict[str, object]:
        """Return the settings as JSON values."""

    def difference(
        self, ledger: Ledger, removal: Leaving, rounds: Sequence[RoundEntry]
    ) -> Difference:
        """Return the difference that forgetting adds to the model."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """The paper's skew: training pulls back the same part of everything every round.

    Attributes:
        damping: The part that is pulled back in a round, from 0 to 1: one number, or
            one for each round. It is minus the paper's alpha, so a number from -1 to
            0 runs the formula as the paper prints it; the result warns of that.
        damped: `all` rounds, or `alternate` ones: the first, the third and so on.
    """

    damping: float | tuple[float, ...] = PAPERS_DAMPING
    damped: Literal["all", "alternate"] = "all"
    name: ClassVar[str] = "scalar"

    def __post_init__(self) -> None:
        try:
            given = np.asarray(self.damping, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInputError(
                f"damping is a number from 0 to 1, not {show(self.damping)}"
            ) from None
        # Plain numbers can be compared and logged; an array can be neither.
        plain = tuple(given.tolist()) if given.ndim == 1 else given.tolist()
        object.__setattr__(self, "damping", plain)
        values = np.atleast_1d(given)
        if values.ndim != 1 or not (np.abs(values) <= 1).all():
            raise InvalidInputError(
                f"damping is from 0 to 1, not {self.damping}; the paper's alpha of "
                "-0.07 is damping 0.07, and -0.07 is its formula as printed"
            )
        require_choice("choice of damped rounds", self.damped, ("all", "alternate"))

    def settings(self) -> dict[str, object]:
        """Return the settings as JSON values."""
        several = isinstance(self.damping, tuple)
        damping = list(self.damping) if isinstance(self.damping, tuple) else None
        return {
            "damping": damping if several else self.damping,
            "damped": self.damped,
        }

    def per_round(self, num_rounds: int) -> tuple[float, ...]:
        """Return the damping of each round."""
        values = np.asarray(self.damping, np.float64)
        if values.ndim == 1 and len(values) != num_rounds:
            raise InvalidInputError(
                f"{len(values)} dampings were given for {num_rounds} rounds"
            )
        full = np.broadcast_to(values, num_rounds).copy()
        if self.damped == "alternate":
            full[1::2] = 0
        return tuple(full.tolist())

    def difference(
        self, ledger: Ledger, removal: Leaving, rounds: Sequence[RoundEntry]
    ) -> Difference:
        """Return the difference that forgetting adds to the model."""
        damping = self.per_round(len(rounds))
        if ledger.settings.optimizer is not None:
            return _by_servers(ledger, removal, rounds, damping, self)
        traced = trace(ledger, removal, left_at_end(damping)[None])
        norms = tuple(traced.gamma_norms.tolist())
        notes = (_PRINTED_SIGN,) if min(damping, default=0.0) < 0 else ()
        return Difference(traced.sums[0], norms, damping, 0.0, self, notes=notes)


@dataclass(frozen=True, slots=True)
class NoSkew:
    """Nobody reacted: the whole difference is removed."""

    name: ClassVar[str] = "none"

    def settings(self) -> dict[str, object]:
        """Return the settings as JSON values."""
        return {}

    def difference(
        self, ledger: Ledger, removal: Leaving, rounds: Sequence[RoundEntry]
    ) -> Difference:
        """Return the difference that forgetting adds to the model."""
        still = (0.0,) * len(rounds)
        if ledger.settings.optimizer is not None:
            return _by_servers(ledger, removal, rounds, still, self)
        traced = trace(ledger, removal, np.ones((1, len(rounds))))
        norms = tuple(traced.gamma_norms.tolist())
        return Difference(traced.sums[0], norms, still, 0.0, self)


@dataclass(frozen=True, slots=True)
class Kronecker:
    """Training pulls back most where the staying clients' updates differ most.

    `kronecker.py` has the formula, and docs/methods.md says how well it does.

    Attributes:
        updates: How many updates of staying clients to learn from, drawn at random;
            `all` of them; or None for 64, and fewer where the model is very large. A
            ledger of sums always uses the pairs it keeps.
    """

    updates: int | Literal["all"] | None = None
    name: ClassVar[str] = "kronecker"

    def __post_init__(self) -> None:
        if not (isinstance(self.updates, str) and self.updates == "all"):
            number = self.updates
            require_number("number of updates", number, least=1, whole=True, unset=True)

    def settings(self) -> dict[str, object]:
        """Return the settings as JSON values."""
        return {"updates": self.updates}

    def difference(
        self, ledger: Ledger, removal: Leaving, rounds: Sequence[RoundEntry]
    ) -> Difference:
        """Return the difference that forgetting adds to the model."""
        settings = ledger.settings
        if settings.aggregation != MEAN:
            raise UnlearnRefusedError(
                "skew kronecker needs weighted means, and this ledger was aggregated "
                f"by {settings.aggregation!r:.40}; use skew scalar"
            )
        size = settings.layout.size
        updates = usual_updates(size) if self.updates is None else self.updates
        count = None if updates == "all" else updates
        terms = undamped(ledger, removal, rounds, count)
        least = LEAST_IN_INT8 if settings.update_dtype == "int8" else LEAST

        def held_back(terms: Undamped) -> HeldBack:
            return hold_back(
                terms.marks,
                terms.ages,
                terms.deviations,
                settings.layout,
                terms.scale,
                ledger.chain,
                least,
            )

        held, notes = held_back(terms), list(terms.notes)
        if norm(held.difference) > (1 + _ROUNDING) * held.length:
            held = held_back(terms.without_ages())
            notes.append(_CANCELLING)
        if held.num_updates == 0 and held.difference.any():
            notes.append(_NOBODY_TO_LEARN_FROM)
        return Difference(
            held.difference,
            tuple(terms.gamma_norms.tolist()),
            (0.0,) * len(rounds),
            held.held_back,
            Kronecker(updates),
            Reaction(
                held.num_updates,
                held.num_directions,
                terms.scale,
                terms.num_unknown,
                held.removed_by_layer,
            ),
            tuple(notes),
            terms.server,
        )


def _by_servers(
    ledger: Ledger,
    removal: Leaving,
    rounds: Sequence[RoundEntry],
    damping: tuple[float, ...],
    skew: Skew,
) -> Difference:
    """Return the difference of two servers, the second one damped."""
    found = two_servers(ledger, removal, rounds).run(damping)
    lengths = tuple(found.lengths.tolist())
    return Difference(found.marks[0], lengths, damping, 0.0, skew, server=found.state)


SKEWS: dict[str, type[Scalar] | type[NoSkew] | type[Kronecker]] = {
    skew.name: skew for skew in (Kronecker, Scalar, NoSkew)
}
"""Every skew by its name."""


def usual_updates(size: int) -> int:
    """Return how many updates to learn from for a model of so many values.

    >>> usual_updates(1_000_000), usual_updates(30_000_000), usual_updates(10**9)
    (64, 42, 32)
    """
    return max(FEWEST_UPDATES, min(USUAL_UPDATES, USUAL_UPDATES * USUAL_SIZE // size))


def usual_skew(aggregation: str) -> Skew:
    """Return the default skew for a ledger of an aggregation."""
    return Kronecker() if aggregation == MEAN else Scalar()


def skew_settings(skew: Skew) -> dict[str, object]:
    """Return the name and the settings of a skew, as `skew_of` takes them."""
    return {"skew": skew.name, **skew.settings()}


def skew_of(settings: Mapping[str, Any]) -> Skew:
    """Return the skew that an entry of the log names, with its settings.

    Raises:
        InvalidInputError: If the settings are of no skew.
    """
    name = settings.get("skew")
    if name == Scalar.name:
        damping = settings["damping"]
        several = tuple(damping) if isinstance(damping, list) else damping
        return Scalar(several, settings.get("damped", "all"))
    if name == Kronecker.name:
        return Kronecker(settings.get("updates"))
    if name == NoSkew.name:
        return NoSkew()
    raise InvalidInputError(f"there is no skew {name!r:.40}; {', '.join(SKEWS)} are")


def left_at_end(damping: Sequence[float]) -> Array:
    """Return the part of each round's gamma that is left at the end.

    >>> left_at_end([0.5, 0.5, 0.5])
    array([0.25, 0.5 , 1.  ])
    """
    kept = 1 - np.asarray(damping, np.float64)
    after = np.ones(len(kept))
    after[:-1] = np.cumprod(kept[:0:-1])[::-1]
    return after
