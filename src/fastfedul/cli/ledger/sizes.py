"""`fastfedul ledger estimate`: disk and time of a ledger before it exists."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_json,
    print_table,
    show_bytes,
    show_seconds,
)
from fastfedul.errors import InvalidInputError
from fastfedul.ledger.advice import Option, options_within
from fastfedul.ledger.estimate import (
    READ_RATE,
    WRITE_RATE,
    FederationSize,
    estimate,
)
from fastfedul.ledger.store.codec import STORAGE_DTYPES


def estimate_ledger(
    parameters: Annotated[int, typer.Option(help="Parameters of the model.")],
    clients: Annotated[int, typer.Option(help="Clients over all rounds.")],
    rounds: Annotated[int, typer.Option(help="Rounds to record.")],
    per_round: Annotated[
        int | None, typer.Option(help="Participants of a round. [all]")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Updates the ledger keeps: all, optimal:M, sums or sums:K. [all]"
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Bytes the ledger may take, such as 500GB; compares the policies.",
            metavar="BYTES",
        ),
    ] = None,
    write_rate: Annotated[
        float, typer.Option(help="Bytes a second that the disk writes and syncs.")
    ] = WRITE_RATE,
    read_rate: Annotated[
        float, typer.Option(help="Bytes a second that the disk reads.")
    ] = READ_RATE,
    json: JsonFlag = False,
) -> None:
    """Show how much disk and time the ledger of a federation will take.

    The table has a row for each dtype. The headroom must be free beyond the total: the
    ledger writes new files before it removes old ones. The times follow from measured
    ratios to plain writing and reading (`benchmarks/scale.py`).

    With --budget the table has a row for each policy, the best first, and says how many
    clients the server could forget. It takes all clients to be alike.

    Example: `fastfedul ledger estimate --parameters 11000000 --clients 20 --rounds 100`
    """
    if keep is not None and budget is not None:
        raise InvalidInputError(
            "--budget compares all policies; leave out --keep, or --budget"
        )
    if not (write_rate > 0 and read_rate > 0):
        raise InvalidInputError("a rate is a number of bytes a second above 0")
    federation = FederationSize(
        parameters=parameters,
        clients=clients,
        rounds=rounds,
        per_round=per_round,
        keep=keep or "all",
    )
    title = f"{parameters:,} parameters, {clients:,} clients, {rounds:,} rounds"
    if budget is not None:
        _compare_policies(title, federation, budget, json=json)
        return
    rates = {"write_rate": write_rate, "read_rate": read_rate}
    found = {dtype: estimate(federation, dtype, **rates) for dtype in STORAGE_DTYPES}
    if json:
        print_json({dtype: asdict(needed) for dtype, needed in found.items()})
        return
    print_table(
        title,
        ["dtype", "a round", "total", "headroom", "append", "forget"],
        [
            [
                dtype,
                show_bytes(needed.per_round),
                show_bytes(needed.total),
                show_bytes(needed.headroom),
                show_seconds(needed.append_seconds),
                show_seconds(needed.forget_seconds),
            ]
            for dtype, needed in found.items()
        ],
    )


def _compare_policies(
    title: str, federation: FederationSize, budget: str, *, json: bool
) -> None:
    """Show the result of each policy within a budget, each with its best dtype."""
    # Imported here, because pydantic takes longer to import than `info` takes to run.
    from fastfedul.runs.config import parse_bytes

    best: dict[str, Option] = {}
    for option in options_within(federation, parse_bytes(budget)):
        policy, _, count = option.keep.partition(":")
        best.setdefault("sums:K" if policy == "sums" and count else policy, option)
    found = list(best.values())
    if not found:
        raise InvalidInputError(
            f"{budget} cannot hold the models of this federation; choose a larger "
            "budget"
        )
    if json:
        print_json({"options": [asdict(option) for option in found]})
        return
    print_table(
        f"{title}, budget {budget}",
        ["keep", "dtype", "total", "clients to forget", "updates covered"],
        [
            [
                option.keep,
                option.dtype,
                show_bytes(option.total),
                f"{option.forgettable:.1%}",
                f"{option.coverage:.1%}",
            ]
            for option in found
        ],
    )
    first = found[0]
    out().print(
        f"Recommended: --keep {first.keep} --dtype {first.dtype} --budget {budget}",
        markup=False,
        soft_wrap=True,
    )
