"""Puts models beside each other: accuracy, success of attacks, traces of a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastfedul.evaluate.closeness import Closeness, closeness
from fastfedul.evaluate.intervals import Proportion
from fastfedul.evaluate.membership import Membership, membership, per_example_loss
from fastfedul.evaluate.metrics import (
    PredictionChange,
    accuracy,
    prediction_change,
    prediction_kl,
)
from fastfedul.records import Model

BEFORE = "before"
RETRAINED = "retrained"
NOW = "now"
"""Names of models that no method made: as trained, as retrained, as it is."""

Inputs = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
Predict = Callable[[Model, Inputs], Logits]


@dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """Examples on which models are measured.

    Attributes:
        test: Clean test images, on which nobody trained.
        test_labels: Their true classes.
        backdoor: Images on which the attack is measured, none of the target class.
        backdoor_labels: The attackers' label for them.
        target: Training images of the clients to forget, as they trained on them.
        target_labels: The labels they trained with.
    """

    test: Inputs
    test_labels: Labels
    backdoor: Inputs
    backdoor_labels: Labels
    target: Inputs
    target_labels: Labels


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """A model's logits for each kind of question."""

    model: Model
    test: Logits
    backdoor: Logits
    target: Logits


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """One row of a comparison.

    Attributes:
        method: How the model came about.
        main: Right answers on clean test images.
        backdoor: Attacks that work; None without an attack.
        membership: Inference from the loss which images the target trained on.
        closeness: Distance and angles to the retrained model.
        kl: Divergence of its predictions from the retrained model's, on test images.
        change: How its predictions on the target's images differ from before.
        seconds: Time to get the model from the trained one.
        client_calls: Times a client had to compute something.
        history_bytes: Bytes of the ledger that were read.
    """

    method: str
    main: Proportion
    backdoor: Proportion | None
    membership: Membership | None
    closeness: Closeness | None
    kl: float | None
    change: PredictionChange | None
    seconds: float
    client_calls: int
    history_bytes: int


def ask(predict: Predict, model: Model, questions: Questions) -> Answers:
    """Return a model's answers."""
    return Answers(
        model,
        predict(model, questions.test),
        predict(model, questions.backdoor),
        predict(model, questions.target),
    )


def score(
    answers: Answers, questions: Questions
) -> tuple[Proportion, Proportion | None]:
    """Return right answers on clean images, and attacks that work if there are any."""
    main = accuracy(answers.test, questions.test_labels)
    if not len(questions.backdoor_labels):
        return main, None
    return main, accuracy(answers.backdoor, questions.backdoor_labels)


def evaluate(
    method: str,
    answers: Answers,
    questions: Questions,
    *,
    before: Answers,
    reference: Answers,
    seconds: float,
    client_calls: int = 0,
    history_bytes: int = 0,
) -> Evaluation:
    """Return everything that is measured of one model.

    Args:
        method: How the model came about.
        answers: Its answers.
        questions: The examples.
        before: The answers of the model that still remembers.
        reference: The answers of the model retrained without the target.
        seconds: Time it took.
        client_calls: Times a client had to compute something.
        history_bytes: Bytes of the ledger that were read.
    """
    main, backdoor = score(answers, questions)
    remembered = None
    if len(questions.target_labels):
        remembered = membership(
            per_example_loss(answers.target, questions.target_labels),
            per_example_loss(answers.test, questions.test_labels),
        )
    return Evaluation(
        method=method,
        main=main,
        backdoor=backdoor,
        membership=remembered,
        closeness=closeness(answers.model.params, reference.model.params),
        kl=prediction_kl(reference.test, answers.test),
        change=prediction_change(before.target, answers.target),
        seconds=seconds,
        client_calls=client_calls,
        history_bytes=history_bytes,
    )
