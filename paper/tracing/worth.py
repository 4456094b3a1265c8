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
from fastfedul.evaluate.membership import per_example_loss
from fastfedul.investigate.contribution import contributions_to
from fastfedul.ledger.reader import LedgerReader
from fastfedul.records import Model
from fastfedul.runs.config import RunConfig
from fastfedul.runs.given import tested_by
from fastfedul.runs.preparation import Prepared, prepare, retrain, start_workers
from fastfedul.runs.training import train
from paper.board.store import Line

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


RUNS = (WorthRun(0, "dirichlet:0.2", 20_000), WorthRun(1, "iid", 20_001))


def compare(run: WorthRun, folder: Path) -> list[Line]:
    """Return for each client its worth by forgetting and by retraining."""
    config = run.config
    train(config, folder / "run")
    prepared = prepare(config)
    with LedgerReader(folder / "run") as ledger:
        told = contributions_to(ledger, tested_by(prepared))
        accuracy, loss = _quality(prepared, ledger.final)
    lines = []
    with start_workers(prepared) as workers:
        for own in told.clients:
            model = retrain(prepared, workers, frozenset([own.client]))
            accuracy_without, loss_without = _quality(prepared, model)
            lines.append(
                {
                    **run.facts,
                    "method": own.client,
                    "loss": {
                        "forgotten": own.loss,
                        "retrained": loss_without - loss,
                    },
                    "accuracy": {
                        "forgotten": own.accuracy,
                        "retrained": accuracy - accuracy_without,
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
    yield ""
    yield (
        "| split | worth in | clients | rank correlation | mean worth by forgetting "
        "| mean worth by retraining | mean absolute gap | largest gap |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for run in RUNS:
        own = [line for line in lines if line["run"] == run.key]
        if not own:
            yield f"| {run.split} | not run | | | | | | |"
            continue
        for what, unit, factor in (("loss", "nats", 1), ("accuracy", "points", 100)):
            told = [factor * line[what]["forgotten"] for line in own]
            true = [factor * line[what]["retrained"] for line in own]
            gaps = np.subtract(told, true)
            order = rank_correlation(told, true)
            yield (
                f"| {run.split} | {what}, {unit} | {len(own)} "
                f"| {'-' if order is None else f'{order:.2f}'} "
                f"| {np.mean(told):.3f} | {np.mean(true):.3f} "
                f"| {np.abs(gaps).mean():.3f} "
                f"| {gaps[np.abs(gaps).argmax()]:+.3f} |"
            )
    yield ""
