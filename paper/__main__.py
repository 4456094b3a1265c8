"""`python -m paper`: the paper's tables and figures, with ours beside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastfedul.cli.main import run_app
from fastfedul.cli.output import JsonFlag, err, out, print_json
from paper.experiments import EXPERIMENTS
from paper.reproducing import Plan, plan, reproduce

if TYPE_CHECKING:
    from paper.running import Say

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def reproduce_paper(
    name: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(EXPERIMENTS)}, several with commas, or all.",
            metavar="NAME",
        ),
    ],
    folder: Annotated[Path, typer.Option("--out", help="Folder for the pages.")],
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: digits, minutes. standard: MNIST, CIFAR-10 and retinal scans, "
            "hours on two cores. paper: MNIST with the rounds and epochs of the paper, "
            "half an hour for a run and its retraining.",
            metavar="smoke|standard|paper",
        ),
    ] = "smoke",
    seeds: Annotated[int, typer.Option(help="Seeds 0 to this number less 1.")] = 3,
    data: Annotated[
        str | None,
        typer.Option(help="Only this data set of the tables, such as mnist."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Stop after so many new runs; the rest another day."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the results of cells.", show_default="OUT/results"
        ),
    ] = None,
    server_only: Annotated[
        bool,
        typer.Option(
            "--server-only", help="Only methods that ask no client and need no images."
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Also compute results again that lack newer measures or times.",
        ),
    ] = False,
    timed: Annotated[
        bool,
        typer.Option(
            "--times/--no-times",
            help="Whether to measure time and memory. On a busy machine choose "
            "--no-times: results keep the times they have, and --again adds the rest.",
        ),
    ] = True,
    keep_runs: Annotated[
        bool,
        typer.Option("--keep-runs", help="Leave the trained runs in OUT/runs."),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Run the paper's evaluation again and put our figures beside the paper's.

    Every cell of a table is one method on one run. Its result is a line of
    RESULTS/DATA.jsonl, under a digest of everything it depends on. So the command can
    be stopped and goes on where it was, and a table can be built up over days. The
    command writes NAME.md, NAME.csv and the plots to OUT; --limit 0 writes them from
    the results that are there.

    Example: `python -m paper edge-case --out tables --scale smoke --seeds 2`

    `python -m paper.pages` writes all pages of the repository from its results.
    """

    def planning() -> Plan:
        return plan(
            name,
            scale,
            seeds,
            folder,
            results=results,
            only=data,
            again=again,
            timed=timed,
            server_only=server_only,
        )

    planned = planning()
    with _progress(planned.num_done, planned.num_cells) as say:
        written = reproduce(planned, say, limit=limit, keep_runs=keep_runs)
    done = planning().num_done
    facts = {
        "cells": planned.num_cells,
        "cells_done": done,
        "files": [str(path) for path in written],
    }
    if json:
        print_json(facts)
        return
    left = planned.num_cells - done
    out().print(
        f"{done} of {planned.num_cells} cells"
        + (f", {left} left: run the same command again" if left else ""),
        markup=False,
    )
    for path in written:
        out().print(str(path), markup=False, soft_wrap=True)


@contextmanager
def _progress(done: int, total: int) -> Iterator[Say]:
    if not err().is_terminal:
        yield _print_finished(done, total)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    with Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        # Cells are few and slow, so the estimate looks far back.
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=err(),
        speed_estimate_period=3600,
    ) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda what, count: bar.update(task, description=what, advance=count)


def _print_finished(done: int, total: int) -> Say:
    """Return a function that prints a line for each finished cell."""
    counted = done

    def say(what: str, count: int) -> None:
        nonlocal counted
        counted += count
        if count:
            err().print(f"{counted}/{total} {what}", markup=False, soft_wrap=True)

    return say


if __name__ == "__main__":
    run_app(app)
