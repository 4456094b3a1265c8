"""What is decided once, when a ledger is created."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import MEAN, Aggregation, check_supported
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from fastfedul.params import Layout
from fastfedul.records import History, StorageDtype

LONGEST_FEDERATION = 200
"""Characters of a federation's name: it stands on one line of a certificate."""


def check_federation(name: object) -> None:
    """Raise unless a federation may have this name."""
    if not (
        isinstance(name, str)
        and 1 <= len(name) <= LONGEST_FEDERATION
        and name.isprintable()
        and unicodedata.is_normalized("NFC", name)
    ):
        raise InvalidInputError(
            f"the federation's name is {name!r:.80}; give 1 to {LONGEST_FEDERATION} "
            "printable characters in Unicode's form NFC"
        )


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """Storage and assumptions of a ledger.

    Attributes:
        layout: Names, shapes and dtypes of the parameters.
        aggregation: `mean`, or the name of an aggregation that can be replayed.
        custom: The caller's own aggregations by name; they are not stored, so they
            must be given again whenever the ledger is opened.
        update_dtype: How updates are stored on disk.
        step_dtype: How steps are stored on disk.
        history: `rounds`: steps and updates of every round, as far as they are kept.
            `sums`: one sum per client and a few differences of two clients, and no
            other vectors of rounds.
        sums_from: From how many rounds on a client has a sum, in a ledger of sums.
            Parts of fewer rounds are stored one by one, as updates are.
        budget: Bytes the ledger may take on disk; None for any number.
        federation: Name of the federation, for its certificates; None if it has none.
        optimizer: The server optimizer, which turns a round's mean into the step; None
            if the server adds the mean.
    """

    layout: Layout
    aggregation: str = MEAN
    custom: Mapping[str, Aggregation] = field(default_factory=dict)
    update_dtype: StorageDtype = "float32"
    step_dtype: StorageDtype = "float32"
    history: History = "rounds"
    sums_from: int = 1
    budget: int | None = None
    federation: str | None = None
    optimizer: ServerOptimizer | None = None

    def __post_init__(self) -> None:
        check_supported(self.aggregation)
        for dtype in (self.update_dtype, self.step_dtype):
            if dtype not in STORAGE_DTYPES:
                raise InvalidInputError(
                    f"unknown storage dtype {dtype!r}; "
                    f"choose {', '.join(STORAGE_DTYPES)}"
                )
        if self.federation is not None:
            check_federation(self.federation)
        # What a row of the index says must come back from SQLite as it was.
        if self.budget is not None and type(self.budget) is not int:
            raise InvalidInputError(
                f"budget is a whole number, not {self.budget!r:.40}; write it as an int"
            )
        if type(self.sums_from) is not int or not 1 <= self.sums_from < 2**31:
            raise InvalidInputError(
                f"sums_from is {self.sums_from!r:.40}; choose a whole number from 1 on"
            )
        if self.history not in ("rounds", "sums"):
            raise InvalidInputError(
                f"the history is rounds or sums, not {self.history!r:.40}"
            )
        if self.budget is not None and not 1 <= self.budget < 2**63:
            choose = "more" if self.budget < 1 else "less"
            raise InvalidInputError(
                f"the budget is {self.budget} bytes; choose {choose}"
            )
        self._check_optimizer()
        if self.aggregation != MEAN and (self.history == "sums" or self.budget):
            raise InvalidInputError(
                f"{self.aggregation!r:.40} is replayed from every update of a round, "
                "so it needs a history of rounds without a budget"
            )

    def _check_optimizer(self) -> None:
        """Raise unless forgetting can replay the server optimizer."""
        if self.optimizer is None:
            return
        if not isinstance(self.optimizer, ServerOptimizer):
            raise InvalidInputError(
                "a server optimizer is made with ServerOptimizer.make, not "
                f"{self.optimizer!r:.40}"
            )
        if self.aggregation != MEAN:
            raise InvalidInputError(
                f"the server optimizer {self.optimizer.name} needs the mean of the "
                f"updates, not their {self.aggregation!r:.40}; leave one of them out"
            )
        if self.history == "sums":
            raise InvalidInputError(
                f"the server optimizer {self.optimizer.name} is replayed from the mean "
                "of every round, and a ledger of sums has none; keep rounds"
            )
