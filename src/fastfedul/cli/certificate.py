"""`fastfedul certificate`: check a certificate against its signature and ledger."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fastfedul.cli.output import (
    JsonFlag,
    err,
    out,
    print_error,
    print_facts,
    print_json,
    show_name,
)
from fastfedul.errors import InvalidInputError, LedgerDamagedError, LedgerError
from fastfedul.forgetting.certificates import conclusions, read_certificate
from fastfedul.forgetting.checking import Audit, audit
from fastfedul.forgetting.signing import read_public_key
from fastfedul.ledger.disk import LedgerReader
from fastfedul.ledger.store.folder import INDEX

_COLORS = {"holds": "green", "fails": "red", "not checked": "yellow"}


app = typer.Typer(no_args_is_help=True)


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
    public_key: Annotated[
        Path | None,
        typer.Option(help="The signer's public key, a PEM file that you trust."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Check a certificate, and say which conclusions it allows.

    It checks the signature. If the ledger is there, it compares the log, the rounds and
    the model with the certificate. If the ledger still has the clients' updates, it
    computes the forgetting again. Exit codes: 0 all checks that were possible hold; 1 a
    check fails, or none was possible; 2 no certificate, key or ledger is there.

    Example: `fastfedul certificate check RUN/certificates/1.json --public-key KEY.pub`
    """
    with ExitStack() as stack:
        try:
            found = read_certificate(certificate)
            key = None if public_key is None else read_public_key(public_key)
            place = run or _around(certificate)
            ledger = stack.enter_context(LedgerReader(place)) if place else None
        except LedgerDamagedError:
            raise
        except (InvalidInputError, LedgerError) as error:
            print_error(str(error), only_json=json)
            raise typer.Exit(2) from None
        with err().status("checking"):
            result = audit(found, ledger, key)
    if json:
        print_json(_facts(result, found))
    else:
        _show(result, found, place)
    if not result.ok:
        raise typer.Exit(1)


def _around(certificate: Path) -> Path | None:
    """Return the run or ledger in whose folder of certificates a file lies."""
    folder = certificate.absolute().parent.parent
    inside = [folder / INDEX, folder / "ledger" / INDEX]
    return folder if any(path.is_file() for path in inside) else None


def _facts(result: Audit, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "ok": result.ok,
        "checks": [
            {"name": check.name, "verdict": check.verdict, "text": check.text}
            for check in result.checks
        ],
        "signed": found["signature"] is not None,
        "fingerprint": result.fingerprint,
        "certificate": found,
    }


def _show(result: Audit, found: dict[str, Any], place: Path | None) -> None:
    coverage = found["coverage"]["all"]
    names = ", ".join(show_name(str(name)) for name in found["clients"])
    ledger = str(place) if place else "not at hand; only the file is checked"
    print_facts(
        f"Certificate: {_plain(found['action'])} {names}",
        [
            ("applied", _plain(found["applied"])),
            ("updates", _plain(found["history"])),
            ("rounds", _rounds(found["rounds"])),
            ("kept of their share", "-" if coverage is None else f"{coverage:.1%}"),
            ("model before", _plain(found["model"]["before"])),
            ("model after", _plain(found["model"]["after"])),
            ("signed by", result.fingerprint or "nobody"),
            ("ledger", ledger),
        ],
    )  # fmt: skip
    for check in result.checks:
        color = _COLORS[check.verdict]
        out().print(
            f"[{color}]{check.verdict}[/{color}] {check.name}: {escape(check.text)}",
            soft_wrap=True,
        )
    if not result.ok:
        failed = [c.name for c in result.checks if c.verdict == "fails"]
        why = f"{', '.join(failed)} fails" if failed else "nothing could be checked"
        err().print(f"[red]does not hold:[/red] {why}", soft_wrap=True)
        return
    # In the words of this program: a file may say anything.
    may, may_not = conclusions(erased=found["history"] == "erased")
    for title, texts in (
        ("You may conclude", may),
        ("You may not conclude", may_not),
    ):
        out().print(f"{title}:")
        for text in texts:
            out().print(f"- {text}", markup=False)


def _rounds(found: Mapping[str, Any]) -> str:
    """Return in words how many rounds a certificate is about."""
    taken, recorded = found["taken_part"], found["recorded"]
    return f"{recorded} recorded" if taken is None else f"{taken} of {recorded}"


def _plain(text: str) -> str:
    """Return text that is safe to print, from any author."""
    return text if text.isprintable() else repr(text)
