from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.forgetting.signing import (
    SigningKey,
    default_key_path,
    find_key,
    new_key,
    public_path,
    read_key,
    read_public_key,
)
from tests.support.commands import require_programs

pytest.importorskip("cryptography")

RFC_8032 = (
    # Section 7.1, test 2: private key, public key, message, signature.
    "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
    "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
    "72",
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
)


def test_a_signature_is_that_of_the_standard() -> None:
    private, public, message, signature = map(bytes.fromhex, RFC_8032)
    key = SigningKey.of_bytes(private)
    assert key.public.der[-32:] == public
    assert key.sign(message) == signature
    assert key.public.verifies(message, signature)
    assert not key.public.verifies(message + b"x", signature)
    assert not key.public.verifies(message, signature[:-1])
    assert private.hex() not in repr(key)
    assert repr(private) not in repr(key)


def test_the_fingerprint_is_what_openssl_and_sha256_say(tmp_path: Path) -> None:
    require_programs("openssl")
    path = tmp_path / "key.pem"
    key = new_key(path)
    command = ["openssl", "pkey", "-pubin", "-in", str(public_path(path))]
    der = subprocess.run([*command, "-outform", "DER"], capture_output=True, check=True)
    assert hashlib.sha256(der.stdout).hexdigest() == key.public.fingerprint
    pem = subprocess.run(command, capture_output=True, check=True)
    assert pem.stdout == key.public.pem


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o777])
def test_a_key_that_others_may_read_or_change_is_refused(
    mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "my key.pem"
    key = new_key(path)
    path.chmod(mode)
    with pytest.raises(InvalidInputError, match=r"chmod 600 '.*my key.pem'") as caught:
        read_key(path)
    assert "\n" not in str(caught.value)
    path.chmod(0o400)
    assert read_key(path) == key
    assert read_key(f"file:{path}") == key


def test_a_new_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "signing.pem"
    key = new_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"BEGIN PRIVATE KEY" in path.read_bytes()
    assert read_key(path) == key
    assert read_public_key(public_path(path)) == key.public
    assert len(key.public.fingerprint) == 64
    assert {p.name for p in path.parent.iterdir()} == {"signing.pem", "signing.pem.pub"}
    before = path.read_bytes()
    with pytest.raises(FastFedULError, match="not overwritten"):
        new_key(path)
    path.unlink()
    with pytest.raises(FastFedULError, match="not overwritten"):
        new_key(path)
    assert not path.exists()
    public_path(path).unlink()
    new_key(path)
    assert path.read_bytes() != before


def test_the_usual_place_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTFEDUL_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_key_path() == tmp_path / "fastfedul" / "signing.pem"
    assert find_key() is None
    key = new_key(default_key_path())
    assert find_key() == key
    monkeypatch.setenv("FASTFEDUL_KEY", str(tmp_path / "other.pem"))
    with pytest.raises(InvalidInputError, match="fastfedul key new"):
        find_key()
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("FASTFEDUL_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_key_path() == tmp_path / ".config" / "fastfedul" / "signing.pem"


def test_what_is_no_key_is_refused_in_one_line(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    path = tmp_path / "key.pem"
    pem = serialization.Encoding.PEM
    pkcs8 = serialization.PrivateFormat.PKCS8
    nothing = serialization.NoEncryption()
    other = ec.generate_private_key(ec.SECP256R1())
    secret = serialization.BestAvailableEncryption(b"password")
    locked = ed25519.Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, secret)
    for data in (b"", b"nonsense", other.private_bytes(pem, pkcs8, nothing), locked):
        path.write_bytes(data)
        path.chmod(0o600)
        for read in (read_key, read_public_key):
            with pytest.raises(InvalidInputError) as caught:
                read(path)
            assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInputError, match="cannot read"):
        read_public_key(tmp_path / "nowhere")
    with pytest.raises(InvalidInputError, match="cannot write"):
        new_key(path / "below a file")
    curve = ec.generate_private_key(ec.SECP256K1()).public_key()
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(curve.public_bytes(pem, spki))
    with pytest.raises(InvalidInputError, match="no usable public key"):
        read_public_key(path)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from fastfedul.cli.main import run\n"
        f"sys.argv = ['fastfedul', 'key', 'new', {str(tmp_path / 'key.pem')!r}]\n"
        "run()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 1
    [line] = found.stderr.strip().splitlines()
    assert "pip install 'fastfedul[sign]'" in line
    assert not list(tmp_path.iterdir())
