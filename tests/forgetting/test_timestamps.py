"""Time stamps by an authority that `openssl ts` makes."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastfedul import DiskLedger, FastFedULError, InvalidInputError, Model, forget
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.forgetting.checking import Audit, audit
from fastfedul.forgetting.timestamps import Stamp, request_stamp, stamp_path
from tests.support.audited import CLIENTS, START, key_of, round_of, verdicts
from tests.support.commands import require_programs

pytest.importorskip("rfc3161_client")
KEY = key_of(1)
CONFIG = """
[ req ]
prompt = no
distinguished_name = name
[ name ]
CN = Authority of the tests
[ root ]
basicConstraints = critical, CA:true
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[ stamping ]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = critical, timeStamping
[ tsa ]
default_tsa = own
[ own ]
serial = serial
crypto_device = builtin
signer_cert = stamper.pem
signer_key = stamper.key
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256, sha384, sha512
ess_cert_id_alg = sha256
"""


def openssl(folder: Path, *words: str) -> None:
    done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


class Authority(HTTPServer):
    """A time stamping authority that runs `openssl ts -reply`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder = folder
        self.lies: bytes | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        (folder / "ts.cnf").write_text(CONFIG)
        (folder / "serial").write_text("01\n")
        own = ("-config", "ts.cnf", "-newkey", "rsa:2048", "-nodes")
        openssl(
            folder, "req", "-x509", *own, "-extensions", "root", "-days", "2",
            "-subj", "/CN=Root", "-keyout", "root.key", "-out", "root.pem",
        )  # fmt: skip
        openssl(folder, "req", *own, "-keyout", "stamper.key", "-out", "stamper.csr")
        openssl(
            folder, "x509", "-req", "-in", "stamper.csr", "-CA", "root.pem",
            "-CAkey", "root.key", "-CAcreateserial", "-days", "2",
            "-extfile", "ts.cnf", "-extensions", "stamping", "-out", "stamper.pem",
        )  # fmt: skip

    def reply(self, query: bytes) -> bytes:
        if self.lies is not None:
            return self.lies
        (self.folder / "query.tsq").write_bytes(query)
        openssl(
            self.folder, "ts", "-reply", "-config", "ts.cnf",
            "-queryfile", "query.tsq", "-out", "reply.tsr",
        )  # fmt: skip
        return (self.folder / "reply.tsr").read_bytes()


class _Answer(BaseHTTPRequestHandler):
    server: Authority

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/timestamp-query"
        query = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.server.reply(query)
        self.send_response(200)
        self.send_header("Content-Type", "application/timestamp-reply")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    require_programs("openssl")
    server = Authority(tmp_path_factory.mktemp("authority"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    with DiskLedger.create(tmp_path / "ledger", Model(START)) as ledger:
        ledger.append(round_of(0, CLIENTS))
        path = forget(ledger, ["a"], key=KEY).certificate
    assert path is not None
    return path


def checked(path: Path, roots: Path | None) -> Audit:
    stamp = Stamp.beside(path, roots)
    return audit(read_certificate(path), None, [KEY.public], stamp=stamp)


def test_a_stamp_is_asked_for_and_checked(
    certificate: Path, authority: Authority
) -> None:
    root = authority.folder / "root.pem"
    assert "stamp" not in verdicts(checked(certificate, None))
    assert checked(certificate, root).failed == ("stamp",)
    place, time = request_stamp(certificate, authority.url)
    assert place == stamp_path(certificate)
    assert abs(datetime.now(UTC) - time) < timedelta(minutes=1)
    result = checked(certificate, root)
    assert result.ok
    assert verdicts(result)["stamp"] == "holds"
    # Nobody is trusted unless the user says so.
    assert verdicts(checked(certificate, None))["stamp"] == "not checked"
    with pytest.raises(InvalidInputError, match="not overwritten"):
        request_stamp(certificate, authority.url)
    # The same with the command that every system has.
    openssl(
        certificate.parent, "ts", "-verify", "-data", certificate.name,
        "-in", place.name, "-CAfile", str(root),
    )  # fmt: skip


def test_a_stamp_of_another_file_or_by_a_stranger_fails(
    certificate: Path, authority: Authority, tmp_path: Path
) -> None:
    root = authority.folder / "root.pem"
    place, _ = request_stamp(certificate, authority.url)
    answer = place.read_bytes()
    text = certificate.read_text()
    certificate.write_text(text.replace("\n", " \n", 1))
    assert checked(certificate, root).failed == ("stamp",)
    certificate.write_text(text)
    assert checked(certificate, root).ok
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    other = Authority(stranger)
    other.server_close()
    assert checked(certificate, stranger / "root.pem").failed == ("stamp",)
    for at in range(0, len(answer), 97):
        place.write_bytes(answer[:at] + bytes([answer[at] ^ 1]) + answer[at + 1 :])
        changed = checked(certificate, root)
        # Bytes that neither the signature nor the digest covers change no time.
        assert changed.failed == ("stamp",) or changed.checks[2] == (
            _holding(certificate, answer, root)
        )
    with pytest.raises(InvalidInputError, match="no certificate in PEM"):
        checked(certificate, certificate)


def _holding(certificate: Path, answer: bytes, root: Path) -> object:
    place = stamp_path(certificate)
    now = place.read_bytes()
    place.write_bytes(answer)
    found = checked(certificate, root).checks[2]
    place.write_bytes(now)
    return found


def test_a_certificate_that_claims_a_later_time_fails(
    certificate: Path, authority: Authority
) -> None:
    """Stamped, and applied an hour later by its own words."""
    from fastfedul.forgetting.envelopes import Envelope

    payload = read_certificate(certificate).envelope.payload.decode()
    applied = read_certificate(certificate).predicate.applied
    later = (datetime.fromisoformat(applied) + timedelta(hours=1)).isoformat()
    changed = payload.replace(f'"applied":"{applied}"', f'"applied":"{later}"')
    certificate.write_text(Envelope(changed.encode()).signed_by(KEY).to_text())
    request_stamp(certificate, authority.url)
    result = checked(certificate, authority.folder / "root.pem")
    assert result.failed == ("stamp",)
    assert "before it was applied" in result.checks[2].text


def test_an_authority_that_lies_or_is_away_is_found(
    certificate: Path, authority: Authority, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_text("another file")
    place, _ = request_stamp(other, authority.url)
    try:
        for lie, said in (
            (place.read_bytes(), "stamped something else"),
            (b"nonsense", "no time stamp"),
            (b"", "no time stamp"),
        ):
            authority.lies = lie
            with pytest.raises(FastFedULError, match=said):
                request_stamp(certificate, authority.url)
    finally:
        authority.lies = None
    with pytest.raises(FastFedULError, match="does not answer"):
        request_stamp(certificate, "http://127.0.0.1:9/")
    with pytest.raises(InvalidInputError, match="no address"):
        request_stamp(certificate, f"file://{other}")
    assert not stamp_path(certificate).exists()
