"""Options and last lines of verbs that compare a run's clients without changing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastfedul.cli.output import out, warn

RunOrLedger = Annotated[Path, typer.Argument(help="A run, or a ledger.", metavar="RUN")]
PageFile = Annotated[
    Path | None, typer.Option("--out", help="Also write an HTML page to this file.")
]


def warn_of(notes: tuple[str, ...]) -> None:
    """Show the limits of an answer as warnings."""
    for note in notes:
        warn(note)


def name_page(page: Path | None) -> None:
    """Print where the page is, if there is one."""
    if page is not None:
        out().print(f"page: {page}", markup=False, soft_wrap=True)
