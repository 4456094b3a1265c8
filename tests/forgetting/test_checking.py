"""Certificates: what was changed is found, what was computed is computed again."""

from __future__ import annotations

import copy
import json
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul import (
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    Kronecker,
    LedgerReader,
    LocalSGD,
    Model,
    NoSkew,
    Params,
    Round,
    Scalar,
    UnlearnRequest,
    add_request,
    apply_requests,
    erase,
    forget,
    preview,
)
from fastfedul.canonical_json import encode
from fastfedul.forgetting.certificates import (
    certificates_folder,
    read_certificate,
    signed,
    write_certificates,
)
from fastfedul.forgetting.checking import Audit, audit
from fastfedul.forgetting.service import describe
from fastfedul.forgetting.signing import SigningKey
from fastfedul.ledger.store.schema import digest_of
from fastfedul.rng import stream
from tests.support.rounds import random_round

pytest.importorskip("cryptography")

SIZE = 200
CLIENTS = ("a", "b", "c", "d")
START = Params.of({"w": np.zeros(SIZE, np.float32)})
LARGER = Params.of({"w": np.zeros(5_000, np.float32)})
KEY, OTHER_KEY = SigningKey(bytes(range(32))), SigningKey(bytes(32))


def round_of(index: int, clients: tuple[str, ...], start: Params = START) -> Round:
    return random_round(index, clients, start.layout, stream(9, "auditing", index))


def build(path: Path) -> None:
    """A ledger with an erasure by request, and two forgettings that kept history."""
    with DiskLedger.create(path, Model(START)) as ledger:
        everybody = (*CLIENTS, "e", "f")
        for index in range(3):
            ledger.append(round_of(index, everybody))
        add_request(path, "a", "consent withdrawn")
        apply_requests(ledger, certificates=certificates_folder(path), key=KEY)
        ledger.append(round_of(3, everybody[1:]))
        forget(
            ledger, ["b"], FastFedUL(skew=Scalar(0.1, rounds="alternate")), erase=False
        )
        forget(ledger, ["c"], FastFedUL(skew=NoSkew()), erase=False)
        for index in range(4, 6):
            ledger.append(round_of(index, everybody[3:]))
        forget(ledger, ["d"], FastFedUL(), erase=False)
        write_certificates(ledger, certificates_folder(path), KEY)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audited") / "ledger"
    build(path)
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "ledger"


@pytest.fixture(scope="module")
def certificate(template: Path) -> dict[str, Any]:
    return read_certificate(template.parent / "certificates" / "1.json")


def found(path: Path, name: str, key: SigningKey | None = KEY) -> Audit:
    file = certificates_folder(path) / f"{name}.json"
    with LedgerReader(path) as ledger:
        return audit(read_certificate(file), ledger, key.public if key else None)


def verdicts(result: Audit) -> dict[str, str]:
    return {check.name: check.verdict for check in result.checks}


def test_everything_that_can_be_checked_holds(path: Path) -> None:
    first = found(path, "1")
    assert first.ok
    assert verdicts(first) == {
        **dict.fromkeys(("signature", "log", "request", "chain", "clients"), "holds"),
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
    method = read_certificate(written[0])["method"]
    assert method["settings"]["skew"] == "kronecker"
    assert method["settings"]["updates"] == updates or updates is None


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
    assert (
        read_certificate(certificates_folder(path) / "event-5.json")["method"] is None
    )


def test_who_signed_is_known_only_with_the_signers_key(
    path: Path, certificate: dict[str, Any]
) -> None:
    embedded = audit(certificate)
    assert embedded.ok
    assert "not who signed" in embedded.checks[0].text
    assert not found(path, "1", OTHER_KEY).ok
    forged = signed(
        {k: v for k, v in certificate.items() if k != "signature"}, OTHER_KEY
    )
    assert audit(forged).ok
    assert audit(forged).fingerprint != embedded.fingerprint
    assert not audit(forged, public_key=KEY.public).ok


def test_without_signature_only_the_ledger_can_vouch_for_it(
    path: Path, certificate: dict[str, Any]
) -> None:
    bare = {**certificate, "signature": None}
    assert not audit(bare).ok
    assert not audit(bare, public_key=KEY.public).ok
    with LedgerReader(path) as ledger:
        result = audit(bare, ledger)
        assert result.ok
        assert verdicts(result)["signature"] == "not checked"
        # The ledger knows every field.
        for place in places_of({**bare, "signature": {}}):
            new = 7 if place == ("log", "entry") else "changed"
            if place != ("signature",):
                assert not audit(change(bare, place, new), ledger).ok, place


def places_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value that holds no other."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from places_of(inner, (*place, name))
    else:
        yield place


def change(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = new
    return value


@settings(max_examples=150)
@given(data=st.data())
def test_any_changed_field_is_found_by_the_signature(
    data: st.DataObject, certificate: dict[str, Any]
) -> None:
    place = data.draw(st.sampled_from(list(places_of(certificate))))
    old: Any = certificate
    for name in place:
        old = old[name]
    near = st.just(old + "x") | st.just(old[:-1]) if isinstance(old, str) else st.none()
    new = data.draw(near | st.text(max_size=3) | st.integers(0, 9) | st.none())
    changed = change(certificate, place, new)
    if encode(changed) != encode(certificate):
        assert not audit(changed, public_key=KEY.public).ok
        assert not audit(changed).ok


@settings(max_examples=300)
@given(data=st.data())
def test_any_changed_byte_is_found_or_makes_no_difference(
    data: st.DataObject, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = (template.parent / "certificates" / "1.json").read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    new = data.draw(st.integers(0, 255))
    changed = content[:at] + bytes([new]) + content[at + 1 :]
    file = tmp_path_factory.getbasetemp() / "changed.json"
    file.write_bytes(changed)
    try:
        read = read_certificate(file)
    except InvalidInputError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    same = encode(read) == encode(json.loads(content))
    assert audit(read, public_key=KEY.public).ok == same


def test_a_field_too_many_or_too_few_is_found(certificate: dict[str, Any]) -> None:
    assert not audit({**certificate, "more": 1}, public_key=KEY.public).ok
    for name in certificate:
        if name != "signature":
            fewer = {k: v for k, v in certificate.items() if k != name}
            assert not audit(fewer, public_key=KEY.public).ok
    extra = {**certificate["signature"], "more": 1}
    assert not audit({**certificate, "signature": extra}).ok
    upper = certificate["signature"]["value"].upper()
    other = {**certificate["signature"], "value": upper}
    assert not audit({**certificate, "signature": other}).ok


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "not json",
        '{"type": "fastfedul certificate of forgetting"}',
        '{"type": "fastfedul certificate of forgetting", "format": 2}',
        '{"type": "fastfedul certificate of forgetting", "format": 1}',
    ],
)
def test_what_is_no_certificate_is_refused_in_one_line(
    text: str, tmp_path: Path
) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        read_certificate(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInputError):
        read_certificate(tmp_path / "nowhere.json")
    with pytest.raises(InvalidInputError):
        read_certificate(tmp_path)


def test_a_ledger_that_says_otherwise_is_found(path: Path, tmp_path: Path) -> None:
    certificate = read_certificate(certificates_folder(path) / "event-4.json")
    other = tmp_path / "other"
    with DiskLedger.create(other, Model(START)) as ledger:
        ledger.append(round_of(0, CLIENTS))
        result = audit(certificate, ledger, KEY.public)
        assert verdicts(result) == {"signature": "holds", "log": "fails"}
        for client in CLIENTS:
            forget(ledger, [client], erase=False)
        result = audit(certificate, ledger, KEY.public)
        assert verdicts(result) == {"signature": "holds", "log": "fails"}
    with LedgerReader(path) as ledger:
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
