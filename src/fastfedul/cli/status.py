"""`fastfedul status`: how a run or ledger is doing, on one screen."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastfedul.cli.options import RunPath
from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_facts,
    print_json,
    say,
    show_bytes,
    show_name,
)

if TYPE_CHECKING:
    from fastfedul.runs.status import Status

ALERT_CODE = 1
"""Exit code of `--alert` if an operator should see to something now."""

_NAMED = 3
_LONGEST = 1e6
"""Hours: more than a century."""


def show_status(
    path: RunPath,
    alert: Annotated[
        bool,
        typer.Option(
            "--alert",
            help=f"End with exit code {ALERT_CODE} if there is a problem: damage, a "
            "request that waits too long, or a disk that is nearly full.",
        ),
    ] = False,
    max_wait: Annotated[
        float,
        typer.Option(
            help="Hours after which a waiting request is a problem.", metavar="HOURS"
        ),
    ] = 24.0,
    json: JsonFlag = False,
) -> None:
    """Show how a run or ledger is doing: rounds, clients, requests, disk, integrity.

    The last lines say what to do next. The command changes nothing and takes no lock,
    so it may run at any time.

    Example: `fastfedul status my-run`
    """
    from fastfedul.limits import require_number
    from fastfedul.runs.status import status_of

    require_number("--max-wait", max_wait, least=0, most=_LONGEST)
    found = status_of(path, long_wait=timedelta(hours=max_wait))
    if json:
        print_json(_facts(found))
    else:
        _show(found)
    if alert and found.problems:
        raise typer.Exit(ALERT_CODE)


def _facts(found: Status) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "run": None if found.run is None else str(found.run),
        "federation": found.federation,
        "rounds": found.rounds,
        "planned": found.planned,
        "clients": found.clients,
        "last_clients": found.last_clients,
        "metrics": found.metrics and asdict(found.metrics),
        "forgot_since_metrics": found.forgot_since,
        "changed": found.changed,
        "writer": found.writer,
        "failures": len(found.failures),
        "last_failures": [asdict(one) for one in found.last_failures],
        "waiting": [
            {
                "request": one.number,
                "client": one.client,
                "asked": one.asked,
                "reason": one.reason,
            }
            for one in found.waiting
        ],
        "bytes": found.num_bytes,
        "bytes_at_end": found.bytes_at_end,
        "budget": found.budget,
        "free_bytes": found.free_bytes,
        "verified": found.verified and asdict(found.verified),
        "certificates": {
            "all": found.certificates,
            "missing": found.missing,
            "unsigned": found.unsigned,
        },
        "problems": list(found.problems),
        "advice": list(found.advice),
    }


def _show(found: Status) -> None:
    named = f", {show_name(found.federation)}" if found.federation else ""
    title = f"Run {found.run}" if found.run else f"Ledger {found.path}"
    print_facts(
        title + named,
        [
            ("rounds", _rounds(found)),
            ("clients", _clients(found)),
            ("last round", _last_round(found)),
            ("left out", _failures(found)),
            ("requests", _waiting(found)),
            ("certificates", _certificates(found)),
            ("disk", _disk(found)),
            ("integrity", _integrity(found)),
        ],
    )
    for text in found.problems:
        say(text, level="error", label="problem")
    for text in found.advice:
        out().print(f"next: {text}", markup=False, soft_wrap=True)
    if not found.problems and not found.advice:
        out().print("Nothing to do.")


def _rounds(found: Status) -> str:
    of = f" of {found.planned}" if found.planned is not None else ""
    training = f", process {found.writer} writes" if found.writer else ""
    return f"{found.rounds:,}{of}{training}"


def _clients(found: Status) -> str:
    named = [f"{count:,} {state}" for state, count in found.clients.items() if count]
    return ", ".join(named) or "none yet"


def _last_round(found: Status) -> str:
    if not found.rounds:
        return "none yet"
    text = f"{found.last_clients:,} clients"
    own = found.metrics
    if own is not None and own.main is not None:
        late = "" if own.round + 1 == found.rounds else f" after round {own.round + 1}"
        since = ", before the last forgetting" if found.forgot_since else ""
        text += f", accuracy {own.main:.1%}{late}{since}"
    return f"{text}; the ledger changed at {found.changed}"


def _failures(found: Status) -> str:
    if not found.failures:
        return "nobody"
    last = found.last_failures
    names = list(dict.fromkeys(show_name(one.client) for one in last))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    now = f", in the last round {', '.join(names[:_NAMED])}{more}" if names else ""
    return f"{len(found.failures):,} replies left out or capped{now}"


def _waiting(found: Status) -> str:
    if not found.waiting:
        return "none waits"
    first = found.waiting[0]
    count = len(found.waiting)
    text = "1 waits" if count == 1 else f"{count:,} wait"
    return f"{text}, the oldest for {show_name(first.client)} since {first.asked}"


def _certificates(found: Status) -> str:
    text = f"{found.certificates:,}"
    if found.missing:
        text += f", {found.missing:,} missing"
    if found.unsigned:
        text += f", {found.unsigned:,} not signed"
    return text


def _disk(found: Status) -> str:
    text = show_bytes(found.num_bytes)
    if found.budget is not None:
        text += f" of a budget of {show_bytes(found.budget)}"
    if found.bytes_at_end is not None and found.bytes_at_end > found.num_bytes:
        text += f", about {show_bytes(found.bytes_at_end)} at the end"
    if found.free_bytes is not None:
        text += f"; {show_bytes(found.free_bytes)} free"
    return text


def _integrity(found: Status) -> str:
    own = found.verified
    if own is None:
        return "never verified"
    text = "intact" if not own.problems else f"{len(own.problems)} problems"
    rounds = "" if own.rounds == found.rounds else f", {own.rounds:,} rounds then"
    return f"{text} at {own.time}{rounds}"
