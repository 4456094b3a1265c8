"""Entry point: mounts the verbs and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.markup import escape

from fastfedul.cli import (
    certificate,
    compare,
    data,
    demo,
    evaluate,
    flower,
    forget,
    key,
    ledger,
    methods,
    request,
    train,
)
from fastfedul.cli.output import err
from fastfedul.errors import FastFedULError

app = typer.Typer(
    name="fastfedul",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_BEGIN = "Begin here"
_RUN = "Train and measure"
_FORGET = "Forget and prove it"
_KEEP = "What the server keeps"

app.command("demo", rich_help_panel=_BEGIN)(demo.run_demo)
app.command("train", rich_help_panel=_RUN)(train.train_run)
app.command("evaluate", rich_help_panel=_RUN)(evaluate.evaluate_run)
app.command("compare", rich_help_panel=_RUN)(compare.compare_methods)
app.command("report", rich_help_panel=_RUN)(compare.write_report)
app.add_typer(data.app, name="data", rich_help_panel=_RUN)
app.command("forget", rich_help_panel=_FORGET)(forget.forget_clients)
app.add_typer(request.app, name="request", rich_help_panel=_FORGET)
app.add_typer(certificate.app, name="certificate", rich_help_panel=_FORGET)
app.add_typer(key.app, name="key", rich_help_panel=_FORGET)
app.command("methods", rich_help_panel=_FORGET)(methods.show_methods)
app.add_typer(ledger.app, name="ledger", rich_help_panel=_KEEP)
app.add_typer(flower.app, name="flower", rich_help_panel=_KEEP)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastfedul {version('fastfedul')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and stop.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Take a client back out of a federated model, without data and without training.

    Start with **fastfedul demo**. **train** runs a federation on one machine,
    **evaluate**, **compare** and **report** measure it. A **ledger** remembers what
    every client contributed to every round. **forget** reads it, estimates what the
    model would be without a client, and makes that the current model. It is an
    estimate: each result says how much of the client's history it could use, and
    nothing here certifies that a model has forgotten. **request** asks for it while
    training goes on; every forgetting gets a **certificate** of what was done, signed
    with a **key**.

    Exit codes: 0 done; 1 refused, damaged or failed, with one line that says why; 2
    wrong usage; 130 interrupted.
    """


def run() -> None:
    """Run the command line."""
    run_app(app)


def run_app(application: typer.Typer) -> None:
    """Run verbs; errors become one line and an exit code."""
    try:
        application()
    except FastFedULError as error:
        _print_error(str(error))
        sys.exit(1)
    except OSError as error:
        # Most errors about files are explained where they arise, with what to do;
        # the rest at least name the file.
        _print_error(_told(error))
        if _is_of_output(error):
            # Else the interpreter would try again on leaving, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _print_error(text: str) -> None:
    line = " ".join(text.split("\n"))
    err().print(f"[red]error:[/red] {escape(line)}", soft_wrap=True)


def _told(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if _is_of_output(error):
        return f"cannot write the output: {reason}"
    if error.filename is None:
        return str(FastFedULError(reason))
    name = error.filename
    name = os.fsdecode(name) if isinstance(name, bytes) else name
    # A file may be called anything: the error class shows it on one line.
    return str(FastFedULError(f"cannot use {name}: {reason}"))


def _is_of_output(error: OSError) -> bool:
    """Return whether standard output failed: it is the one file without a name."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EIO)
