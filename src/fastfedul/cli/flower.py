"""`fastfedul flower`: clean the database of a Flower server, estimate its disk."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated

import typer

from fastfedul.cli.output import (
    JsonFlag,
    err,
    print_facts,
    print_json,
    print_table,
    show_bytes,
    warn,
)
from fastfedul.integrations.flower.database import clear_deleted
from fastfedul.ledger.budget import FederationSize, budget
from fastfedul.ledger.store.codec import STORAGE_DTYPES

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
    with err().status("rewriting the database"):
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


@app.command()
def disk(
    parameters: Annotated[int, typer.Option(help="Parameters of the model.")],
    clients: Annotated[int, typer.Option(help="Clients over all rounds.")],
    rounds: Annotated[int, typer.Option(help="Rounds to record.")],
    per_round: Annotated[
        int | None, typer.Option(help="Participants of a round. [all]")
    ] = None,
    kept: Annotated[
        int | None, typer.Option(help="Updates kept of a round. [all]")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show how much disk the ledger of a federation will need.

    The table has a row for each dtype, `Recorded(..., dtype=...)`. The headroom must be
    free beyond the total: the ledger writes new files before it removes old ones.

    Example: `fastfedul flower disk --parameters 11000000 --clients 20 --rounds 100`
    """
    federation = FederationSize(
        parameters=parameters,
        clients=clients,
        rounds=rounds,
        per_round=per_round,
        kept=kept,
    )
    found = {dtype: budget(federation, dtype) for dtype in STORAGE_DTYPES}
    if json:
        print_json({dtype: asdict(needed) for dtype, needed in found.items()})
        return
    print_table(
        f"{parameters:,} parameters, {clients} clients, {rounds} rounds",
        ["dtype", "an update", "a round", "constant", "total", "headroom"],
        [
            [dtype, *(show_bytes(count) for count in astuple(needed))]
            for dtype, needed in found.items()
        ],
    )
