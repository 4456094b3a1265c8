"""The only list of methods; the command line and comparisons pick them up from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastfedul.errors import InvalidInputError
from fastfedul.history.sampling import Keep
from fastfedul.history.views import KeptView
from fastfedul.unlearn.fast_fedul import FastFedUL
from fastfedul.unlearn.protocol import Unlearner, UnlearnRequest, UnlearnResult


@dataclass(frozen=True, slots=True, kw_only=True)
class OnSample:
    """A method applied as if only a sample of the updates had been kept.

    Attributes:
        method: The method.
        keep: What would have been kept.
    """

    method: Unlearner
    keep: Keep

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the method's answer from the smaller history."""
        view = KeptView(request.ledger, self.keep)
        return self.method(UnlearnRequest(view, request.forget))


def _random_keeping(damping: float) -> Unlearner:
    # The paper keeps 5 updates a round. Whoever compares wants to see also what a
    # badly covered client comes to, so nothing is refused.
    method = FastFedUL(damping=damping, minimum_coverage=0)
    return OnSample(method=method, keep=Keep("uniform", 5))


METHODS: dict[str, Callable[[float], Unlearner]] = {
    "fast-fedul": lambda damping: FastFedUL(damping=damping),
    "fast-fedul-1": _random_keeping,
    "fast-fedul-2": lambda damping: FastFedUL(damping=0),
    "fast-fedul-3": lambda damping: FastFedUL(damping=damping, damped="alternate"),
}
"""Name to a function of the damping that gives the method."""


def find_method(name: str, *, damping: float) -> Unlearner:
    """Return a method by name.

    Raises:
        InvalidInputError: If there is none of that name.
    """
    if name not in METHODS:
        raise InvalidInputError(
            f"unknown method {name!r:.40}; choose from {', '.join(METHODS)}"
        )
    return METHODS[name](damping)
