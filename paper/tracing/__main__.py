"""`python -m paper.tracing run|worth|page|list`, from the root of the repository."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from fastfedul.errors import FastFedULError
from paper.board import store
from paper.board.running import commit
from paper.board.store import Line, Results, is_done, read_lines
from paper.tracing import worth
from paper.tracing.page import TRACES, WORTH, write_page
from paper.tracing.runs import COUNTS, all_runs, in_order
from paper.tracing.scoring import measure

RESULTS = Path("results")
PAGES = Path("docs/results")

_Run = TypeVar("_Run", bound=store.Run)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of the command line; return the exit code."""
    asked = _parser().parse_args(words)
    only = asked.only if asked.verb in ("run", "list") else ()
    runs = in_order([run for run in all_runs() if not only or run.data in only])
    try:
        if asked.verb == "list":
            for run in runs:
                print(", ".join(str(value) for value in run.facts.values()))
        elif asked.verb == "page":
            for path in write_page(asked.results, asked.out):
                print(path)
        elif asked.verb == "worth":
            return do_missing(worth.RUNS, asked.results / WORTH, worth.compare)
        else:
            return do_missing(runs, asked.results / TRACES, measure, asked.limit)
    except FastFedULError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


def do_missing(
    runs: Sequence[_Run],
    path: Path,
    measure: Callable[[_Run, Path], list[Line]],
    limit: int | None = None,
) -> int:
    """Do the runs that are missing; another process may do others meanwhile.

    Args:
        runs: The runs, in the order of the work.
        path: File of the results.
        measure: Does a run in a folder and returns its lines.
        limit: Missing runs to do at most; None for all.

    Returns:
        The exit code: 1 if a run failed.
    """
    about = {"commit": commit()}
    failed = 0
    known = read_lines(path)
    missing = [run for run in runs if not is_done(run, known)]
    with Results(path) as results:
        for run in missing[:limit]:
            with results.claim(run) as mine:
                if not mine:
                    continue
                started = time.perf_counter()
                try:
                    with tempfile.TemporaryDirectory(prefix="tracing-") as folder:
                        lines = measure(run, Path(folder))
                except FastFedULError as error:
                    failed += 1
                    print(f"{run.key} FAILED: {error}", file=sys.stderr, flush=True)
                    continue
                names = {"run": run.key}
                results.append(
                    [
                        {**line, **about, **names, "key": f"{run.key}/{line['method']}"}
                        for line in lines
                    ]
                )
                took = time.perf_counter() - started
                print(f"{run.key} {took:.0f} s", file=sys.stderr, flush=True)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paper.tracing", description=__doc__
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, text in (
        ("run", "do the missing runs of the board, small federations first"),
        ("worth", "compare contributions with leave-one-out retraining"),
        ("page", "write the page from the results"),
        ("list", "show the runs in the order of the work"),
    ):
        verb = verbs.add_parser(name, help=text)
        if name != "list":
            verb.add_argument(
                "--results", type=Path, default=RESULTS, help="folder of the results"
            )
        if name in ("run", "list"):
            verb.add_argument("--only", nargs="*", choices=tuple(COUNTS), default=())
    choices = verbs.choices
    choices["run"].add_argument("--limit", type=int, help="do at most so many runs")
    choices["page"].add_argument("--out", type=Path, default=PAGES)
    return parser


if __name__ == "__main__":
    sys.exit(main())
