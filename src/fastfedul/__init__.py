"""Take a client back out of a federated model, without data and without training."""

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
from fastfedul.forgetting import erase, forget
from fastfedul.history.ledger import Ledger, params_at, read_round
from fastfedul.history.memory import MemoryLedger
from fastfedul.history.reading import LedgerReader
from fastfedul.history.sampling import Keep
from fastfedul.history.storage import DiskLedger
from fastfedul.history.verification import verify
from fastfedul.params import Params
from fastfedul.records import ClientUpdate, ForgetRequest, LocalSGD, Model, Round
from fastfedul.requests import (
    AppliedRequest,
    add_request,
    apply_requests,
    cancel_request,
)
from fastfedul.unlearn.fast_fedul import FastFedUL
from fastfedul.unlearn.protocol import UnlearnRequest, UnlearnResult
from fastfedul.unlearn.removal import Removal
from fastfedul.unlearn.skews import Kronecker, NoSkew, Scalar

__all__ = [
    "Aggregation",
    "AppliedRequest",
    "ClientUpdate",
    "DiskLedger",
    "FastFedUL",
    "FastFedULError",
    "ForgetRequest",
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
    "Model",
    "NoSkew",
    "Params",
    "Removal",
    "Round",
    "Scalar",
    "UnknownClientError",
    "UnlearnRefusedError",
    "UnlearnRequest",
    "UnlearnResult",
    "add_request",
    "apply_requests",
    "cancel_request",
    "erase",
    "forget",
    "params_at",
    "read_round",
    "verify",
]
