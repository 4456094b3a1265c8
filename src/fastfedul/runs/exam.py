"""The exam of a model: the questions of a run or ledger, and how to ask them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastfedul.data.dataset import Images, to_model_input
from fastfedul.evaluate.comparison import Answers, Questions, ask, score
from fastfedul.evaluate.intervals import Proportion
from fastfedul.federation.trainer import Trainer
from fastfedul.ledger.protocol import Ledger
from fastfedul.records import ClientId, Model
from fastfedul.runs.evaluation_source import run_at
from fastfedul.runs.given import labelled_test
from fastfedul.runs.preparation import Prepared, prepare
from fastfedul.runs.training import load_config


@dataclass(frozen=True, slots=True, eq=False)
class Exam:
    """Questions to the models of a ledger.

    Attributes:
        trainer: Gives a model's answers.
        questions: The examples on which models are measured.
        prepared: The run around the ledger; None if the ledger is in no run.
    """

    trainer: Trainer
    questions: Questions
    prepared: Prepared | None

    @property
    def attackers(self) -> tuple[ClientId, ...]:
        """Clients known to attack: nobody in a ledger outside a run."""
        return self.prepared.attack.attackers if self.prepared else ()

    def ask(self, model: Model) -> Answers:
        """Return a model's answers."""
        return ask(self.trainer.predict, model, self.questions)

    def score(self, model: Model) -> tuple[Proportion, Proportion | None]:
        """Return a model's accuracy, and the attack success if there is an attack."""
        return score(self.ask(model), self.questions)


def exam_of(ledger: Ledger, path: Path, target: Sequence[ClientId] = ()) -> Exam:
    """Return the exam of a run's models, or of the models of a ledger outside a run.

    Args:
        ledger: The ledger whose models are asked.
        path: The run, or a ledger.
        target: Clients to forget; a run knows their training examples.

    Raises:
        InvalidInputError: If nobody said how the ledger's model is evaluated.
    """
    run = run_at(path)
    if run is not None:
        return exam_of_run(prepare(load_config(run)), target)
    given = labelled_test(ledger, path)
    assert given.labels is not None
    inputs = to_model_input(given.examples)
    none = np.zeros(0, np.int64)
    questions = Questions(inputs, given.labels, inputs[:0], none, inputs[:0], none)
    return Exam(given.trainer, questions, None)


def exam_of_run(prepared: Prepared, target: Sequence[ClientId] = ()) -> Exam:
    """Return the exam of a run's models."""
    return Exam(prepared.trainer, questions_of(prepared, target), prepared)


def questions_of(prepared: Prepared, target: Sequence[ClientId] = ()) -> Questions:
    """Return the examples on which the models of a run are measured."""
    own = [data for data in prepared.clients if data.client in target]
    none: Images = prepared.dataset.test_images[:0]
    images = np.concatenate([none, *(data.images for data in own)])
    labels = np.concatenate([np.zeros(0, np.int64), *(data.labels for data in own)])
    return Questions(
        to_model_input(prepared.dataset.test_images),
        prepared.dataset.test_labels,
        to_model_input(prepared.backdoor.images),
        prepared.backdoor.labels,
        to_model_input(images),
        labels,
    )
