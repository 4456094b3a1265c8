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
from fastfedul.records import ClientUpdate, Model, Round
from fastfedul.unlearn.fast_fedul import FastFedUL
from fastfedul.unlearn.protocol import UnlearnRequest, UnlearnResult
from fastfedul.unlearn.removal import Removal

__all__ = [
    "Aggregation",
    "ClientUpdate",
    "DiskLedger",
    "FastFedUL",
    "FastFedULError",
    "InvalidInputError",
    "Keep",
    "Ledger",
    "LedgerDamagedError",
    "LedgerError",
    "LedgerLockedError",
    "LedgerReader",
    "MemoryLedger",
    "Model",
    "Params",
    "Removal",
    "Round",
    "UnknownClientError",
    "UnlearnRefusedError",
    "UnlearnRequest",
    "UnlearnResult",
    "erase",
    "forget",
    "params_at",
    "read_round",
    "verify",
]
