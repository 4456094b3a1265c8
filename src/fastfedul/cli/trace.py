"""`fastfedul trace`: who taught the model these answers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastfedul.cli.investigation import (
    PageFile,
    RunOrLedger,
    look_into,
    name_page,
    warn_of,
)
from fastfedul.cli.output import JsonFlag, out, print_json, print_table, say, show_name
from fastfedul.errors import InvalidInputError

if TYPE_CHECKING:
    from fastfedul.investigate.trace import Trace

NOBODY_CODE = 3
"""Exit code of `--quiet` if nobody stands out."""

_SHOWN = 10
"""Clients of the table; `--json` has all."""


def trace_inputs(
    path: RunOrLedger,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Inputs that the model answers wrongly: an .npz file with images and, "
            "if you know it, the unwanted answer to each as the array unwanted.",
            metavar="FILE.npz",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Clean images with their true labels to compare with. [the "
            "test examples of the run or ledger]",
            metavar="FILE.npz",
        ),
    ] = None,
    backdoor: Annotated[
        int | None,
        typer.Option(
            help="To try it out: trace so many of the run's own backdoor images that "
            "work.",
            metavar="N",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            help="Print the names of the clients that stand out and nothing else. If "
            f"nobody does, print nothing and end with exit code {NOBODY_CODE}.",
        ),
    ] = False,
    out_file: PageFile = None,
    json: JsonFlag = False,
) -> None:
    """Rank the clients by their blame for answers that the model should not give.

    The command takes away half of what each client added, on a copy, and asks the model
    again. The score of a client is the fall of the odds of the unwanted answers, in
    nats, beyond the fall of right answers of the same class. The command accuses only
    if forgetting all suspects, or one client, undoes the unwanted answers. The run does
    not change.

    Examples: `fastfedul trace my-run --inputs bad.npz`,
    `fastfedul forget my-run $(fastfedul trace my-run --inputs bad.npz --quiet)`
    """
    from fastfedul.investigate.trace import trace
    from fastfedul.report.investigation_pages import render_trace

    if quiet and json:
        raise InvalidInputError("--quiet and --json exclude each other; choose one")
    found = look_into(
        path,
        out_file,
        lambda say: trace(
            path, inputs, reference=reference, backdoor=backdoor, say=say
        ),
        render_trace,
    )
    if quiet:
        _print_names(found)
    elif json:
        print_json(trace_json(found, out_file))
    else:
        _show(found, out_file)


def trace_json(found: Trace, page: Path | None) -> dict[str, Any]:
    """Return a trace as scripts want it."""
    return {
        "verdict": found.verdict,
        "culprits": list(found.culprits),
        "clients": [
            {
                "client": own.client,
                "score": own.score,
                "p_value": own.p_value,
                "gap": own.gap,
                "trajectory": own.trajectory,
                "coverage": own.coverage,
            }
            for own in found.clients
        ],
        "search": [
            {"client": step.client, "look": step.look, "score": step.score}
            for step in found.search.steps
        ],
        "fall": found.search.fall,
        "alone": dict(found.search.alone),
        "wanted_fall": found.search.wanted,
        "inputs": len(found.answers),
        "reference": found.num_clean,
        "notes": list(found.notes),
        "page": None if page is None else str(page),
    }


def _print_names(found: Trace) -> None:
    """Print the culprits so that a shell can pass them on.

    Raises:
        InvalidInputError: If a shell would take a name for something else.
    """
    if not found.culprits:
        say(found.verdict)
        raise typer.Exit(NOBODY_CODE)
    for name in found.culprits:
        if shlex.quote(name) != name or name.startswith("-"):
            raise InvalidInputError(
                f"client {name!r:.80} stands out, and a shell would change this name; "
                "write it in quotes after `fastfedul forget RUN --`"
            )
    typer.echo("\n".join(found.culprits))


def _show(found: Trace, page: Path | None) -> None:
    from fastfedul.investigate.trace import verdict_on

    warn_of(found.notes)
    many = len(found.answers)
    with_paths = any(own.trajectory is not None for own in found.clients)
    columns = ["client", "score", "gap", "p-value"]
    columns += ["trajectory"] if with_paths else []
    rows = []
    for own in found.clients[:_SHOWN]:
        cells = [show_name(own.client), f"{own.score:.2f}", f"{own.gap:.2f}"]
        cells.append("-" if own.p_value is None else f"{own.p_value:.3f}")
        if with_paths:
            cells.append("-" if own.trajectory is None else f"{own.trajectory:.2f}")
        rows.append(cells)
    title = f"Blame for {many} unwanted answer{'s' if many > 1 else ''}"
    print_table(title, columns, rows)
    if len(found.clients) > _SHOWN:
        left = len(found.clients) - _SHOWN
        out().print(f"{left} more clients: see --json", markup=False)
    verdict = verdict_on([show_name(name) for name in found.culprits])
    out().print(f"Verdict: {verdict}.", markup=False, soft_wrap=True, style="bold")
    name_page(page)
