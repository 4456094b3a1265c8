"""A method of one's own: go part of the way that Fast-FedUL would go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastfedul import (
    FastFedUL,
    InvalidInputError,
    Needs,
    Params,
    UnlearnRequest,
    UnlearnResult,
)


@dataclass(frozen=True, kw_only=True)
class Halfway:
    """Moves the model part of the way that Fast-FedUL would move it.

    Attributes:
        part: Which part of the way, from 0 to 1.
    """

    part: float = 0.5
    name: ClassVar[str] = "halfway"
    needs: ClassVar[Needs] = Needs(history=True)

    def __post_init__(self) -> None:
        if not 0 <= self.part <= 1:
            raise InvalidInputError(f"part is {self.part}; choose from 0 to 1")

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model part of the way."""
        whole = FastFedUL()(request)
        current = request.ledger.final.params
        moved = current.flat + np.float32(self.part) * whole.delta.flat
        return UnlearnResult(
            params=Params(current.layout, moved),
            clients=whole.clients,
            warnings=whole.warnings,
        )
