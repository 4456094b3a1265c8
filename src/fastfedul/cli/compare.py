"""`fastfedul compare` and `fastfedul report`: ways to forget beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastfedul.cli.method_options import DampingNumber, read_settings
from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_json,
    print_table,
    show_name,
    show_seconds,
    task_progress,
    warn,
    working,
)
from fastfedul.cli.stopping import telling_how_to_go_on, this_command
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.ledger.store.folder import INDEX
from fastfedul.methods.registry import SHOWN_BY_DEFAULT, list_methods
from fastfedul.strict_json import finite_values

if TYPE_CHECKING:
    from fastfedul.report.comparison_table import ComparisonTable
    from fastfedul.report.model_rows import ModelMeans

PAGE = "report.html"
USUAL_METHODS = ",".join(SHOWN_BY_DEFAULT)

RunPath = Annotated[
    Path, typer.Argument(help="A finished run, or a ledger.", metavar="RUN")
]
ForgetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--forget",
        help="Whom to forget; may be repeated. The attackers of a run by default.",
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
        help="A setting of a method, such as federaser.interval=4; `fastfedul methods "
        "METHOD` lists them. Can be repeated.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help=f"Where the page goes; RUN/{PAGE} or LEDGER.{PAGE}."),
]
SeedsOption = Annotated[
    str | None,
    typer.Option(
        metavar="SEEDS",
        help="Compare the runs of these seeds, such as 0,1,2, and show means. Missing "
        "runs are trained beside RUN, as RUN-seed-1, with its configuration.",
    ),
]
CsvOption = Annotated[
    Path | None,
    typer.Option("--csv", help="Also write every row to this file, with its seed."),
]
LatexOption = Annotated[
    Path | None, typer.Option("--latex", help="Also write a LaTeX table to this file.")
]


def compare_methods(
    path: RunPath,
    forget: ForgetOption = None,
    methods: MethodsOption = USUAL_METHODS,
    damping: DampingNumber = None,
    set_: SetOption = None,
    seeds: SeedsOption = None,
    out_file: OutOption = None,
    csv: CsvOption = None,
    latex: LatexOption = None,
    json: JsonFlag = False,
) -> None:
    """Compare ways to forget with the model before and with true retraining.

    The run itself is not changed. Retraining leaves the clients' slots empty and keeps
    everything else: seed, split, draws, initial model. It is done once and kept in the
    run. Methods that ask clients to train take longer. The command writes a page with
    pictures beside the numbers.

    A ledger outside a run, such as a Flower server's, needs `LEDGER.federation.toml`.
    There is no retrained model then, and methods that ask clients are left out.

    Examples: `fastfedul compare my-run --methods all`,
    `fastfedul compare my-run --methods fast-fedul,my_module:MyMethod`,
    `fastfedul compare my-run --seeds 0,1,2 --csv rows.csv --latex table.tex`
    """
    with telling_how_to_go_on(_how_to_go_on):
        settings = read_settings(set_ or ())
        names = named_methods(methods, settings)
        numbers = read_seeds(seeds) if seeds is not None else ()
        check_page(path, out_file)
        check_file(path, csv, "--csv", ".csv")
        check_file(path, latex, "--latex", ".tex")
        found = run_comparison(path, forget or (), names, damping, settings, numbers)
        if csv is not None:
            found.to_csv(csv)
        if latex is not None:
            found.to_latex(latex)
        page = _page_or_warning(path, found, out_file)
        facts = comparison_json(found, page)
        keep_comparison(path, facts)
        if json:
            print_json(facts)
        else:
            show_comparison(found, page)
            for file in (csv, latex):
                if file is not None:
                    out().print(f"written: {file}", markup=False, soft_wrap=True)


def write_report(
    path: RunPath,
    forget: ForgetOption = None,
    damping: DampingNumber = None,
    out_file: OutOption = None,
    json: JsonFlag = False,
) -> None:
    """Write one HTML page about a run: pictures, numbers, settings, how to reproduce.

    The page shows the effect of forgetting the attackers, or the clients you name. If
    you name nobody and no attacker is left, it shows the model as it is, beside a model
    that was retrained without the forgotten clients. The page stands alone: it needs no
    network and no other file.
    """
    with telling_how_to_go_on(_how_to_go_on):
        check_page(path, out_file)
        found = _found_for_report(path, forget or (), damping)
        page = write_page(path, found, out_file)
        if json:
            print_json({"report": str(page)})
        else:
            out().print(f"report: {page}", markup=False, soft_wrap=True)


def _found_for_report(
    path: Path, forget: Sequence[str], damping: float | None
) -> ComparisonTable:
    from fastfedul.report.comparison_table import table_of
    from fastfedul.runs.comparison import active_attackers, look_back
    from fastfedul.runs.evaluation_source import run_at
    from fastfedul.runs.preparation import prepare
    from fastfedul.runs.training import load_config

    run = run_at(path)
    prepared = prepare(load_config(run)) if run else None
    if forget or active_attackers(path, prepared):
        return run_comparison(path, forget, SHOWN_BY_DEFAULT, damping)
    if damping is not None:
        raise InvalidInputError(
            "--damping is for forgetting, and this report forgets nobody; leave it "
            "out, or name a client, as --forget CLIENT"
        )
    with task_progress("loading") as say:
        return table_of(look_back(path, say))


def named_methods(
    text: str, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[str, ...]:
    """Return the methods that the option names, none twice.

    `all` leaves out retraining, which every comparison has as its reference, and
    methods that cannot be made without settings which nobody gave.
    """
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if name != "all":
            names.append(name)
            continue
        for entry in list_methods():
            unset = entry.needs is None and entry.name not in (settings or {})
            if not (entry.is_retraining or entry.problem or unset):
                names.append(entry.name)
    return tuple(dict.fromkeys(names))


def read_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds that the option names.

    >>> read_seeds("2, 0,1")
    (2, 0, 1)
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal())]
    if wrong:
        raise InvalidInputError(
            f"cannot read --seeds {text!r:.60}; write whole numbers with commas, such "
            "as 0,1,2"
        )
    return tuple(map(int, parts))


def run_comparison(
    path: Path,
    forget: Sequence[str],
    methods: Sequence[str],
    damping: float | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    seeds: Sequence[int] = (),
) -> ComparisonTable:
    """Compare, with progress on standard error.

    Args:
        path: The run.
        forget: Clients to forget; the attackers if there is none.
        methods: Names of methods.
        damping: Damping of skew scalar.
        settings: Settings of methods, by name of the method and of the setting.
        seeds: Seeds whose runs are compared; none for the run alone.
    """
    from fastfedul.report.comparison_table import compare

    with task_progress("loading") as say:
        return compare(
            path,
            forget,
            methods=methods,
            damping=damping,
            settings=settings,
            seeds=seeds,
            say=say,
        )


def check_page(path: Path, out_file: Path | None) -> None:
    """Raise if the page would be written over a file of the run."""
    check_file(path, out_file, "--out", ".html")


def check_file(path: Path, file: Path | None, option: str, suffix: str) -> None:
    """Raise if a file cannot be written, or only over a file of the run.

    A comparison may take hours, so this is found out before.
    """
    if file is None:
        return
    place, run = file.resolve(), path.resolve()
    own = place.is_relative_to(run) and place.exists() and place.suffix != suffix
    ledgers = (run, run / "ledger")
    if own or any((p / INDEX).exists() and place.is_relative_to(p) for p in ledgers):
        raise InvalidInputError(
            f"{option} {file} is a place of the run itself; name a file that ends in "
            f"{suffix}"
        )
    if place.is_dir() or not place.parent.is_dir():
        why = "is a folder" if place.is_dir() else "is in a folder that does not exist"
        raise InvalidInputError(f"{option} {file} {why}; name another file")


def write_page(path: Path, found: ComparisonTable, out_file: Path | None) -> Path:
    """Write the HTML page and return its path."""
    from fastfedul.report.of_run import report_of
    from fastfedul.report.page import write_html
    from fastfedul.report.stored import place_of

    page = out_file or place_of(path, PAGE)
    with working("drawing the report"):
        write_html(page, report_of(path, found.comparison))
    return page


def keep_comparison(path: Path, facts: Mapping[str, Any]) -> None:
    """Keep the numbers for the console; warn if they cannot be written."""
    from fastfedul.report.stored import write_comparison

    try:
        write_comparison(path, finite_values(facts))
    except InvalidInputError as error:
        warn(f"the comparison was not kept: {error}")


def _page_or_warning(
    path: Path, found: ComparisonTable, out_file: Path | None
) -> Path | None:
    """Write the page; warn if it cannot be written and nobody named its place."""
    try:
        return write_page(path, found, out_file)
    except FastFedULError as error:
        if out_file is not None:
            raise
        warn(f"no page was written: {error}")
        return None


def comparison_json(found: ComparisonTable, page: Path | None) -> dict[str, Any]:
    """Return a comparison as scripts want it."""
    own = found.comparison
    seen = own.reaction
    return {
        "rows": [dict(row) for row in found.rows],
        "means": [means.to_json() for means in found.means],
        "seeds": [seed for seed in found.seeds if seed is not None],
        "forget": list(found.forget),
        "damping": own.damping,
        "refused": dict(found.refused),
        "keeping": {
            "budget": own.keeping.num_kept,
            "attackers": own.keeping.attackers,
            "others": own.keeping.others,
        },
        "removed_by_layer": dict(seen.removed_by_layer) if seen else None,
        "report": None if page is None else str(page),
    }


def show_comparison(found: ComparisonTable, page: Path | None) -> None:
    """Print the table anyone understands, and where the page is."""
    columns = ["", f"accuracy{_out_of(found, 'main')}"]
    attacked = found.rows[0]["backdoor_count"] is not None
    if attacked:
        columns.append(f"attack success{_out_of(found, 'backdoor')}")
    columns.append("time")
    rows = []
    for means in found.means:
        cells = [means.method, _percent(found, means, "main")]
        if attacked:
            cells.append(_percent(found, means, "backdoor"))
        seconds = means.measures["seconds"]
        cells.append(show_seconds(seconds.mean) if seconds else "")
        rows.append(cells)
    who = ", ".join(show_name(name) for name in found.forget)
    print_table(f"Forgetting {who}", columns, rows)
    _tell(_legend(found))
    for name, reason in found.refused.items():
        _tell(f"left out: {name}: {reason}")
    for text in found.caveats:
        _tell(text)
    if page is not None:
        _tell(f"report: {page}")


def _out_of(found: ComparisonTable, name: str) -> str:
    """Return the number of examples, unless it differs from seed to seed."""
    totals = {row[f"{name}_count"][1] for row in found.rows}
    return f" (of {totals.pop()})" if len(totals) == 1 else ""


def _tell(text: str) -> None:
    out().print(text, markup=False, soft_wrap=True)


def _legend(found: ComparisonTable) -> str:
    if len(found.seeds) == 1:
        return "In brackets: 95 % intervals."
    seeds = ", ".join(map(str, found.seeds))
    text = f"Means and standard deviations over the seeds {seeds}."
    fewer = [m for m in found.means if len(m.seeds) < len(found.seeds)]
    for means in fewer:
        text += f" {means.method}: only {', '.join(map(str, means.seeds))}."
    return text


def _percent(found: ComparisonTable, means: ModelMeans, name: str) -> str:
    spread = means.measures[name]
    if spread is None:
        return "-"
    if len(found.seeds) > 1:
        return f"{spread.mean:.1%}" + (
            "" if spread.std is None else f" ± {100 * spread.std:.1f}"
        )
    [row] = [row for row in found.rows if row["method"] == means.method]
    low, high = row[f"{name}_interval"]
    return f"{spread.mean:.1%} [{100 * low:.1f} to {100 * high:.1f}]"


def _how_to_go_on() -> str:
    kept = "trained rounds and retrained models are kept"
    return f"stopped; {kept}; go on with: {this_command()}"
