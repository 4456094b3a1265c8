"""Counts of each class at each client, with one ratio of classes at every client."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def count_at_level(
    sizes: Counts, num_clients: int, level: float, rng: np.random.Generator
) -> Counts:
    """Return a table of counts, a row per client and a column per class.

    In every row, the largest count is `level` times the smallest, rounded to a whole
    number. The other classes lie in between, in another order at every client. The
    counts use all examples if they can; otherwise they leave out as many of a class as
    the ratio demands. At level 1 all counts are equal.

    Args:
        sizes: Number of examples of each class, 1 or more.
        num_clients: Number of clients.
        level: The ratio, 1 or more.
        rng: Decides which classes are frequent at which client.

    Raises:
        InvalidInputError: If there are too few examples, or only one class.
    """
    if len(sizes) < 2:
        raise InvalidInputError("a split by level needs at least two classes")
    mixed = _rotate(rng.permutation(len(sizes)), num_clients)
    by_size = np.tile(np.argsort(np.argsort(sizes, kind="stable")), (num_clients, 1))
    # Classes of different sizes make the rotation waste images. Then every client gets
    # few images of small classes and many of large ones.
    plans = [(_plan(sizes, ranks, level), ranks) for ranks in (mixed, by_size)]
    (num_dropped, low, high), ranks = min(plans, key=lambda plan: plan[0][0])
    if math.isinf(num_dropped):
        raise InvalidInputError(
            f"{sizes.sum()} images are too few for level {level:g} among {num_clients} "
            "clients; use fewer clients, more images or a lower level"
        )
    last = len(sizes) - 1
    columns = [
        _fill(ranks[:, column], int(size), last, low, high)
        for column, size in enumerate(sizes)
    ]
    return np.stack(columns, axis=1)


def _rotate(order: Counts, num_clients: int) -> Counts:
    """Return the rank of each class at each client, 0 for the least frequent."""
    step = max(1, len(order) // num_clients)
    turns = step * np.arange(num_clients)[:, np.newaxis]
    return (order[np.newaxis, :] + turns) % len(order)


def _plan(sizes: Counts, ranks: Counts, level: float) -> tuple[float, int, int]:
    """Return the number of examples left out, and the two extreme counts.

    A client gets the low count of its class at rank 0, the high count of its class at
    the last rank, and anything from low to high in between. So each class has a least
    and a greatest number of used examples. The best low count leaves out the fewest;
    among equals it is nearest to the natural grading.
    """
    num_clients, num_classes = ranks.shape
    num_low = (ranks == 0).sum(axis=0)
    num_high = (ranks == num_classes - 1).sum(axis=0)
    lows = np.arange(1, sizes.min() // num_clients + 2)[:, np.newaxis]
    highs = np.rint(lows * level).astype(np.int64)
    least = lows * (num_clients - num_high) + highs * num_high
    most = lows * num_low + highs * (num_clients - num_low)
    dropped = np.maximum(0, sizes - most).sum(axis=1).astype(np.float64)
    dropped[(least > sizes).any(axis=1)] = math.inf
    natural = sizes.sum() / (level ** (ranks / (num_classes - 1))).sum()
    distance = np.abs(lows[:, 0] - natural)
    best = int(np.lexsort((distance, dropped))[0])
    return float(dropped[best]), int(lows[best, 0]), int(highs[best, 0])


def _fill(ranks: Counts, size: int, last: int, low: int, high: int) -> Counts:
    """Return one class's counts, client by client, which use up its examples.

    The extreme ranks get the extreme counts. The others start from their grades and
    move towards low or high, each by the same part of its way.
    """
    counts = np.where(ranks == 0, low, high)
    free = (ranks > 0) & (ranks < last)
    num_free = int(free.sum())
    left = min(size - int(counts[~free].sum()), high * num_free)
    grades: Floats = low * (high / low) ** (ranks[free] / last)
    edge = low if left < grades.sum() else high
    way = edge * num_free - grades.sum()
    part = (left - grades.sum()) / way if way else 0.0
    exact = grades + part * (edge - grades)
    whole = np.floor(exact + 1e-9).astype(np.int64)
    rest = left - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    counts[free] = whole
    return counts
