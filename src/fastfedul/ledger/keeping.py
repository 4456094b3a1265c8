"""Which updates of a round to keep.

Thanh Trung Huynh et al., "Fast-FedUL: A Training-Free Federated Unlearning with
Provable Skew Resilience", ECML PKDD 2024, section 4.2. The optimal probabilities are
from Horvath and Richtarik, "Nonconvex variance reduced optimization with arbitrary
sampling", ICML 2019: they minimise the variance of the weighted sum of kept updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError
from fastfedul.limits import require_number, require_type
from fastfedul.params import norm
from fastfedul.records import History, KeepUse, Round
from fastfedul.rng import stream

Policy = Literal["all", "optimal", "top", "uniform", "sums"]
POLICIES: tuple[Policy, ...] = ("all", "optimal", "top", "uniform", "sums")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Keep:
    """A policy that decides which updates of each round the ledger keeps.

    Attributes:
        policy: `all`; `optimal`: independent draws with the probabilities that give
            the least variance; `top`: the largest contributions, no draw, no
            reweighting; `uniform`: a simple random sample; `sums`: none, for a ledger
            that keeps sums.
        count: How many updates a round keeps, on average for `optimal`. For `sums`,
            from how many rounds on a client has a sum; None for 1.
        use: `store` or `aggregate`, see `Round`.
        seed: Seed of the draws; the draw of a round depends on seed and round alone.
    """

    policy: Policy = "all"
    count: int | None = None
    use: KeepUse = "store"
    seed: int = 0

    def __post_init__(self) -> None:
        require_type("the keeping policy", self.policy, str, "text")
        require_type("use", self.use, str, "store or aggregate")
        require_number("number of updates", self.count, whole=True, unset=True)
        require_number("seed", self.seed, least=0, whole=True)
        if self.policy not in POLICIES:
            raise InvalidInputError(
                f"unknown keeping policy {self.policy!r}; choose {', '.join(POLICIES)}"
            )
        optional = self.policy in ("all", "sums")
        if (self.count is None and not optional) or (
            self.count is not None and self.count < 1
        ):
            raise InvalidInputError(
                f"the policy {self.policy!r} needs a number of 1 or more, as in "
                f"{self.policy}:5"
            )
        if self.use not in ("store", "aggregate"):
            raise InvalidInputError(f"use is store or aggregate, not {self.use!r}")
        if self.policy == "sums" and self.use == "aggregate":
            raise InvalidInputError(
                "sums are over all updates, so all of them must count; use store"
            )

    @classmethod
    def parse(cls, text: str, *, use: KeepUse = "store", seed: int = 0) -> Keep:
        """Return the policy written as `all`, `optimal:5`, `top:5`, `sums:3` and so on.

        >>> Keep.parse("optimal:5").count
        5
        """
        require_type("a keeping policy", text, str, "text, such as optimal:5")
        policy, colon, count = text.partition(":")
        whole = count.isascii() and count.isdecimal() and len(count) < 10
        counted = policy != "all" and whole
        if policy not in POLICIES or (colon and not counted):
            raise InvalidInputError(
                f"cannot read the policy {text!r:.40}; write all, optimal:5, top:5, "
                "uniform:5, sums or sums:3"
            )
        return cls(policy, int(count) if count else None, use, seed)

    @property
    def history(self) -> History:
        """Kind of history of a ledger with this policy."""
        return "sums" if self.policy == "sums" else "rounds"

    @property
    def sums_from(self) -> int:
        """From how many rounds on a client has a sum, in a ledger of sums."""
        return self.count if self.policy == "sums" and self.count else 1

    def __call__(self, round_: Round) -> Round:
        """Return the round with every update marked as kept or not.

        The updates come back sorted by client: a client's draw must not depend on the
        order in which updates arrived.
        """
        ordered = sorted(round_.updates, key=lambda update: update.client)
        sizes = [1.0] * len(ordered)
        if self.policy in ("optimal", "top"):
            sizes = [u.share * (norm(u.delta.flat) if u.delta else 0) for u in ordered]
        probabilities, kept = self.choose(np.array(sizes), round_.index)
        updates = tuple(
            replace(u, keep_probability=float(p), kept=bool(k) and u.delta is not None)
            for u, p, k in zip(ordered, probabilities, kept, strict=True)
        )
        return replace(round_, updates=updates, use=self.use)

    def choose(
        self, magnitudes: Floats, index: int
    ) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the keeping probabilities, and which updates of a round are kept.

        Args:
            magnitudes: Share times norm of each update, sorted by client.
            index: Number of the round.
        """
        size = len(magnitudes)
        if self.policy == "all" or size == 0:
            return np.ones(size), np.ones(size, bool)
        if self.policy == "sums":
            return np.zeros(size), np.zeros(size, bool)
        assert self.count is not None
        count = min(self.count, size)
        rng = stream(self.seed, "keep", index)
        if self.policy == "optimal":
            probabilities = optimal_probabilities(magnitudes, count)
            return probabilities, rng.random(size) < probabilities
        if self.policy == "uniform":
            kept = np.zeros(size, bool)
            kept[rng.choice(size, count, replace=False)] = True
            return np.full(size, count / size), kept
        # Ties go to the earlier client, so that the choice is reproducible.
        kept = np.zeros(size, bool)
        kept[np.argsort(-magnitudes, kind="stable")[:count]] = True
        return kept.astype(np.float64), kept


def optimal_probabilities(magnitudes: npt.ArrayLike, count: int) -> Floats:
    """Return the keeping probabilities of least variance, by water-filling.

    They minimise the sum of (1 - p) / p times the squared magnitude, subject to p at
    most 1 and their sum being the smaller of the count and the number of updates.
    Updates of magnitude zero share the rest of that sum.

    Args:
        magnitudes: Share times norm of each update.
        count: Expected number of kept updates.

    >>> optimal_probabilities([1, 1, 2, 10], 2)
    array([0.25, 0.25, 0.5 , 1.  ])
    """
    sizes = np.asarray(magnitudes, np.float64)
    if sizes.ndim != 1 or not np.isfinite(sizes).all() or (sizes < 0).any():
        raise InvalidInputError("magnitudes must be finite numbers, none negative")
    if count < 1:
        raise InvalidInputError(
            f"the number of updates to keep is {count}; keep at least 1"
        )
    if count >= sizes.size:
        return np.ones(sizes.size)
    positive = sizes > 0
    num_positive = int(positive.sum())
    if num_positive <= count:
        rest = (count - num_positive) / max(1, sizes.size - num_positive)
        return np.where(positive, 1.0, rest)
    probabilities = np.zeros(sizes.size)
    probabilities[positive] = _water_fill(sizes[positive], count)
    return probabilities


def _water_fill(sizes: Floats, count: int) -> Floats:
    """Solve for magnitudes above zero, more of them than the count."""
    order = np.argsort(sizes, kind="stable")
    ascending = sizes[order]
    # Sum of the l smallest over the l-th, without sums that could over- or underflow.
    sums = np.ones(sizes.size)
    for i in range(1, sizes.size):
        sums[i] += sums[i - 1] * (ascending[i - 1] / ascending[i])
    counts = np.arange(1, sizes.size + 1)
    # With l updates below 1, the other size - l are certain and the l share the rest.
    left = count - (sizes.size - counts)
    below = int(counts[(left > 0) & (left <= sums * (1 + 1e-12))].max())
    probabilities = np.ones(sizes.size)
    relative = ascending[:below] / ascending[below - 1]
    probabilities[order[:below]] = np.minimum(
        1.0, left[below - 1] * relative / sums[below - 1]
    )
    return probabilities
