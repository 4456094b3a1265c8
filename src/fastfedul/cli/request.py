"""`fastfedul request`: ask for a client to be forgotten, while training goes on."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fastfedul.cli.judging import ImagesFile, Judge, LargestDrop, NetworkName
from fastfedul.cli.method_options import (
    USUAL_METHOD,
    DampingNumber,
    EraseFlag,
    MethodName,
    MinimumCoverage,
    SettingTexts,
    SkewName,
    chosen_method,
    method_choice,
)
from fastfedul.cli.output import (
    JsonFlag,
    err,
    out,
    print_json,
    print_table,
    show_name,
    warn,
)
from fastfedul.cli.stopping import telling_how_to_go_on, this_command
from fastfedul.errors import (
    InvalidInputError,
    NotAcceptedError,
    UnlearnRefusedError,
)
from fastfedul.forgetting.certificates import certificate_path, certificates_folder
from fastfedul.forgetting.requests import (
    AppliedRequest,
    add_request,
    apply_requests,
    cancel_request,
    method_for,
)
from fastfedul.forgetting.service import preview
from fastfedul.ledger.disk import DiskLedger, LedgerReader
from fastfedul.ledger.lookalikes import lookalike_warnings
from fastfedul.methods.protocol import Method, needs_help
from fastfedul.records import ForgetRequest
from fastfedul.runs import help_texts

app = typer.Typer(no_args_is_help=True)

RunPath = Annotated[Path, typer.Argument(help="A run, or a ledger.", metavar="RUN")]

RequestedMethod = Annotated[
    str | None,
    typer.Option(
        "--method",
        help=f"{help_texts.METHOD} [default: the choice of whoever applies the "
        "request]",
        metavar="METHOD",
        show_default=False,
        rich_help_panel="Method",
    ),
]

UNSIGNED = (
    "not signed; make a key with `fastfedul key new` and sign with `fastfedul request "
    "apply`"
)


@app.command()
def add(
    run: RunPath,
    client: Annotated[str, typer.Argument(help="Client to forget.")],
    reason: Annotated[
        str | None,
        typer.Option(
            help="Why. It stays in the ledger and in the certificate for good, so "
            "write no personal data."
        ),
    ] = None,
    method_name: RequestedMethod = None,
    skew: SkewName = None,
    damping: DampingNumber = None,
    minimum_coverage: MinimumCoverage = None,
    set_: SettingTexts = None,
    json: JsonFlag = False,
) -> None:
    """File the request to forget a client.

    A training that runs applies it before its next round; so does the next
    **train --resume**. Without training, **fastfedul request apply RUN** does.
    Without options of the method, they decide how.

    Example: `fastfedul request add my-run client-3 --reason "consent withdrawn"`
    """
    options = (skew, damping, minimum_coverage, set_ or ())
    method, settings = None, None
    if method_name is not None or any(option not in (None, ()) for option in options):
        method, settings = method_choice(method_name or USUAL_METHOD, *options)
    with err().status("waiting for the ledger"):
        request = add_request(run, client, reason, method=method, settings=settings)
        with LedgerReader(run) as ledger:
            warnings = lookalike_warnings([client], ledger.clients())
    if json:
        print_json({**facts_of(request), "warnings": list(warnings)})
        return
    for text in warnings:
        warn(text)
    out().print(
        f"Request {request.number}: {show_name(client)} is waiting to be forgotten. "
        "Training applies it before its next round; without training: "
        f"fastfedul request apply {run}",
        markup=False,
        soft_wrap=True,
    )


@app.command("list")
def list_requests(run: RunPath, json: JsonFlag = False) -> None:
    """List the requests: state, time, and certificate or refusal."""
    with LedgerReader(run) as ledger, ledger.snapshot():
        folder = certificates_folder(ledger.path)
        log = ledger.log()
        rows = []
        for request in ledger.requests():
            path = None
            if request.event is not None:
                path = certificate_path(folder, log[request.event - 1])
            rows.append(facts_of(request, path))
    if json:
        print_json({"requests": rows})
        return
    if not rows:
        out().print("There is no request.")
        return
    print_table(
        f"Requests of {run}",
        ["request", "client", "state", "asked", "reason", "outcome"],
        [
            [
                str(row["request"]),
                show_name(row["client"]),
                row["state"],
                row["asked"],
                show_name(row["reason"] or ""),
                _outcome(row),
            ]
            for row in rows
        ],
    )


@app.command()
def cancel(
    run: RunPath,
    number: Annotated[int, typer.Argument(help="Number of the request.", metavar="ID")],
    json: JsonFlag = False,
) -> None:
    """Take a waiting request back.

    Example: `fastfedul request cancel my-run 2`
    """
    with err().status("waiting for the ledger"):
        request = cancel_request(run, number)
    if json:
        print_json(facts_of(request))
    else:
        out().print(f"Request {number} is cancelled.")


@app.command("apply")
def apply_waiting(
    run: RunPath,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be done; change nothing."),
    ] = False,
    erase_history: EraseFlag = True,
    method_name: MethodName = USUAL_METHOD,
    skew: SkewName = None,
    damping: DampingNumber = None,
    minimum_coverage: MinimumCoverage = None,
    set_: SettingTexts = None,
    validation: ImagesFile = None,
    max_drop: LargestDrop = None,
    network: NetworkName = None,
    json: JsonFlag = False,
) -> None:
    """Apply all waiting requests, and write missing certificates.

    For a ledger nobody is writing to; a training that runs does it by itself.
    The exit code is 0 also if a request was refused: look at its state. If a cleaned
    model loses more than **--max-drop**, that request and the later ones still wait.

    Example: `fastfedul request apply my-run`
    """
    method = chosen_method(method_name, skew, damping, minimum_coverage, set_ or ())
    judge = Judge(validation, max_drop, network)
    if dry_run:
        _show_preview(run, method, judge, json=json)
        return
    with (
        telling_how_to_go_on(
            lambda: (
                f"stopped; requests without an answer still wait; go on with: "
                f"{this_command()}"
            )
        ),
        DiskLedger(run) as ledger,
        err().status("forgetting"),
    ):
        judge.open(ledger, run)
        with _helpers(run, method) as federation:
            done = apply_requests(
                ledger,
                method=method,
                erase=erase_history,
                federation=federation,
                accept=judge,
            )
    if json:
        print_json({"requests": answers_of(done)})
        return
    if not done:
        out().print("No request is waiting.")
    show_answers(done)


def _helpers(run: Path, method: Method) -> Any:
    """Return a context that yields the clients, for a method that needs them."""
    if not needs_help(method):
        return nullcontext()
    from fastfedul.runs.federation import open_federation

    return open_federation(run, method)


def _show_preview(run: Path, method: Method, judge: Judge, *, json: bool) -> None:
    """Print how each waiting request would end, taken by itself."""
    rows = []
    with LedgerReader(run) as ledger, _helpers(run, method) as federation:
        judge.open(ledger, run)
        for request in ledger.waiting():
            row: dict[str, Any] = {"request": request.number, "client": request.client}
            try:
                own = method_for(request, method)
                found = preview(ledger, [request.client], own, federation=federation)
                judge(ledger.final, found.model)
                row |= {
                    "state": "would be applied",
                    "coverage": found.coverage,
                    "delta_norm": found.delta_norm,
                    "warnings": list(found.warnings),
                }
            except NotAcceptedError as error:
                row |= {"state": "would wait", "answer": str(error)}
            except (UnlearnRefusedError, InvalidInputError) as error:
                row |= {"state": "would be refused", "answer": str(error)}
            rows.append({**row, "validation": judge.found})
    if json:
        print_json({"requests": rows, "dry_run": True})
        return
    for row in rows:
        told = row.get("answer") or (
            f"{row['coverage']:.1%} of its share was kept, the model would move by "
            f"{row['delta_norm']:.4g}"
        )
        out().print(
            f"Request {row['request']}, {show_name(row['client'])}: {row['state']}; "
            f"{told}",
            markup=False,
            soft_wrap=True,
        )
    out().print("Dry run: nothing was changed." if rows else "No request is waiting.")


def facts_of(request: ForgetRequest, certificate: Path | None = None) -> dict[str, Any]:
    """Return a request as it is printed for scripts."""
    return {
        "request": request.number,
        "client": request.client,
        "state": request.state,
        "asked": request.asked,
        "reason": request.reason,
        "decided": request.decided,
        "answer": request.answer,
        "certificate": None if certificate is None else str(certificate),
        "method": request.method,
        "settings": dict(request.settings),
    }


def answers_of(done: tuple[AppliedRequest, ...]) -> list[dict[str, Any]]:
    """Return answered requests as they are printed for scripts."""
    return [
        {**facts_of(one.request, one.certificate), "signed": one.signed} for one in done
    ]


def show_answers(done: tuple[AppliedRequest, ...]) -> None:
    """Print how requests ended, a line each."""
    for row in answers_of(done):
        out().print(
            f"Request {row['request']}, {show_name(row['client'])}: {row['state']}; "
            f"{_outcome(row)}",
            markup=False,
            soft_wrap=True,
        )
    if any(one.certificate and not one.signed for one in done):
        warn(f"the certificates are {UNSIGNED}")


def _outcome(row: dict[str, Any]) -> str:
    return str(row["answer"] or row["certificate"] or row["decided"] or _asked(row))


def _asked(row: dict[str, Any]) -> str:
    """Return in words the method that a request asks for; nothing for the usual one."""
    if row["method"] is None:
        return ""
    settings = "".join(f", {key} {value}" for key, value in row["settings"].items())
    return f"with {row['method']}{settings}"
