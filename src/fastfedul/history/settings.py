"""What is decided once, when a ledger is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import MEAN, Aggregation, check_supported
from fastfedul.history.codec import STORAGE_DTYPES
from fastfedul.params import Layout
from fastfedul.records import StorageDtype


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
    """

    layout: Layout
    aggregation: str = MEAN
    custom: Mapping[str, Aggregation] = field(default_factory=dict)
    update_dtype: StorageDtype = "float32"
    step_dtype: StorageDtype = "float32"
    sums_every: int = 8

    def __post_init__(self) -> None:
        check_supported(self.aggregation)
        for dtype in (self.update_dtype, self.step_dtype):
            if dtype not in STORAGE_DTYPES:
                raise InvalidInputError(
                    f"unknown storage dtype {dtype!r}; "
                    f"choose {', '.join(STORAGE_DTYPES)}"
                )
        if self.sums_every < 1:
            raise InvalidInputError("running sums are written every 1 or more rounds")
