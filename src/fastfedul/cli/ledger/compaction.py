"""`fastfedul ledger compact`: sums in place of rounds."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fastfedul.cli.options import LedgerPath
from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_json,
    progress_bar,
    show_bytes,
    warn,
)
from fastfedul.errors import InvalidInputError
from fastfedul.ledger.changes.compact import Compaction
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.keeping import Keep


def compact(
    path: LedgerPath,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask. There is no way back.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would do, and do nothing.")
    ] = False,
    keep: Annotated[
        str,
        typer.Option(help="sums, or sums:K for sums of clients of K rounds or more."),
    ] = "sums",
    json: JsonFlag = False,
) -> None:
    """Make the ledger small: one sum per client in place of rounds.

    Afterwards its size depends on the number of clients, not of rounds. You can forget
    a client as before, and training can go on. Steps and updates of rounds are removed,
    and everything that needs them stops working: the command lists it, and asks before
    it removes anything. There is no way back.

    Example: `fastfedul ledger compact my-run --dry-run`
    """
    policy = Keep.parse(keep)
    if policy.history != "sums":
        raise InvalidInputError(f"--keep is sums or sums:K here, not {keep!r:.40}")
    with DiskLedger(path) as ledger:
        kept = ledger.settings
        if kept.history == "sums":
            if kept.sums_from != policy.sums_from:
                raise InvalidInputError(
                    f"{path} keeps sums:{kept.sums_from} already, and a ledger of sums "
                    f"cannot change to {keep}"
                )
            _say_compacted(path, ledger, json=json)
            return
        found = ledger.compaction(policy.sums_from)
        if not json:
            _announce(path, found)
        if not dry_run:
            _confirm(yes)
            with progress_bar("summing up clients") as progress:
                found = ledger.compact(progress, sums_from=policy.sums_from)
    if json:
        print_json({"path": str(path), "dry_run": dry_run, **asdict(found)})
    elif dry_run:
        out().print("Dry run: the ledger is unchanged.")
    else:
        out().print(f"Compacted to {show_bytes(found.bytes_after)}.")


def _say_compacted(path: Path, ledger: DiskLedger, *, json: bool) -> None:
    """Say that there is nothing to do, as after a compaction that was interrupted."""
    size = ledger.num_array_bytes()
    if json:
        nothing = Compaction(size, size, (), ())
        print_json({"path": str(path), "dry_run": False, **asdict(nothing)})
    else:
        out().print("Nothing to do: the ledger keeps sums already.")


def _announce(path: Path, found: Compaction) -> None:
    larger = ", so it grows" if found.bytes_after > found.bytes_before else ""
    out().print(
        f"{path}: {show_bytes(found.bytes_before)} now, "
        f"{show_bytes(found.bytes_after)} with sums only{larger}. Losses:",
        markup=False,
        soft_wrap=True,
    )
    for text in found.lost:
        out().print(f"- {text}", markup=False, soft_wrap=True)
    for text in found.notes:
        warn(text)


def _confirm(yes: bool) -> None:
    """Ask on a terminal; elsewhere --yes must have been given."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInputError(
            "compacting cannot be undone; add --yes, or --dry-run to see the losses"
        )
    if not typer.confirm("Remove the rounds for good?", err=True):
        raise typer.Abort
