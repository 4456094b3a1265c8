"""Options and last lines of verbs that compare a run's clients without changing it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from fastfedul.cli.compare import check_page
from fastfedul.cli.output import Say, out, task_progress, warn, working

Found = TypeVar("Found")

RunOrLedger = Annotated[Path, typer.Argument(help="A run, or a ledger.", metavar="RUN")]
PageFile = Annotated[
    Path | None, typer.Option("--out", help="Also write an HTML page to this file.")
]


def look_into(
    path: Path,
    page: Path | None,
    look: Callable[[Say], Found],
    render: Callable[[str, Found], str],
) -> Found:
    """Return the findings about a run, and write their page if one is wanted.

    Args:
        path: The run.
        page: The file of the page; None for no page.
        look: Returns the findings, and says how far it is.
        render: Returns the page from the name of the run and the findings.
    """
    check_page(path, page)
    with task_progress("reading the ledger") as say:
        found = look(say)
    if page is not None:
        from fastfedul.report.page import write_text

        with working("drawing the page"):
            write_text(page, render(path.name, found))
    return found


def warn_of(notes: tuple[str, ...]) -> None:
    """Show the limits of an answer as warnings."""
    for note in notes:
        warn(note)


def name_page(page: Path | None) -> None:
    """Print where the page is, if there is one."""
    if page is not None:
        out().print(f"page: {page}", markup=False, soft_wrap=True)
