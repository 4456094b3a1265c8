"""`fastfedul key`: the key that signs certificates, and the keys that are trusted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fastfedul.cli.output import JsonFlag, out, print_facts, print_json
from fastfedul.forgetting.signing import (
    PublicKey,
    default_key_path,
    default_key_place,
    new_key,
    public_path,
    read_key,
    read_public_key,
    write_public_key,
)
from fastfedul.forgetting.trust import distrust_key, trust_key, trusted_keys

app = typer.Typer(no_args_is_help=True)


@app.command()
def new(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="File of the private key. [$FASTFEDUL_KEY, else signing.pem in the "
            "user's configuration folder]",
            metavar="[PATH]",
            show_default=False,
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Make a key: the private one in PATH, the public one in PATH.pub.

    The keys are Ed25519. No file is overwritten. Only you may read the private key;
    keep it out of backups that others can read. Give the public key, or its
    fingerprint, to everybody who checks certificates, on another way than the
    certificates.

    Example: `fastfedul key new`
    """
    place = path or default_key_path()
    key = new_key(place)
    facts = {
        "path": str(place),
        "public_path": str(public_path(place)),
        **_facts(key.public),
    }
    if json:
        print_json(facts)
        return
    print_facts(
        "New key",
        [
            ("private key", facts["path"]),
            ("public key", facts["public_path"]),
            *_rows(facts),
        ],
    )
    out().print(
        "To trust it where certificates are checked: fastfedul key trust "
        f"{shlex.quote(facts['public_path'])}",
        markup=False,
        soft_wrap=True,
    )
    if path is not None and path != default_key_path():
        out().print(
            f"Use it with: export FASTFEDUL_KEY={shlex.quote(str(path.absolute()))}",
            markup=False,
            soft_wrap=True,
        )


@app.command()
def show(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A file, or awskms:KEY or hsm:[ID][?label=TOKEN]. [$FASTFEDUL_KEY, "
            "else signing.pem in the user's configuration folder]",
            metavar="[KEY]",
            show_default=False,
        ),
    ] = None,
    public_key: Annotated[
        Path | None,
        typer.Option(help="Also write the public key to this file, in PEM."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show the public key and its fingerprint; never the private one.

    Example: `fastfedul key show awskms:alias/forgetting --public-key signer.pub`
    """
    place = key or default_key_place()
    public = read_key(place).public
    if public_key is not None:
        write_public_key(public, public_key)
    facts = {"key": place, **_facts(public)}
    if json:
        print_json(facts)
    else:
        print_facts("Key", [("key", place), *_rows(facts)])


@app.command()
def trust(
    file: Annotated[Path, typer.Argument(help="The signer's public key, in PEM.")],
    json: JsonFlag = False,
) -> None:
    """Trust a public key: checks accept its signatures.

    Compare the fingerprint with the signer first, on another way than the one that
    brought you the file.

    Example: `fastfedul key trust signer.pem.pub`
    """
    key = read_public_key(file)
    facts = {**_facts(key), "path": str(trust_key(key))}
    if json:
        print_json(facts)
    else:
        print_facts("Trusted key", [*_rows(facts), ("kept in", facts["path"])])


@app.command()
def trusted(json: JsonFlag = False) -> None:
    """List the public keys that you trust."""
    found = [_facts(key) for key in trusted_keys()]
    if json:
        print_json({"keys": found})
    elif not found:
        out().print("You trust no key yet; `fastfedul key trust FILE` adds one.")
    for facts in () if json else found:
        print_facts("Trusted key", _rows(facts))


@app.command()
def distrust(
    fingerprint: Annotated[
        str, typer.Argument(help="First digits of the key's fingerprint, 8 or more.")
    ],
    json: JsonFlag = False,
) -> None:
    """Stop trusting a public key."""
    facts = _facts(distrust_key(fingerprint))
    if json:
        print_json(facts)
    else:
        print_facts("Not trusted any more", _rows(facts))


def _facts(key: PublicKey) -> dict[str, Any]:
    return {
        "algorithm": key.algorithm,
        "public_key": key.pem.decode(),
        "fingerprint": key.fingerprint,
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("algorithm", facts["algorithm"]),
        ("fingerprint", facts["fingerprint"]),
    ]
