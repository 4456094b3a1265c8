"""`fastfedul ledger info`, `lineage` and `clients`: the contents of a ledger."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fastfedul.cli.local_training import (
    TrainingSpan,
    show_training,
    training_spans,
)
from fastfedul.cli.options import LedgerPath
from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_facts,
    print_json,
    print_table,
    show_bytes,
    show_name,
)
from fastfedul.ledger.changes.drop import dropped_by
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.schema import FORMAT


def info(path: LedgerPath, json: JsonFlag = False) -> None:
    """Show rounds, clients, settings, size, and who was forgotten."""
    with LedgerReader(path) as ledger:
        settings, spans, facts = ledger.index.look(partial(_facts, ledger))
    if json:
        print_json(facts)
        return
    states = facts["clients"]
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


def _facts(
    ledger: LedgerReader,
) -> tuple[LedgerSettings, list[TrainingSpan], dict[str, Any]]:
    """Return settings, local training, and everything that `info --json` shows."""
    clients = ledger.clients().values()
    states = {
        state: sum(client.state == state for client in clients)
        for state in ("active", "forgotten", "erased")
    }
    settings = ledger.settings
    spans = training_spans(ledger.rounds())
    facts = {
        "path": str(ledger.path),
        "format": FORMAT,
        "ledger_id": ledger.ledger_id,
        "federation": settings.federation,
        "rounds": ledger.num_rounds,
        "clients": states,
        "parameters": settings.layout.size,
        "arrays": len(settings.layout.slots),
        "buffers": list(ledger.buffer_names),
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
    return settings, spans, facts


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

    with LedgerReader(path) as ledger:
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


def clients(path: LedgerPath, json: JsonFlag = False) -> None:
    """List the clients: rounds, share, kept updates, norm of updates."""
    with LedgerReader(path) as ledger:
        sums_only, entries = ledger.index.look(
            lambda: (ledger.settings.history == "sums", ledger.clients())
        )
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
            for name, entry in entries.items()
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
    """Return the line about updates that gave way to the budget, if there are any."""
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
