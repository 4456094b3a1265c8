"""`fastfedul request`: ask for a client to be forgotten, while training goes on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fastfedul.cli.judging import JUDGING_OPTIONS, Judge
from fastfedul.cli.method_options import (
    EraseFlag,
    chosen_method,
    federation_of,
    method_choice,
    method_options,
)
from fastfedul.cli.options import RunPath, with_options
from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_json,
    print_table,
    show_already,
    show_name,
    warn,
    working,
)
from fastfedul.cli.stopping import telling_how_to_go_on, this_command
from fastfedul.errors import (
    AlreadyForgottenError,
    InvalidInputError,
    NotAcceptedError,
    RequestClosedError,
    UnlearnRefusedError,
)
from fastfedul.forgetting.certificates import FOLDER as CERTIFICATES
from fastfedul.forgetting.certificates import certificate_path, certificates_folder
from fastfedul.forgetting.folder import RUN_CONFIG, bring_up_to_date
from fastfedul.forgetting.requests import (
    AppliedRequest,
    add_request,
    apply_requests,
    cancel_request,
    method_for,
)
from fastfedul.forgetting.service import preview
from fastfedul.forgetting.signing import find_key
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.lookalikes import lookalike_warnings
from fastfedul.ledger.reader import LedgerReader
from fastfedul.methods.protocol import Method
from fastfedul.methods.registry import DEFAULT_METHOD
from fastfedul.records import ClientId, ForgetRequest
from fastfedul.runs import help_texts

app = typer.Typer(no_args_is_help=True)

UNSIGNED = (
    "not signed; make a key with `fastfedul key new` and sign with `fastfedul request "
    "apply`"
)


@app.command()
@with_options(
    method_options(help_texts.METHOD, "the choice of the operator who applies it")
)
def add(
    run: RunPath,
    client: Annotated[str, typer.Argument(help="Client to forget.")],
    *,
    reason: Annotated[
        str | None,
        typer.Option(
            help="Why. It stays in the ledger and in the certificate for good, so "
            "write no personal data."
        ),
    ] = None,
    json: JsonFlag = False,
    **options: Any,
) -> None:
    """File the request to forget a client.

    A training that runs applies it before its next round; so does the next
    **train --resume**. Without training, **fastfedul request apply RUN** does.
    Without options of the method, they decide how.

    Example: `fastfedul request add my-run client-3 --reason "consent withdrawn"`
    """
    method, settings = method_choice(options)
    if settings and method is None:
        method = DEFAULT_METHOD
    try:
        request = add_request(run, client, reason, method=method, settings=settings)
    except AlreadyForgottenError as error:
        show_already({"clients": [client]}, error, json=json)
        return
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
    with LedgerReader(run) as ledger:
        folder = certificates_folder(ledger.path)
        log, requests = ledger.index.look(lambda: (ledger.log(), ledger.requests()))
        rows = []
        for request in requests:
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
    try:
        request = cancel_request(run, number)
    except RequestClosedError as error:
        with LedgerReader(run) as ledger:
            request = ledger.requests()[number - 1]
        if request.state != "cancelled":
            raise
        show_already(facts_of(request), error, json=json)
        return
    if json:
        print_json(facts_of(request))
    else:
        out().print(f"Request {number} is cancelled.")


@app.command("apply")
@with_options(method_options() | JUDGING_OPTIONS)
def apply_waiting(
    run: RunPath,
    *,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be done; change nothing."),
    ] = False,
    erase_history: EraseFlag = True,
    json: JsonFlag = False,
    **options: Any,
) -> None:
    """Apply all waiting requests, and write missing certificates.

    For a ledger nobody is writing to; a training that runs does it by itself.
    The exit code is 0 also if a request was refused: look at its state. If a cleaned
    model loses more than **--max-drop**, that request and the later ones still wait.

    Example: `fastfedul request apply my-run`
    """
    method, judge = chosen_method(options), Judge(options)
    if dry_run:
        _show_preview(run, method, judge, erase_history, json=json)
        return
    with (
        telling_how_to_go_on(
            lambda: (
                f"stopped; requests without an answer still wait; go on with: "
                f"{this_command()}"
            )
        ),
        DiskLedger(run) as ledger,
        working("forgetting"),
    ):
        judge.open(ledger, run)
        key = find_key()
        mended = bring_up_to_date(ledger, key)
        with federation_of(run, method) as federation:
            done = apply_requests(
                ledger,
                method=method,
                erase=erase_history,
                federation=federation,
                key=key,
                accept=judge,
            )
    if json:
        written = [str(path) for path in mended]
        print_json({"requests": answers_of(done), "written": written})
        return
    for path in mended:
        signed = key is not None and path.parent.name == CERTIFICATES
        out().print(
            f"Wrote {path}{', signed' if signed else ''}", markup=False, soft_wrap=True
        )
    if not done:
        out().print("No request is waiting.")
    show_answers(done)
    gone = [one.request.client for one in done if one.request.state == "applied"]
    for text in still_held(run, gone):
        warn(text)


def _show_preview(
    run: Path, method: Method, judge: Judge, erase: bool, *, json: bool
) -> None:
    """Print how each waiting request would end, taken by itself."""
    rows = []
    with LedgerReader(run) as ledger, federation_of(run, method) as federation:
        judge.open(ledger, run)
        for request in ledger.waiting():
            row: dict[str, Any] = {"request": request.number, "client": request.client}
            try:
                own = method_for(request, method)
                found = preview(
                    ledger, [request.client], own, erase=erase, federation=federation
                )
                judge(ledger.final, found.model)
                row |= {
                    "state": "would be applied",
                    "coverage": found.coverage,
                    "delta_norm": found.delta_norm,
                    "given_up": list(found.given_up),
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
        for text in row.get("warnings", ()):
            warn(text)
    out().print("Dry run: nothing was changed." if rows else "No request is waiting.")


def still_held(path: Path, clients: Sequence[ClientId]) -> list[str]:
    """Return a sentence for each run of another seed that still holds a client.

    `compare --seeds` trains these runs beside a run, with clients of the same names.
    """
    if not (path / RUN_CONFIG).is_file():
        return []
    from fastfedul.runs.seeds import seed_runs_with

    return [
        f"{place.name} beside this run still holds {', '.join(map(show_name, held))}; "
        f"forget there too: {shlex.join(['fastfedul', 'forget', str(place), *held])}"
        for place, held in seed_runs_with(path, clients).items()
    ]


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
        {
            **facts_of(one.request, one.certificate),
            "signed": one.signed,
            "given_up": list(one.forgetting.given_up) if one.forgetting else [],
            "warnings": list(one.forgetting.warnings) if one.forgetting else [],
        }
        for one in done
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
        for text in row["warnings"]:
            warn(text)
    if any(one.certificate and not one.signed for one in done):
        warn(f"the certificates are {UNSIGNED}")


def certificate_text(path: Path | str | None, signed: bool) -> str:
    """Return where a certificate is, and that it is signed."""
    return f"certificate {path}{', signed' if signed else ''}"


def _outcome(row: dict[str, Any]) -> str:
    if row.get("signed"):
        return certificate_text(row["certificate"], signed=True)
    if row["state"] == "cancelled":
        return f"cancelled at {row['decided']}"
    return str(row["answer"] or row["certificate"] or row["decided"] or _asked(row))


def _asked(row: dict[str, Any]) -> str:
    """Return in words the method that a request asks for; nothing for the usual one."""
    if row["method"] is None:
        return ""
    settings = "".join(f", {key} {value}" for key, value in row["settings"].items())
    return f"with {row['method']}{settings}"
