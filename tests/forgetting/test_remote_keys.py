"""Keys that are in no file: AWS KMS (moto's server, by HTTP) and an HSM."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastfedul import (
    DiskLedger,
    InvalidInputError,
    LedgerReader,
    Model,
    apply_requests,
    forget,
)
from fastfedul.errors import FastFedULError, MissingPackageError
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.forgetting.checking import audit
from fastfedul.forgetting.signing import (
    find_key,
    read_key,
    read_public_key,
    write_public_key,
)
from tests.support.audited import CLIENTS, START, key_of, round_of
from tests.support.commands import require_programs

pytest.importorskip("cryptography")
SOFTHSM = Path("/usr/lib/softhsm/libsofthsm2.so")
PIN = "4711"


def certify(folder: Path) -> Path:
    """Forget a client with the key of the usual place, and check by the public key."""
    with DiskLedger.create(folder / "ledger", Model(START)) as ledger:
        ledger.append(round_of(0, CLIENTS))
        done = forget(ledger, ["a"])
    assert done.signed
    assert done.certificate is not None
    key = find_key()
    assert key is not None
    write_public_key(key.public, folder / "signer.pub")
    public = read_public_key(folder / "signer.pub")
    assert public == key.public
    with LedgerReader(folder / "ledger") as reader:
        result = audit(read_certificate(done.certificate), reader, [public])
    assert result.ok, result
    return done.certificate


def openssl_verifies(certificate: Path, public: Path) -> bool:
    envelope = read_certificate(certificate).envelope
    folder = certificate.parent
    (folder / "signed").write_bytes(envelope.signed_bytes())
    (folder / "signature").write_bytes(envelope.signatures[0].value)
    command = ["openssl", "dgst", "-sha256", "-verify", str(public)]
    command += ["-signature", str(folder / "signature"), str(folder / "signed")]
    return subprocess.run(command, capture_output=True).returncode == 0


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """A client of AWS KMS, and the process that serves it."""
    boto3 = pytest.importorskip("boto3")
    with (
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.kms_server", *arguments],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                patch.setenv(name, "testing")
            patch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
            patch.setenv("AWS_ENDPOINT_URL_KMS", f"http://127.0.0.1:{port}")
            patch.setenv("AWS_MAX_ATTEMPTS", "1")
            yield boto3.client("kms"), process
        finally:
            process.kill()


@pytest.fixture
def kms() -> Iterator[Any]:
    """A client of AWS KMS."""
    pytest.importorskip("moto")
    with serving() as (client, _):
        yield client


@pytest.mark.parametrize("spec", ["ECC_NIST_P256", "ECC_NIST_P384", "RSA_2048"])
def test_a_key_in_aws_kms_signs(
    spec: str, kms: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kms.create_key(KeyUsage="SIGN_VERIFY", KeySpec=spec)
    kms.create_alias(
        AliasName="alias/forgetting", TargetKeyId=made["KeyMetadata"]["KeyId"]
    )
    for name in (made["KeyMetadata"]["Arn"], "alias/forgetting"):
        monkeypatch.setenv("FASTFEDUL_KEY", f"awskms:{name}")
        folder = tmp_path / str(len(name))
        folder.mkdir()
        certificate = certify(folder)
        if spec == "ECC_NIST_P256":
            assert openssl_verifies(certificate, folder / "signer.pub")


def test_a_key_that_kms_does_not_have_is_refused_in_one_line(
    kms: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTFEDUL_KEY", "awskms:alias/nowhere")
    with DiskLedger.create(tmp_path / "ledger", Model(START)) as ledger:
        ledger.append(round_of(0, CLIENTS))
        with pytest.raises(InvalidInputError, match="alias/nowhere cannot") as caught:
            forget(ledger, ["a"])
        assert "\n" not in str(caught.value)
        assert ledger.clients()["a"].state == "active"
    made = kms.create_key(KeyUsage="ENCRYPT_DECRYPT", KeySpec="SYMMETRIC_DEFAULT")
    with pytest.raises(InvalidInputError, match="cannot be used"):
        read_key(f"awskms:{made['KeyMetadata']['KeyId']}")


def test_a_key_that_fails_after_the_commit_leaves_a_certificate_to_sign(
    tmp_path: Path,
) -> None:
    pytest.importorskip("moto")
    with (
        serving() as (kms, server),
        DiskLedger.create(tmp_path / "ledger", Model(START)) as ledger,
    ):
        made = kms.create_key(KeyUsage="SIGN_VERIFY", KeySpec="ECC_NIST_P256")
        key = read_key(f"awskms:{made['KeyMetadata']['KeyId']}")
        ledger.append(round_of(0, CLIENTS))
        server.kill()
        server.wait()
        with pytest.raises(FastFedULError, match="the client is forgotten, but") as e:
            forget(ledger, ["a"], key=key)
        assert "\n" not in str(e.value)
        assert ledger.clients()["a"].state == "erased"
        other = key_of(3)
        assert apply_requests(ledger, key=other) == ()
    certificate = read_certificate(tmp_path / "certificates" / "event-1.json")
    assert audit(certificate, None, [other.public]).ok


def test_a_service_that_signs_something_else_signs_no_certificate(
    tmp_path: Path,
) -> None:
    """As moto does: it signs the digest of the digest."""
    pytest.importorskip("moto")
    with (
        serving("as-it-is") as (kms, _),
        DiskLedger.create(tmp_path / "ledger", Model(START)) as ledger,
    ):
        made = kms.create_key(KeyUsage="SIGN_VERIFY", KeySpec="ECC_NIST_P256")
        key = read_key(f"awskms:{made['KeyMetadata']['KeyId']}")
        ledger.append(round_of(0, CLIENTS))
        with pytest.raises(FastFedULError, match="does not verify its signature"):
            forget(ledger, ["a"], key=key)
        # The next key signs it.
        apply_requests(ledger, key=key_of(3))
    certificate = read_certificate(tmp_path / "certificates" / "event-1.json")
    assert audit(certificate, None, [key_of(3).public]).ok


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A token of SoftHSM with an ECDSA key of number 7; its label."""
    pkcs11 = pytest.importorskip("pkcs11")
    require_programs("softhsm2-util")
    (tmp_path / "tokens").mkdir()
    config = tmp_path / "softhsm2.conf"
    config.write_text(f"directories.tokendir = {tmp_path / 'tokens'}\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(config))
    monkeypatch.setenv("PYKCS11LIB", str(SOFTHSM))
    monkeypatch.setenv("FASTFEDUL_HSM_PIN", PIN)
    label, pins = "forgetting", ("--so-pin", "0000", "--pin", PIN)
    subprocess.run(
        ["softhsm2-util", "--init-token", "--free", "--label", label, *pins],
        check=True,
        capture_output=True,
    )
    library = pkcs11.lib(str(SOFTHSM))
    library.reinitialize()
    with library.get_token(token_label=label).open(user_pin=PIN, rw=True) as session:
        parameters = session.create_domain_parameters(
            pkcs11.KeyType.EC,
            {
                pkcs11.Attribute.EC_PARAMS: (
                    pkcs11.util.ec.encode_named_curve_parameters("secp256r1")
                )
            },
            local=True,
        )
        parameters.generate_keypair(store=True, id=bytes([7]), label="own")
    return label


def test_a_key_in_an_hsm_signs(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTFEDUL_KEY", f"hsm:7?label={token}")
    certificate = certify(tmp_path)
    assert openssl_verifies(certificate, tmp_path / "signer.pub")
    for place in (f"hsm:8?label={token}", "hsm:7?label=another", "hsm:x"):
        with pytest.raises(InvalidInputError, match="cannot be used") as caught:
            read_key(place)
        assert "\n" not in str(caught.value)
    with DiskLedger(tmp_path / "ledger") as ledger:
        key = find_key()
        monkeypatch.delenv("FASTFEDUL_HSM_PIN")
        with pytest.raises(FastFedULError, match="FASTFEDUL_HSM_PIN"):
            forget(ledger, ["b"], key=key)


def test_a_service_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from securesystemslib.signer import _aws_signer, _hsm_signer

    monkeypatch.setattr(_aws_signer, "AWS_IMPORT_ERROR", "missing")
    monkeypatch.setattr(_hsm_signer, "PKCS11_IMPORT_ERROR", "missing")
    for place, extra in (("awskms:alias/x", "kms"), ("hsm:", "hsm")):
        with pytest.raises(MissingPackageError, match=rf"fastfedul\[{extra}\]"):
            read_key(place)
