"""The only list of methods; the command line and comparisons pick them up from here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.views import KeptView
from fastfedul.methods.cdp import CDP
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.skews import (
    PAPERS_DAMPING,
    Kronecker,
    NoSkew,
    Scalar,
    skew_of,
)
from fastfedul.methods.federaser import FedAccum, FedEraser
from fastfedul.methods.fedrecover import FedRecover
from fastfedul.methods.kd import KD
from fastfedul.methods.pga import PGA
from fastfedul.methods.protocol import (
    Needs,
    Unlearner,
    UnlearnRequest,
    UnlearnResult,
    require_rounds_for,
)
from fastfedul.methods.retrain import Retrain


@dataclass(frozen=True, slots=True, kw_only=True)
class OnSample:
    """A method applied as if only a sample of the updates had been kept.

    Attributes:
        method: The method.
        keep: What would have been kept.
    """

    method: Unlearner
    keep: Keep

    @property
    def needs(self) -> Needs:
        """What the method needs."""
        return self.method.needs

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


def _fast_fedul(
    skew: str | None = None,
    damping: float = PAPERS_DAMPING,
    updates: int | Literal["all"] | None = None,
    keep: str = "all",
    keep_seed: int = 0,
) -> Unlearner:
    """Return Fast-FedUL as `forget` uses it, or with another skew.

    Whoever compares wants to see also what a badly covered client comes to, so a
    sample is never refused.
    """
    chosen: dict[str, object] = {"skew": skew, "damping": damping, "updates": updates}
    method = FastFedUL(
        skew=None
        if skew is None and updates is None
        else skew_of({**chosen, "skew": skew or Kronecker.name}),
        minimum_coverage=0.2 if keep == "all" else 0,
    )
    if keep == "all":
        return method
    policy = Keep.parse(keep, seed=keep_seed)
    return OnSample(method=method, keep=policy)


def _papers(
    damping: float = PAPERS_DAMPING, keep: str = "all", keep_seed: int = 0
) -> Unlearner:
    """Return Fast-FedUL as in the paper."""
    return _fast_fedul("scalar", damping, keep=keep, keep_seed=keep_seed)


def _random_keeping(
    damping: float = PAPERS_DAMPING, keep: str = "uniform:5", keep_seed: int = 0
) -> Unlearner:
    # The paper keeps 5 updates a round.
    return _papers(damping, keep, keep_seed)


def _no_skew() -> Unlearner:
    return FastFedUL(skew=NoSkew())


def _half_skew(damping: float = PAPERS_DAMPING) -> Unlearner:
    return FastFedUL(skew=Scalar(damping, rounds="alternate"))


METHODS: dict[str, Callable[..., Unlearner]] = {
    "retrain": Retrain,
    "federaser": FedEraser,
    "fedaccum": FedAccum,
    "cdp": CDP,
    "pga": PGA,
    "kd": KD,
    "fedrecover": FedRecover,
    "fast-fedul": _fast_fedul,
    "fast-fedul-paper": _papers,
    "fast-fedul-1": _random_keeping,
    "fast-fedul-2": _no_skew,
    "fast-fedul-3": _half_skew,
}
"""Name to a function of the settings that gives the method."""

DAMPED = ("fast-fedul-paper", "fast-fedul-1", "fast-fedul-3")
"""Methods that have a damping."""

SERVER_ONLY = (
    "fast-fedul",
    "fast-fedul-paper",
    "fast-fedul-1",
    "fast-fedul-2",
    "fast-fedul-3",
)
"""Methods that need nothing but the history; comparisons show them by default."""


def find_method(name: str, settings: Mapping[str, Any] | None = None) -> Unlearner:
    """Return a method by name, with its settings.

    Raises:
        InvalidInputError: If there is none of that name, or it has no such setting.
    """
    if name not in METHODS:
        raise InvalidInputError(
            f"unknown method {name!r:.40}; choose from {', '.join(METHODS)}"
        )
    given, make = dict(settings or {}), METHODS[name]
    known = inspect.signature(make).parameters
    unknown = [key for key in given if key not in known]
    if unknown:
        raise InvalidInputError(
            f"{name} has no such setting: {unknown[0]:.40}; choose from "
            f"{', '.join(known) or 'none'}"
        )
    try:
        return make(**given)
    except (TypeError, AttributeError):
        said = ", ".join(f"{key}={value!r:.40}" for key, value in given.items())
        raise InvalidInputError(
            f"a setting of {name} is of the wrong kind: {said}"
        ) from None
