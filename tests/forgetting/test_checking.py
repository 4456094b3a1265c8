"""Certificates: what was changed is found, what was computed is computed again."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    Kronecker,
    LedgerReader,
    LocalSGD,
    Model,
    Params,
    Scalar,
    UnlearnRequest,
    add_request,
    apply_requests,
    erase,
    forget,
    preview,
)
from fastfedul.forgetting.certificates import (
    Certificate,
    certificates_folder,
    read_certificate,
    write_certificates,
)
from fastfedul.forgetting.checking import Audit, audit
from fastfedul.forgetting.envelopes import Envelope
from fastfedul.forgetting.service import describe
from fastfedul.forgetting.signing import SigningKey
from fastfedul.forgetting.statements import parse_statement
from fastfedul.ledger.store.schema import digest_of
from fastfedul.runs.status import status_of
from tests.support.audited import (
    CLIENTS,
    SIZE,
    START,
    audit_file,
    build,
    key_of,
    round_of,
    verdicts,
)

pytest.importorskip("cryptography")

LARGER = Params.of({"w": np.zeros(5_000, np.float32)})
KEY, OTHER_KEY = key_of(1), key_of(2)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audited") / "ledger"
    build(path, KEY)
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "ledger"


@pytest.fixture(scope="module")
def certificate(template: Path) -> Certificate:
    return read_certificate(template.parent / "certificates" / "1.json")


def found(path: Path, name: str, key: SigningKey | None = KEY) -> Audit:
    return audit_file(path, name, key)


def signed_again(payload: bytes) -> Certificate:
    """A certificate whose payload somebody with the key has signed."""
    return Certificate(Envelope(payload).signed_by(KEY), parse_statement(payload))


def test_everything_that_can_be_checked_holds(path: Path) -> None:
    first = found(path, "1")
    assert first.ok
    holding = ("signature", "time", "ledger", "log", "request", "chain", "clients")
    assert verdicts(first) == {
        **dict.fromkeys(holding, "holds"),
        **dict.fromkeys(("model", "recomputed"), "not checked"),
    }
    last = found(path, "event-4")
    assert last.ok
    assert set(verdicts(last).values()) == {"holds"}


@pytest.mark.parametrize("name", ["event-2", "event-3", "event-4"])
def test_while_the_history_is_kept_the_result_is_computed_again(
    name: str, path: Path
) -> None:
    result = found(path, name)
    assert result.ok
    assert verdicts(result)["recomputed"] == "holds"


MANY = tuple(f"client-{number:02}" for number in range(12))
LOCAL = LocalSGD(lr=0.1, momentum=0.9, batch_size=32, epochs=2)


@pytest.mark.parametrize("updates", [None, 5, "all"])
@pytest.mark.parametrize("num_later", [0, 3])
def test_what_kronecker_removed_is_computed_again_also_after_later_rounds(
    updates: Any, num_later: int, tmp_path: Path
) -> None:
    """Of 96 updates a part is drawn, by the hash chain of the time of forgetting."""
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(START)) as ledger:
        for index in range(8):
            ledger.append(replace(round_of(index, MANY), local=LOCAL))
        forget(ledger, [MANY[0]], FastFedUL(skew=Kronecker(updates)), erase=False)
        for index in range(8, 8 + num_later):
            ledger.append(replace(round_of(index, MANY[1:]), local=LOCAL))
        if num_later:
            forget(ledger, [MANY[1], MANY[2]], erase=False)
            ledger.append(replace(round_of(8 + num_later, MANY[3:]), local=LOCAL))
        written = write_certificates(ledger, certificates_folder(path), KEY)
    assert len(written) == (2 if num_later else 1)
    for file in written:
        result = found(path, file.stem)
        assert result.ok
        [check] = [check for check in result.checks if check.name == "recomputed"]
        assert check.verdict == "holds", check.text
        assert "1e-05 is allowed" in check.text
    method = read_certificate(written[0]).predicate.method
    assert method is not None
    assert method.settings is not None
    assert method.settings["skew"] == "kronecker"
    assert method.settings["updates"] == updates or updates is None


def test_a_certificate_with_other_settings_than_those_used_is_found(
    tmp_path: Path,
) -> None:
    """Somebody says that it was Kronecker, and it was the paper's damping."""
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(START)) as ledger:
        for index in range(3):
            ledger.append(round_of(index, CLIENTS))
        request = UnlearnRequest(ledger, frozenset({"a"}))
        removed = FastFedUL(skew=Scalar(0.1))(request)
        said = describe(FastFedUL(), preview(ledger, ["a"]))
        ledger.commit_forgetting(["a"], removed.delta.flat, said)
        [written] = write_certificates(ledger, certificates_folder(path), KEY)
    assert verdicts(found(path, written.stem))["recomputed"] == "fails"


def test_a_model_that_was_moved_elsewhere_is_found_by_computing_again(
    path: Path,
) -> None:
    """Somebody forges a ledger in which every digest fits but the sum is wrong."""
    forged = path.with_name("forged")
    with LedgerReader(path) as honest, DiskLedger.create(forged, Model(START)) as new:
        everybody = (*CLIENTS, "e", "f")
        for index in range(3):
            new.append(round_of(index, everybody))
        details = dict(honest.events()[-1].details)
        new.commit_forgetting(["a"], np.full(SIZE, 0.01, np.float32), details)
        write_certificates(new, certificates_folder(forged), KEY)
    result = found(forged, "event-1")
    assert not result.ok
    assert verdicts(result)["recomputed"] == "fails"
    assert verdicts(result)["signature"] == "holds"


def test_after_an_erasure_earlier_certificates_still_hold_as_far_as_can_be(
    path: Path,
) -> None:
    with DiskLedger(path) as ledger:
        erase(ledger, ["b"])
        write_certificates(ledger, certificates_folder(path), KEY)
    for name in ("1", "event-2", "event-3", "event-4", "event-5"):
        result = found(path, name)
        assert result.ok, result
    assert verdicts(found(path, "event-2"))["recomputed"] == "not checked"
    assert verdicts(found(path, "event-2"))["chain"] == "not checked"
    assert verdicts(found(path, "event-4"))["chain"] == "holds"
    last = read_certificate(certificates_folder(path) / "event-5.json")
    assert last.predicate.method is None
    assert last.statement.before == last.statement.after


def test_certificates_that_swapped_their_names_are_there_all_the_same(
    path: Path,
) -> None:
    folder = certificates_folder(path)
    one, other = folder / "event-2.json", folder / "event-3.json"
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    state = status_of(path)
    assert (state.certificates, state.missing) == (4, 0)
    with LedgerReader(path) as ledger:
        assert write_certificates(ledger, folder, KEY) == ()
    assert found(path, "event-2").ok
    other.unlink()
    assert status_of(path).missing == 1
    with LedgerReader(path) as ledger:
        [written] = write_certificates(ledger, folder, KEY)
    assert written.name.startswith("event-2-")


def test_only_a_trusted_key_authenticates(path: Path, certificate: Certificate) -> None:
    payload = certificate.envelope.payload
    assert audit(certificate, trusted=[OTHER_KEY.public, KEY.public]).ok
    for trusted in ([], [OTHER_KEY.public]):
        with LedgerReader(path) as ledger:
            result = audit(certificate, ledger, trusted)
        # Every other check holds, and still nobody vouches for the file.
        assert not result.ok
        assert result.failed == ()
        assert verdicts(result)["log"] == "holds"
        assert verdicts(result)["signature"] == "not checked"
    own = Certificate(Envelope(payload).signed_by(OTHER_KEY), certificate.statement)
    assert not audit(own, trusted=[KEY.public]).ok
    both = Certificate(certificate.envelope.signed_by(OTHER_KEY), certificate.statement)
    for key in (KEY, OTHER_KEY):
        assert audit(both, trusted=[key.public]).fingerprint == key.public.fingerprint
    bare = Certificate(Envelope(payload), certificate.statement)
    assert not audit(bare, trusted=[KEY.public]).ok
    assert "anybody may have written it" in audit(bare).checks[0].text


def test_a_key_that_only_claims_to_be_trusted_fails(certificate: Certificate) -> None:
    mine = Envelope(certificate.envelope.payload).signed_by(OTHER_KEY)
    [signature] = mine.signatures
    claimed = replace(signature, keyid=KEY.public.fingerprint)
    forged = Certificate(replace(mine, signatures=(claimed,)), certificate.statement)
    assert audit(forged, trusted=[KEY.public]).failed == ("signature",)


def test_a_certificate_of_another_ledger_is_found(
    path: Path, tmp_path: Path, certificate: Certificate
) -> None:
    """Two ledgers of the same training differ in nothing but their id and times."""
    twin = tmp_path / "twin" / "ledger"
    twin.parent.mkdir()
    build(twin, KEY)
    with LedgerReader(path) as one, LedgerReader(twin) as other:
        assert one.chain == other.chain
        assert one.ledger_id != other.ledger_id
        result = audit(certificate, other, [KEY.public])
        assert result.failed == ("ledger",)
        assert one.ledger_id in result.checks[-1].text
        for ledger_id, ok in ((one.ledger_id, True), (other.ledger_id, False)):
            assert audit(certificate, None, [KEY.public], ledger_id=ledger_id).ok == ok
            assert audit(certificate, one, [KEY.public], ledger_id=ledger_id).ok == ok
    assert certificate.predicate.ledger.federation == "Four of us"


def test_a_forgetting_before_its_request_is_found(certificate: Certificate) -> None:
    payload = certificate.envelope.payload.decode()
    applied = certificate.predicate.applied
    for time in ("2020-01-01T00:00:00+00:00", "2020-01-01T00:00:00", "yesterday"):
        changed = payload.replace(f'"applied":"{applied}"', f'"applied":"{time}"')
        assert changed != payload
        result = audit(signed_again(changed.encode()), None, [KEY.public])
        assert result.failed == ("time",)


def test_a_clock_that_was_set_back_makes_no_wrong_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(START)) as ledger:
        ledger.append(round_of(0, CLIENTS))
        asked = add_request(path, "a").asked
        early = "2001-01-01T00:00:00+00:00"
        monkeypatch.setattr("fastfedul.ledger.changes.log.now", lambda: early)
        [done] = apply_requests(ledger, key=KEY)
        forget(ledger, ["b"], key=KEY)
        assert [event.time for event in ledger.events()] == [asked, asked]
    assert done.certificate is not None
    assert audit(read_certificate(done.certificate), None, [KEY.public]).ok


def certificate_digest(payload: str, name: str) -> str:
    """SHA-256 of a subject."""
    [found] = [one for one in json.loads(payload)["subject"] if one["name"] == name]
    return str(found["digest"]["sha256"])


def test_a_ledger_that_says_otherwise_is_found(path: Path) -> None:
    with LedgerReader(path) as ledger:
        payload = read_certificate(
            certificates_folder(path) / "event-4.json"
        ).envelope.payload.decode()
        # The signer itself says something else than its ledger.
        for old, new, field in (
            ('"entry":4', '"entry":5', "no number 5"),
            ('"entry":4', '"entry":3', "clients"),
            ('"taken_part":6', '"taken_part":4', "rounds"),
            ('"clients":["d"]', '"clients":["e"]', "clients"),
        ):
            assert old in payload
            forged = signed_again(payload.replace(old, new).encode())
            result = audit(forged, ledger, [KEY.public])
            assert result.failed == ("log",)
            assert field in result.checks[-1].text
        before = certificate_digest(payload, "model-before")
        forged = signed_again(payload.replace(before, "0" * 64).encode())
        result = audit(forged, ledger, [KEY.public])
        assert "about: subject" in result.checks[-1].text
        model = ledger.model_path
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert verdicts(found(path, "event-4"))["model"] == "fails"


@pytest.mark.parametrize(
    ("table", "sql", "check"),
    [
        ("clients", "UPDATE clients SET state = 'active' WHERE name = 'a'", "clients"),
        ("requests", "UPDATE requests SET reason = 'another'", "request"),
        ("requests", "UPDATE requests SET state = 'refused'", "request"),
        ("events", "UPDATE events SET details = replace(details, '1', '2')", "log"),
        ("rounds", "UPDATE rounds SET chain = zeroblob(32) WHERE round = 2", "chain"),
    ],
)
def test_a_ledger_that_was_rewritten_with_fitting_digests_is_found(
    table: str, sql: str, check: str, path: Path
) -> None:
    index = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    index.execute(sql)
    for row in index.execute(f"SELECT * FROM {table}").fetchall():
        digest = digest_of(table, *row[:-1])
        key = "round" if table == "rounds" else "id"
        index.execute(
            f"UPDATE {table} SET digest = ? WHERE {key} = ?", (digest, row[0])
        )
    index.close()
    assert verdicts(found(path, "1"))[check] == "fails"
    damaged = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    damaged.execute("UPDATE events SET kind = 'other'")
    damaged.close()
    assert not found(path, "1").ok


def test_nobody_gets_a_certificate_for_what_a_budget_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    folder = certificates_folder(path)
    with DiskLedger.create(path, Model(LARGER), budget=800_000) as ledger:
        for index in range(14):
            ledger.append(round_of(index, CLIENTS, LARGER))
        assert [event.kind for event in ledger.events()] == ["drop"]
        assert write_certificates(ledger, folder, KEY) == ()
        forget(
            ledger, ["a"], FastFedUL(skew=Scalar(0.1), minimum_coverage=0), erase=False
        )
        [written] = write_certificates(ledger, folder, KEY)
    result = found(path, written.stem)
    assert result.ok
    assert verdicts(result)["recomputed"] == "holds"


def test_updates_dropped_afterwards_do_not_make_a_certificate_fail(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(LARGER), budget=10_000_000) as ledger:
        for index in range(6):
            ledger.append(round_of(index, CLIENTS, LARGER))
        forget(ledger, ["a"], FastFedUL(skew=Scalar(0.1)), erase=False)
        [written] = write_certificates(ledger, certificates_folder(path), KEY)
        ledger.set_budget(700_000)
        for index in range(6, 10):
            ledger.append(round_of(index, CLIENTS[1:], LARGER))
        assert [event.kind for event in ledger.events()] == ["forget", "drop"]
    result = found(path, written.stem)
    assert result.ok
    assert verdicts(result)["recomputed"] == "not checked"


def test_a_ledger_of_sums_vouches_for_all_but_the_computation(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(START), history="sums") as ledger:
        for index in range(4):
            ledger.append(round_of(index, CLIENTS))
        forget(ledger, ["a"], erase=False)
        [written] = write_certificates(ledger, certificates_folder(path), KEY)
    result = found(path, written.stem)
    assert result.ok
    assert verdicts(result)["recomputed"] == "not checked"
