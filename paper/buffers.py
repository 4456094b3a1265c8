"""`python -m paper.buffers run|page`: forgetting with batch normalisation.

Every case trains a network with batch norm on digits and forgets one client with the
default method: once with the other clients' buffers, and once with the buffers as the
client left them. It also retrains without the client. A case is a line of
results/buffers.jsonl. The command can be stopped; the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fastfedul.ledger.reader import LedgerReader
from fastfedul.records import Model
from fastfedul.runs.config import RunConfig
from paper.leaving import (
    LEAVERS,
    SPLITS,
    Command,
    Line,
    forgotten,
    measured,
    put_page,
    read_results,
    run_missing,
)

RESULTS = Path("results/buffers.jsonl")
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

    def models(ledger: LedgerReader) -> dict[str, Model]:
        found = forgotten(ledger)
        kept = Model(found.params, ledger.final.buffers)
        return {"kept": kept, "forgotten": found}

    return measured(case, folder, models)


def write_page(results: Path, out: Path) -> Iterator[Path]:
    """Write the page of the results; yield its file."""
    yield put_page(out / PAGE, page_text(read_results(results)))


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


def run(asked: argparse.Namespace) -> Iterator[Line]:
    """Do the cases that are missing; yield their results."""
    return run_missing(all_cases(), asked.results, measure)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of the command line; return the exit code."""
    return Command("buffers", RESULTS, run, write_page)(words)


if __name__ == "__main__":
    sys.exit(main())
