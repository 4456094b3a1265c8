"""Keys that sign certificates, in files, in AWS KMS or in an HSM; needs extra `sign`.

securesystemslib signs and verifies. It is imported only when a key is made, read or
used.
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import platformdirs

from fastfedul.errors import (
    FastFedULError,
    InvalidInputError,
    MissingPackageError,
    require_extra,
)
from fastfedul.files import open_regular

if TYPE_CHECKING:
    from securesystemslib.signer import Signer, SSlibKey

KEY_VARIABLE = "FASTFEDUL_KEY"
PIN_VARIABLE = "FASTFEDUL_HSM_PIN"

_SERVICES = {"awskms": "kms", "hsm": "hsm"}
"""Where else than in a file a key may be, and the extra that is needed for it."""

_NEED = "keys and signatures need packages that are not installed"
_PUBLIC_ADVICE = (
    "give a public key in PEM, such as the .pub file that `fastfedul key new` writes"
)


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key: Ed25519, ECDSA on P-256 or P-384, or RSA.

    Attributes:
        der: The key as SubjectPublicKeyInfo in DER.
    """

    der: bytes

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key in DER, in hexadecimal; the `keyid` of its signatures."""
        return hashlib.sha256(self.der).hexdigest()

    @property
    def algorithm(self) -> str:
        """Signature scheme of the key, as securesystemslib calls it."""
        return self._loaded().scheme

    @property
    def pem(self) -> bytes:
        """The key in PEM."""
        body = base64.encodebytes(self.der).replace(b"\n", b"")
        lines = [body[at : at + 64] for at in range(0, len(body), 64)]
        begin, end = b"-----BEGIN PUBLIC KEY-----", b"-----END PUBLIC KEY-----"
        return b"\n".join([begin, *lines, end, b""])

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Return whether the holder of the private key signed these data."""
        key = self._loaded()
        with sign_extra():
            from securesystemslib.exceptions import (
                UnverifiedSignatureError,
                VerificationError,
            )
            from securesystemslib.signer import Signature
        try:
            key.verify_signature(Signature(key.keyid, signature.hex()), data)
        except (UnverifiedSignatureError, VerificationError):
            return False
        return True

    def _loaded(self) -> SSlibKey:
        with sign_extra():
            from cryptography.hazmat.primitives.serialization import load_der_public_key
            from securesystemslib.signer import SSlibKey
        return SSlibKey.from_crypto(load_der_public_key(self.der), self.fingerprint)


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key, wherever it is kept; it does not show itself.

    Attributes:
        public: The public key.
        signer: Signs with the private key.
    """

    public: PublicKey
    signer: Signer = field(repr=False, compare=False)

    @classmethod
    def of_bytes(cls, private: bytes) -> SigningKey:
        """Return the Ed25519 key of 32 private bytes."""
        with sign_extra():
            from cryptography.hazmat.primitives.asymmetric import ed25519
        return _held(ed25519.Ed25519PrivateKey.from_private_bytes(private))

    def sign(self, data: bytes) -> bytes:
        """Return the signature of data.

        Raises:
            FastFedULError: If the service or device that holds the key refuses, or
                gives a signature that the public key does not verify.
        """
        with _explained("the key cannot sign"):
            signature = bytes.fromhex(self.signer.sign(data).signature)
        if not self.public.verifies(data, signature):
            raise InvalidInputError(
                "the key cannot sign: its own public key does not verify its signature"
            )
        return signature


def default_key_path() -> Path:
    """Return the file of the usual key.

    Raises:
        InvalidInputError: If `$FASTFEDUL_KEY` names a key that is in no file.
    """
    place = default_key_place()
    path = _file_of(place)
    if path is None:
        raise InvalidInputError(
            f"${KEY_VARIABLE} is {place:.120}, which is no file; name a file"
        )
    return path


def configuration_folder() -> Path:
    """Return the folder of the user's keys."""
    return platformdirs.user_config_path("fastfedul", appauthor=False)


def default_key_place() -> str:
    """Return `$FASTFEDUL_KEY`, or the file in the user's configuration folder."""
    named = os.environ.get(KEY_VARIABLE)
    return named or str(configuration_folder() / "signing.pem")


def public_path(path: Path) -> Path:
    """Return where the public key of a private key's file is put."""
    return path.with_name(f"{path.name}.pub")


def find_key() -> SigningKey | None:
    """Return the key of the usual place; None if nobody has made one.

    Raises:
        InvalidInputError: If `$FASTFEDUL_KEY` names a key that is not there, or the
            file holds no usable key.
    """
    if os.environ.get(KEY_VARIABLE) or default_key_path().exists():
        return read_key(default_key_place())
    return None


def new_key(path: Path) -> SigningKey:
    """Make a key and write it and its public key; nothing is ever overwritten.

    Raises:
        FastFedULError: If one of the files is there already.
        InvalidInputError: If the path names no file, or it cannot be written.
    """
    if not path.name:
        raise InvalidInputError("the key needs a file; name one, such as signing.pem")
    with sign_extra():
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    made = ed25519.Ed25519PrivateKey.generate()
    private = made.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    key = _held(made)
    files = {path: (private, 0o600), public_path(path): (key.public.pem, 0o644)}
    for place in files:
        if place.exists():
            raise FastFedULError(
                f"{place} exists already and is not overwritten; choose another place"
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for place, (data, mode) in files.items():
            create_file(place, data, mode)
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {path}: {error.strerror or error}"
        ) from None
    return key


def read_key(place: Path | str) -> SigningKey:
    """Return the private key of a place.

    Args:
        place: A PEM file, or `file:PATH`, `awskms:KEY` or `hsm:[ID][?label=TOKEN]`.

    Raises:
        InvalidInputError: If there is no usable key, or others can read its file.
    """
    path = _file_of(str(place))
    if path is None:
        return _service_key(str(place))
    data = _read(path, "make one with `fastfedul key new`", private=True)
    with sign_extra():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except TypeError:
        raise InvalidInputError(
            f"the key in {path} has a password; use one without"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InvalidInputError(
            f"{path} holds no Ed25519 private key in PEM; restore it from a backup, or "
            "move it away and make another with `fastfedul key new`"
        )
    return _held(key)


def read_public_key(path: Path) -> PublicKey:
    """Return the public key of a PEM file."""
    data = _read(path, _PUBLIC_ADVICE)
    with sign_extra():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from securesystemslib.signer import SSlibKey
    try:
        key = serialization.load_pem_public_key(data)
        SSlibKey.from_crypto(key)
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidInputError(
            f"{path} holds no usable public key; {_PUBLIC_ADVICE}"
        ) from None
    return _public(key)


def create_file(path: Path, data: bytes, mode: int) -> None:
    """Put a file in its place whole, unless something is there.

    Raises:
        OSError: If it cannot be written, or something is there.
    """
    temporary = path.with_name(f".{path.name}.new-{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        # A link, unlike a rename, never takes the place of a file.
        os.link(temporary, path)
    finally:
        temporary.unlink()


def write_public_key(key: PublicKey, path: Path) -> None:
    """Write a public key to a new file, in PEM.

    Raises:
        InvalidInputError: If it cannot be written, or something is there.
    """
    try:
        create_file(path, key.pem, 0o644)
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {path}: {error.strerror or error}; choose another place"
        ) from None


def _file_of(place: str) -> Path | None:
    """Return the file that a place names; None if a service or device has the key."""
    scheme, colon, rest = place.partition(":")
    if colon and scheme in _SERVICES:
        return None
    return Path(rest if colon and scheme == "file" else place).expanduser()


def _held(private: Any) -> SigningKey:
    """Return a private key of the package `cryptography` as one that signs."""
    with sign_extra():
        from securesystemslib.signer import CryptoSigner
    return SigningKey(_public(private.public_key()), CryptoSigner(private))


def _public(key: Any) -> PublicKey:
    with sign_extra():
        from cryptography.hazmat.primitives import serialization
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return PublicKey(key.public_bytes(serialization.Encoding.DER, form))


def _service_key(place: str) -> SigningKey:
    """Return a key that a service or a device holds."""
    with sign_extra():
        from cryptography.hazmat.primitives import serialization
        from securesystemslib.exceptions import UnsupportedLibraryError
        from securesystemslib.signer import AWSSigner, HSMSigner, Signer
    try:
        what = f"the key {place:.120} cannot be used"
        with _explained(what, UnsupportedLibraryError):
            uri = urlsplit(place)
            if uri.scheme == "awskms":
                found, key = AWSSigner.import_(uri.path)
            else:
                number = int(uri.path) if uri.path else None
                label = dict(parse_qsl(uri.query)).get("label")
                found, key = HSMSigner.import_(number, label, _ask_pin)
            signer = Signer.from_priv_key_uri(found, key, _ask_pin)
            loaded = serialization.load_pem_public_key(key.keyval["public"].encode())
    except UnsupportedLibraryError:
        raise MissingPackageError(_SERVICES[place.partition(":")[0]], _NEED) from None
    return SigningKey(_public(loaded), signer)


def _ask_pin(_name: str) -> str:
    """Return the PIN of the token."""
    pin = os.environ.get(PIN_VARIABLE)
    if pin:
        return pin
    if not sys.stdin.isatty():
        raise InvalidInputError(f"the token needs a PIN; put it into ${PIN_VARIABLE}")
    return getpass.getpass("PIN of the token: ")


_MOST_BYTES = 1 << 20
"""More than any key in PEM has."""


def _read(path: Path, advice: str, *, private: bool = False) -> bytes:
    try:
        with open_regular(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if private and mode & 0o077:
                raise InvalidInputError(
                    f"others may read or change the key {path}, whose mode is "
                    f"{mode:04o}; run chmod 600 {shlex.quote(str(path))}, and make "
                    "another key if somebody may have copied it"
                )
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise InvalidInputError(
            f"cannot read the key {path}: {error.strerror or error}; {advice}"
        ) from None


@contextmanager
def _explained(what: str, passed: type[Exception] = FastFedULError) -> Iterator[None]:
    """Turn the error of a service or a device into one line.

    The signers document no list of their errors: those of networks, of drivers and
    of two libraries come through.
    """
    try:
        yield
    except (FastFedULError, passed):
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInputError(f"{what}: {text:.300}") from None


def sign_extra() -> AbstractContextManager[None]:
    """Return a block in which a failed import names the extra for keys."""
    return require_extra("sign", _NEED)
