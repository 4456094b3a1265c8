"""Ed25519 keys in files, and signatures; needs the extra `sign`.

The package `cryptography` is imported only when a key is made, read or used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from fastfedul.errors import FastFedULError, InvalidInputError

ALGORITHM = "Ed25519"
KEY_VARIABLE = "FASTFEDUL_KEY"


class MissingCryptographyError(FastFedULError, ImportError):
    """Keys are used and the package for them is not installed."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key; it does not show itself.

    Attributes:
        private: The 32 bytes of the private key.
    """

    private: bytes = field(repr=False)

    @property
    def public(self) -> bytes:
        """The 32 bytes of the public key."""
        with _cryptography():
            from cryptography.hazmat.primitives.asymmetric import ed25519
        key = ed25519.Ed25519PrivateKey.from_private_bytes(self.private)
        return key.public_key().public_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """Return the 64 bytes of the signature."""
        with _cryptography():
            from cryptography.hazmat.primitives.asymmetric import ed25519
        key = ed25519.Ed25519PrivateKey.from_private_bytes(self.private)
        return key.sign(data)


def is_signed(data: bytes, signature: bytes, public: bytes) -> bool:
    """Return whether a signature of data was made with the key of a public key."""
    with _cryptography():
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ed25519
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint(public: bytes) -> str:
    """Return the SHA-256 of a public key's 32 bytes, in hexadecimal."""
    return hashlib.sha256(public).hexdigest()


def default_key_path() -> Path:
    """Return `$FASTFEDUL_KEY`, or a file in the user's configuration folder."""
    named = os.environ.get(KEY_VARIABLE)
    if named:
        return Path(named).expanduser()
    folder = platformdirs.user_config_path("fastfedul", appauthor=False)
    return folder / "signing.pem"


def public_path(path: Path) -> Path:
    """Return where the public key of a private key's file is put."""
    return path.with_name(f"{path.name}.pub")


def find_key() -> SigningKey | None:
    """Return the key of the usual place; None if nobody has made one.

    Raises:
        InvalidInputError: If `$FASTFEDUL_KEY` names a file that is not there, or the
            file holds no usable key.
    """
    path = default_key_path()
    if os.environ.get(KEY_VARIABLE) or path.exists():
        return read_key(path)
    return None


def new_key(path: Path) -> SigningKey:
    """Make a key and write it and its public key; nothing is ever overwritten.

    Raises:
        InvalidInputError: If one of the files is there already, or the path has none.
    """
    if not path.name:
        raise InvalidInputError("the key needs a file; name one, such as signing.pem")
    with _cryptography():
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    made = ed25519.Ed25519PrivateKey.generate()
    private = made.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = made.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    files = {path: (private, 0o600), public_path(path): (public, 0o644)}
    for place in files:
        if place.exists():
            raise InvalidInputError(
                f"{place} exists already and is not overwritten; choose another place"
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for place, (data, mode) in files.items():
            _create(place, data, mode)
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {path}: {error.strerror or error}"
        ) from None
    return SigningKey(made.private_bytes_raw())


def read_key(path: Path) -> SigningKey:
    """Return the private key of a PEM file."""
    data = _read(path, "make one with `fastfedul key new`")
    with _cryptography():
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
    return SigningKey(key.private_bytes_raw())


def read_public_key(path: Path) -> bytes:
    """Return the 32 bytes of the public key of a PEM file."""
    data = _read(path, "it is the .pub file that `fastfedul key new` writes")
    with _cryptography():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise InvalidInputError(
            f"{path} holds no Ed25519 public key in PEM; it is the .pub file that "
            "`fastfedul key new` writes"
        )
    return key.public_bytes_raw()


def _read(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"cannot read the key {path}: {error.strerror or error}; {advice}"
        ) from None


def _create(path: Path, data: bytes, mode: int) -> None:
    """Put a file in its place whole, unless something is there."""
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


@contextlib.contextmanager
def _cryptography() -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise MissingCryptographyError(
            "keys and signatures need the package cryptography; install it with "
            "pip install 'fastfedul[sign]'"
        ) from None
