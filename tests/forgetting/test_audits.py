"""An audit's digest in a certificate: what fits, what does not, and its check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastfedul.errors import InvalidInputError
from fastfedul.forgetting.audits import AUDIT_KIND, audit_digests
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.forgetting.checking import audit
from fastfedul.forgetting.service import forget
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.protocol import read_round
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.protocol import method_settings
from fastfedul.testing import small_federation


@pytest.fixture
def ledger(tmp_path: Path) -> DiskLedger:
    """Return a ledger on disk with the rounds of a small federation."""
    memory, _ = small_federation()
    ledger = DiskLedger.create(tmp_path / "ledger", memory.initial)
    for index in range(memory.num_rounds):
        ledger.append(read_round(memory, index))
    return ledger


def audit_of(
    ledger: DiskLedger, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the part of an audit that a forgetting looks at."""
    settings = json.loads(json.dumps(method_settings(FastFedUL())))
    return {
        **{"kind": AUDIT_KIND, "client": "ann", "ledger": ledger.ledger_id},
        **{"chain": ledger.chain.hex()},
        "rows": [{"settings": settings, "whole": {}}],
        **(changes or {}),
    }


def test_a_certificate_names_an_audit_and_a_check_compares_it(
    ledger: DiskLedger, tmp_path: Path
) -> None:
    file, other = tmp_path / "audit.json", tmp_path / "other.json"
    file.write_text(json.dumps(audit_of(ledger)))
    other.write_text(file.read_text() + "\n")
    done = forget(ledger, ["ann"], audit=file, key=None)
    assert done.certificate is not None
    found = read_certificate(done.certificate)
    assert found.predicate.audit is not None
    assert found.predicate.audit.model_dump() == audit_digests(file)

    def verdict(attached: Path | None) -> str:
        checks = audit(found, ledger, attached=attached).checks
        assert next(c.verdict for c in checks if c.name == "log") == "holds"
        return next(c.verdict for c in checks if c.name == "audit")

    assert [verdict(path) for path in (None, file, other)] == [
        *("not checked", "holds", "fails")
    ]
    with pytest.raises(InvalidInputError, match="cannot read"):
        audit(found, ledger, attached=tmp_path / "none")


def test_a_certificate_without_an_audit_names_none(
    ledger: DiskLedger, tmp_path: Path
) -> None:
    done = forget(ledger, ["ann"], key=None)
    assert done.certificate is not None
    found = read_certificate(done.certificate)
    assert found.predicate.audit is None
    assert "audit" not in [check.name for check in audit(found, ledger).checks]
    file = tmp_path / "audit.json"
    file.write_text("{}")
    assert "audit" in audit(found, ledger, attached=file).failed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "another"}, "of another format"),
        ({"client": "bob"}, "of client 'bob'"),
        ({"ledger": "0" * 32}, "of another ledger"),
        ({"chain": "0" * 64}, "of an earlier state"),
        ({"rows": [{"settings": {}, "whole": {}}]}, "of other methods"),
        ({"rows": 3}, "is no audit"),
    ],
)
def test_an_audit_of_something_else_is_refused_and_nothing_changes(
    ledger: DiskLedger, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = tmp_path / "audit.json"
    file.write_text(json.dumps(audit_of(ledger, changes)))
    before = ledger.chain
    with pytest.raises(InvalidInputError, match=said):
        forget(ledger, ["ann"], audit=file, key=None)
    assert (ledger.chain, ledger.log()) == (before, ())


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"kind": NaN}'])
def test_a_file_that_is_no_audit_is_refused(
    ledger: DiskLedger, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "audit.json"
    file.write_bytes(content)
    with pytest.raises(InvalidInputError, match="is no audit"):
        forget(ledger, ["ann"], audit=file, key=None)


def test_a_ledger_in_memory_has_no_certificate_for_an_audit(tmp_path: Path) -> None:
    memory, _ = small_federation()
    assert isinstance(memory, MemoryLedger)
    with pytest.raises(InvalidInputError, match="in memory"):
        forget(memory, ["ann"], audit=tmp_path / "audit.json")
