"""`fastfedul key`: the key that signs certificates."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fastfedul.cli.output import JsonFlag, out, print_facts, print_json
from fastfedul.forgetting.signing import (
    ALGORITHM,
    SigningKey,
    default_key_path,
    fingerprint,
    new_key,
    public_path,
    read_key,
)

app = typer.Typer(no_args_is_help=True)

KeyPath = Annotated[
    Path | None,
    typer.Argument(
        help="File of the private key. [$FASTFEDUL_KEY, else signing.pem in the "
        "user's configuration folder]",
        metavar="[PATH]",
        show_default=False,
    ),
]


@app.command()
def new(path: KeyPath = None, json: JsonFlag = False) -> None:
    """Make a key: the private one in PATH, the public one in PATH.pub.

    The keys are Ed25519. No file is overwritten. Keep the private key to yourself and
    out of backups that others can read. Give the public key, or its fingerprint, to
    everybody who checks certificates, on another way than the certificates.

    Example: `fastfedul key new`
    """
    place = path or default_key_path()
    facts = _facts(place, new_key(place))
    if json:
        print_json(facts)
        return
    print_facts("New key", _rows(facts))
    if path is not None and path != default_key_path():
        out().print(
            f"Use it with: export FASTFEDUL_KEY={shlex.quote(str(path.absolute()))}",
            markup=False,
            soft_wrap=True,
        )


@app.command()
def show(path: KeyPath = None, json: JsonFlag = False) -> None:
    """Show the public key and its fingerprint; never the private one."""
    place = path or default_key_path()
    facts = _facts(place, read_key(place))
    if json:
        print_json(facts)
    else:
        print_facts("Key", _rows(facts))


def _facts(path: Path, key: SigningKey) -> dict[str, Any]:
    return {
        "path": str(path),
        "public_path": str(public_path(path)),
        "algorithm": ALGORITHM,
        "public_key": key.public.hex(),
        "fingerprint": fingerprint(key.public),
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("private key", facts["path"]),
        ("public key", facts["public_path"]),
        ("in hexadecimal", facts["public_key"]),
        ("fingerprint", facts["fingerprint"]),
    ]
