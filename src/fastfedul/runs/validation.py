"""Judges a cleaned model by clean images that the server has of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastfedul.data.dataset import to_model_input
from fastfedul.evaluate.intervals import Proportion, paired_interval
from fastfedul.federation.trainer import Inputs, Labels, Logits
from fastfedul.ledger.protocol import Ledger
from fastfedul.records import Model
from fastfedul.runs.given import given_in_file


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a cleaned model does on clean images, beside the model before.

    Attributes:
        total: Number of images.
        right_before: Right answers of the model before; None without labels.
        right_after: Right answers of the cleaned model; None without labels.
        changed: Images that the two models put into different classes.
        drop: Share of the images lost: right answers, or without labels images that
            change class.
        interval: 95 % interval of the drop.
    """

    total: int
    right_before: int | None
    right_after: int | None
    changed: int
    drop: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """Clean images of the server's own, and how to ask a model about them.

    Attributes:
        inputs: The images, as a model sees them.
        labels: Their classes; None if nobody knows.
        predict: Gives the logits of a model.
    """

    inputs: Inputs
    labels: Labels | None
    predict: Callable[[Model, Inputs], Logits]

    def answers(self, model: Model) -> Labels:
        """Return the class a model gives each image."""
        found: Labels = self.predict(model, self.inputs).argmax(axis=1)
        return found

    def judge(self, before: Model, after: Model) -> Judgement:
        """Return how a cleaned model does beside the model before."""
        first, second = self.answers(before), self.answers(after)
        total, changed = len(first), int((first != second).sum())
        if self.labels is None:
            found = Proportion(changed, total)
            assert found.interval is not None
            return Judgement(
                total, None, None, changed, changed / total, found.interval
            )
        right_before, right_after = first == self.labels, second == self.labels
        lost = int((right_before & ~right_after).sum())
        gained = int((right_after & ~right_before).sum())
        return Judgement(
            total,
            int(right_before.sum()),
            int(right_after.sum()),
            changed,
            (lost - gained) / total,
            paired_interval(lost, gained, total),
        )


def open_validation(file: Path, ledger: Ledger, path: Path) -> Validation:
    """Return the images of a file, and how to ask a ledger's network about them.

    Args and errors are as of `given_in_file`.
    """
    found = given_in_file(file, ledger, path)
    inputs = to_model_input(found.examples)
    return Validation(inputs, found.labels, found.trainer.predict)
