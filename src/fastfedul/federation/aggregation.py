"""Aggregations: how a round's updates become one step, and how a method undoes it.

A method undoes a mean by arithmetic. It undoes any other function of the round's
updates by replaying the function without the forgotten clients. A server optimizer is
no aggregation: it turns the mean into the step, and `server_optimizers.py` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.params import Array

MEAN = "mean"

WITH_MEMORY = frozenset(
    {"fedadagrad", "fedadam", "fedavgm", "fedmom", "fednova", "fedopt", "fedyogi"}
    | {"adam", "adagrad", "momentum", "scaffold", "yogi"}
)
"""Names of server optimizers, which are no aggregations."""

AggregateFunction = Callable[[Array, Array], Array]
"""Takes updates (clients by values) and shares that sum to 1; returns the step."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A replayable aggregation.

    Attributes:
        function: The step as a function of updates and shares.
        coordinatewise: Whether each value of the step depends on the updates' values
            at the same place alone. A method then replays slices of bounded memory.
    """

    function: AggregateFunction
    coordinatewise: bool = False


def coordinate_median(updates: Array, shares: Array) -> Array:
    """Return the median of each value; the shares have no influence."""
    del shares
    return np.median(updates, axis=0).astype(np.float32)


def trimmed_mean(fraction: float) -> AggregateFunction:
    """Return the mean of each value without its smallest and largest fraction."""
    if not 0 <= fraction < 0.5:
        raise InvalidInputError(
            f"a trimmed mean cuts a fraction from 0 to below 0.5, not {fraction}"
        )

    def aggregate(updates: Array, shares: Array) -> Array:
        del shares
        cut = int(fraction * len(updates))
        ordered = np.sort(updates, axis=0)[cut : len(updates) - cut]
        return np.asarray(ordered.mean(axis=0), np.float32)

    return aggregate


def resolve(name: str, custom: Mapping[str, Aggregation]) -> Aggregation:
    """Return the replayable aggregation of a name.

    Args:
        name: `median`, `trimmed-mean:0.1`, or a name in `custom`.
        custom: The caller's own aggregations by name.

    Raises:
        InvalidInputError: If the name is unknown.
    """
    if name in custom:
        return custom[name]
    if name == "median":
        return Aggregation(coordinate_median, coordinatewise=True)
    if name.startswith("trimmed-mean:"):
        try:
            fraction = float(name.partition(":")[2])
        except ValueError:
            raise InvalidInputError(
                f"{name!r} has no number after the colon; write trimmed-mean:0.1"
            ) from None
        return Aggregation(trimmed_mean(fraction), coordinatewise=True)
    raise InvalidInputError(
        f"the aggregation {name!r:.80} is unknown; choose mean, median or "
        "trimmed-mean:FRACTION, or pass a function under this name"
    )


def check_supported(name: str) -> None:
    """Raise if a name is no aggregation but a server optimizer."""
    if name.lower().replace("-", "").replace("_", "") in WITH_MEMORY:
        raise InvalidInputError(
            f"{name!r} is a server optimizer and no aggregation: it gets the mean of "
            "the updates; choose the mean, and name the optimizer of the ledger"
        )
