"""What retraining really leaves of a difference, beside what the default skew says.

Six federations on digits are trained, and trained again without four of their twenty
clients. The undamped difference is then compared with the true one, direction by
direction, sorted by how much the staying clients' updates scatter there: along the
deviations themselves, and in the bases of single layers across them. It takes about
three minutes.

    python benchmarks/held_back.py [--json] [--figure FILE.svg]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import machine, progress, write_result
from fastfedul import LedgerReader
from fastfedul.methods.fast_fedul.columns import rows_of
from fastfedul.methods.fast_fedul.kronecker import LEAST
from fastfedul.methods.fast_fedul.remainder import (
    ALONG_DEVIATIONS,
    WITHIN_LAYERS,
    Strength,
    left_of,
)
from fastfedul.methods.fast_fedul.skews import USUAL_UPDATES
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.methods.fast_fedul.undamped import ages_of, undamped
from fastfedul.params import Array
from fastfedul.report.drawing import BLUE, FAINT, GREEN, INK
from fastfedul.runs.comparison import retrained_model
from fastfedul.runs.config import RunConfig
from fastfedul.runs.preparation import prepare
from fastfedul.runs.training import train
from paper.plot_style import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
ROUNDS = 20
EDGES = 10.0 ** np.arange(-2, 6.01, 0.5)
LEAST_PART = 0.01
"""A bin with less of the squared difference than this says nothing."""

Part = tuple[float, float, float]
"""Pull, what retraining leaves there, and the bin's part of the difference."""


@dataclass(frozen=True, slots=True)
class Row:
    """One federation.

    Attributes:
        federation: What the leavers did and how the data are split.
        within: Bins of the single layers' bases.
        along: Bins of the deviations' own directions.
    """

    federation: str
    within: tuple[Part, ...]
    along: tuple[Part, ...]


def main() -> None:
    """Measure every federation and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--figure", type=Path, help="write the figure of docs/methods")
    arguments = parser.parse_args()
    before = machine()
    rows: list[Row] = []
    with progress() as display, tempfile.TemporaryDirectory() as folder:
        task = display.add_task("federations", total=len(FEDERATIONS))
        for number, (name, options) in enumerate(FEDERATIONS.items()):
            given: dict[str, Any] = {"clients": 20, "epochs": 2, "rounds": ROUNDS}
            config = RunConfig.from_options(seed=SEED, **given, **options)
            rows.append(measure(name, Path(folder) / str(number), config))
            display.advance(task)
    if arguments.figure:
        arguments.figure.write_text(draw(rows), encoding="utf-8")
    write_result(
        {"rows": [asdict(row) for row in rows], "machine": before},
        only_json=arguments.json,
        title="digits, 4 of 20 clients leave: what retraining leaves of the difference",
        columns=("federation", "where", "strength: left (formula)"),
        rows=[
            (row.federation, where, shown(parts, strength))
            for row in rows
            for where, parts, strength in (
                ("within", row.within, WITHIN_LAYERS),
                ("along", row.along, ALONG_DEVIATIONS),
            )
        ],
    )


def shown(parts: tuple[Part, ...], strength: Strength) -> str:
    """Return bins as text."""
    return ", ".join(
        f"{pull:.2g}: {left:.2f} ({float(formula(pull, strength)):.2f})"
        for pull, left, _ in parts
    )


def formula(pull: Array | float, strength: Strength) -> Array:
    """Return what the skew leaves of equal marks in every round.

    Args:
        pull: C v sqrt(T b) / g.
        strength: The skew's constants.
    """
    ages = ages_of(np.ones(ROUNDS))
    return left_of(np.asarray(pull, np.float64), Strength(1, strength.power), 1, ages)


def measure(name: str, run: Path, config: RunConfig) -> Row:
    """Train, train again without four clients, and compare."""
    train(config, run)
    prepared = prepare(config)
    with LedgerReader(run) as ledger:
        gone = tuple(prepared.attack.attackers or sorted(ledger.clients())[:4])
        again, _, _ = retrained_model(run, prepared, ledger, gone, lambda *_: None)
        rounds = ledger.rounds()
        removal = leaving(ledger, frozenset(gone), rounds)
        terms = undamped(ledger, removal, rounds, USUAL_UPDATES)
        layout = ledger.settings.layout
        deviations = rows_of(terms.deviations, 0, layout.size)
        real = again.params.flat.astype(np.float64) - ledger.final.params.flat
    removed = terms.difference.astype(np.float64)
    values, vectors = np.linalg.eigh((deviations @ deviations.T).astype(np.float64))
    some = values > LEAST * values.max()
    basis = (vectors[:, some] / np.sqrt(values[some])).T @ deviations
    ours, theirs = basis @ removed, basis @ real
    factor = ALONG_DEVIATIONS.factor * terms.scale
    along = bins(factor * values[some], ours, theirs, removed)
    across, others = removed - basis.T @ ours, real - basis.T @ theirs
    found = []
    start = 0
    for slot in layout.slots:
        part = slice(start, start := start + slot.size)
        if len(slot.shape) > 1:
            left, right, variance = layer_bases(deviations[:, part], slot.shape[0])
            turned = [
                left.T @ vector[part].reshape(variance.shape) @ right
                for vector in (across, others)
            ]
            found.append([variance.ravel(), *(matrix.ravel() for matrix in turned)])
    variance, ours, theirs = (
        np.concatenate(column) for column in zip(*found, strict=True)
    )
    factor = WITHIN_LAYERS.factor * terms.scale
    within = bins(factor * variance, ours, theirs, removed)
    return Row(name, within, along)


def layer_bases(rows: Array, side: int) -> tuple[Array, Array, Array]:
    """Return both bases of a layer, and the variance of the deviations in them."""
    stacked = rows.reshape(len(rows), side, -1).astype(np.float64)
    of_left, left = np.linalg.eigh(np.einsum("nij,nkj->ik", stacked, stacked))
    of_right, right = np.linalg.eigh(np.einsum("nij,nik->jk", stacked, stacked))
    return left, right, np.multiply.outer(of_left, of_right) / of_left.sum()


def bins(pull: Array, ours: Array, theirs: Array, removed: Array) -> tuple[Part, ...]:
    """Return what is left of the difference where directions scatter alike."""
    parts: list[Part] = []
    whole = float(removed @ removed)
    for low, high in itertools.pairwise(EDGES):
        here = (pull > low) & (pull <= high)
        squared = float(ours[here] @ ours[here])
        if squared > LEAST_PART * whole:
            left = float(ours[here] @ theirs[here]) / squared
            parts.append((float(np.sqrt(low * high)), left, squared / whole))
    return tuple(parts)


def draw(rows: list[Row]) -> str:
    """Return the figure of docs/methods.md."""

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        within = (panels[0], "within a layer", BLUE, WITHIN_LAYERS, (0.01, 1, 100))
        title = "along the others' deviations"
        ticks = (1, 100, 10_000, 1_000_000)
        along = (panels[1], title, GREEN, ALONG_DEVIATIONS, ticks)
        for axes, title, colour, strength, marks in (within, along):
            line = np.geomspace(marks[0], marks[-1], 100)
            for row in rows:
                parts = row.within if colour == BLUE else row.along
                axes.scatter(
                    [pull for pull, _, _ in parts],
                    [left for _, left, _ in parts],
                    s=[20 + 300 * size for _, _, size in parts],
                    color=colour,
                    alpha=0.55,
                    linewidths=0,
                )
            axes.plot(line, formula(line, strength), color=INK)
            axes.axhline(0, color=FAINT, linewidth=0.8)
            axes.set_xscale("log")
            axes.set_xticks(marks, [f"{mark:,}" for mark in marks])
            axes.set_xticks([], minor=True)
            axes.set_ylim(-0.25, 1.25)
            axes.set_title(title)
            axes.set_xlabel("how much the others' updates scatter there")
        panels[0].set_ylabel("part of the difference")
        panels[0].annotate("line: what the server removes", (0.011, 1.07), color=INK)
        panels[0].annotate("dots: what retraining removes", (0.011, -0.15))

    title = "What training with the others leaves of a client's influence"
    return render("held-back", title, 3.6, paint)


if __name__ == "__main__":
    main()
