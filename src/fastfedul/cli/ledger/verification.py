"""`fastfedul ledger verify`: every byte against its digest."""

from __future__ import annotations

import typer

from fastfedul.cli.options import LedgerPath
from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_json,
    progress_bar,
    say,
    show_bytes,
    show_name,
)
from fastfedul.ledger.reader import LedgerReader

_NAMED = 3
"""How many names of foreign files are shown; --json has all."""


def verify_ledger(path: LedgerPath, json: JsonFlag = False) -> None:
    """Compare every byte with its digest.

    If the ledger is damaged, the exit code is 1 and the output names the place.
    **fastfedul status** shows when the last verification was, and what it found.
    """
    # Imported here, because certificates need pydantic, which is slow to import.
    from fastfedul.forgetting.verification import verify_with_files

    with progress_bar("checking bytes") as progress:
        found = verify_with_files(path, progress)
    sums_only = False
    if not found.problems:
        with LedgerReader(path) as ledger:
            sums_only = ledger.settings.history == "sums"
    if json:
        print_json(
            {
                "ok": not found.problems,
                "problems": list(found.problems),
                "rounds": found.num_rounds,
                "files": found.num_files,
                "bytes": found.num_bytes,
                "strays": found.num_strays,
                "foreign": list(found.foreign),
                "chain": found.chain,
                "chain_covers_updates": not sums_only,
            }
        )
    elif not found.problems:
        out().print(
            f"intact: {found.num_rounds} rounds, {found.num_files} files, "
            f"{show_bytes(found.num_bytes)}; the chain ends in {found.chain}",
            soft_wrap=True,
        )
        if sums_only:
            out().print(
                "it keeps sums: the chain covers who took part with which share, not "
                "the updates",
                soft_wrap=True,
            )
        if found.num_strays:
            say(
                f"{found.num_strays} files of an interrupted writer will be removed "
                "by the next one"
            )
        if found.foreign:
            names = ", ".join(show_name(name) for name in found.foreign[:_NAMED])
            say(
                f"not the ledger's, and left alone: {len(found.foreign)} in arrays/, "
                f"such as {names}"
            )
    for problem in found.problems if not json else ():
        say(problem, level="error", label="damaged")
    if found.problems:
        raise typer.Exit(1)
