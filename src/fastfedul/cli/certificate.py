"""`fastfedul certificate`: check a certificate against its signature and ledger."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_error,
    print_facts,
    print_json,
    say,
    show_name,
    warn,
    working,
)
from fastfedul.errors import InvalidInputError, LedgerDamagedError, LedgerError
from fastfedul.forgetting.certificates import Certificate, read_certificate
from fastfedul.forgetting.checking import Audit, audit
from fastfedul.forgetting.signing import PublicKey, read_public_key
from fastfedul.forgetting.statements import RoundCounts, conclusions
from fastfedul.forgetting.timestamps import Stamp, request_stamp
from fastfedul.forgetting.trust import trusted_keys
from fastfedul.ledger.anchor import require_anchored
from fastfedul.ledger.lookalikes import lookalike_warnings
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.folder import INDEX

NOT_AUTHENTICATED = 3
"""Exit code: no check fails, but no key that the user trusts signed."""

_COLORS = {"holds": "green", "fails": "red", "not checked": "yellow"}


app = typer.Typer(no_args_is_help=True)

SignersKey = Annotated[
    Path | None,
    typer.Option(
        help="The signer's public key in PEM, which you trust. [the keys of "
        "`fastfedul key trusted`]",
        show_default=False,
    ),
]


@app.command("check")
def check_certificate(
    certificate: Annotated[
        Path, typer.Argument(help="File of the certificate.", metavar="CERTIFICATE")
    ],
    run: Annotated[
        Path | None,
        typer.Option(
            help="The run or ledger it is about. [the one the file lies in, if any]",
            show_default=False,
        ),
    ] = None,
    public_key: SignersKey = None,
    ledger_id: Annotated[
        str | None,
        typer.Option(
            help="Id of the ledger that the certificate must be about.", metavar="ID"
        ),
    ] = None,
    tsa_root: Annotated[
        Path | None,
        typer.Option(
            help="Root certificate in PEM of a time stamping authority that you trust; "
            "the certificate must then have a time stamp of it."
        ),
    ] = None,
    audit_file: Annotated[
        Path | None,
        typer.Option(
            "--audit",
            help="File of the audit that the certificate must name.",
            metavar="AUDIT.json",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Check a certificate, and say which conclusions it allows.

    It checks that a key that you trust signed. If the ledger is there, it compares the
    log, the rounds and the model with the certificate. If the ledger still has the
    clients' updates, it computes the forgetting again. Exit codes: 0 a trusted key
    signed and every possible check holds; 1 a check fails; 2 no certificate, key or
    ledger is there; 3 not authenticated: no check fails, but no trusted key signed.

    Example: `fastfedul certificate check RUN/certificates/1.json --public-key KEY.pub`
    """
    with ExitStack() as stack:
        try:
            found = read_certificate(certificate)
            keys = believed_keys(public_key)
            stamp = Stamp.beside(certificate, tsa_root)
            place = run or _around(certificate)
            ledger = stack.enter_context(LedgerReader(place)) if place else None
            if ledger is not None:
                require_anchored(ledger)
        except LedgerDamagedError:
            raise
        except (InvalidInputError, LedgerError) as error:
            print_error(str(error), only_json=json)
            raise typer.Exit(2) from None
        with working("checking"):
            result = audit(
                found,
                ledger,
                keys,
                ledger_id=ledger_id,
                stamp=stamp,
                attached=audit_file,
            )
        names = found.predicate.clients
        # A ledger that fails its checks may not be readable.
        known = ledger.clients() if ledger and not result.failed else names
        lookalikes = lookalike_warnings(names, known)
    if json:
        print_json({**_facts(result, found), "warnings": list(lookalikes)})
    else:
        _show(result, found, place, lookalikes)
    if result.failed:
        raise typer.Exit(1)
    if not result.ok:
        raise typer.Exit(NOT_AUTHENTICATED)


@app.command()
def timestamp(
    certificate: Annotated[
        Path, typer.Argument(help="File of the certificate.", metavar="CERTIFICATE")
    ],
    tsa: Annotated[
        str, typer.Option(help="Address of a time stamping authority.", metavar="URL")
    ],
    json: JsonFlag = False,
) -> None:
    """Have somebody else say when a certificate existed, by RFC 3161.

    The authority gets a digest of the file and nothing else. Its answer is put beside
    the file, in CERTIFICATE.tsr, and counts as long as the file stays as it is.

    Example: `fastfedul certificate timestamp RUN/certificates/1.json --tsa URL`
    """
    read_certificate(certificate)
    with working("waiting for the authority"):
        place, time = request_stamp(certificate, tsa)
    if json:
        print_json({"stamp": str(place), "time": time.isoformat()})
    else:
        facts = [("time", time.isoformat()), ("stamp", str(place))]
        print_facts("Time stamp", facts)


def believed_keys(public_key: Path | None) -> tuple[PublicKey, ...]:
    """Return the key of the command line alone, else the keys that the user pinned."""
    return (read_public_key(public_key),) if public_key else trusted_keys()


def _around(certificate: Path) -> Path | None:
    """Return the run or ledger in whose folder of certificates a file lies."""
    folder = certificate.absolute().parent.parent
    inside = [folder / INDEX, folder / "ledger" / INDEX]
    return folder if any(path.is_file() for path in inside) else None


def _facts(result: Audit, found: Certificate) -> dict[str, Any]:
    statement = found.statement.to_json()
    return {
        "ok": result.ok,
        "authenticated": result.fingerprint is not None,
        "checks": [
            {"name": check.name, "verdict": check.verdict, "text": check.text}
            for check in result.checks
        ],
        "signed": found.is_signed,
        "fingerprint": result.fingerprint,
        "subject": statement["subject"],
        "certificate": statement["predicate"],
    }


def _show(
    result: Audit, found: Certificate, place: Path | None, lookalikes: Sequence[str]
) -> None:
    said, models = found.predicate, found.statement
    coverage = said.coverage.all
    names = ", ".join(show_name(name) for name in said.clients)
    print_facts(
        f"Certificate: {said.action} {names}",
        [
            ("ledger id", said.ledger.id),
            ("federation", _plain(said.ledger.federation or "has no name")),
            ("applied", _plain(said.applied)),
            ("updates", said.history),
            *_given_up(said.sums_given_up),
            ("rounds", _rounds(said.rounds)),
            ("kept of their share", "-" if coverage is None else f"{coverage:.1%}"),
            ("model before, SHA-256", models.before.sha256),
            ("model after, SHA-256", models.after.sha256),
            ("signed by", result.fingerprint or "nobody whom you trust"),
            ("ledger", str(place or "not at hand; only the file is checked")),
        ],
    )  # fmt: skip
    for text in lookalikes:
        warn(text)
    for check in result.checks:
        color = _COLORS[check.verdict]
        out().print(
            f"[{color}]{check.verdict}[/{color}] {check.name}: {escape(check.text)}",
            soft_wrap=True,
        )
    if result.failed:
        why = f"{', '.join(result.failed)} fails"
        say(why, level="error", label="does not hold")
        return
    if not result.ok:
        say(result.checks[0].text, level="warning", label="not authenticated")
        return
    # In the words of this program: a file may say anything.
    may, may_not = conclusions(erased=said.history == "erased")
    for title, texts in (
        ("You may conclude", may),
        ("You may not conclude", may_not),
    ):
        out().print(f"{title}:")
        for text in texts:
            out().print(f"- {text}", markup=False)


def _rounds(found: RoundCounts) -> str:
    """Return in words how many rounds a certificate is about."""
    if found.taken_part is None:
        return f"{found.recorded} recorded"
    return f"{found.taken_part} of {found.recorded}"


def _given_up(count: int | None) -> list[tuple[str, str]]:
    """Return the line about sums of others that the erasure gave up, if any."""
    if not count:
        return []
    return [("given up", f"the sums of {count:,} other clients")]


def _plain(text: str) -> str:
    """Return text that is safe to print, from any author."""
    return text if text.isprintable() else repr(text)
