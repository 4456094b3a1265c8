"""Splits of the training examples among clients.

Dirichlet: Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study",
ICDE 2022. Level: the "non-IID level" of Huynh et al., "Fast-FedUL: A Training-Free
Federated Unlearning with Provable Skew Resilience", ECML PKDD 2024, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fastfedul.data.dataset import ClientData, Dataset, Indices, Labels
from fastfedul.data.level import count_at_level
from fastfedul.data.npz import order_owners
from fastfedul.errors import InvalidInputError
from fastfedul.limits import require_choice, require_number
from fastfedul.records import ClientId
from fastfedul.rng import stream

Kind = Literal["iid", "dirichlet", "level", "ratio"]
Counts = npt.NDArray[np.int64]

_FEW = 5
_CONCENTRATIONS = (0.05, 1e4)
"""Least and greatest concentration that the search for a ratio tries."""
_NUM_HALVINGS = 40
_NEAR = math.log(1.1)


@dataclass(frozen=True, slots=True)
class Partition:
    """A split of the training examples.

    Attributes:
        kind: `iid`: at random; sizes differ by at most one. `dirichlet`: each class is
            split by shares from a Dirichlet distribution, so sizes differ too.
            `level`: at every client, the most frequent class is `value` times as
            frequent as the least frequent class. `ratio`: as `dirichlet`, with the
            concentration at which the same ratio is `value` on average over clients.
        value: For `dirichlet` the concentration, small for very different clients. For
            `level` and `ratio` the ratio, 1 for balanced classes, 2 to 4 in the paper.
            `iid` does not use it.
    """

    kind: Kind = "iid"
    value: float = 1.0

    def __post_init__(self) -> None:
        require_choice("split", self.kind, ("iid", "dirichlet", "level", "ratio"))
        if self.kind == "dirichlet":
            require_number("concentration", self.value, least=1e-3, most=1e6)
        if self.kind == "level":
            require_number("level", self.value, least=1)
        if self.kind == "ratio":
            require_number("ratio", self.value, least=1.1, most=20)

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Return the split written as `iid`, `dirichlet:0.5`, `level:3` or `ratio:3`.

        >>> Partition.parse("dirichlet:0.5")
        Partition(kind='dirichlet', value=0.5)
        """
        kind, colon, number = text.partition(":")
        try:
            value = float(number) if colon else None
        except ValueError:
            kind, value = "", None
        if kind == "iid" and value is None:
            return cls("iid")
        if kind == "dirichlet" and value is not None:
            return cls("dirichlet", value)
        if kind == "level" and value is not None:
            return cls("level", value)
        if kind == "ratio" and value is not None:
            return cls("ratio", value)
        raise InvalidInputError(
            f"cannot read the split {text!r}; write iid, dirichlet:0.5, level:3 or "
            "ratio:3"
        )

    def __str__(self) -> str:
        number = repr(float(self.value)).removesuffix(".0")
        return self.kind if self.kind == "iid" else f"{self.kind}:{number}"


def client_name(number: int) -> ClientId:
    """Return the name of a client by its number from 0."""
    return f"client-{number}"


def split(
    dataset: Dataset, num_clients: int, partition: Partition, seed: int
) -> tuple[ClientData, ...]:
    """Return the clients `client-0`, `client-1`, ... with their training examples.

    The clients hold slices of one array, which is the only copy of the examples.

    Raises:
        InvalidInputError: If there are too few training examples for this split.
    """
    places = assign(dataset.train_labels, num_clients, partition, seed)
    names = [client_name(number) for number in range(num_clients)]
    return _deal_out(dataset, names, places)


def split_by_owner(dataset: Dataset) -> tuple[ClientData, ...]:
    """Return the clients that the data set names, with their examples."""
    assert dataset.owners is not None
    names = order_owners(dataset.owners)
    places = [np.flatnonzero(dataset.owners == name) for name in names]
    return _deal_out(dataset, names, places)


def _deal_out(
    dataset: Dataset, names: Sequence[ClientId], places: Sequence[Indices]
) -> tuple[ClientData, ...]:
    order = np.concatenate(places)
    images, labels = dataset.train_images[order], dataset.train_labels[order]
    ends = np.cumsum([len(own) for own in places]).tolist()
    starts = [0, *ends[:-1]]
    return tuple(
        ClientData(name, images[start:end], labels[start:end])
        for name, start, end in zip(names, starts, ends, strict=True)
    )


def assign(
    labels: Labels, num_clients: int, partition: Partition, seed: int
) -> tuple[Indices, ...]:
    """Return each client's examples, as ascending places in the labels.

    No example goes to two clients. `level` leaves out examples that make a class too
    frequent for the ratio; every other split uses all examples. Every client gets
    at least five examples, or an equal part if there are fewer than five for each.

    Args:
        labels: Class of every example.
        num_clients: Number of clients.
        partition: The split.
        seed: Seed of the draws; the same arguments always give the same split.
    """
    if num_clients < 1:
        raise InvalidInputError(f"there are {num_clients} clients; ask for 1 or more")
    if len(labels) < num_clients:
        raise InvalidInputError(
            f"{len(labels)} training examples cannot be split among {num_clients} "
            f"clients; use at most {len(labels)} clients or more examples"
        )
    if partition.kind == "iid":
        shuffled = stream(seed, "split iid").permutation(len(labels))
        return tuple(np.sort(own) for own in np.array_split(shuffled, num_clients))
    classes, sizes = np.unique(labels, return_counts=True)
    concentration = partition.value
    if partition.kind == "ratio":
        concentration = find_concentration(labels, num_clients, partition.value, seed)
    rng = stream(seed, f"split {partition.kind}")
    if partition.kind == "level":
        counts = count_at_level(sizes, num_clients, partition.value, rng)
    else:
        counts = _count_dirichlet(sizes, num_clients, concentration, rng)
    return _deal(labels, classes, counts, rng)


def class_ratio(counts: Counts) -> float:
    """Return how many times as frequent the first class of a client is as its last.

    The ratio is the geometric mean over clients; a missing class counts as half an
    example.

    Args:
        counts: Examples of each class (columns) at each client (rows).

    >>> round(class_ratio(np.array([[4, 1], [9, 9]])), 3)
    2.0
    """
    ratios = counts.max(axis=1) / np.maximum(counts.min(axis=1), 0.5)
    return float(np.exp(np.log(ratios).mean()))


def find_concentration(
    labels: Labels, num_clients: int, ratio: float, seed: int
) -> float:
    """Return the concentration whose Dirichlet split comes nearest to a class ratio.

    The search halves the interval of concentrations; each try draws from the same
    seed, as the split itself does.

    Raises:
        InvalidInputError: If no concentration comes within a tenth of the ratio.
    """
    _, sizes = np.unique(labels, return_counts=True)

    def reached(exponent: float) -> float:
        rng = stream(seed, "split ratio")
        counts = _count_dirichlet(sizes, num_clients, math.exp(exponent), rng)
        return class_ratio(counts)

    low, high = (math.log(end) for end in _CONCENTRATIONS)
    tried: dict[float, float] = {}
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        tried[middle] = reached(middle)
        if tried[middle] > ratio:
            low = middle
        else:
            high = middle
    best = min(tried, key=lambda exponent: abs(math.log(tried[exponent] / ratio)))
    if abs(math.log(tried[best] / ratio)) > _NEAR:
        raise InvalidInputError(
            f"no Dirichlet split of {len(labels)} examples among {num_clients} clients "
            f"has the ratio {ratio:g}, the nearest has {tried[best]:.2f}; use fewer "
            "clients, more examples or another ratio"
        )
    return math.exp(best)


def _count_dirichlet(
    sizes: Counts, num_clients: int, concentration: float, rng: np.random.Generator
) -> Counts:
    """Return the counts of each class (columns) at each client (rows)."""
    shares = rng.dirichlet(np.full(num_clients, concentration), size=len(sizes))
    ends = np.rint(np.cumsum(shares, axis=1) * sizes[:, np.newaxis]).astype(np.int64)
    ends[:, -1] = sizes
    counts = np.diff(ends, axis=1, prepend=0).T
    enough = min(_FEW, int(sizes.sum()) // num_clients)
    totals = counts.sum(axis=1)
    for poor in np.flatnonzero(totals < enough):
        while totals[poor] < enough:
            # From the client with the most, of the class it has most of.
            rich = int(totals.argmax())
            label = int(counts[rich].argmax())
            counts[rich, label] -= 1
            counts[poor, label] += 1
            totals[rich] -= 1
            totals[poor] += 1
    return counts


def _deal(
    labels: Labels, classes: Labels, counts: Counts, rng: np.random.Generator
) -> tuple[Indices, ...]:
    """Return the places of each client's examples, given its count of each class."""
    hands: list[list[Indices]] = [[] for _ in counts]
    for column, label in enumerate(classes):
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(counts[:, column])
        for hand, own in zip(hands, np.split(shuffled, cuts)[:-1], strict=True):
            hand.append(own)
    return tuple(np.sort(np.concatenate(hand)) for hand in hands)
