"""KD: subtract the clients' updates, then learn back from the current model.

Chen Wu, Sencun Zhu, Prasenjit Mitra: "Federated Unlearning with Knowledge
Distillation", 2022 (arXiv 2201.09441).

The student starts at M_T - sum over rounds of a_t U_t: M_T is the current model, U_t a
target's update in round t and a_t the weight with which it went into the model. This is
what the paper calls lazy: the target stays in every round, with an update of zero. The
teacher is M_T. The server trains the student on its own images, which need no labels
and on which nothing is scored, to give the teacher's answers: the loss is T^2 times the
cross-entropy of softmax(z_student / T) against softmax(z_teacher / T). A backdoor is
not passed on as long as the images carry no trigger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN
from fastfedul.federation.trainer import (
    GradientTrainer,
    Inputs,
    LocalTraining,
    Logits,
    TrainingError,
)
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.methods.protocol import (
    OLD_BUFFERS,
    Needs,
    UnlearnRequest,
    UnlearnResult,
    federation_of,
)
from fastfedul.params import Flat, Params
from fastfedul.records import ClientId, Model, UpdateEntry, VectorRef
from fastfedul.rng import stream

Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KD:
    """Subtracts a client's updates, then learns from the old model on server images.

    Temperature and learning rate are those of a public re-implementation, which makes
    two passes over 5,000 images. The server rarely has that many: twenty passes over
    500 come to the same number of steps.

    Attributes:
        temperature: T, what logits of both models are divided by.
        lr: Learning rate of the student.
        momentum: Its momentum.
        batch_size: Largest number of images of a step. All batches of an epoch are of
            nearly the same size, since batch normalisation cannot use a single image.
        epochs: How often the student goes through the server's images.
        minimum_coverage: Below this part of a client's share kept, refuse.
    """

    temperature: float = 2.0
    lr: float = 0.02
    momentum: float = 0.0
    batch_size: int = 32
    epochs: int = 20
    minimum_coverage: float = 0.2
    name: ClassVar[str] = "kd"
    needs: ClassVar[Needs] = Needs(history=True, server_data=True)

    def __post_init__(self) -> None:
        LocalTraining(batch_size=self.batch_size, lr=self.lr, momentum=self.momentum)
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InvalidInputError(
                f"the temperature is {self.temperature:g}; choose a number above 0"
            )
        if self.epochs < 0 or self.epochs != int(self.epochs):
            raise InvalidInputError(
                f"the distillation has {self.epochs} epochs; choose 0, 1 or more"
            )
        if not 0 <= self.minimum_coverage <= 1:
            raise InvalidInputError(
                f"the minimum coverage is from 0 to 1, not {self.minimum_coverage}"
            )

    def kept_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of one running sum for each client."""
        return len(ledger.clients()) * encoded_bytes(
            "float32", ledger.settings.layout.size
        )

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the student after the distillation."""
        federation = federation_of(request, self)
        trainer = federation.trainer
        if not isinstance(trainer, GradientTrainer):
            raise UnlearnRefusedError(
                f"{KD.name} needs gradients, and {type(trainer).__name__} gives none"
            )
        ledger = request.ledger
        with ledger.snapshot():
            teacher = ledger.final
            updates = _updates(request)
            warnings = _judge(updates, self.minimum_coverage)
            if teacher.buffers:
                warnings = (*warnings, OLD_BUFFERS)
            student = subtracted(ledger, [u for own in updates.values() for u in own])
        inputs = federation.server
        answers = soft_labels(trainer.predict(teacher, inputs), self.temperature)
        rng = stream(federation.seed, "kd distillation")
        for step in self.distil(trainer, student, inputs, answers, rng):
            student = step
        return UnlearnResult(
            params=student.params,
            clients=tuple(sorted(request.forget)),
            warnings=warnings,
        )

    def distil(
        self,
        trainer: GradientTrainer,
        student: Model,
        inputs: Inputs,
        answers: Probabilities,
        rng: np.random.Generator,
    ) -> Iterator[Model]:
        """Yield the student after each step towards the teacher's answers.

        Its buffers, such as the statistics of batch normalisation, stay the teacher's.

        Args:
            trainer: Gives the gradients.
            student: Where to start from.
            inputs: The server's images as a model sees them.
            answers: The teacher's, at the temperature of the distillation.
            rng: For the order of the images.

        Raises:
            TrainingError: If the student ran away.
        """
        # The gradient at temperature T shrinks with T^2.
        rate = np.float32(self.lr * self.temperature**2)
        velocity = np.zeros_like(student.params.flat)
        num_batches = math.ceil(len(inputs) / self.batch_size)
        for _ in range(self.epochs):
            for batch in np.array_split(rng.permutation(len(inputs)), num_batches):
                _, gradient = trainer.gradient(
                    student, inputs[batch], answers[batch], self.temperature
                )
                velocity = velocity * np.float32(self.momentum) + gradient
                flat = student.params.flat - velocity * rate
                if not np.isfinite(flat).all():
                    raise TrainingError(
                        "the distillation ran away: its model has infinite values; use "
                        "a smaller learning rate"
                    )
                student = Model(Params(student.params.layout, flat), student.buffers)
                yield student


def soft_labels(logits: Logits, temperature: float) -> Probabilities:
    """Return softmax(z / T), a row of class probabilities for each image.

    >>> soft_labels(np.float32([[0, 2 * np.log(3)]]), 2.0).round(4).tolist()
    [[0.25, 0.75]]
    """
    scaled = logits.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    rows: Probabilities = powers / powers.sum(axis=1, keepdims=True)
    return rows


def subtracted(ledger: Ledger, updates: Sequence[UpdateEntry]) -> Model:
    """Return the current model minus what these updates put into it.

    An update that was not kept is estimated by those kept: each of them counts with its
    share over the probability with which it was kept.
    """
    current = ledger.final
    kept = [update for update in updates if update.kept]
    if not kept:
        return current
    rounds = ledger.rounds()
    departed = {n for n, c in ledger.clients().items() if c.state == "forgotten"}
    factors = []
    for update in kept:
        # When others left, the weights of those who stayed in the round grew.
        others = ledger.updates_in(update.round) if departed else ()
        gone = math.fsum(u.share for u in others if u.client in departed)
        left = 1 - rounds[update.round].removed_share - gone
        factors.append(-update.weight / left)
    refs = [VectorRef(update.round, update.client) for update in kept]
    difference: Flat = ledger.combine(refs, [factors]).sums[0]
    flat = current.params.flat + difference
    return Model(Params(current.params.layout, flat), current.buffers)


def _updates(request: UnlearnRequest) -> dict[ClientId, Sequence[UpdateEntry]]:
    ledger = request.ledger
    if ledger.settings.aggregation != MEAN:
        raise UnlearnRefusedError(
            f"{KD.name} takes a client out of a mean, and this model was aggregated by "
            f"{ledger.settings.aggregation!r:.80}; retrain without the client"
        )
    clients = ledger.clients()
    for name in sorted(request.forget & set(clients)):
        if clients[name].state != "active":
            raise InvalidInputError(
                f"client {name!r:.80} is {clients[name].state} already"
            )
    return {name: ledger.updates_of(name) for name in sorted(request.forget)}


def _judge(
    updates: Mapping[ClientId, Sequence[UpdateEntry]], minimum: float
) -> tuple[str, ...]:
    """Return warnings for clients of whom not everything was kept."""
    warnings = []
    for client, own in updates.items():
        entered = math.fsum(u.share for u in own if u.entered)
        kept = math.fsum(u.share for u in own if u.entered and u.kept)
        part = kept / entered if entered else 1.0
        if part < minimum:
            raise UnlearnRefusedError(
                f"only {part:.0%} of what client {client!r:.80} put into the model was "
                f"kept, less than the {minimum:.0%} required; retrain without it, or "
                "lower the minimum coverage if an incomplete removal will do"
            )
        if part < 1:
            warnings.append(
                f"only {part:.0%} of what client {client!r:.80} put into the model was "
                "kept; the rest is estimated from that or stays in"
            )
    return tuple(warnings)
