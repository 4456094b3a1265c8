"""The certificate's file: ordinary tools verify it, and no changed byte passes."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.altered_envelopes import CHANGES, change, places_of, value_at
from fastfedul import DiskLedger, InvalidInputError, LedgerReader, Model, forget
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.forgetting.checking import audit
from tests.support.audited import (
    CLIENTS,
    START,
    build,
    key_of,
    round_of,
)
from tests.support.commands import require_programs

pytest.importorskip("cryptography")

KEY = key_of(1)
PAYLOAD_TYPE = "application/vnd.in-toto+json"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("enveloped") / "ledger"
    build(path, KEY)
    return path.parent / "certificates" / "1.json"


def dsse_encoding(kind: str, payload: bytes) -> bytes:
    """Pre-authentication encoding, as the text of DSSE v1 says, by hand."""
    return b" ".join(
        [
            b"DSSEv1",
            str(len(kind.encode())).encode(),
            kind.encode(),
            str(len(payload)).encode(),
            payload,
        ]
    )


def test_the_package_cryptography_alone_verifies_it(file: Path) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    found = json.loads(file.read_bytes())
    assert set(found) == {"payload", "payloadType", "signatures"}
    assert found["payloadType"] == PAYLOAD_TYPE
    payload = base64.b64decode(found["payload"], validate=True)
    [signature] = found["signatures"]
    assert signature["keyid"] == sha256(KEY.public.der).hexdigest()
    value = base64.b64decode(signature["sig"], validate=True)
    key: Any = load_der_public_key(KEY.public.der)
    key.verify(value, dsse_encoding(PAYLOAD_TYPE, payload))
    with pytest.raises(InvalidSignature):
        key.verify(value, dsse_encoding(PAYLOAD_TYPE, payload + b" "))


def test_openssl_verifies_it_as_the_page_says(file: Path, tmp_path: Path) -> None:
    page = (
        Path(__file__).parents[2] / "docs" / "reference" / "certificate-format.md"
    ).read_text()
    [script] = [part for part in page.split("```") if part.startswith("sh\n")]
    require_programs("openssl", "jq")
    shutil.copy(file, tmp_path / "1.json")
    (tmp_path / "signer.pub").write_bytes(KEY.public.pem)
    command = ["bash", "-euo", "pipefail", "-c", script.removeprefix("sh\n")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Signature Verified Successfully" in done.stdout
    assert "model-after" in done.stdout


def test_the_in_toto_package_reads_the_statement(file: Path) -> None:
    statements: Any = pytest.importorskip("in_toto_attestation.v1.statement")
    protobuf: Any = pytest.importorskip("in_toto_attestation.v1.statement_pb2")
    json_format: Any = pytest.importorskip("google.protobuf.json_format")
    payload = base64.b64decode(json.loads(file.read_bytes())["payload"])
    parsed = json_format.Parse(payload, protobuf.Statement())
    statement = statements.Statement.copy_from_pb(parsed)
    statement.validate()
    found = read_certificate(file).statement
    assert [one.name for one in statement.pb.subject] == ["model-before", "model-after"]
    digests = statement.pb.subject[1].digest
    assert dict(digests) == {
        "sha256": found.after.sha256,
        "blake3": found.after.blake3,
    }
    assert statement.pb.predicate_type == "urn:fastfedul:forgetting:v1"
    assert statement.pb.predicate["clients"][0] == "a"


def test_securesystemslib_verifies_it(file: Path) -> None:
    from cryptography.hazmat.primitives.serialization import load_der_public_key
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    key = SSlibKey.from_crypto(
        load_der_public_key(KEY.public.der), KEY.public.fingerprint
    )
    envelope = Envelope.from_dict(json.loads(file.read_bytes()))
    assert set(envelope.verify([key], 1)) == {KEY.public.fingerprint}
    envelope.payload += b" "
    with pytest.raises(VerificationError):
        envelope.verify([key], 1)


def test_the_subjects_are_the_files_of_the_models(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(START)) as ledger:
        ledger.append(round_of(0, CLIENTS))
        before = sha256(ledger.model_path.read_bytes()).hexdigest()
        done = forget(ledger, ["a"], key=KEY)
        after = sha256(ledger.model_path.read_bytes()).hexdigest()
        assert done.certificate is not None
        statement = read_certificate(done.certificate).statement
        assert (statement.before.sha256, statement.after.sha256) == (before, after)
        assert statement.after.blake3 == ledger.model_digest


def passes(file: Path, data: bytes, scratch: Path) -> bool:
    """Whether a check of these bytes would exit with 0, with the ledger and without."""
    changed = scratch / "changed.json"
    changed.write_bytes(data)
    try:
        read = read_certificate(changed)
    except InvalidInputError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return False
    with LedgerReader(file.parent.parent) as ledger:
        here = audit(read, ledger, [KEY.public]).ok
    return here or audit(read, None, [KEY.public]).ok


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_changed_byte_passes(
    data: st.DataObject, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = file.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    new = data.draw(st.integers(0, 255))
    changed = content[:at] + bytes([new]) + content[at + 1 :]
    # White space between tokens of the envelope is no part of what it says.
    try:
        same = json.loads(changed) == json.loads(content)
    except ValueError:
        same = False
    assert passes(file, changed, tmp_path_factory.getbasetemp()) == same


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_changed_field_of_the_statement_passes(
    data: st.DataObject, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The signature stays, and one field of the payload is another."""
    envelope = json.loads(file.read_bytes())
    statement = json.loads(base64.b64decode(envelope["payload"]))
    place = data.draw(st.sampled_from(list(places_of(statement))))
    old = value_at(statement, place)
    near = st.just(old + "x") | st.just(old[:-1]) if isinstance(old, str) else st.none()
    new = data.draw(near | st.text(max_size=3) | st.integers(0, 9) | st.none())
    changed = change(statement, place, new)
    payload = json.dumps(changed, ensure_ascii=False, separators=(",", ":")).encode()
    if payload == base64.b64decode(envelope["payload"]):
        return
    envelope["payload"] = base64.b64encode(payload).decode()
    data_now = json.dumps(envelope).encode()
    assert not passes(file, data_now, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", CHANGES)
def test_no_changed_envelope_passes(name: str, file: Path, tmp_path: Path) -> None:
    envelope = json.loads(file.read_bytes())
    assert passes(file, json.dumps(envelope).encode(), tmp_path)
    CHANGES[name](envelope)
    assert not passes(file, json.dumps(envelope).encode(), tmp_path)


def test_another_serialization_of_the_same_envelope_passes(
    file: Path, tmp_path: Path
) -> None:
    """A store of attestations may write the envelope anew, in either base64."""
    envelope = json.loads(file.read_bytes())
    envelope["payload"] = envelope["payload"].replace("+", "-").replace("/", "_")
    data = json.dumps(envelope, separators=(",", ":"), sort_keys=True).encode()
    assert passes(file, data, tmp_path)
    twice = file.read_text().replace('"payload":', '"payload": "", "payload":')
    assert not passes(file, twice.encode(), tmp_path)


STATEMENT = {"_type": "https://in-toto.io/Statement/v1", "subject": [], "predicate": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "not json",
        json.dumps({"payload": "", "payloadType": PAYLOAD_TYPE, "signatures": []}),
        *(
            json.dumps(
                {
                    "payload": base64.b64encode(payload).decode(),
                    "payloadType": PAYLOAD_TYPE,
                    "signatures": [],
                }
            )
            for payload in (
                b"\xff",
                b"[]",
                json.dumps(STATEMENT).encode(),
                json.dumps({**STATEMENT, "predicateType": "another"}).encode(),
                json.dumps(
                    {**STATEMENT, "predicateType": "urn:fastfedul:forgetting:v1"}
                ).encode(),
            )
        ),
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
