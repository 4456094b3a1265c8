"""Rounds after forgetting, on a copy: does what was forgotten come back?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import numpy as np

from fastfedul.evaluate.comparison import Answers, Questions, ask, score
from fastfedul.evaluate.intervals import Proportion
from fastfedul.evaluate.membership import per_example_loss
from fastfedul.federation.workers.pool import Workers
from fastfedul.records import ClientId, Model
from fastfedul.runs.preparation import Prepared, rounds_of

_WORST_LOSS = 50.0
"""Loss of one example beyond which a model is simply wrong."""


@dataclass(frozen=True, slots=True)
class Point:
    """A model some rounds after forgetting.

    Attributes:
        rounds: Rounds since then; 0 for the model itself.
        main: Accuracy on the test examples.
        backdoor: Attack success; None without an attack.
        loss: Mean loss on the examples of the clients that were forgotten, in nats.
    """

    rounds: int
    main: Proportion
    backdoor: Proportion | None
    loss: float


def point_of(answers: Answers, questions: Questions, rounds: int = 0) -> Point:
    """Return how a model does, by its answers."""
    main, backdoor = score(answers, questions)
    losses = per_example_loss(answers.target, questions.target_labels)
    return Point(rounds, main, backdoor, float(np.minimum(losses, _WORST_LOSS).mean()))


def course(
    prepared: Prepared,
    workers: Workers,
    model: Model,
    count: int,
    *,
    start: int,
    absent: Set[ClientId],
    questions: Questions,
    done: Callable[[Point], bool] = lambda point: False,
) -> Iterator[Point]:
    """Yield how a model does now and after each further round; nothing is recorded.

    Args:
        prepared: Data and trainer of the run.
        workers: From `start_workers`.
        model: The model to train on from.
        count: Number of rounds.
        start: Number of the first of these rounds.
        absent: Clients that do not take part.
        questions: The examples.
        done: Whether a point is the last that is wanted.
    """
    predict = prepared.trainer.predict
    point = point_of(ask(predict, model, questions), questions)
    yield point
    rounds = rounds_of(prepared, workers, model, start, start + count, absent)
    while not done(point) and point.rounds < count:
        after = next(rounds).model
        answers = ask(predict, after, questions)
        point = point_of(answers, questions, point.rounds + 1)
        yield point
