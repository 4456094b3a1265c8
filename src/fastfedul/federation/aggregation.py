"""Aggregations: how a round's updates become one step, and how a method undoes it.

A method undoes a mean by arithmetic. It undoes any other function of the round's
updates by replaying the function without the forgotten clients. A server optimizer is
no aggregation: it turns the mean into the step, and `server_optimizers.py` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.federation.krum import krum_places, mean_around_median, weighted_mean
from fastfedul.params import Array, Flat

MEAN = "mean"

WITH_MEMORY = frozenset(
    {"fedadagrad", "fedadam", "fedavgm", "fedmom", "fednova", "fedopt", "fedyogi"}
    | {"adam", "adagrad", "momentum", "scaffold", "yogi"}
)
"""Names of server optimizers, which are no aggregations."""

AggregateFunction = Callable[[Array, Array], Array]
"""Takes updates (clients by values) and shares that sum to 1; returns the step."""


ChooseFunction = Callable[[Array], Array]
"""Takes squared distances between all updates; returns the places of some of them."""

ReadFunction = Callable[[int, int], Array]
"""Returns the values from one place to before another of each update, a row each."""

_BLOCK_VALUES = 1 << 16
"""Values of an update that are in memory at once; 20 clients' are 10 MB in float64."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A replayable aggregation.

    Attributes:
        function: The step as a function of updates and shares.
        coordinatewise: Whether each value of the step depends on the updates' values
            at the same place alone. A method then replays slices of bounded memory.
        choose: Chooses the updates that the function gets, by their distances; None
            if it gets all of them.
        least: Updates that a new round needs, so that the function keeps its promise.
        computable: Updates without which there is no step, as in a replay of a round
            without the forgotten clients.
    """

    function: AggregateFunction
    coordinatewise: bool = False
    choose: ChooseFunction | None = None
    least: int = 1
    computable: int = 1

    def chosen(self, read: ReadFunction, size: int, shares: Array) -> ChosenUpdates:
        """Return the updates that count in a round.

        Args:
            read: Reads the round's updates.
            size: Number of values of an update.
            shares: Shares of the updates.
        """
        if self.choose is None:
            return ChosenUpdates(np.arange(len(shares)), shares)
        places = self.choose(_squared_distances(read, size, len(shares)))
        return ChosenUpdates(places, shares[places] / shares[places].sum())

    def step(self, read: ReadFunction, size: int, shares: Array) -> Flat:
        """Return the step of a round; the arguments are as in `chosen`."""
        found = self.chosen(read, size, shares)

        def aggregated(start: int, stop: int) -> Array:
            rows = read(start, stop)
            counted = rows if self.choose is None else rows[found.places]
            return np.asarray(self.function(counted, found.shares), np.float32)

        if not self.coordinatewise:
            return aggregated(0, size)
        parts = [aggregated(start, stop) for start, stop in _blocks(size)]
        return np.concatenate([np.empty(0, np.float32), *parts])


@dataclass(frozen=True, slots=True)
class ChosenUpdates:
    """The updates of a round that an aggregation lets count.

    Attributes:
        places: Their places among all updates of the round.
        shares: Their shares, which sum to 1.
    """

    places: Array
    shares: Array

    def weights(self, count: int) -> list[float]:
        """Return a weight for each of a round's updates; 0 if it was not chosen."""
        found = np.zeros(count)
        found[self.places] = self.shares
        return [float(weight) for weight in found]


def rows_reader(rows: Sequence[Flat]) -> ReadFunction:
    """Return a function that reads vectors in memory."""
    return lambda start, stop: np.stack([row[start:stop] for row in rows])


def _blocks(size: int) -> list[tuple[int, int]]:
    starts = range(0, size, _BLOCK_VALUES)
    return [(start, min(size, start + _BLOCK_VALUES)) for start in starts]


def _squared_distances(read: ReadFunction, size: int, count: int) -> Array:
    products = np.zeros((count, count))
    for start, stop in _blocks(size):
        rows = read(start, stop).astype(np.float64)
        products += rows @ rows.T
    squares = np.diag(products)
    distances = squares[:, None] + squares[None, :] - 2 * products
    # Equal by definition; rounding must not decide which of two updates comes first.
    distances = np.maximum((distances + distances.T) / 2, 0)
    np.fill_diagonal(distances, 0)
    return distances


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
        return weighted_mean(ordered, np.full(len(ordered), 1 / len(ordered)))

    return aggregate


def multi_krum(num_malicious: int, num_chosen: int) -> Aggregation:
    """Return the mean of the updates that lie closest to others; of one, Krum.

    Args:
        num_malicious: How many clients may attack.
        num_chosen: How many updates count.
    """
    choose = partial(krum_places, num_malicious=num_malicious, num_chosen=num_chosen)
    # The theorem of Krum asks for 2f + 3 updates. Of more than n - f chosen ones, one
    # would always be an attacker's. Flower computes a step from fewer all the same.
    least = max(2 * num_malicious + 3, num_chosen + num_malicious)
    return Aggregation(weighted_mean, coordinatewise=True, choose=choose, least=least)


def bulyan(num_malicious: int) -> Aggregation:
    """Return Bulyan: Multi-Krum chooses, and values close to the median count.

    Args:
        num_malicious: How many clients may attack.
    """

    def choose(distances: Array) -> Array:
        num_chosen = len(distances) - 2 * num_malicious
        return krum_places(distances, num_malicious, num_chosen)

    def aggregate(updates: Array, shares: Array) -> Array:
        del shares
        return mean_around_median(updates, len(updates) - 2 * num_malicious)

    least = 4 * num_malicious + 3
    return Aggregation(
        aggregate, coordinatewise=True, choose=choose, least=least, computable=least
    )


NAMES = (
    "mean, median, trimmed-mean:FRACTION, krum:ATTACKERS, "
    "multi-krum:ATTACKERS:CHOSEN or bulyan:ATTACKERS"
)
"""How the aggregations are written."""


def resolve(name: str, custom: Mapping[str, Aggregation]) -> Aggregation:
    """Return the replayable aggregation of a name.

    Args:
        name: `median`, `trimmed-mean:0.1`, `krum:1`, `multi-krum:1:3`, `bulyan:1`, or
            a name in `custom`.
        custom: The caller's own aggregations by name.

    Raises:
        InvalidInputError: If the name is unknown.

    >>> resolve("bulyan:2", {}).least
    11
    """
    if name in custom:
        return custom[name]
    kind, *given = name.split(":")
    if kind == "median" and not given:
        return Aggregation(coordinate_median, coordinatewise=True)
    if kind == "trimmed-mean":
        try:
            fraction = float(":".join(given))
        except ValueError:
            raise InvalidInputError(
                f"{name!r:.80} has no number after the colon; write trimmed-mean:0.1"
            ) from None
        return Aggregation(trimmed_mean(fraction), coordinatewise=True)
    if kind == "krum":
        [attackers] = _counts(name, given, "krum:1")
        return multi_krum(attackers, 1)
    if kind == "multi-krum":
        attackers, chosen = _counts(name, given, "multi-krum:1:3")
        if chosen < 1:
            raise InvalidInputError(
                f"{name!r:.80} chooses no update; write multi-krum:{attackers}:1 or "
                "more"
            )
        return multi_krum(attackers, chosen)
    if kind == "bulyan":
        [attackers] = _counts(name, given, "bulyan:1")
        return bulyan(attackers)
    raise InvalidInputError(
        f"the aggregation {name!r:.80} is unknown; choose {NAMES}, or pass a function "
        "under this name"
    )


def _counts(name: str, given: Sequence[str], example: str) -> list[int]:
    """Return the whole numbers in a name, as many as an example has."""
    wanted = example.count(":")
    right = all(text.isascii() and text.isdigit() and len(text) < 10 for text in given)
    if len(given) != wanted or not right:
        numbers = "whole numbers" if wanted > 1 else "a whole number"
        raise InvalidInputError(
            f"{name!r:.80} needs {numbers} after a colon; write {example}"
        )
    return [int(text) for text in given]


def named_rule(name: str, custom: Mapping[str, Aggregation]) -> Aggregation | None:
    """Return the aggregation of a name; None for the weighted mean.

    Raises:
        InvalidInputError: If the name is unknown.
    """
    return None if name == MEAN else resolve(name, custom)


def require_enough(needed: int, count: int, index: int) -> None:
    """Raise if a round has fewer updates than its aggregation needs.

    Args:
        needed: `least` of the aggregation before a round, `computable` after it.
        count: Number of updates.
        index: Number of the round.

    Raises:
        InvalidInputError: If there are too few.
    """
    if count < needed:
        raise InvalidInputError(
            f"the aggregation needs {needed} updates, and round {index} has "
            f"{count}; let more clients take part, or choose another aggregation"
        )


def check_supported(name: str) -> None:
    """Raise if a name is no aggregation but a server optimizer."""
    if name.lower().replace("-", "").replace("_", "") in WITH_MEMORY:
        raise InvalidInputError(
            f"{name!r} is a server optimizer and no aggregation: it gets the mean of "
            "the updates; choose the mean, and name the optimizer of the ledger"
        )
