"""How much of a client's mark the others' training would have pulled back, and where.

Federations learn the digits and are trained again without the clients that leave. The
difference between the two models is compared with D0, the undamped difference that the
history gives: along the directions in which the staying clients' updates differ, by how
much they differ there, and across all of them. 1 means that nothing was pulled back, 0
that everything was. Skew per direction rests on this (docs/methods.md). It takes about
two minutes.

    python benchmarks/pulled_back.py [--json]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import machine, progress, write_result

from fastfedul import FastFedUL, LedgerReader, UnlearnRequest
from fastfedul.comparing import retrained_model
from fastfedul.experiment import train
from fastfedul.history.ledger import vector
from fastfedul.params import Array
from fastfedul.preparation import prepare
from fastfedul.records import VectorRef
from fastfedul.run_config import RunConfig

FEDERATIONS = {
    "even, pixel": {"attack": "pixel", "attackers": "4"},
    "even, edge-case": {"attack": "edge-case", "attackers": "4"},
    "even, honest": {"attack": "none"},
    "Dirichlet 0.5, honest": {"attack": "none", "partition": "dirichlet:0.5"},
    "Dirichlet 0.1, honest": {"attack": "none", "partition": "dirichlet:0.1"},
    "level 4, label flip": {
        "attack": "label-flip",
        "attackers": "4",
        "partition": "level:4",
    },
}
SEED = 110
EDGES = (np.inf, 3.0, 1.0, 0.3, 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One federation.

    Attributes:
        federation: What the leavers did and how the data are split.
        left: What is left of D0 after retraining, by how much clients differ along a
            direction relative to the mean over all directions: above 3, 1 to 3, 0.3 to
            1, below 0.3.
        across: The same across all directions.
        part_across: Part of the squared D0 that is across them.
    """

    federation: str
    left: tuple[float | None, ...]
    across: float
    part_across: float


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
            config = RunConfig(clients=20, epochs=2, seed=SEED, **options)  # type: ignore[arg-type]
            rows.append(measure(name, Path(folder) / str(number), config))
            display.advance(task)
    write_result(
        {"rows": [asdict(row) for row in rows], "machine": before},
        only_json=arguments.json,
        title="digits, 4 of 20 clients leave: what is left of D0 after retraining",
        columns=("federation", "above 3", "1 to 3", "0.3 to 1", "below", "across"),
        rows=[
            (
                row.federation,
                *("-" if part is None else f"{part:.2f}" for part in row.left),
                f"{row.across:.2f} ({row.part_across:.0%} of D0)",
            )
            for row in rows
        ],
    )


def measure(name: str, run: Path, config: RunConfig) -> Row:
    """Train, train again without four clients, and compare."""
    train(run, config)
    prepared = prepare(config)
    with LedgerReader(run) as ledger:
        gone = tuple(prepared.attack.attackers or sorted(ledger.clients())[:4])
        again, _, _ = retrained_model(run, prepared, ledger, gone, lambda *_: None)
        request = UnlearnRequest(ledger, frozenset(gone))
        removed = FastFedUL(skew="none")(request).delta.flat.astype(np.float64)
        rows = _deviations(ledger, frozenset(gone))
        real = again.params.flat.astype(np.float64) - ledger.final.params.flat
    values, vectors = np.linalg.eigh(rows @ rows.T)
    some = values > 1e-6 * values.max()
    basis = (vectors[:, some] / np.sqrt(values[some])).T @ rows
    relative = values[some] / values[some].mean()
    ours, theirs = basis @ removed, basis @ real
    left: list[float | None] = []
    for above, edge in itertools.pairwise(EDGES):
        here = (relative <= above) & (relative > edge)
        squared = float(ours[here] @ ours[here])
        left.append(float(ours[here] @ theirs[here]) / squared if squared else None)
    across, others = removed - basis.T @ ours, real - basis.T @ theirs
    squared = float(across @ across)
    return Row(
        name,
        tuple(left),
        float(across @ others) / squared,
        squared / float(removed @ removed),
    )


def _deviations(ledger: LedgerReader, gone: frozenset[str]) -> Array:
    """Return a row for each update of those who stay: V of the method, plainly."""
    found = []
    for round_ in ledger.rounds():
        stay = [u for u in ledger.updates_in(round_.index) if u.client not in gone]
        deltas = np.stack([vector(ledger, VectorRef(u.round, u.client)) for u in stay])
        shares = np.array([u.share for u in stay])
        cleaned = shares @ deltas.astype(np.float64) / shares.sum()
        found.append(np.sqrt(shares)[:, None] * (deltas - cleaned))
    return np.concatenate(found)


if __name__ == "__main__":
    main()
