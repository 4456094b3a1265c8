"""Take a client back out of a federated model, without data and without training."""

from typing import TYPE_CHECKING

from fastfedul.lazy_names import lazy_names

if TYPE_CHECKING:
    from fastfedul import methods as methods
    from fastfedul.errors import FastFedULError as FastFedULError
    from fastfedul.errors import InvalidInputError as InvalidInputError
    from fastfedul.errors import LedgerDamagedError as LedgerDamagedError
    from fastfedul.errors import LedgerError as LedgerError
    from fastfedul.errors import LedgerLockedError as LedgerLockedError
    from fastfedul.errors import UnknownClientError as UnknownClientError
    from fastfedul.errors import UnlearnRefusedError as UnlearnRefusedError
    from fastfedul.federation.aggregation import Aggregation as Aggregation
    from fastfedul.federation.server_optimizers import (
        ServerOptimizer as ServerOptimizer,
    )
    from fastfedul.forgetting.requests import AppliedRequest as AppliedRequest
    from fastfedul.forgetting.requests import add_request as add_request
    from fastfedul.forgetting.requests import apply_requests as apply_requests
    from fastfedul.forgetting.requests import cancel_request as cancel_request
    from fastfedul.forgetting.service import Forgetting as Forgetting
    from fastfedul.forgetting.service import erase as erase
    from fastfedul.forgetting.service import forget as forget
    from fastfedul.forgetting.service import preview as preview
    from fastfedul.investigate.audit.auditing import audit as audit
    from fastfedul.investigate.audit.findings import Audit as Audit
    from fastfedul.investigate.contribution import Contribution as Contribution
    from fastfedul.investigate.contribution import contributions as contributions
    from fastfedul.investigate.trace import Trace as Trace
    from fastfedul.investigate.trace import trace as trace
    from fastfedul.ledger.disk import DiskLedger as DiskLedger
    from fastfedul.ledger.disk import create_ledger as create_ledger
    from fastfedul.ledger.disk import open_ledger as open_ledger
    from fastfedul.ledger.keeping import Keep as Keep
    from fastfedul.ledger.memory import MemoryLedger as MemoryLedger
    from fastfedul.ledger.protocol import Ledger as Ledger
    from fastfedul.ledger.protocol import params_at as params_at
    from fastfedul.ledger.protocol import read_round as read_round
    from fastfedul.ledger.reader import LedgerReader as LedgerReader
    from fastfedul.ledger.restoration import restore_ledger as restore_ledger
    from fastfedul.ledger.verify import verify as verify
    from fastfedul.methods import FastFedUL as FastFedUL
    from fastfedul.methods import Kronecker as Kronecker
    from fastfedul.methods import Method as Method
    from fastfedul.methods import Needs as Needs
    from fastfedul.methods import NoSkew as NoSkew
    from fastfedul.methods import Removal as Removal
    from fastfedul.methods import Scalar as Scalar
    from fastfedul.methods import UnlearnRequest as UnlearnRequest
    from fastfedul.methods import UnlearnResult as UnlearnResult
    from fastfedul.params import Params as Params
    from fastfedul.records import CentralPrivacy as CentralPrivacy
    from fastfedul.records import ClientUpdate as ClientUpdate
    from fastfedul.records import ForgetRequest as ForgetRequest
    from fastfedul.records import LocalSGD as LocalSGD
    from fastfedul.records import Model as Model
    from fastfedul.records import Round as Round
    from fastfedul.report.comparison_table import ComparisonTable as ComparisonTable
    from fastfedul.report.comparison_table import compare as compare
    from fastfedul.runs.config import RunConfig as RunConfig
    from fastfedul.runs.evaluation_source import EvaluationSource as EvaluationSource
    from fastfedul.runs.training import train as train

_NAMES = {
    # a ledger
    "ledger.disk": ("open_ledger", "create_ledger", "DiskLedger"),
    "ledger.reader": ("LedgerReader",),
    "ledger.restoration": ("restore_ledger",),
    "ledger.memory": ("MemoryLedger",),
    "ledger.protocol": ("Ledger", "params_at", "read_round"),
    "ledger.keeping": ("Keep",),
    "ledger.verify": ("verify",),
    # forgetting
    "forgetting.service": ("preview", "forget", "erase", "Forgetting"),
    "forgetting.requests": (
        "add_request",
        "cancel_request",
        "apply_requests",
        "AppliedRequest",
    ),
    # how to forget
    "methods": (),
    "methods.fast_fedul.method": ("FastFedUL",),
    "methods.fast_fedul.skews": ("Kronecker", "NoSkew", "Scalar"),
    "methods.fast_fedul.removal": ("Removal",),
    "methods.protocol": ("Method", "Needs", "UnlearnRequest", "UnlearnResult"),
    # a run
    "runs.config": ("RunConfig",),
    "runs.evaluation_source": ("EvaluationSource",),
    "runs.training": ("train",),
    "investigate.trace": ("trace", "Trace"),
    "investigate.audit.auditing": ("audit",),
    "investigate.audit.findings": ("Audit",),
    "investigate.contribution": ("contributions", "Contribution"),
    "report.comparison_table": ("compare", "ComparisonTable"),
    # a round
    "params": ("Params",),
    "records": (
        *("CentralPrivacy", "ClientUpdate", "ForgetRequest"),
        *("LocalSGD", "Model", "Round"),
    ),
    "federation.aggregation": ("Aggregation",),
    "federation.server_optimizers": ("ServerOptimizer",),
    # errors
    "errors": (
        "FastFedULError",
        "InvalidInputError",
        "LedgerDamagedError",
        "LedgerError",
        "LedgerLockedError",
        "UnknownClientError",
        "UnlearnRefusedError",
    ),
}
"""The public names, in groups, by the module that has them."""

__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
