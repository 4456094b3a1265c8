"""Runs that one client leaves, a line of results each, beside retraining.

The commands of such runs are alike: `run` does the cases that the results do not have,
and `page` writes the page from the results. A stopped command goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastfedul.errors import FastFedULError
from fastfedul.files import write_whole
from fastfedul.forgetting.service import preview
from fastfedul.ledger.reader import LedgerReader
from fastfedul.records import Model
from fastfedul.runs.config import RunConfig
from fastfedul.runs.training import prepare, retrain, score, start_workers, train
from paper.board.running import commit

PAGES = Path("docs/results")

Line = dict[str, Any]

SPLITS = ("iid", "dirichlet:0.5")
LEAVERS: Mapping[str, Mapping[str, Any]] = {
    "pixel": {"attack": "pixel"},
    "honest": {},
}
LEAVER = "client-0"
"""The client that leaves; with an attack it is the attacker."""


def read_results(path: Path) -> list[Line]:
    """Return all lines; none if there is no file.

    Raises:
        FastFedULError: If a line cannot be read.
    """
    if not path.exists():
        return []
    found: list[Line] = []
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            found.append({**line, "key": line["key"]})
        except (ValueError, KeyError, TypeError):
            raise FastFedULError(f"{path}, line {number}: cannot be read") from None
    return found


class AnyCase(Protocol):
    """A case of some results."""

    @property
    def key(self) -> str:
        """Name of the case in the results."""

    @property
    def split(self) -> str:
        """How the clients share the examples."""

    @property
    def leaver(self) -> str:
        """Kind of the client that leaves."""

    @property
    def seed(self) -> int:
        """Seed of the run."""

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""


C = TypeVar("C", bound=AnyCase)


def run_missing(
    cases: Sequence[C], path: Path, measure: Callable[[C, Path], Line]
) -> Iterator[Line]:
    """Do the cases that the results do not have; yield each line once it is stored.

    Args:
        cases: All cases.
        path: File of the results.
        measure: Returns the result of a case; its run goes into a folder.
    """
    for case in cases:
        lines = read_results(path)
        if case.key in {line["key"] for line in lines}:
            continue
        with tempfile.TemporaryDirectory(prefix="paper-") as folder:
            found = measure(case, Path(folder) / "run")
        every = sorted([*read_results(path), found], key=lambda line: line["key"])
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in every)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        yield found


def forgotten(ledger: LedgerReader) -> Model:
    """Return the model that the default method makes without the client."""
    return preview(ledger, [LEAVER]).model


def measured(
    case: AnyCase, folder: Path, models: Callable[[LedgerReader], Mapping[str, Model]]
) -> Line:
    """Return the scores of a case: before, of some models, and after retraining.

    Args:
        case: The case.
        folder: New folder of its run.
        models: Returns the models to score, by name.
    """
    train(case.config, folder)
    prepared = prepare(case.config)
    with start_workers(prepared) as workers, LedgerReader(folder) as ledger:
        every = {
            "before": ledger.final,
            **models(ledger),
            "retrained": retrain(prepared, workers, frozenset([LEAVER])),
        }
        scores = {name: score(prepared, workers, m) for name, m in every.items()}
    return {
        "key": case.key,
        "split": case.split,
        "leaver": case.leaver,
        "seed": case.seed,
        "commit": commit(),
        "main": {name: main for name, (main, _) in scores.items()},
        "backdoor": {name: found for name, (_, found) in scores.items()},
    }


def put_page(path: Path, text: str) -> Path:
    """Write a page, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


class Command:
    """The command line of such runs.

    Attributes:
        run: The parser of the verb `run`, for further options.
    """

    def __init__(
        self,
        module: str,
        results: Path,
        do: Callable[[argparse.Namespace], Iterator[Line]],
        write_page: Callable[[Path, Path], Iterable[Path]],
    ) -> None:
        self._parser = argparse.ArgumentParser(prog=f"python -m paper.{module}")
        verbs = self._parser.add_subparsers(dest="verb", required=True)
        self.run = verbs.add_parser("run", help="do the cases that are missing")
        page = verbs.add_parser("page", help="write the page from the results")
        page.add_argument("--out", type=Path, default=PAGES, help=f"usually {PAGES}")
        for verb in (self.run, page):
            verb.add_argument("--results", type=Path, default=results)
        self._do, self._write_page = do, write_page

    def __call__(self, words: Sequence[str] | None = None) -> int:
        """Run the command; return the exit code."""
        asked = self._parser.parse_args(words)
        try:
            if asked.verb == "page":
                for path in self._write_page(asked.results, asked.out):
                    print(path)
                return 0
            for line in self._do(asked):
                scores = json.dumps(line["main"]), json.dumps(line["backdoor"])
                print(line["key"], *scores, flush=True)
        except FastFedULError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("stopped; the same command goes on", file=sys.stderr)
            return 130
        return 0
