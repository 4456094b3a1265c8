"""What is said of the run's own model: measures, relearning, relapse, noise.

The retrained model stands beside it in everything. Retrainings that differ in nothing
but the order of batches say how far apart equals are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastfedul.evaluate.comparison import Answers, Questions, ask
from fastfedul.evaluate.membership import per_example_loss, separation
from fastfedul.evaluate.metrics import prediction_kl
from fastfedul.federation.workers.pool import Workers, open_workers
from fastfedul.records import ClientId, Model
from fastfedul.rng import stream
from fastfedul.runs.afterwards import Point, course, point_of
from fastfedul.runs.preparation import Prepared, retrain

RELEARN_ROUNDS, RELAPSE_ROUNDS = 10, 5
"""Rounds of the checks at most."""

NEARLY = 0.95
"""Part of the way back at which something counts as learned again."""

MEASURES = ("main", "backdoor", "auc", "kl")
"""Measures that have a noise floor."""


@dataclass(frozen=True, slots=True)
class Course:
    """How a model did in further rounds.

    Attributes:
        points: The model itself, then a point per round.
        reached: Rounds until the backdoor, or the loss, was where it had been; None if
            it was not, or nobody asked.
    """

    points: tuple[Point, ...]
    reached: int | None


@dataclass(frozen=True, slots=True)
class Whole:
    """What one model of the whole federation does.

    Attributes:
        point: Accuracy, attack success, loss on the client's examples.
        auc: Chance that one of the client's examples has a lower loss than a test
            example.
        kl: Divergence of its predictions on test examples from the retrained model's.
        relearn: Rounds with the client back.
        relapse: Rounds without the client.
        seconds: Time of the forgetting; None for a model that no method made.
    """

    point: Point
    auc: float
    kl: float | None
    relearn: Course
    relapse: Course
    seconds: float | None = None

    def measures(self) -> dict[str, float | None]:
        """Return the measures that have a noise floor, by name."""
        main, backdoor = self.point.main, self.point.backdoor
        return {
            "main": main.value,
            "backdoor": None if backdoor is None else backdoor.value,
            "auc": self.auc,
            "kl": self.kl,
        }


@dataclass(frozen=True, slots=True)
class WholeFederation:
    """The whole federation of a run, as the checks of one model need it.

    Attributes:
        prepared: Data and trainer of the run.
        workers: From `start_workers`.
        client: The client that leaves.
        absent: Clients that had gone before.
        questions: The examples.
        rounds: Rounds of the run.
        retrained: Answers of the retrained model.
        before: The model that remembers, as a point.
    """

    prepared: Prepared
    workers: Workers
    client: ClientId
    absent: frozenset[ClientId]
    questions: Questions
    rounds: int
    retrained: Answers
    before: Point

    def check(self, model: Model, seconds: float | None = None) -> Whole:
        """Return what a model does, now and in further rounds."""
        answers = ask(self.prepared.trainer.predict, model, self.questions)
        relearn = tuple(self._course(model, RELEARN_ROUNDS, self.absent, self.is_back))
        last = relearn[-1]
        gone = self.absent | {self.client}
        relapse = tuple(self._course(model, RELAPSE_ROUNDS, gone))
        return Whole(
            point_of(answers, self.questions),
            _auc(answers, self.questions),
            prediction_kl(self.retrained.test, answers.test),
            Course(relearn, last.rounds if self.is_back(last) else None),
            Course(relapse, None),
            seconds,
        )

    def is_back(self, point: Point) -> bool:
        """Return whether the backdoor, else the loss, is nearly where it was.

        The backdoor counts only if the client attacked and the attack worked.
        """
        before = self.before
        if self.by_backdoor:
            assert before.backdoor is not None
            assert point.backdoor is not None
            wanted = NEARLY * (before.backdoor.value or 0.0)
            return (point.backdoor.value or 0.0) >= wanted
        return point.loss * NEARLY <= before.loss

    @property
    def by_backdoor(self) -> bool:
        """Whether the backdoor, and not the loss, says that the client is back."""
        attacked = self.client in self.prepared.attack.attackers
        return attacked and bool(self.before.backdoor and self.before.backdoor.value)

    def _course(
        self,
        model: Model,
        count: int,
        absent: frozenset[ClientId],
        done: Callable[[Point], bool] = lambda point: False,
    ) -> Iterator[Point]:
        return course(
            self.prepared,
            self.workers,
            model,
            count,
            start=self.rounds,
            absent=absent,
            questions=self.questions,
            done=done,
        )


def retrained_again(
    prepared: Prepared, gone: frozenset[ClientId], number: int
) -> Model:
    """Return the retrained model with batches in another order, all else the same."""
    config = prepared.config
    rng = stream(config.seed, "another order of batches", number)
    seed = int(rng.integers(2**31))
    with open_workers(
        prepared.trainer,
        prepared.clients,
        seed=seed,
        num_workers=config.workers or 1,
    ) as workers:
        return retrain(prepared, workers, gone)


def gaps(found: Whole, retrained: Whole) -> dict[str, float | None]:
    """Return for each measure how far a model is from the retrained model."""
    one, other = found.measures(), retrained.measures()
    return {
        name: None
        if (value := one[name]) is None or (reference := other[name]) is None
        else value - reference
        for name in MEASURES
    }


def noise_of(retrained: Sequence[Whole]) -> dict[str, float | None]:
    """Return for each measure the largest distance between two retrained models.

    Of the divergences the largest counts, which are all from the first model.
    """
    rows = [own.measures() for own in retrained]
    found: dict[str, float | None] = {}
    for name in MEASURES:
        values = [value for row in rows if (value := row[name]) is not None]
        least = 0.0 if name == "kl" else min(values, default=0.0)
        found[name] = max(values) - least if len(values) == len(rows) else None
    return found


def _auc(answers: Answers, questions: Questions) -> float:
    return separation(
        per_example_loss(answers.target, questions.target_labels),
        per_example_loss(answers.test, questions.test_labels),
    )
