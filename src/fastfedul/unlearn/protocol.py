"""What a method of unlearning is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fastfedul.history.ledger import Ledger
from fastfedul.params import Params
from fastfedul.records import ClientId
from fastfedul.unlearn.bound import Bound


@dataclass(frozen=True, slots=True)
class UnlearnRequest:
    """Whom to forget, and from which history."""

    ledger: Ledger
    forget: frozenset[ClientId]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlearnResult:
    """The cleaned model, what was done to get it, and how sure it is.

    Attributes:
        params: The cleaned model.
        delta: Cleaned minus current model.
        clients: Who was forgotten.
        rounds: Rounds in which any of them took part.
        coverage: Part of their share in the model whose updates were kept, 0 to 1.
        coverage_by_client: The same for each client.
        damping: The damping of each round.
        gamma_norms: How far each round would have gone elsewhere without them.
        standard_error: Of delta, from keeping only a sample of the updates; None if
            what is missing was not left out at random.
        bound: Distance to a retrained model under the assumptions of Theorem 1.
        seconds: Time taken.
        bytes_read: Bytes of history read.
        client_calls: Times a client had to compute something.
        warnings: What a reader of the result should know.
    """

    params: Params
    delta: Params
    clients: tuple[ClientId, ...]
    rounds: int
    coverage: float
    coverage_by_client: Mapping[ClientId, float]
    damping: tuple[float, ...]
    gamma_norms: tuple[float, ...]
    standard_error: float | None
    bound: Bound
    seconds: float
    bytes_read: int
    client_calls: int = 0
    warnings: tuple[str, ...] = field(default=())


class Unlearner(Protocol):
    """A method: hyperparameters that can be called."""

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model without the forgotten clients."""
