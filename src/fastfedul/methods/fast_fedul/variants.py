"""Fast-FedUL by the names that tables have: as `forget` uses it, and the paper's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.views import KeptView
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.skews import (
    PAPERS_DAMPING,
    Kronecker,
    Scalar,
    Skew,
    skew_of,
)
from fastfedul.methods.protocol import (
    Method,
    Needs,
    UnlearnRequest,
    UnlearnResult,
    method_settings,
    require_rounds_for,
)

PAPERS_KEEPING = "uniform:5"
"""The keeping of Fast-FedUL-1: the paper keeps 5 updates of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnSample:
    """A method applied as if only a sample of the updates had been kept.

    Attributes:
        method: The method.
        keep: Which updates would have been kept.
    """

    method: Method
    keep: Keep

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.method.name

    @property
    def needs(self) -> Needs:
        """Needs of the method."""
        return self.method.needs

    def settings(self) -> dict[str, object]:
        """Return the settings of the method, and the keeping."""
        keep = self.keep
        text = keep.policy if keep.count is None else f"{keep.policy}:{keep.count}"
        return {**method_settings(self.method), "keep": text, "keep_seed": keep.seed}

    def kept_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of the updates that would have been kept, and of the steps.

        Raises:
            UnlearnRefusedError: If the ledger keeps sums.
        """
        require_rounds_for("a sample of the updates", ledger)
        size, budget = ledger.settings.layout.size, self.keep.count
        updates = [round_.num_updates for round_ in ledger.rounds()]
        kept = sum(n if budget is None else min(budget, n) for n in updates)
        step = encoded_bytes(ledger.settings.step_dtype, size)
        update = encoded_bytes(ledger.settings.update_dtype, size)
        return kept * update + len(updates) * step

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the method's answer from the smaller history.

        Raises:
            UnlearnRefusedError: If the ledger itself is a sample: whether an update is
                there then depends on two draws, and the second knows only its own.
        """
        require_rounds_for("a sample of the updates", request.ledger)
        for client in sorted(request.forget):
            updates = request.ledger.updates_of(client)
            if any(not u.kept or u.keep_probability < 1 for u in updates):
                raise UnlearnRefusedError(
                    f"not every update of client {client!r:.80} was kept, so this "
                    "ledger cannot show what a smaller one would give; use fast-fedul"
                )
        view = KeptView(request.ledger, self.keep)
        return self.method(UnlearnRequest(view, request.forget, request.federation))


def fast_fedul(
    skew: str | None = None,
    damping: float | list[float] | None = None,
    damped: Literal["all", "alternate"] | None = None,
    updates: int | Literal["all"] | None = None,
    minimum_coverage: float | None = None,
    keep: str = "all",
    keep_seed: int = 0,
) -> Method:
    """Takes a client's updates out of the final model, by the server alone.

    With nothing set it is what `forget` does.

    Args:
        skew: How the others' training reacted: kronecker, scalar or none. Without it,
            scalar if a damping is given or the server adds no mean.
            [default: kronecker]
        damping: The damping of skew scalar, one number or one for each round.
            [default: 0.07]
        damped: Rounds that skew scalar damps: all or alternate. [default: all]
        updates: Updates of the others that skew kronecker draws, or all; fewer where
            the model is very large. [default: 64]
        minimum_coverage: Least part of a client's share that must be kept; 0 with
            another `keep` than all. [default: 0.2]
        keep: Forget as if the ledger had kept only these updates.
        keep_seed: Seed of the draw of `keep`.

    Raises:
        InvalidInputError: If a setting belongs to another skew.
    """
    usual = 0.2 if keep == "all" else 0.0
    method = FastFedUL(
        skew=_skew(skew, damping, damped, updates),
        minimum_coverage=usual if minimum_coverage is None else minimum_coverage,
    )
    if keep == "all":
        return method
    return OnSample(method=method, keep=Keep.parse(keep, seed=keep_seed))


def papers(
    damping: float = PAPERS_DAMPING,
    minimum_coverage: float | None = None,
    keep: str = "all",
    keep_seed: int = 0,
) -> Method:
    """Fast-FedUL as in the paper: the same damping in every round.

    Args:
        damping: The part that a round pulls back.
        minimum_coverage: Least part of a client's share that must be kept; 0 with
            another `keep` than all. [default: 0.2]
        keep: Forget as if the ledger had kept only these updates.
        keep_seed: Seed of the draw of `keep`.
    """
    return fast_fedul(
        Scalar.name,
        damping,
        minimum_coverage=minimum_coverage,
        keep=keep,
        keep_seed=keep_seed,
    )


def random_keeping(
    damping: float = PAPERS_DAMPING,
    minimum_coverage: float | None = None,
    keep: str = PAPERS_KEEPING,
    keep_seed: int = 0,
) -> Method:
    """Fast-FedUL-1 of the paper: from updates that were kept at random.

    Args:
        damping: The part that a round pulls back.
        minimum_coverage: Least part of a client's share that must be kept; 0.2 with
            `keep` all. [default: 0]
        keep: Forget as if the ledger had kept only these updates.
        keep_seed: Seed of the draw of `keep`.
    """
    return papers(damping, minimum_coverage, keep, keep_seed)


def without_skew(
    minimum_coverage: float | None = None, keep: str = "all", keep_seed: int = 0
) -> Method:
    """Fast-FedUL-2 of the paper: as if nobody had reacted to the client.

    Args:
        minimum_coverage: Least part of a client's share that must be kept; 0 with
            another `keep` than all. [default: 0.2]
        keep: Forget as if the ledger had kept only these updates.
        keep_seed: Seed of the draw of `keep`.
    """
    return fast_fedul(
        "none", minimum_coverage=minimum_coverage, keep=keep, keep_seed=keep_seed
    )


def half_skew(
    damping: float = PAPERS_DAMPING,
    minimum_coverage: float | None = None,
    keep: str = "all",
    keep_seed: int = 0,
) -> Method:
    """Fast-FedUL-3 of the paper: damping in every other round.

    Args:
        damping: The part that a round of every two pulls back.
        minimum_coverage: Least part of a client's share that must be kept; 0 with
            another `keep` than all. [default: 0.2]
        keep: Forget as if the ledger had kept only these updates.
        keep_seed: Seed of the draw of `keep`.
    """
    return fast_fedul(
        Scalar.name,
        damping,
        "alternate",
        minimum_coverage=minimum_coverage,
        keep=keep,
        keep_seed=keep_seed,
    )


VARIANTS: dict[str, Callable[..., Method]] = {
    FastFedUL.name: fast_fedul,
    "fast-fedul-paper": papers,
    "fast-fedul-1": random_keeping,
    "fast-fedul-2": without_skew,
    "fast-fedul-3": half_skew,
}
"""Name to a function of the settings that gives the method."""


def _skew(
    name: str | None,
    damping: float | list[float] | None,
    damped: str | None,
    updates: int | str | None,
) -> Skew | None:
    """Return the skew that settings name; None if they name none."""
    of_scalar = damping is not None or damped is not None
    if name is None and of_scalar:
        name = Scalar.name
    if name is None and updates is not None:
        name = Kronecker.name
    if name is None:
        return None
    if of_scalar and name != Scalar.name:
        raise InvalidInputError(
            f"damping belongs to skew scalar, not to {name!r:.40}; leave one away"
        )
    if updates is not None and name != Kronecker.name:
        raise InvalidInputError(
            f"updates belongs to skew kronecker, not to {name!r:.40}; leave one away"
        )
    return skew_of(
        {
            "skew": name,
            "damping": PAPERS_DAMPING if damping is None else damping,
            "damped": damped or "all",
            "updates": updates,
        }
    )
