"""A ledger with certificates, and how tests check them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastfedul import (
    DiskLedger,
    FastFedUL,
    LedgerReader,
    Model,
    NoSkew,
    Params,
    Round,
    Scalar,
    add_request,
    apply_requests,
    forget,
)
from fastfedul.forgetting.certificates import (
    certificates_folder,
    read_certificate,
    write_certificates,
)
from fastfedul.forgetting.checking import Audit, audit
from fastfedul.forgetting.signing import SigningKey
from fastfedul.rng import stream
from tests.support.rounds import random_round

SIZE = 200
CLIENTS = ("a", "b", "c", "d")
START = Params.of({"w": np.zeros(SIZE, np.float32)})


def key_of(number: int) -> SigningKey:
    """An Ed25519 key that is the same in every test."""
    return SigningKey.of_bytes(bytes([number]) * 32)


def round_of(index: int, clients: tuple[str, ...], start: Params = START) -> Round:
    return random_round(index, clients, start.layout, stream(9, "auditing", index))


def build(path: Path, key: SigningKey) -> None:
    """A ledger with an erasure by request, and three forgettings that kept history."""
    with DiskLedger.create(path, Model(START), federation="Four of us") as ledger:
        everybody = (*CLIENTS, "e", "f")
        for index in range(3):
            ledger.append(round_of(index, everybody))
        add_request(path, "a", "consent withdrawn")
        apply_requests(ledger, certificates=certificates_folder(path), key=key)
        ledger.append(round_of(3, everybody[1:]))
        forget(
            ledger, ["b"], FastFedUL(skew=Scalar(0.1, damped="alternate")), erase=False
        )
        forget(ledger, ["c"], FastFedUL(skew=NoSkew()), erase=False)
        for index in range(4, 6):
            ledger.append(round_of(index, everybody[3:]))
        forget(ledger, ["d"], FastFedUL(), erase=False)
        write_certificates(ledger, certificates_folder(path), key)


def audit_file(path: Path, name: str, key: SigningKey | None) -> Audit:
    """The audit of a ledger's certificate."""
    file = certificates_folder(path) / f"{name}.json"
    with LedgerReader(path) as ledger:
        return audit(read_certificate(file), ledger, [key.public] if key else [])


def verdicts(result: Audit) -> dict[str, str]:
    return {check.name: check.verdict for check in result.checks}
