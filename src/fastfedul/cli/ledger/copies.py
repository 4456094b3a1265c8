"""`fastfedul ledger import`, `backup` and `restore`: ledgers from copies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastfedul.cli.local_training import (
    BatchSize,
    Epochs,
    LearningRate,
    Momentum,
    chosen_training,
)
from fastfedul.cli.options import LedgerPath
from fastfedul.cli.output import JsonFlag, out, print_json, progress_bar
from fastfedul.cli.stopping import telling_how_to_go_on, this_command
from fastfedul.errors import InvalidInputError
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.importing import import_ledger
from fastfedul.ledger.restoration import restore_ledger
from fastfedul.ledger.store.codec import STORAGE_DTYPES


def import_models(
    folder: Annotated[Path, typer.Argument(help="Folder with the saved models.")],
    out_path: Annotated[
        Path, typer.Argument(help="Where the new ledger goes.", metavar="OUT")
    ],
    aggregation: Annotated[
        str, typer.Option(help="mean, median or trimmed-mean:FRACTION.")
    ] = "mean",
    dtype: Annotated[
        str,
        typer.Option(
            help=f"How the ledger stores updates: {', '.join(STORAGE_DTYPES)}."
        ),
    ] = "float32",
    buffer: Annotated[
        list[str] | None,
        typer.Option(help="Name of an array that is not learned; may be repeated."),
    ] = None,
    lr: LearningRate = None,
    momentum: Momentum = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    arrays: Annotated[
        str | None,
        typer.Option(
            help="Where the array files go, such as s3://bucket/prefix. [OUT]",
            metavar="ADDRESS",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Make a ledger from models that were saved in every round.

    FOLDER holds `global/0.safetensors`, `global/1.safetensors` and so on (the server's
    model before each round, and the last one); `clients/0/NAME.safetensors` and so on
    (each participant's model after its training in that round); and, if clients count
    by their size, `shares.json`: {"0": {"NAME": 120, ...}, ...}, with every round in
    it. Files may be .npz too.

    If you know how the clients trained, add --lr, --momentum, --batch-size and
    --epochs: all four or none, the same for every round. **forget** uses them.
    """
    if dtype not in STORAGE_DTYPES:
        raise InvalidInputError(
            f"--dtype is {', '.join(STORAGE_DTYPES)}, not {dtype!r:.40}"
        )
    local = chosen_training(lr, momentum, batch_size, epochs)
    with (
        telling_how_to_go_on(
            lambda: (
                f"stopped; no ledger was left at {out_path}; start again with: "
                f"{this_command()}"
            )
        ),
        progress_bar("importing rounds") as progress,
    ):
        rounds = import_ledger(
            folder,
            out_path,
            aggregation=aggregation,
            update_dtype=dtype,
            buffers=frozenset(buffer or ()),
            local=local,
            arrays=arrays,
            progress=progress,
        )
    if json:
        print_json({"path": str(out_path), "rounds": rounds})
    else:
        out().print(
            f"{rounds} rounds imported to {out_path}", markup=False, soft_wrap=True
        )


def backup(path: LedgerPath, json: JsonFlag = False) -> None:
    """Copy the index to the object store that has the arrays.

    A writer does so by itself when it closes the ledger. Run this after a message that
    the copy is old, or after requests were filed.

    Example: `fastfedul ledger backup my-ledger`
    """
    with DiskLedger(path) as ledger:
        ledger.backup()
        rounds, address = ledger.num_rounds, ledger.files.address
    if json:
        print_json({"path": str(path), "arrays_at": address, "rounds": rounds})
    else:
        out().print(
            f"{address} has the index of {rounds} rounds", markup=False, soft_wrap=True
        )


def restore(
    address: Annotated[
        str,
        typer.Argument(
            help="Where the arrays lie, such as s3://bucket/prefix.", metavar="ADDRESS"
        ),
    ],
    path: Annotated[
        Path, typer.Argument(help="Where the ledger goes.", metavar="PATH")
    ],
    json: JsonFlag = False,
) -> None:
    """Bring a ledger back from an object store.

    For a ledger whose folder was lost. From then on only PATH may write to the store.
    A folder that wrote there before is refused.

    Example: `fastfedul ledger restore s3://bucket/prefix my-ledger`
    """
    rounds = restore_ledger(address, path)
    if json:
        print_json({"path": str(path), "arrays_at": address, "rounds": rounds})
    else:
        out().print(f"{rounds} rounds restored to {path}", markup=False, soft_wrap=True)
