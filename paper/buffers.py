"""`python -m paper.buffers run|page`: forgetting with batch normalisation.

Every case trains a network with batch norm on digits and forgets one client with the
default method: once with the other clients' buffers, and once with the buffers as the
client left them. It also retrains without the client. A case is a line of
results/buffers.jsonl. The command can be stopped; the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fastfedul.errors import FastFedULError
from fastfedul.files import write_whole
from fastfedul.forgetting.service import preview
from fastfedul.ledger.reader import LedgerReader
from fastfedul.records import Model
from fastfedul.runs.config import RunConfig
from fastfedul.runs.training import prepare, retrain, score, start_workers, train
from paper.board.running import commit
from paper.server_rules import LEAVER, LEAVERS, SPLITS, Line, read_results, run_missing

RESULTS = Path("results/buffers.jsonl")
PAGES = Path("docs/results")
PAGE = "buffers.md"

NETWORK = "paper.board.models:batch_norm_cnn"
SEEDS = (0, 1, 2, 3, 4)
WAYS = {
    "before": "before",
    "kept": "forgotten, buffers as they were",
    "forgotten": "forgotten, the others' buffers",
}
"""The models that are compared with the retrained one, and their names."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run, and the client that leaves.

    Attributes:
        split: How the clients share the examples.
        leaver: Kind of the client that leaves.
        seed: Seed of the run.
    """

    split: str
    leaver: str
    seed: int

    @property
    def key(self) -> str:
        """Name of the case in the results."""
        return f"{self.split}/{self.leaver}/{self.seed}"

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return RunConfig.from_options(
            {"data": "digits", "model": NETWORK, **LEAVERS[self.leaver]},
            partition=self.split,
            seed=self.seed,
            workers=1,
        )


def all_cases() -> list[Case]:
    """Return every case, seed by seed."""
    found = product(SEEDS, SPLITS, LEAVERS)
    return [Case(split, leaver, seed) for seed, split, leaver in found]


def measure(case: Case, folder: Path) -> Line:
    """Return the result of a case; its run goes into a folder."""
    config = case.config
    train(config, folder)
    prepared = prepare(config)
    with start_workers(prepared) as workers, LedgerReader(folder) as ledger:
        final, forgotten = ledger.final, preview(ledger, [LEAVER]).model
        models = {
            "before": final,
            "kept": Model(forgotten.params, final.buffers),
            "forgotten": forgotten,
            "retrained": retrain(prepared, workers, frozenset([LEAVER])),
        }
        scores = {name: score(prepared, workers, m) for name, m in models.items()}
    return {
        "key": case.key,
        "split": case.split,
        "leaver": case.leaver,
        "seed": case.seed,
        "commit": commit(),
        "main": {name: main for name, (main, _) in scores.items()},
        "backdoor": {name: found for name, (_, found) in scores.items()},
    }


def write_page(results: Path, out: Path) -> Iterator[Path]:
    """Write the page of the results; yield its file."""
    path = out / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page_text(read_results(results)))
    yield path


def page_text(lines: Sequence[Line]) -> str:
    """Return the page: gaps to retraining with and without the leaver's buffers."""
    parts = [
        "# Forgetting with batch normalisation",
        "",
        "`python -m paper.buffers run` does the runs, and "
        "`python -m paper.buffers page` writes this page.",
        "A run trains a small convolutional network with batch norm on digits, "
        "and forgets one of ten clients with the default method.",
        "A gap is the accuracy, or the attack success, minus that of retraining, in "
        "points.",
        "",
        "| split | who leaves | model | runs | main gap: mean | mean absolute | worst "
        "| backdoor gap: mean | mean absolute | worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for split, leaver, way in product(SPLITS, LEAVERS, WAYS):
        own = [
            line
            for line in lines
            if line["split"] == split and line["leaver"] == leaver
        ]
        if own:
            cells = [split, leaver, WAYS[way], str(len(own))]
            for what in ("main", "backdoor"):
                cells += _summary(own, what, way)
            parts.append(f"| {' | '.join(cells)} |")
    if not lines:
        parts.append("\nThese runs have not been done yet.")
    return "\n".join([*parts, ""])


def _summary(lines: Sequence[Line], what: str, way: str) -> list[str]:
    """Return mean, mean absolute and worst gap of a model to the retrained one."""
    gaps = [
        100 * (line[what][way] - line[what]["retrained"])
        for line in lines
        if line[what]["retrained"] is not None
    ]
    if not gaps:
        return ["none"] * 3
    mean = sum(gaps) / len(gaps)
    absolute = sum(map(abs, gaps)) / len(gaps)
    return [f"{mean:+.2f}", f"{absolute:.2f}", f"{max(gaps, key=abs):+.2f}"]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m paper.buffers")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="do the cases that are missing")
    page = verbs.add_parser("page", help="write the page from the results")
    page.add_argument("--out", type=Path, default=PAGES, help=f"usually {PAGES}")
    for verb in (run, page):
        verb.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    try:
        if asked.verb == "page":
            for path in write_page(asked.results, asked.out):
                print(path)
            return 0
        for line in run_missing(all_cases(), asked.results, measure):
            print(line["key"], json.dumps(line["main"]), json.dumps(line["backdoor"]))
            sys.stdout.flush()
    except FastFedULError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
