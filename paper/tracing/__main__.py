"""`python -m paper.tracing run|page|list`, from the root of the repository."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fastfedul.errors import FastFedULError
from paper.board.running import commit
from paper.board.store import Results
from paper.tracing.page import write_page
from paper.tracing.runs import COUNTS, Run, all_runs
from paper.tracing.scoring import measure

RESULTS = Path("results/tracing.jsonl")
PAGES = Path("docs/results")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of the command line; return the exit code."""
    asked = _parser().parse_args(words)
    runs = [run for run in all_runs() if not asked.only or run.data in asked.only]
    try:
        if asked.verb == "list":
            for run in runs:
                print(", ".join(str(value) for value in run.facts.values()))
        elif asked.verb == "page":
            print(write_page(asked.results, PAGES))
        else:
            return _run(runs[: asked.limit], asked.results)
    except FastFedULError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _run(runs: Sequence[Run], path: Path) -> int:
    """Do the runs that are missing; another process may do others meanwhile."""
    about = {"commit": commit()}
    failed = 0
    with Results(path) as store:
        for run in runs:
            with store.claim(run) as mine:
                if not mine:
                    continue
                started = time.perf_counter()
                folder = Path(tempfile.mkdtemp(prefix="tracing-"))
                try:
                    rows = measure(run, folder)
                    keyed = [
                        {**row, **about, "run": run.key, "key": f"{run.key}/{name}"}
                        for row in rows
                        for name in [row["method"]]
                    ]
                    store.append(keyed)
                except FastFedULError as error:
                    failed += 1
                    print(f"{run.key} FAILED: {error}", file=sys.stderr, flush=True)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                took = time.perf_counter() - started
                print(f"{run.key} {took:.0f} s", file=sys.stderr, flush=True)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paper.tracing", description=__doc__
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, text in (
        ("run", "do the runs that are missing"),
        ("page", "write the page from the results"),
        ("list", "show the runs"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("--results", type=Path, default=RESULTS)
        verb.add_argument("--only", nargs="*", choices=tuple(COUNTS), default=())
        verb.add_argument("--limit", type=int, help="at most the first so many")
    return parser


if __name__ == "__main__":
    sys.exit(main())
