"""`fastfedul ledger`: look at a ledger, verify it, import, back up and restore one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape

from fastfedul.cli.local_training import (
    BatchSize,
    Epochs,
    LearningRate,
    Momentum,
    chosen_training,
    show_training,
    training_spans,
)
from fastfedul.cli.output import (
    JsonFlag,
    err,
    out,
    print_facts,
    print_json,
    print_table,
    progress_bar,
    show_bytes,
    show_name,
    show_seconds,
    warn,
)
from fastfedul.cli.stopping import telling_how_to_go_on, this_command
from fastfedul.errors import InvalidInputError, LedgerDamagedError, LedgerError
from fastfedul.ledger.advice import Option, options_within
from fastfedul.ledger.changes.compact import Compaction
from fastfedul.ledger.changes.drop import dropped_by
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.estimate import (
    READ_RATE,
    WRITE_RATE,
    FederationSize,
    estimate,
)
from fastfedul.ledger.importing import import_ledger
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.restoration import restore_ledger
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from fastfedul.ledger.store.schema import FORMAT
from fastfedul.ledger.verify import Verification, verify

app = typer.Typer(no_args_is_help=True)

_NAMED = 3
"""How many names of foreign files are shown; --json has all."""

LedgerPath = Annotated[
    Path, typer.Argument(help="A ledger, or a run that contains one.", metavar="PATH")
]


@app.command()
def info(path: LedgerPath, json: JsonFlag = False) -> None:
    """Show rounds, clients, settings, size, and who was forgotten."""
    with LedgerReader(path) as ledger, ledger.snapshot():
        clients = ledger.clients().values()
        states = {
            state: sum(client.state == state for client in clients)
            for state in ("active", "forgotten", "erased")
        }
        settings = ledger.settings
        spans = training_spans(ledger.rounds())
        facts: dict[str, Any] = {
            "path": str(ledger.path),
            "format": FORMAT,
            "ledger_id": ledger.ledger_id,
            "federation": settings.federation,
            "rounds": ledger.num_rounds,
            "clients": states,
            "parameters": settings.layout.size,
            "arrays": len(settings.layout.slots),
            "buffers": sorted(ledger.final.buffers),
            "aggregation": settings.aggregation,
            "server_optimizer": str(settings.optimizer) if settings.optimizer else None,
            "update_dtype": settings.update_dtype,
            "step_dtype": settings.step_dtype,
            "history": settings.history,
            "sums_from": settings.sums_from,
            "local_training": [asdict(span) for span in spans],
            "budget": settings.budget,
            "dropped": dropped_by(ledger).details(),
            "clients_with_drops": sum(client.num_dropped > 0 for client in clients),
            "bytes": ledger.num_array_bytes(),
            "arrays_at": ledger.files.address,
            "chain": ledger.chain.hex(),
            "model": str(ledger.model_path),
            "events": [
                {
                    "time": event.time,
                    "kind": event.kind,
                    "clients": list(event.clients),
                    "details": dict(event.details),
                }
                for event in ledger.events()
            ],
        }
    if json:
        print_json(facts)
        return
    people = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    print_facts(
        f"Ledger {path}",
        [
            ("id", facts["ledger_id"]),
            ("federation", facts["federation"] or "has no name"),
            ("rounds", str(facts["rounds"])),
            ("clients", people or "none yet"),
            ("parameters", f"{facts['parameters']:,} in {facts['arrays']} arrays"),
            ("aggregation", facts["aggregation"]),
            ("server", facts["server_optimizer"] or "adds the aggregate"),
            ("local training", show_training(spans)),
            ("keeps", _kept(settings)),
            ("size", show_bytes(facts["bytes"]) + _of(settings.budget)),
            *_given_up(facts),
            ("arrays at", facts["arrays_at"]),
            ("chain", facts["chain"]),
            ("model", facts["model"]),
        ],
    )
    for event in facts["events"]:
        out().print(f"{event['time']}  {_told(event)}", markup=False)


@app.command()
def lineage(
    path: LedgerPath,
    picture: Annotated[
        Path | None,
        typer.Option(help="Also draw it to this file, such as lineage.svg."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show every model that the ledger had, and how it was made.

    Rounds that follow each other are one line; --json has every model with its digest
    and the digest of the model it was made from.
    """
    from fastfedul.report.lineage_chart import draw_lineage, stages_of

    with LedgerReader(path) as ledger, ledger.snapshot():
        models, ledger_id = ledger.lineage(), ledger.ledger_id
    if picture is not None:
        draw_lineage(models, picture)
    if json:
        rows = [asdict(model) for model in models]
        print_json({"ledger_id": ledger_id, "models": rows})
        return
    print_table(
        f"Models of {path}",
        ["made by", "BLAKE3 digest of the last one"],
        [[stage.title, stage.last.digest] for stage in stages_of(models)],
    )


@app.command()
def clients(path: LedgerPath, json: JsonFlag = False) -> None:
    """List the clients: rounds, share, kept updates, norm of updates."""
    with LedgerReader(path) as ledger, ledger.snapshot():
        sums_only = ledger.settings.history == "sums"
        kept = "updates in its sum" if sums_only else "updates kept"
        rows = [
            {
                "client": name,
                "state": entry.state,
                "rounds": entry.num_updates,
                "share": entry.mean_share,
                "kept": entry.num_kept,
                "summed": entry.num_summed,
                "dropped": entry.num_dropped,
                "norm": entry.mean_norm,
            }
            for name, entry in ledger.clients().items()
        ]
    if json:
        print_json({"clients": rows})
        return
    columns = {
        "client": [show_name(cast(str, row["client"])) for row in rows],
        "state": [str(row["state"]) for row in rows],
        "rounds": [str(row["rounds"]) for row in rows],
        "mean share": [_number(row["share"]) for row in rows],
        kept: [str(row["summed" if sums_only else "kept"]) for row in rows],
        "mean norm": [_number(row["norm"]) for row in rows],
    }
    if any(row["dropped"] for row in rows):
        columns["given up"] = [str(row["dropped"]) for row in rows]
    print_table(
        f"Clients of {path}",
        list(columns),
        [list(cells) for cells in zip(*columns.values(), strict=True)],
    )


@app.command("estimate")
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
    """Show what each policy gives for a budget, each with its best dtype."""
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


@app.command("verify")
def verify_ledger(path: LedgerPath, json: JsonFlag = False) -> None:
    """Compare every byte with its digest.

    If the ledger is damaged, the exit code is 1 and the output names the place.
    """
    sums_only = False
    try:
        with LedgerReader(path) as ledger, progress_bar("checking bytes") as progress:
            found = verify(ledger, progress)
            beside = _problems_beside(ledger)
            found = replace(found, problems=(*found.problems, *beside))
            sums_only = not found.problems and ledger.settings.history == "sums"
    except LedgerDamagedError as error:
        # An index so damaged that it cannot even be opened.
        found = Verification((str(error),), 0, 0, 0, 0, "")
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
            err().print(
                f"{found.num_strays} files of an interrupted writer will be removed "
                "by the next one"
            )
        if found.foreign:
            names = ", ".join(show_name(name) for name in found.foreign[:_NAMED])
            err().print(
                f"not the ledger's, and left alone: {len(found.foreign)} in arrays/, "
                f"such as {names}",
                markup=False,
                soft_wrap=True,
            )
    for problem in found.problems if not json else ():
        err().print(f"[red]damaged:[/red] {escape(problem)}", soft_wrap=True)
    if found.problems:
        raise typer.Exit(1)


def _problems_beside(ledger: LedgerReader) -> Iterator[str]:
    """Yield what is wrong with the files beside a ledger."""
    # Imported here, because certificates need pydantic, as above.
    from fastfedul.forgetting.folder import require_newest, run_model_problem

    try:
        require_newest(ledger)
        problem = run_model_problem(ledger)
        if problem is not None:
            yield f"{problem}; fastfedul request apply writes it again"
    except LedgerError as error:
        yield str(error)


@app.command()
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


@app.command("import")
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


@app.command()
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


@app.command()
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


def _kept(settings: LedgerSettings) -> str:
    if settings.history == "sums":
        least = settings.sums_from
        of = f" of {least} rounds or more, {settings.update_dtype} parts of others"
        own = "a sum per client" + (of if least > 1 else "")
        return f"{own}, {settings.update_dtype} pairs of updates"
    return f"{settings.update_dtype} updates, {settings.step_dtype} steps"


def _of(budget: int | None) -> str:
    return "" if budget is None else f" of arrays, budget {show_bytes(budget)}"


def _given_up(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the line that says what gave way to the budget, if anything did."""
    dropped = facts["dropped"]
    if not dropped["updates"] and not dropped["pairs"]:
        return []
    what = f"{dropped['updates']:,} updates of {facts['clients_with_drops']:,} clients"
    pairs = f", {dropped['pairs']:,} pairs" if dropped["pairs"] else ""
    return [("given up", f"{what}{pairs} ({show_bytes(dropped['bytes'])})")]


def _told(event: dict[str, Any]) -> str:
    names = ", ".join(show_name(name) for name in event["clients"])
    if event["kind"] == "compact":
        return "compact: sums in place of rounds"
    if event["kind"] == "drop":
        details = event["details"]
        parts = [f"{details['updates']} updates"]
        if details["first_round"] is not None:
            span = f"{details['first_round']} to {details['last_round']}"
            parts = [f"{parts[0]} of rounds {span}"]
        if details["pairs"]:
            parts.append(f"{details['pairs']} pairs")
        return (
            f"drop: {' and '.join(parts)} ({show_bytes(details['bytes'])}), for which "
            "the budget had no room"
        )
    return f"{event['kind']}: {names}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-"
