"""Worth of clients by forgetting, beside their worth by true leave-one-out retraining.

Both are measured on the same test examples of the same run: loss and accuracy without
the client, against the model of everybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastfedul.data.dataset import to_model_input
from fastfedul.evaluate.intervals import mean_interval
from fastfedul.evaluate.membership import per_example_loss
from fastfedul.federation.workers.pool import InProcess
from fastfedul.investigate.contribution import contributions_to
from fastfedul.ledger.reader import LedgerReader
from fastfedul.records import Model
from fastfedul.runs.config import RunConfig
from fastfedul.runs.given import tested_by
from fastfedul.runs.preparation import Prepared, prepare, retrain, start_workers
from fastfedul.runs.training import train
from paper.board.store import Line

_ByRun = Sequence[Sequence[float]]
_WORST_LOSS = 50.0
"""Loss of one example beyond which a model is simply wrong, as for contributions."""


@dataclass(frozen=True, slots=True)
class WorthRun:
    """One run whose clients are valued twice.

    Attributes:
        number: Its place in the list, from 0.
        split: How the clients share the examples.
        seed: Seed of the run; the board of tracing uses none of these seeds.
        clients: Number of clients.
        rounds: Number of rounds.
    """

    number: int
    split: str
    seed: int
    clients: int = 10
    rounds: int = 20

    @property
    def key(self) -> str:
        """The name of the run."""
        return f"worth-{self.number}"

    @property
    def seeds(self) -> range:
        """The one seed of the run."""
        return range(self.seed, self.seed + 1)

    @property
    def facts(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        return asdict(self)

    @property
    def config(self) -> RunConfig:
        """The options of the run; nobody attacks."""
        return RunConfig.from_options(
            data="digits",
            clients=self.clients,
            partition=self.split,
            rounds=self.rounds,
            epochs=2,
            seed=self.seed,
            workers=1,
        )


SPLITS = ("dirichlet:0.2", "iid")
SEEDS_EACH = 5
RUNS = tuple(
    WorthRun(number, SPLITS[number % 2], 20_000 + number)
    for number in range(2 * SEEDS_EACH)
)


def compare(run: WorthRun, folder: Path) -> list[Line]:
    """Return for each client its worth by forgetting and by retraining."""
    config = run.config
    train(config, folder / "run")
    prepared = prepare(config)
    with LedgerReader(folder / "run") as ledger:
        told = contributions_to(ledger, tested_by(prepared))
        accuracy, loss = _quality(prepared, ledger.final)
    lines = []
    # The same clients with their batches in another order: how noisy retraining is.
    shuffled = InProcess(prepared.trainer, prepared.clients, seed=config.seed + 1)
    accuracy_again, loss_again = _quality(
        prepared, retrain(prepared, shuffled, frozenset())
    )
    with start_workers(prepared) as workers:
        for own in told.clients:
            without = frozenset([own.client])
            first = _quality(prepared, retrain(prepared, workers, without))
            again = _quality(prepared, retrain(prepared, shuffled, without))
            lines.append(
                {
                    **run.facts,
                    "method": own.client,
                    "loss": {
                        "forgotten": own.loss,
                        "retrained": first[1] - loss,
                        "again": again[1] - loss_again,
                    },
                    "accuracy": {
                        "forgotten": own.accuracy,
                        "retrained": accuracy - first[0],
                        "again": accuracy_again - again[0],
                    },
                }
            )
    return lines


def _quality(prepared: Prepared, model: Model) -> tuple[float, float]:
    """Return a model's accuracy and mean loss on the run's test examples."""
    images, labels = prepared.dataset.test_images, prepared.dataset.test_labels
    logits = prepared.trainer.predict(model, to_model_input(images))
    loss = np.minimum(per_example_loss(logits, labels), _WORST_LOSS)
    return float(np.mean(logits.argmax(axis=1) == labels)), float(loss.mean())


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None if all values of a side are equal.

    >>> rank_correlation([1, 2, 3], [10, 30, 20])
    0.5
    """
    first, second = (_ranks(np.asarray(side, np.float64)) for side in (left, right))
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return round(float(np.corrcoef(first, second)[0, 1]), 12)


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the rank of each value; equal values share their mean rank."""
    below = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    found: np.ndarray[Any, Any] = below + (equal - 1) / 2
    return found


def worth_section(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the part of the page on contributions."""
    yield "## Does a contribution agree with retraining?"
    yield ""
    yield "`fastfedul contribution` forgets each client in turn and retrains nobody."
    yield "`python -m paper.tracing worth` also retrains without each client."
    yield "The runs are on digits, with ten honest clients and twenty rounds."
    yield "The gap is the worth by forgetting minus the worth by retraining."
    yield "Retraining is noisy, so even clients of equal worth get different ranks."
    yield (
        "The noise floor is the agreement of two retrainings that differ in the order "
        "of the batches."
    )
    yield "Ranges are 95 % t intervals over runs."
    yield ""
    yield (
        "| split | worth in | runs done | rank correlation | noise floor of it "
        "| mean absolute gap | noise floor of it | largest gap |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for split in SPLITS:
        runs = [run for run in RUNS if run.split == split]
        by_run = [[line for line in lines if line["run"] == run.key] for run in runs]
        done = [own for own in by_run if own]
        if not done:
            yield f"| {split} | not run | 0 of {len(runs)} | | | | | |"
            continue
        for what, unit, factor in (("loss", "nats", 1), ("accuracy", "points", 100)):
            told, true, again = (
                [
                    [factor * line[what][kind] for line in own]
                    for own in done
                    if all(kind in line[what] for line in own)
                ]
                for kind in ("forgotten", "retrained", "again")
            )
            checked = [
                [factor * line[what]["retrained"] for line in own]
                for own in done
                if all("again" in line[what] for line in own)
            ]
            gaps = np.subtract(told, true).ravel()
            yield (
                f"| {split} | {what}, {unit} | {len(done)} of {len(runs)} "
                f"| {_correlation(told, true)} | {_correlation(checked, again)} "
                f"| {_gap(told, true)} | {_gap(checked, again)} "
                f"| {gaps[np.abs(gaps).argmax()]:+.3f} |"
            )
    yield ""


def _correlation(
    left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]
) -> str:
    """Return the mean rank correlation over runs, with its interval, as a cell."""
    found = [rank_correlation(*pair) for pair in zip(left, right, strict=True)]
    return _cell([value for value in found if value is not None], 2)


def _gap(left: _ByRun, right: _ByRun) -> str:
    """Return the mean absolute gap over runs, with its interval, as a cell."""
    pairs = zip(left, right, strict=True)
    return _cell([float(np.abs(np.subtract(*pair)).mean()) for pair in pairs], 3)


def _cell(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    found = mean_interval(values)
    if found.interval is None:
        return f"{found.value:.{digits}f}"
    low, high = found.interval
    return f"{found.value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
