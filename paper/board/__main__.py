"""`python -m paper.board run|page|list`, from the root of the repository."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fastfedul.errors import FastFedULError, InvalidInputError
from paper.board import runs
from paper.board.page import write_page
from paper.board.running import run_all

RESULTS = Path("results/board.jsonl")
PAGES = Path("docs/results")
_DEVELOPMENT = "board-development.jsonl"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of the command line; return the exit code."""
    asked = _parser().parse_args(words)
    try:
        if asked.verb == "list":
            return _list(asked.only)
        if asked.verb == "page":
            for path in write_page(asked.results or RESULTS, asked.out):
                print(path)
            return 0
        return _run(asked)
    except FastFedULError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def _run(asked: argparse.Namespace) -> int:
    if asked.cells and not asked.development:
        raise InvalidInputError("the board has all its rows; --cells is for trying")
    if asked.limit is not None and asked.limit < 0:
        raise InvalidInputError(f"--limit is {asked.limit}; choose 0 or more")
    chosen = runs.in_order(runs.chosen(runs.all_runs(), asked.only))
    results: Path = asked.results or RESULTS
    if asked.development:
        chosen = runs.for_development(chosen)
        folder = asked.work or Path(tempfile.gettempdir())
        results = asked.results or folder / _DEVELOPMENT
        if results.resolve() == RESULTS.resolve():
            raise InvalidInputError(f"runs of development do not belong in {RESULTS}")
    failed = run_all(
        chosen[: asked.limit],
        results,
        processes=asked.processes,
        work=asked.work,
        cells=asked.cells or None,
    )
    print(results)
    return 1 if failed else 0


def _list(only: Sequence[str]) -> int:
    found = runs.chosen(runs.all_runs(), only)
    for run in found:
        drawn = "half" if run.half else "all"
        rivals = ", rivals" if run.rivals else ""
        print(
            f"{run.key}: {run.split}, {drawn} of {run.clients} a round, {run.leavers} "
            f"leave, {run.attack}, {run.training}, {run.network}, seed {run.seed}"
            f"{rivals}"
        )
    counted = Counter(run.data for run in found)
    print(f"{len(found)} runs:", ", ".join(f"{n} {d}" for d, n in counted.items()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paper.board", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="do the runs that are missing")
    page = verbs.add_parser("page", help="write the page from the results")
    listed = verbs.add_parser("list", help="show the runs")
    for verb in (run, listed):
        verb.add_argument(
            "--only", type=_names, default=(), help="data sets, small, large, or runs"
        )
    for verb in (run, page):
        verb.add_argument("--results", type=Path, help=f"usually {RESULTS}")
    run.add_argument("--limit", type=int, help="do at most the first so many")
    run.add_argument("--processes", type=int, default=2, help="runs at a time")
    run.add_argument("--work", type=Path, help="folder for ledgers of runs under way")
    run.add_argument("--development", action="store_true", help="seeds 100 to 149")
    run.add_argument("--cells", type=_names, default=(), help="rows, in development")
    page.add_argument("--out", type=Path, default=PAGES, help=f"usually {PAGES}")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
