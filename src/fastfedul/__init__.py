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
from fastfedul.forgetting.requests import (
    AppliedRequest,
    add_request,
    apply_requests,
    cancel_request,
)
from fastfedul.forgetting.service import erase, forget
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.protocol import Ledger, params_at, read_round
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.verification import verify
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.removal import Removal
from fastfedul.methods.fast_fedul.skews import Kronecker, NoSkew, Scalar
from fastfedul.methods.protocol import UnlearnRequest, UnlearnResult
from fastfedul.params import Params
from fastfedul.records import ClientUpdate, ForgetRequest, LocalSGD, Model, Round

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
