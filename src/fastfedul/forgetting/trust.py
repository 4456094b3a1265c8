"""Public keys that this user trusts: a folder of PEM files named by fingerprint."""

from __future__ import annotations

from pathlib import Path

from fastfedul.errors import InvalidInputError
from fastfedul.forgetting.signing import (
    PublicKey,
    configuration_folder,
    create_file,
    read_public_key,
)

_ENDING = ".pub"
_SHORTEST = 8
"""Digits that name a key: fewer could fit by chance."""


def trusted_folder() -> Path:
    """Return the folder of the trusted keys, in the user's configuration folder."""
    return configuration_folder() / "trusted"


def trusted_keys() -> tuple[PublicKey, ...]:
    """Return the public keys that this user trusts.

    Raises:
        InvalidInputError: If a file of the folder does not hold the key of its name.
    """
    return tuple(key for _, key in _files())


def trust_key(key: PublicKey) -> Path:
    """Trust a public key; return its file. Trusting a key twice changes nothing.

    Raises:
        InvalidInputError: If the file cannot be written.
    """
    path = trusted_folder() / f"{key.fingerprint}{_ENDING}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        create_file(path, key.pem, 0o644)
    except FileExistsError:
        if read_public_key(path) != key:
            raise _other_key(path) from None
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {path}: {error.strerror or error}"
        ) from None
    return path


def distrust_key(fingerprint: str) -> PublicKey:
    """Stop trusting a key, named by the first digits of its fingerprint; return it.

    Raises:
        InvalidInputError: If no trusted key or more than one fits.
    """
    fitting = [one for one in _files() if one[1].fingerprint.startswith(fingerprint)]
    if len(fingerprint) < _SHORTEST or len(fitting) != 1:
        raise InvalidInputError(
            f"{len(fitting)} trusted keys have a fingerprint that begins with "
            f"{fingerprint!r:.80}; give at least {_SHORTEST} digits of one that "
            "`fastfedul key trusted` lists"
        )
    [(path, key)] = fitting
    try:
        path.unlink()
    except OSError as error:
        raise InvalidInputError(
            f"cannot remove {path}: {error.strerror or error}; the key is still trusted"
        ) from None
    return key


def _files() -> list[tuple[Path, PublicKey]]:
    found = []
    for path in sorted(trusted_folder().glob(f"*{_ENDING}")):
        key = read_public_key(path)
        if path.name != f"{key.fingerprint}{_ENDING}":
            raise _other_key(path)
        found.append((path, key))
    return found


def _other_key(path: Path) -> InvalidInputError:
    return InvalidInputError(
        f"{path} does not hold the key of its name; remove it, and trust the right key "
        "with `fastfedul key trust`"
    )
