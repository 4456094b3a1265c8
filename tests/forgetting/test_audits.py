"""An audit's digest in a certificate: what fits, what does not, and its check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastfedul.errors import InvalidInputError
from fastfedul.forgetting.audits import AUDIT_KIND, audit_digests, content_digest
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
    """Return a small audit with the digest of its content."""
    found = {
        **{"kind": AUDIT_KIND, "client": "ann", "ledger": ledger.ledger_id},
        **{"chain": ledger.chain.hex(), "gone_before": [], "rounds": 3},
        **{"shadows": 8, "shadows_wanted": 8, "examples": {"members": 10}},
        **{"by_backdoor": False, "rows": [row_of()], "noise": {"main": 0.01}},
        **{"may_conclude": ["a"], "may_not_conclude": ["b"], "notes": []},
        **(changes or {}),
    }
    return {**found, "digest": content_digest(found)}


def row_of(settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the row of a method."""
    usual = json.loads(json.dumps(method_settings(FastFedUL())))
    return {
        **{"name": "fast-fedul", "settings": usual if settings is None else settings},
        **{"refused": None, "whole": {}, "gaps": {"main": 0.1}},
        **{"differences": {"main": "some"}, "attack": None, "klom": None},
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
        ({"rows": [row_of({})]}, "of other methods"),
        ({"rows": 3}, "is no audit"),
        ({"rows": [{"settings": {}, "whole": {}}]}, "is no audit"),
        ({"shadows": "8"}, "is no audit"),
        ({"may_conclude": "all is well"}, "is no audit"),
        ({"more": 1}, "is no audit"),
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


@pytest.mark.parametrize(
    "changed",
    [
        {"shadows": 99},
        {"examples": {"members": 11}},
        {"noise": {"main": 9.0}},
        {"rounds": 4},
        {"by_backdoor": True},
        {"may_conclude": []},
        {"may_not_conclude": []},
        {"rows": [{**row_of(), "gaps": None}]},
    ],
)
def test_an_altered_audit_is_refused(
    ledger: DiskLedger, tmp_path: Path, changed: dict[str, Any]
) -> None:
    file = tmp_path / "audit.json"
    file.write_text(json.dumps({**audit_of(ledger), **changed}))
    with pytest.raises(InvalidInputError, match="somebody changed"):
        forget(ledger, ["ann"], audit=file, key=None)
    assert ledger.log() == ()


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
