"""Measures of a model: accuracy, attack success, traces of a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastfedul.evaluate.closeness import Closeness, closeness
from fastfedul.evaluate.intervals import Proportion
from fastfedul.evaluate.membership import Membership, membership, per_example_loss
from fastfedul.evaluate.metrics import (
    accuracy,
    prediction_change,
    prediction_kl,
)
from fastfedul.records import Model

BEFORE = "before"
RETRAINED = "retrained"
NOW = "now"
"""Names of models that no method made: as trained, as retrained, as it is now."""

Inputs = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
Predict = Callable[[Model, Inputs], Logits]


@dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """Examples on which models are measured.

    Attributes:
        test: Clean test images, on which nobody trained.
        test_labels: True classes of the test images.
        backdoor: Images that measure the attack, none of the target class.
        backdoor_labels: The attackers' label for these images.
        target: Training images of the clients to forget, poison included.
        target_labels: Labels with which these clients trained.
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
        method: Name of the method, or of a model that no method made.
        main: Accuracy on clean test images.
        backdoor: Attack success; None without an attack.
        membership: Membership inference on the images of the clients to forget.
        closeness: Distance and angles to the retrained model; None if there is none.
        kl: Divergence of the predictions from the retrained model's, on test images;
            None if there is none.
        change: Mean distance of the predictions on the target's images from before.
        seconds: Time of the method.
        client_calls: Number of computations that clients had to do.
        history_bytes: Bytes read from the ledger.
    """

    method: str
    main: Proportion
    backdoor: Proportion | None
    membership: Membership | None
    closeness: Closeness | None
    kl: float | None
    change: float | None
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
    """Return the accuracy on clean images, and the attack success if there is one."""
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
    reference: Answers | None,
    seconds: float,
    client_calls: int = 0,
    history_bytes: int = 0,
) -> Evaluation:
    """Return all measures of one model.

    Args:
        method: Name of the method, or of a model that no method made.
        answers: The model's answers.
        questions: The examples.
        before: Answers of the model that still remembers.
        reference: Answers of the model retrained without the target; None if nobody
            can retrain.
        seconds: Time of the method.
        client_calls: Number of computations that clients had to do.
        history_bytes: Bytes read from the ledger.
    """
    main, backdoor = score(answers, questions)
    remembered = None
    if len(questions.target_labels):
        remembered = membership(
            per_example_loss(answers.target, questions.target_labels),
            per_example_loss(answers.test, questions.test_labels),
        )
    near = None
    if reference is not None:
        near = closeness(answers.model.params, reference.model.params)
    return Evaluation(
        method=method,
        main=main,
        backdoor=backdoor,
        membership=remembered,
        closeness=near,
        kl=prediction_kl(reference.test, answers.test) if reference else None,
        change=prediction_change(before.target, answers.target),
        seconds=seconds,
        client_calls=client_calls,
        history_bytes=history_bytes,
    )
