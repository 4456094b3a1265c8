"""`fastfedul contribution`: what each client is worth to the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastfedul.cli.evaluate import show_proportion
from fastfedul.cli.investigation import (
    PageFile,
    RunOrLedger,
    look_into,
    name_page,
    warn_of,
)
from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_json,
    print_table,
    show_name,
)

if TYPE_CHECKING:
    from fastfedul.investigate.contribution import Contribution


def show_contributions(
    path: RunOrLedger,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Clean images with labels to measure on. [the test examples of the "
            "run or ledger]",
            metavar="FILE.npz",
        ),
    ] = None,
    shapley: Annotated[
        int,
        typer.Option(
            help="Also estimate Shapley values from so many random orders of the "
            "clients. Each order forgets up to as many coalitions as clients.",
            metavar="N",
        ),
    ] = 0,
    out_file: PageFile = None,
    json: JsonFlag = False,
) -> None:
    """Show what accuracy and loss would be without each client.

    The command forgets each client in turn, on a copy, and measures the model again. A
    positive number means that the client helps. Intervals are 95 % intervals. The run
    does not change.

    Example: `fastfedul contribution my-run --data clean.npz --shapley 20`
    """
    from fastfedul.investigate.contribution import contributions
    from fastfedul.report.investigation_pages import render_contribution

    found = look_into(
        path,
        out_file,
        lambda say: contributions(path, data, shapley=shapley, say=say),
        render_contribution,
    )
    if json:
        print_json(contribution_json(found, out_file))
    else:
        _show(found, out_file)


def contribution_json(found: Contribution, page: Path | None) -> dict[str, Any]:
    """Return contributions as scripts want them."""
    return {
        "clients": [
            {
                "client": own.client,
                "accuracy": own.accuracy,
                "accuracy_interval": own.accuracy_interval,
                "loss": own.loss,
                "loss_interval": own.loss_interval,
                "shapley": own.shapley,
                "shapley_interval": own.shapley_interval,
                "coverage": own.coverage,
            }
            for own in found.clients
        ],
        "accuracy": found.accuracy.value,
        "accuracy_count": [found.accuracy.successes, found.accuracy.total],
        "loss": found.loss,
        "examples": found.num_examples,
        "permutations": found.num_permutations,
        "coalitions": found.num_coalitions,
        "source": found.source,
        "notes": list(found.notes),
        "page": None if page is None else str(page),
    }


def _show(found: Contribution, page: Path | None) -> None:
    warn_of(found.notes)
    columns = ["client", "accuracy added, points", "loss spared, nats"]
    columns += ["Shapley, points"] if found.num_permutations else []
    rows = []
    for own in found.clients:
        cells = [
            show_name(own.client),
            _with_interval(100 * own.accuracy, own.accuracy_interval, 100, 1),
            _with_interval(own.loss, own.loss_interval, 1, 3),
        ]
        if own.shapley is not None:
            value = 100 * own.shapley
            cells.append(_with_interval(value, own.shapley_interval, 100, 1))
        rows.append(cells)
    print_table(f"Worth of the clients on {found.source}", columns, rows)
    said = f"With everybody: {show_proportion(found.accuracy)}, loss {found.loss:.3f}"
    out().print(said, markup=False, soft_wrap=True)
    name_page(page)


def _with_interval(
    value: float, ends: tuple[float, float] | None, factor: float, digits: int
) -> str:
    """Return a number with its interval.

    >>> _with_interval(1.5, (0.01, 0.02), 100, 1)
    '1.5 [1.0 to 2.0]'
    """
    if ends is None:
        return f"{value:.{digits}f}"
    low, high = (f"{factor * end:.{digits}f}" for end in ends)
    return f"{value:.{digits}f} [{low} to {high}]"
