"""Take a client back out of a federated model, without data and without training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from fastfedul.ledger.disk import DiskLedger, LedgerReader
    from fastfedul.ledger.keeping import Keep
    from fastfedul.ledger.memory import MemoryLedger
    from fastfedul.ledger.protocol import Ledger, params_at, read_round
    from fastfedul.ledger.verify import verify
    from fastfedul.methods.fast_fedul.method import FastFedUL
    from fastfedul.methods.fast_fedul.removal import Removal
    from fastfedul.methods.fast_fedul.skews import Kronecker, NoSkew, Scalar
    from fastfedul.methods.protocol import Method, Needs, UnlearnRequest, UnlearnResult
    from fastfedul.params import Params
    from fastfedul.records import ClientUpdate, ForgetRequest, LocalSGD, Model, Round
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

_MODULE_OF = {
    "Aggregation": "federation.aggregation",
    "AppliedRequest": "forgetting.requests",
    "ClientUpdate": "records",
    "ComparisonTable": "report.comparison_table",
    "DiskLedger": "ledger.disk",
    "FastFedUL": "methods.fast_fedul.method",
    "FastFedULError": "errors",
    "ForgetRequest": "records",
    "Forgetting": "forgetting.service",
    "InvalidInputError": "errors",
    "Keep": "ledger.keeping",
    "Kronecker": "methods.fast_fedul.skews",
    "Ledger": "ledger.protocol",
    "LedgerDamagedError": "errors",
    "LedgerError": "errors",
    "LedgerLockedError": "errors",
    "LedgerReader": "ledger.disk",
    "LocalSGD": "records",
    "MemoryLedger": "ledger.memory",
    "Method": "methods.protocol",
    "Model": "records",
    "Needs": "methods.protocol",
    "NoSkew": "methods.fast_fedul.skews",
    "Params": "params",
    "Removal": "methods.fast_fedul.removal",
    "Round": "records",
    "RunConfig": "runs.config",
    "Scalar": "methods.fast_fedul.skews",
    "UnknownClientError": "errors",
    "UnlearnRefusedError": "errors",
    "UnlearnRequest": "methods.protocol",
    "UnlearnResult": "methods.protocol",
    "add_request": "forgetting.requests",
    "apply_requests": "forgetting.requests",
    "cancel_request": "forgetting.requests",
    "compare": "report.comparison_table",
    "erase": "forgetting.service",
    "forget": "forgetting.service",
    "params_at": "ledger.protocol",
    "preview": "forgetting.service",
    "read_round": "ledger.protocol",
    "train": "runs.training",
    "verify": "ledger.verify",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    """Return a public name; its module is imported when somebody asks for the name.

    So `fastfedul --help` and programs that need one name do not wait for all modules.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"fastfedul.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
