"""`fastfedul forget`: take clients out of the model and the ledger."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from fastfedul.cli.judging import JUDGING_OPTIONS, Judge, judgement_text
from fastfedul.cli.method_options import (
    EraseFlag,
    chosen_method,
    federation_of,
    method_options,
)
from fastfedul.cli.options import LedgerPath, with_options
from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_facts,
    print_json,
    show_already,
    show_bytes,
    show_name,
    show_seconds,
    warn,
    working,
)
from fastfedul.cli.request import UNSIGNED, still_held
from fastfedul.cli.stopping import telling_how_to_go_on
from fastfedul.cli.then_check import ThenCheck, show_then_check
from fastfedul.errors import (
    AlreadyForgottenError,
    FastFedULError,
    InvalidInputError,
)
from fastfedul.forgetting.folder import RUN_CONFIG, run_model_of
from fastfedul.forgetting.service import (
    Forgetting,
    checked_names,
    forget,
    given_up_warning,
    preview,
)
from fastfedul.ledger.changes.erase_sums import given_up_by_erasing
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.model_files import model_written
from fastfedul.methods.fast_fedul.removal import Removal
from fastfedul.methods.protocol import Method
from fastfedul.records import ClientId, Model

NOT_A_SAMPLE = (
    "single samples cannot be forgotten: the server only ever saw a client's update as "
    "a whole; forget the client, and let it join again under another name once it has "
    "dropped the samples"
)


@with_options(method_options() | JUDGING_OPTIONS)
def forget_clients(
    path: LedgerPath,
    clients: Annotated[
        list[str], typer.Argument(help="Clients to forget.", metavar="CLIENT...")
    ],
    *,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Change nothing in the ledger; --out is still written."
        ),
    ] = False,
    erase_history: EraseFlag = True,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Do not ask on a terminal if the erasure gives up sums of others.",
        ),
    ] = False,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Write the cleaned model to this .safetensors file."
        ),
    ] = None,
    audit_file: Annotated[
        Path | None,
        typer.Option(
            "--audit",
            help="An audit of this client, from `fastfedul audit --json`; the "
            "certificate names it by its digest.",
            metavar="AUDIT.json",
        ),
    ] = None,
    then_check: Annotated[
        int | None,
        typer.Option(
            help="Then train so many rounds without the clients, on a copy of a run, "
            "and show whether the attack, or what the clients taught, comes back.",
            metavar="N",
        ),
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(help="Not possible; explains why.", hidden=True),
    ] = None,
    json: JsonFlag = False,
    **options: Any,
) -> None:
    """Take clients out of the model, without data, training or their help.

    The cleaned model becomes the ledger's current model, and the run's model file
    follows. The ledger erases the clients' updates and refuses further ones. With
    **--keep-history** it keeps them; the same command with **--erase** removes them
    later. **fastfedul certificate check** checks the certificate that this command
    writes. Try it first with **--dry-run**.

    Example: `fastfedul forget my-ledger hospital-7 --out clean.safetensors`
    """
    if sample:
        raise InvalidInputError(NOT_A_SAMPLE)
    names = tuple(sorted(set(clients)))
    if dry_run and audit_file is not None:
        raise InvalidInputError("--dry-run writes no certificate; leave out --audit")
    judge = Judge(options)
    check = ThenCheck(path, then_check)
    method = chosen_method(options)
    opened = LedgerReader(path) if dry_run else DiskLedger(path)
    with opened as ledger:
        _check_place(out_file, ledger.path)
        _check_took_part(ledger, names)
        if erase_history and not (dry_run or yes or json):
            _confirm(ledger, names)
        judge.open(ledger, path)
        check.open(ledger, names)
        try:
            found = _forget(
                ledger,
                path,
                names,
                method,
                judge,
                out_file,
                erase_history,
                audit_file,
            )
        except AlreadyForgottenError as error:
            judging = options["validation"] is not None or then_check is not None
            _show_done(
                ledger,
                names,
                error,
                out_file,
                erase=erase_history,
                json=json,
                judging=judging,
            )
            return
        model = run_model_of(ledger.path) or ledger.model_path
        facts = _facts(found, method)
    facts |= {
        "validation": judge.found,
        "model": str(out_file) if out_file else None if dry_run else str(model),
        "certificate": None if found.certificate is None else str(found.certificate),
        "signed": found.signed,
        "erased": found.erased,
        "dry_run": dry_run,
        "then_check": _checked(check, found),
    }
    if not dry_run:
        facts["warnings"] += still_held(path, found.clients)
    if json:
        print_json(facts)
    else:
        _show(facts)


def _checked(check: ThenCheck, found: Forgetting) -> list[dict[str, Any]] | None:
    """Return the check after a forgetting; the ledger is closed, so nothing is in it.

    Raises:
        FastFedULError: If the check fails; the forgetting stays done.
    """
    done = "the forgetting is done, and the check after it "
    with telling_how_to_go_on(
        lambda: f"stopped: {done}is not" if found.committed else None
    ):
        try:
            return check(found.model)
        except FastFedULError as error:
            if not found.committed:
                raise
            raise FastFedULError(f"{done}failed: {error}") from None


def _forget(
    ledger: LedgerReader,
    path: Path,
    names: Sequence[ClientId],
    method: Method,
    judge: Judge,
    out_file: Path | None,
    erase: bool,
    audit: Path | None,
) -> Forgetting:
    """Return the forgetting; in a ledger open for reading, the preview of it."""
    with federation_of(path, method) as federation:
        if not isinstance(ledger, DiskLedger):
            with working("reading the ledger"):
                found = preview(
                    ledger, names, method, erase=erase, federation=federation
                )
                judge(ledger.final, found.model)
            if out_file:
                with model_written(out_file, found.model):
                    pass
            return found
        with ExitStack() as files, working("forgetting"):

            def accept(before: Model, after: Model) -> None:
                judge(before, after)
                if out_file:
                    # A full disk is found out before the ledger changes.
                    files.enter_context(model_written(out_file, after))

            found = forget(
                ledger,
                names,
                method,
                erase=erase,
                federation=federation,
                accept=accept,
                audit=audit,
            )
            if out_file and found.result is None:
                files.enter_context(model_written(out_file, found.model))
            return found


def _show_done(
    ledger: DiskLedger | LedgerReader,
    names: Sequence[ClientId],
    error: AlreadyForgottenError,
    out_file: Path | None,
    *,
    erase: bool,
    judging: bool,
    json: bool,
) -> None:
    """Say that nothing is left to do, when a command is repeated.

    Raises:
        AlreadyForgottenError: If updates are to be kept that are erased.
    """
    known = ledger.clients()
    held = [name for name in names if known[name].state == "forgotten"]
    if not erase and len(held) < len(names):
        raise error
    if out_file:
        with model_written(out_file, ledger.final):
            pass
    if judging:
        warn("--validation and --then-check judge a forgetting, and this is none")
    model = out_file or run_model_of(ledger.path) or ledger.model_path
    facts = {"clients": list(names), "model": str(model), "would_erase": []}
    if erase and held:
        # Only a dry run comes here: otherwise the updates are erased by now.
        facts["would_erase"] = held
        who = ", ".join(map(show_name, held))
        error = AlreadyForgottenError(f"{error}; without --dry-run, {who} is erased")
    show_already(facts, error, json=json)


def _check_took_part(ledger: LedgerReader, names: Sequence[ClientId]) -> None:
    """Raise if a client of the run never took part; the nearest name is another's."""
    config = ledger.path.parent / RUN_CONFIG
    known = ledger.clients()
    unknown = [name for name in names if name not in known]
    if not unknown or not config.is_file():
        return
    from fastfedul.runs.preparation import client_names
    from fastfedul.runs.training import load_config

    members = client_names(load_config(config.parent))
    for name in unknown:
        if name in members:
            raise InvalidInputError(
                f"client {name!r:.80} never took part in a round, so the model has "
                "nothing of it to forget"
            )


def _confirm(ledger: LedgerReader, names: Sequence[ClientId]) -> None:
    """Ask on a terminal, if the erasure gives up sums of other clients."""
    if not sys.stdin.isatty():
        return
    given_up = given_up_by_erasing(ledger, checked_names(ledger, names))
    if given_up:
        warn(given_up_warning(given_up))
        if not typer.confirm("Forget and erase?", err=True):
            raise typer.Abort


def _check_place(out_file: Path | None, ledger: Path) -> None:
    """Raise if the model would be written over a file of a ledger or run."""
    if out_file is None:
        return
    place, inside = out_file.resolve(), ledger.resolve()
    run = inside.parent / RUN_CONFIG
    of_run = run.is_file() and place.parent == inside.parent and place.exists()
    if place.is_relative_to(inside) or of_run:
        raise InvalidInputError(
            f"--out {out_file} is a place of the run or ledger itself; choose another"
        )
    if out_file.suffix != ".safetensors":
        raise InvalidInputError(
            f"--out {out_file} must end in .safetensors, the format that is written"
        )


def _facts(found: Forgetting, method: Method) -> dict[str, Any]:
    result = found.result
    facts: dict[str, Any] = {
        "clients": list(found.clients),
        "rounds": found.rounds,
        "method": method.name if result else None,
        "coverage": found.coverage if result else None,
        "coverage_by_client": found.coverage_by_client,
        **dict.fromkeys(("skew", "damping", "used", "removed_by_layer")),
        "delta_norm": found.delta_norm,
        **dict.fromkeys(("standard_error", "bound", "lipschitz", "lipschitz_source")),
        "seconds": result.seconds if result else None,
        "bytes_read": result.bytes_read if result else None,
        "client_calls": result.client_calls if result else None,
        "given_up": list(found.given_up),
        "warnings": list(found.warnings),
    }
    if isinstance(result, Removal):
        seen = result.reaction
        facts |= {
            **result.settings,
            **result.evidence(),
            "removed_by_layer": dict(seen.removed_by_layer) if seen else None,
            "bound": result.bound.value,
            "lipschitz_source": facts.pop("bound_source", result.bound.source),
        }
        facts.pop("bound_source", None)
    return facts


def _show(facts: dict[str, Any]) -> None:
    for text in facts["warnings"]:
        warn(text)
    names = ", ".join(show_name(name) for name in facts["clients"])
    rows = [("rounds taken part in", str(facts["rounds"]))]
    if facts["coverage"] is not None:
        rows.append(("kept of their share", f"{facts['coverage']:.1%}"))
        rows.append(("method", facts["method"]))
        if facts["skew"]:
            rows.append(("skew", _skew(facts)))
        if facts["validation"]:
            rows.append(("validation", judgement_text(facts["validation"])))
        rows.append(("model moved by", f"{facts['delta_norm']:.4g} (Euclidean norm)"))
        if facts["lipschitz_source"]:
            bound = _or_none(facts["bound"]) + _caveat(facts)
            rows.append(("standard error", _or_none(facts["standard_error"])))
            rows.append(("bound of Theorem 1", bound))
        taken = f"{show_bytes(facts['bytes_read'])} in {show_seconds(facts['seconds'])}"
        rows.append(("read", taken))
    if facts["given_up"]:
        rows.append(("gives up sums of", f"{len(facts['given_up']):,} other clients"))
    rows.append(("model", facts["model"] or "not written"))
    if facts["certificate"]:
        note = " (signed)" if facts["signed"] else f" ({UNSIGNED})"
        rows.append(("certificate", facts["certificate"] + note))
    verb = "Forgot" if facts["coverage"] is not None else "Erased"
    verb = "Would forget" if facts["dry_run"] else verb
    print_facts(f"{verb} {names}", rows)
    if facts["dry_run"]:
        note = "Dry run: the ledger is unchanged."
    elif facts["erased"]:
        note = "Erased: the ledger's updates of these clients are gone."
    else:
        note = (
            "Not erased: the ledger still has the updates of these clients; "
            "the same command with --erase removes them."
        )
    out().print(note, markup=False)
    if facts["then_check"]:
        show_then_check(facts["then_check"])


def _skew(facts: dict[str, Any]) -> str:
    if facts["skew"] == "none":
        return "not taken into account"
    if facts["skew"] == "scalar":
        damping = facts["damping"]
        number = "per round" if isinstance(damping, list) else f"{damping:g}"
        odd = ", every other round" if facts["damped"] == "alternate" else ""
        return f"scalar, damping {number}{odd}"
    used = facts["used"]
    many = f"from {used['updates']} updates of clients that stay" + (
        f", along {used['directions']} directions" if used["updates"] else ""
    )
    return f"{facts['skew']}, {many}"


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _caveat(facts: dict[str, Any]) -> str:
    if facts["bound"] is None:
        return f" ({facts['lipschitz_source']})"
    return (
        f" with K = {facts['lipschitz']:.3g}; loose, and not a guarantee of forgetting"
    )
