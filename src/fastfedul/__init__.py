"""Take a client back out of a federated model, without data and without training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastfedul.errors import (
    FastFedULError,
    InvalidInputError,
    LedgerDamagedError,
    LedgerError,
    LedgerLockedError,
    UnknownClientError,
    UnlearnRefusedError,
)
from fastfedul.federation.aggregation import Aggregation
from fastfedul.forgetting.requests import (
    AppliedRequest,
    add_request,
    apply_requests,
    cancel_request,
)
from fastfedul.forgetting.service import Forgetting, erase, forget, preview
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.protocol import Ledger, params_at, read_round
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.verification import verify
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.removal import Removal
from fastfedul.methods.fast_fedul.skews import Kronecker, NoSkew, Scalar
from fastfedul.methods.protocol import Method, Needs, UnlearnRequest, UnlearnResult
from fastfedul.params import Params
from fastfedul.records import ClientUpdate, ForgetRequest, LocalSGD, Model, Round

if TYPE_CHECKING:
    from fastfedul.report.comparison_table import ComparisonTable, compare
    from fastfedul.runs.config import RunConfig
    from fastfedul.runs.training import train

__all__ = [
    "Aggregation",
    "AppliedRequest",
    "ClientUpdate",
    "ComparisonTable",
    "DiskLedger",
    "FastFedUL",
    "FastFedULError",
    "ForgetRequest",
    "Forgetting",
    "InvalidInputError",
    "Keep",
    "Kronecker",
    "Ledger",
    "LedgerDamagedError",
    "LedgerError",
    "LedgerLockedError",
    "LedgerReader",
    "LocalSGD",
    "MemoryLedger",
    "Method",
    "Model",
    "Needs",
    "NoSkew",
    "Params",
    "Removal",
    "Round",
    "RunConfig",
    "Scalar",
    "UnknownClientError",
    "UnlearnRefusedError",
    "UnlearnRequest",
    "UnlearnResult",
    "add_request",
    "apply_requests",
    "cancel_request",
    "compare",
    "erase",
    "forget",
    "params_at",
    "preview",
    "read_round",
    "train",
    "verify",
]

_OF_RUNS = {
    "ComparisonTable": "fastfedul.report.comparison_table",
    "RunConfig": "fastfedul.runs.config",
    "compare": "fastfedul.report.comparison_table",
    "train": "fastfedul.runs.training",
}
"""Names whose modules are imported when somebody asks for them."""


def __getattr__(name: str) -> Any:
    if name not in _OF_RUNS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_OF_RUNS[name]), name)
