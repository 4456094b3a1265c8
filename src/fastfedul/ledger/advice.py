"""Which policy fits a budget, and how many clients a server could then forget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from fastfedul.ledger.changes.drop import FEWEST_PAIRS, ROOM_FOR_WRITING
from fastfedul.ledger.estimate import ENTRY_BYTES, FederationSize, estimate
from fastfedul.ledger.store.codec import STORAGE_DTYPES, encoded_bytes
from fastfedul.records import StorageDtype

MINIMUM_COVERAGE = 0.2
"""Part of a client's share that must be kept, or `forget` refuses by default."""

_LARGEST_SUMS_FROM = 16
"""No dtype is so small that parts of more rounds would save bytes."""

_LIKELY = 1e-9
"""Numbers of rounds that are less probable than this are left out."""

_EXACT_UP_TO = 200
"""Up to so many rounds of a client the binomial distribution is added up exactly."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a policy gives for a budget.

    Attributes:
        keep: The policy, as `--keep` takes it.
        dtype: How the ledger stores updates.
        total: Bytes after the last round, at most the budget.
        forgettable: Part of the clients of which enough is kept to forget them.
        coverage: Part of all updates that a forgetting can take out.
    """

    keep: str
    dtype: StorageDtype
    total: int
    forgettable: float
    coverage: float


def options_within(federation: FederationSize, budget: int) -> list[Option]:
    """Return the outcome of each policy for a budget, the best first.

    With the best policy most clients can be forgotten. Of equals the best policy
    keeps more of every round, in the widest dtype. All clients are taken to be alike.

    Args:
        federation: Sizes of the federation; its policy does not matter.
        budget: Bytes that the ledger may take.
    """
    found = []
    for dtype in STORAGE_DTYPES:
        total = estimate(replace(federation, keep="all"), dtype).total
        if total <= budget:
            found.append(Option("all", dtype, total, 1.0, 1.0))
    for dtype in STORAGE_DTYPES:
        count = _most_updates(federation, dtype, budget)
        if 0 < count < federation.drawn:
            found.append(_sampled(federation, dtype, count))
    for dtype in STORAGE_DTYPES:
        found += _summed(federation, dtype, budget)
    return sorted(
        found, key=lambda one: (-round(one.forgettable, 3), -round(one.coverage, 3))
    )


def _most_updates(federation: FederationSize, dtype: StorageDtype, budget: int) -> int:
    """Return how many updates of a round fit into a budget; 0 if steps do not fit."""
    one = estimate(replace(federation, keep="optimal:1"), dtype)
    left = budget - one.total
    each = federation.rounds * (one.update + ENTRY_BYTES)
    return 0 if left < 0 else min(federation.drawn, 1 + left // each)


def _sampled(federation: FederationSize, dtype: StorageDtype, count: int) -> Option:
    """Return the outcome of keeping so many updates of a round."""
    sample = replace(federation, keep=f"optimal:{count}")
    share = count / federation.drawn
    odds = federation.appearances()
    enough = math.fsum(
        odds[n] * _at_least(int(n), share)
        for n in np.flatnonzero(odds > _LIKELY)
        if n > 0
    )
    seen = max(1 - float(odds[0]), _LIKELY)
    total = estimate(sample, dtype).total
    return Option(sample.keep, dtype, total, min(1.0, enough / seen), share)


def _at_least(rounds: int, share: float) -> float:
    """Return the probability that enough of a client's updates is kept to forget it."""
    least = math.ceil(MINIMUM_COVERAGE * rounds - 1e-9)
    if rounds > _EXACT_UP_TO:
        spread = math.sqrt(rounds * share * (1 - share)) or 1.0
        return 1 - NormalDist().cdf((least - 0.5 - rounds * share) / spread)
    return math.fsum(
        math.comb(rounds, k) * share**k * (1 - share) ** (rounds - k)
        for k in range(least, rounds + 1)
    )


def _summed(
    federation: FederationSize, dtype: StorageDtype, budget: int
) -> list[Option]:
    """Return the outcomes of sums, and of sums of clients of several rounds."""
    size = federation.parameters
    plain = replace(federation, keep="sums")
    several = [
        replace(federation, keep=f"sums:{k}") for k in range(2, _LARGEST_SUMS_FROM + 1)
    ]
    smallest = min(several, key=lambda one: one.vector_bytes(dtype))
    index = estimate(plain, dtype).index
    models = 2 * encoded_bytes("float32", size)
    pairs = min(federation.pairs, FEWEST_PAIRS) * encoded_bytes(dtype, size)
    room = (budget - index) * (ROOM_FOR_WRITING - 1) // ROOM_FOR_WRITING
    saves = smallest.vector_bytes(dtype) < plain.vector_bytes(dtype)
    found = []
    for one in (plain, smallest) if saves else (plain,):
        needed = one.vector_bytes(dtype)
        fits = max(0.0, min(1.0, (room - models - pairs) / needed))
        total = min(budget, estimate(one, dtype).total)
        if models + index <= budget:
            found.append(Option(one.keep, dtype, total, fits, fits))
    return found
