"""How far forgetting from sums is from forgetting with every round at hand.

Federations learn the digits: everybody in every round, or half of them, with even or
skewed data. Each client, and some pairs, are forgotten per coordinate from the ledger
of rounds and from sums of the same training. The relative distance between the two
differences is printed beside what the result said that it may be off by. It takes
about a minute.

    python benchmarks/small_history.py [--json]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import machine, progress, write_result

from fastfedul import FastFedUL, LedgerReader, UnlearnRefusedError, UnlearnRequest
from fastfedul.experiment import train
from fastfedul.history.ledger import Ledger
from fastfedul.history.recoding import recoded
from fastfedul.history.sampling import Keep
from fastfedul.params import Flat
from fastfedul.run_config import RunConfig

FEDERATIONS = {
    "even, everybody": {},
    "even, half a round": {"per_round": 5},
    "skewed, everybody": {"partition": "dirichlet:0.5"},
    "skewed, half a round": {"partition": "dirichlet:0.5", "per_round": 5},
}
METHOD = FastFedUL(skew="coordinate")
UNDAMPED = FastFedUL(skew="coordinate", spread=0, persistence=0)


@dataclass(frozen=True, slots=True)
class Row:
    """Distances in one federation, relative, at worst over the clients.

    Attributes:
        federation: How the data are split and who takes part.
        clients: How many are forgotten at once.
        removed: Of what is removed before any damping.
        damped: Of what is removed with the usual settings.
        refused: How many requests were refused, out of how many.
    """

    federation: str
    clients: int
    removed: float
    damped: float
    refused: str


def main() -> None:
    """Measure every federation and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    before = machine()
    rows: list[Row] = []
    with progress() as display, tempfile.TemporaryDirectory() as folder:
        task = display.add_task("federations", total=len(FEDERATIONS))
        for number, (name, options) in enumerate(FEDERATIONS.items()):
            run = Path(folder) / str(number)
            train(run, RunConfig(**options))  # type: ignore[arg-type]
            rows += measure(name, run)
            display.advance(task)
    write_result(
        {"rows": [asdict(row) for row in rows], "machine": before},
        only_json=arguments.json,
        title="digits, 10 clients, 20 rounds: distance between sums and rounds",
        columns=("federation", "at once", "removed", "damped", "refused"),
        rows=[
            (
                row.federation,
                str(row.clients),
                f"{row.removed:.1e}",
                f"{row.damped:.1e}",
                row.refused,
            )
            for row in rows
        ],
    )


def measure(name: str, run: Path) -> list[Row]:
    """Return how far single clients and pairs of them are off."""
    with LedgerReader(run) as full:
        recoded(full, run / "sums", keep=Keep("sums")).close()
        with LedgerReader(run / "sums") as sums:
            names = list(full.clients())
            pairs = list(itertools.combinations(names[:5], 2))
            return [
                _row(name, full, sums, [(client,) for client in names]),
                _row(name, full, sums, pairs),
            ]


def _row(name: str, full: Ledger, sums: Ledger, groups: Sequence[Sequence[str]]) -> Row:
    distances: dict[FastFedUL, list[float]] = {UNDAMPED: [], METHOD: []}
    refused = 0
    for group in groups:
        try:
            for method, found in distances.items():
                one, other = (_answer(method, ledger, group) for ledger in (full, sums))
                found.append(float(np.linalg.norm(one - other) / np.linalg.norm(one)))
        except UnlearnRefusedError:
            refused += 1
    worst = {method: max(found, default=0.0) for method, found in distances.items()}
    return Row(
        name,
        len(groups[0]),
        worst[UNDAMPED],
        worst[METHOD],
        f"{refused} of {len(groups)}",
    )


def _answer(method: FastFedUL, ledger: Ledger, group: Sequence[str]) -> Flat:
    return method(UnlearnRequest(ledger, frozenset(group))).delta.flat


if __name__ == "__main__":
    main()
