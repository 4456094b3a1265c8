"""`fastfedul compare` and `fastfedul report`: ways to forget beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastfedul.cli.method_options import DampingNumber, read_settings
from fastfedul.cli.output import (
    JsonFlag,
    err,
    out,
    print_json,
    print_table,
    show_seconds,
)
from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.intervals import Proportion
from fastfedul.methods.registry import SHOWN_BY_DEFAULT, list_methods

if TYPE_CHECKING:
    from fastfedul.runs.comparison import Comparison, Say

PAGE = "report.html"
USUAL_METHODS = ",".join(SHOWN_BY_DEFAULT)

RunPath = Annotated[Path, typer.Argument(help="A finished run.", metavar="RUN")]
ForgetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--forget", help="Whom to forget; may be repeated. The attackers by default."
    ),
]
MethodsOption = Annotated[
    str,
    typer.Option(
        help="Names with commas, `all`, or your own as package.module:Class; "
        f"`fastfedul methods` lists them. [default: {', '.join(SHOWN_BY_DEFAULT)}]",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="METHOD.NAME=VALUE",
        help="A setting of a method, such as federaser.interval=4; may be repeated.",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help=f"Where the page goes; RUN/{PAGE}.")
]


def compare_methods(
    path: RunPath,
    forget: ForgetOption = None,
    methods: MethodsOption = USUAL_METHODS,
    damping: DampingNumber = None,
    set_: SetOption = None,
    out_file: OutOption = None,
    json: JsonFlag = False,
) -> None:
    """Compare ways to forget with the model before and with true retraining.

    The run itself is not changed. Retraining leaves the clients' slots empty and keeps
    everything else: seed, split, draws, initial model. It is done once and kept in the
    run. Other methods than Fast-FedUL ask clients to train, so they take longer. A
    page with pictures is written beside the numbers.
    """
    names = named_methods(methods)
    settings = read_settings(set_ or ())
    check_page(path, out_file)
    found = run_comparison(path, forget or (), names, damping, settings)
    page = write_page(path, found, out_file)
    if json:
        print_json(comparison_json(found, page))
    else:
        show_comparison(found, page)


def write_report(
    path: RunPath,
    forget: ForgetOption = None,
    damping: DampingNumber = None,
    out_file: OutOption = None,
    json: JsonFlag = False,
) -> None:
    """Write one HTML page about a run: pictures, numbers, settings, how to reproduce.

    It shows what forgetting the attackers, or the clients you name, would do. Where
    nobody is named and no attacker is left, it shows the model as it is, beside one
    that was retrained without those who have gone. The page stands alone: it needs no
    network and no other file.
    """
    check_page(path, out_file)
    found = _found_for_report(path, forget or (), damping)
    page = write_page(path, found, out_file)
    if json:
        print_json({"report": str(page)})
    else:
        out().print(f"report: {page}", markup=False, soft_wrap=True)


def _found_for_report(
    path: Path, forget: Sequence[str], damping: float | None
) -> Comparison:
    from fastfedul.runs.comparison import active_attackers, look_back
    from fastfedul.runs.preparation import prepare
    from fastfedul.runs.training import load_config

    if forget or active_attackers(path, prepare(load_config(path))):
        return run_comparison(path, forget, SHOWN_BY_DEFAULT, damping)
    with _progress() as say:
        return look_back(path, say)


def named_methods(text: str) -> tuple[str, ...]:
    """Return the methods that the option names, none twice.

    `all` leaves out retraining, which every comparison has as its reference.
    """
    if text == "all":
        found = [m.name for m in list_methods() if not (m.is_retraining or m.problem)]
        return tuple(found)
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def run_comparison(
    path: Path,
    forget: Sequence[str],
    methods: Sequence[str],
    damping: float | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Comparison:
    """Compare, with a progress bar on standard error."""
    from fastfedul.runs.comparison import compare

    with _progress() as say:
        return compare(
            path, forget, methods=methods, damping=damping, settings=settings, say=say
        )


def check_page(path: Path, out_file: Path | None) -> None:
    """Raise if the page would be written over what belongs to the run."""
    if out_file is None:
        return
    place, run = out_file.resolve(), path.resolve()
    own = place.is_relative_to(run) and place.exists() and place.suffix != ".html"
    if own or place.is_relative_to(run / "ledger"):
        raise InvalidInputError(
            f"--out {out_file} is a place of the run itself; name an .html file"
        )


def write_page(path: Path, found: Comparison, out_file: Path | None) -> Path:
    """Write the HTML page and return its path."""
    from fastfedul.report.of_run import report_of
    from fastfedul.report.page import write_html

    page = out_file or path / PAGE
    with err().status("drawing the report"):
        write_html(page, report_of(path, found))
    return page


def comparison_json(found: Comparison, page: Path) -> dict[str, Any]:
    """Return a comparison as scripts want it."""
    from fastfedul.report.of_run import row_of
    from fastfedul.report.tables import rows_to_json

    seen = found.reaction
    rows = rows_to_json([row_of(row) for row in found.rows])
    for row, evaluation in zip(rows, found.rows, strict=True):
        near, member = evaluation.closeness, evaluation.membership
        row["last_layer_angle_degrees"] = row["angle_degrees"]
        row["angle_degrees"] = near.angle_degrees if near else None
        row["mia_tpr_at_1_fpr"] = member.tpr_at_1_fpr if member else None
        row["mia_auc_interval"] = member.auc_interval if member else None
        row["kl"] = evaluation.kl
        change = evaluation.change
        row["prediction_change"] = change.mean_distance if change else None
    return {
        "rows": rows,
        "forget": list(found.forget),
        "damping": found.damping,
        "refused": dict(found.refused),
        "keeping": {
            "budget": found.keeping.budget,
            "attackers": found.keeping.attackers,
            "others": found.keeping.others,
        },
        "removed_by_layer": dict(seen.removed_by_layer) if seen else None,
        "report": str(page),
    }


def show_comparison(found: Comparison, page: Path) -> None:
    """Print the table anyone understands, and where the page is."""
    first = found.rows[0]
    columns = ["", f"model works (of {first.main.total})"]
    if first.backdoor:
        columns.append(f"attack works (of {first.backdoor.total})")
    columns.append("time taken")
    rows = []
    for row in found.rows:
        cells = [row.method, _percent(row.main)]
        if first.backdoor:
            cells.append(_percent(row.backdoor))
        cells.append("" if row.method == "before" else show_seconds(row.seconds))
        rows.append(cells)
    print_table(f"Forgetting {', '.join(found.forget)}", columns, rows)
    out().print("In brackets: 95 % intervals.", markup=False)
    for name, reason in found.refused.items():
        out().print(f"left out: {name}: {reason}", markup=False, soft_wrap=True)
    for text in found.caveats:
        out().print(text, markup=False, soft_wrap=True)
    out().print(f"report: {page}", markup=False, soft_wrap=True)


def _percent(proportion: Proportion | None) -> str:
    if proportion is None or proportion.value is None or proportion.interval is None:
        return "-"
    low, high = proportion.interval
    return f"{proportion.value:.1%} [{100 * low:.1f} to {100 * high:.1f}]"


@contextmanager
def _progress() -> Iterator[Say]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err(),
        transient=True,
        disable=not err().is_terminal,
    ) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )
