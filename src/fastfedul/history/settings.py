"""What is decided once, when a ledger is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import MEAN, Aggregation, check_supported
from fastfedul.history.codec import STORAGE_DTYPES
from fastfedul.params import Layout
from fastfedul.records import History, StorageDtype


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """How a ledger stores and what it assumes.

    Attributes:
        layout: Names, shapes and dtypes of the parameters.
        aggregation: `mean`, or the name of an aggregation that can be replayed.
        custom: The caller's own aggregations by name; they are not stored, so they
            must be given again whenever the ledger is opened.
        update_dtype: How updates are stored on disk.
        step_dtype: How steps are stored on disk.
        sums_every: After how many rounds the running sums are written anew.
        history: `rounds`: steps and updates of every round, as far as they are kept.
            `sums`: sums of what each client did, and no vectors of rounds.
        budget: Bytes the ledger may take on disk; None for any number.
    """

    layout: Layout
    aggregation: str = MEAN
    custom: Mapping[str, Aggregation] = field(default_factory=dict)
    update_dtype: StorageDtype = "float32"
    step_dtype: StorageDtype = "float32"
    sums_every: int = 8
    history: History = "rounds"
    budget: int | None = None

    def __post_init__(self) -> None:
        check_supported(self.aggregation)
        for dtype in (self.update_dtype, self.step_dtype):
            if dtype not in STORAGE_DTYPES:
                raise InvalidInputError(
                    f"unknown storage dtype {dtype!r}; "
                    f"choose {', '.join(STORAGE_DTYPES)}"
                )
        for name, value in (("sums_every", self.sums_every), ("budget", self.budget)):
            # What a row of the index says must come back from SQLite as it was.
            if value is not None and type(value) is not int:
                raise InvalidInputError(
                    f"{name} is a whole number, not {value!r:.40}; write it as an int"
                )
        if self.sums_every < 1:
            raise InvalidInputError("running sums are written every 1 or more rounds")
        if self.history not in ("rounds", "sums"):
            raise InvalidInputError(
                f"the history is rounds or sums, not {self.history!r:.40}"
            )
        if self.budget is not None and self.budget < 1:
            raise InvalidInputError(f"the budget is {self.budget} bytes; choose more")
        if self.aggregation != MEAN and (self.history == "sums" or self.budget):
            raise InvalidInputError(
                f"{self.aggregation!r:.40} is replayed from every update of a round, "
                "so it needs a history of rounds without a budget"
            )

    @property
    def sum_dtype(self) -> StorageDtype:
        """How a history of sums stores them.

        Sums grow round by round, and what is added must not drown in the rounding:
        of the dtypes in fewer bits only float16, with its scales, is fine enough.
        """
        return "float16" if self.update_dtype == "float16" else "float32"
