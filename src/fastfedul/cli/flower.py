"""`fastfedul flower`: clean the database of a Flower server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastfedul.cli.output import (
    JsonFlag,
    print_facts,
    print_json,
    show_bytes,
    warn,
    working,
)
from fastfedul.integrations.flower.database import clear_deleted

app = typer.Typer(no_args_is_help=True)


@app.command()
def clean(
    path: Annotated[
        Path,
        typer.Argument(
            help="The file given to flower-superlink as --database.", metavar="STATE.db"
        ),
    ],
    json: JsonFlag = False,
) -> None:
    """Remove deleted arrays from the database of a SuperLink.

    Every update that a client sends passes through that database. Flower deletes it
    when the run is over, but its bytes stay in the file and in the log beside it until
    they happen to be overwritten. So a client that was erased from the ledger
    can still be read there. Stop the SuperLink, run this, and start it again: all rows
    (nodes, keys, runs) stay as they are.

    Example: `fastfedul flower clean state.db`
    """
    with working("rewriting the database"):
        found = clear_deleted(path)
    if json:
        print_json(
            {
                "path": str(path),
                "rows": found.num_rows,
                "objects": found.num_objects,
                "bytes_before": found.bytes_before,
                "bytes_after": found.bytes_after,
            }
        )
        return
    print_facts(
        f"Cleared {path}",
        [
            ("rows", f"{found.num_rows}, all kept"),
            ("size before", show_bytes(found.bytes_before)),
            ("size now", show_bytes(found.bytes_after)),
        ],
    )
    if found.num_objects:
        warn(
            f"{found.num_objects} parts of messages have not been deleted by Flower "
            "yet; start the SuperLink, let it end the run, and clear again"
        )
