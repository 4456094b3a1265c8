"""`fastfedul receipt`: a client sees in which rounds the ledger has it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fastfedul.cli.certificate import NOT_AUTHENTICATED, SignersKey, believed_keys
from fastfedul.cli.options import RunPath
from fastfedul.cli.output import (
    JsonFlag,
    print_error,
    print_facts,
    print_json,
    say,
    show_name,
    warn,
)
from fastfedul.errors import InvalidInputError, LedgerError
from fastfedul.forgetting.certificates import read_envelope
from fastfedul.forgetting.checking import check_signature
from fastfedul.forgetting.receipts import (
    Receipt,
    erased_since,
    make_receipt,
    other_rounds,
    parse_receipt,
    wrong_rounds,
)
from fastfedul.forgetting.signing import create_file, find_key
from fastfedul.ledger.reader import LedgerReader

_NOWHERE = (
    "no recorded round has {}, so the receipt proves exclusion: right after an "
    "erasure, else look at the spelling with `fastfedul ledger clients`"
)

app = typer.Typer(no_args_is_help=True)


@app.command()
def make(
    run: RunPath,
    client: Annotated[str, typer.Argument(help="Client that gets the receipt.")],
    out: Annotated[Path, typer.Option(help="File of the receipt.", metavar="FILE")],
    json: JsonFlag = False,
) -> None:
    """Write a client's receipt: in which rounds the ledger has it now.

    The receipt proves each round, and shows no other client's name. It holds the
    client's secret, so give it to the client alone.

    Example: `fastfedul receipt make RUN client-3 --out client-3.json`
    """
    key = find_key()
    with LedgerReader(run) as ledger:
        receipt = make_receipt(ledger, client, key)
    try:
        # It holds the client's secret.
        create_file(out, receipt.envelope.to_text().encode(), 0o600)
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {out}: {error.strerror or error}; choose another file"
        ) from None
    warnings = [] if receipt.included else [_NOWHERE.format(show_name(client))]
    facts = {**_facts(receipt), "file": str(out), "signed": key is not None}
    facts["warnings"] = warnings
    if json:
        print_json(facts)
        return
    for text in warnings:
        warn(text)
    signed = "yes" if key else "no; make a key with `fastfedul key new`"
    print_facts("Receipt", [*_rows(receipt), ("signed", signed), ("file", str(out))])


@app.command()
def check(
    receipt: Annotated[
        Path, typer.Argument(help="File of the receipt.", metavar="RECEIPT")
    ],
    public_key: SignersKey = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Compare with the roots of this ledger.", metavar="RUN"),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Check the proofs and the signature of a receipt.

    With --ledger, the command also compares the receipt with the roots that the ledger
    stored round by round. An erasure of another client after the receipt was made
    changes the roots of that client's rounds; ask for a new receipt then.

    Exit codes: 0 a key that you trust signed and every proof holds; 1 a proof, a root
    or the signature fails; 2 no receipt, key or ledger is there; 3 not authenticated:
    every proof holds, but no key that you trust signed.

    Example: `fastfedul receipt check client-3.json --public-key signer.pub`
    """
    try:
        found = parse_receipt(read_envelope(receipt))
        keys = believed_keys(public_key)
        others, erased = _other_rounds(found, ledger)
    except (InvalidInputError, LedgerError) as error:
        print_error(str(error), only_json=json)
        raise typer.Exit(2) from None
    signature, signer = check_signature(found.envelope, keys)
    wrong = wrong_rounds(found)
    if json:
        facts = {
            **_facts(found),
            "ok": signer is not None and not wrong and not others,
            "authenticated": signer is not None,
            "wrong_rounds": list(wrong),
            "other_roots": None if ledger is None else list(others),
            "erased_since": erased,
            "fingerprint": signer,
        }
        print_json(facts)
    else:
        by = signer or "nobody whom you trust"
        print_facts("Receipt", [*_rows(found), ("signed by", by)])
    if wrong or others or signature.verdict == "fails":
        why = signature.text
        if others:
            why = f"the ledger has another root for round {others[0]}"
            if erased is not None:
                why += (
                    f"; it erased a client at {erased}, after the receipt was made, "
                    "which changes the roots of that client's rounds: make a new "
                    "receipt with `fastfedul receipt make`"
                )
        if wrong:
            why = f"the proof of round {wrong[0]} fails"
        say(why, level="error", label="does not hold")
        raise typer.Exit(1)
    if signer is None:
        say(signature.text, level="warning", label="not authenticated")
        raise typer.Exit(NOT_AUTHENTICATED)


def _other_rounds(
    receipt: Receipt, ledger: Path | None
) -> tuple[tuple[int, ...], str | None]:
    """Return rounds with another root, and when the ledger erased a client since."""
    if ledger is None:
        return (), None
    with LedgerReader(ledger) as opened:
        return other_rounds(receipt, opened), erased_since(receipt, opened)


def _facts(receipt: Receipt) -> dict[str, Any]:
    said = receipt.said
    return {
        "ledger": said.ledger.model_dump(),
        "client": said.client,
        "made": said.made,
        "rounds": len(said.rounds),
        "included": list(receipt.included),
    }


def _rows(receipt: Receipt) -> list[tuple[str, str]]:
    said, included = receipt.said, receipt.included
    having = ", ".join(map(str, included[:10])) + (" ..." if included[10:] else "")
    return [
        ("client", show_name(said.client)),
        ("ledger id", said.ledger.id),
        ("rounds", str(len(said.rounds))),
        ("rounds with the client", having or "none"),
    ]
