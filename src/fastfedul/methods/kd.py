"""KD: subtract the clients' updates, then learn back from the current model.

Chen Wu, Sencun Zhu, Prasenjit Mitra: "Federated Unlearning with Knowledge
Distillation", 2022 (arXiv 2201.09441).

The student starts at M_T - sum over rounds of a_t U_t. M_T is the current model, U_t a
target's update in round t, and a_t the weight of the update in the model. The paper
calls this lazy: the target stays in every round, with an update of zero. The teacher is
M_T.

The server trains the student on images of its own to give the teacher's answers. The
loss is T^2 times the cross-entropy of softmax(z_student / T) against
softmax(z_teacher / T). The images need no labels, and no score is measured on them. The
student does not learn a backdoor as long as the images carry no trigger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fastfedul.data.dataset import Indices
from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.trainer import (
    GradientTrainer,
    Inputs,
    LocalTraining,
    Logits,
)
from fastfedul.ledger.protocol import Ledger
from fastfedul.limits import require_number
from fastfedul.methods.protocol import (
    Needs,
    UnlearnRequest,
    UnlearnResult,
    coverage_of,
    federation_of,
    require_active,
    require_mean,
    vector_bytes,
)
from fastfedul.methods.steps import gradient_trainer, momentum_steps
from fastfedul.params import Flat, Params
from fastfedul.records import ClientId, Model, UpdateEntry, VectorRef
from fastfedul.rng import stream

Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KD:
    """Subtracts a client's updates, then learns from the old model on server images.

    Temperature and learning rate come from a public re-implementation, which makes two
    passes over 5,000 images. A server rarely has so many images: twenty passes over
    500 images have the same number of steps.

    Attributes:
        temperature: T, the divisor of the logits of both models.
        lr: Learning rate of the student.
        momentum: Momentum of the student's SGD.
        batch_size: Largest number of images of a step.
        epochs: Passes of the student over the server's images.
        minimum_coverage: Least part of a client's share in the model whose updates
            the ledger must have; below it the method refuses.
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
        require_number("temperature", self.temperature, above=0)
        require_number("number of epochs", self.epochs, least=0, whole=True)
        require_number("minimum coverage", self.minimum_coverage, least=0, most=1)

    def kept_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of one running sum for each client."""
        return vector_bytes(ledger, len(ledger.clients()))

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the student after the distillation."""
        federation = federation_of(request, self)
        trainer = gradient_trainer(federation, self)
        ledger = request.ledger
        require_mean(self.name, ledger)
        require_active(request)
        with ledger.snapshot():
            teacher = ledger.final
            leaving: list[UpdateEntry] = []
            warnings: list[str] = []
            for name in sorted(request.forget):
                own = ledger.updates_of(name)
                warnings += self._judge(name, own)
                leaving += own
            student = subtracted(ledger, leaving)
        inputs = federation.server
        answers = soft_labels(trainer.predict(teacher, inputs), self.temperature)
        rng = stream(federation.seed, "kd distillation")
        for step in self.distil(trainer, student, inputs, answers, rng):
            student = step
        return UnlearnResult(
            params=student.params,
            clients=tuple(sorted(request.forget)),
            warnings=tuple(warnings),
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

        Args:
            trainer: Gives the gradients.
            student: Model to start from.
            inputs: The server's images as a model sees them.
            answers: The teacher's answers, at the temperature of the distillation.
            rng: Decides the order of the images.
        """

        def downhill(model: Model, batch: Indices) -> Flat:
            _, gradient = trainer.gradient(
                model, inputs[batch], answers[batch], self.temperature
            )
            return -gradient

        return momentum_steps(
            student,
            downhill,
            len(inputs),
            # The gradient at temperature T shrinks with T^2.
            rate=self.lr * self.temperature**2,
            momentum=self.momentum,
            batch_size=self.batch_size,
            epochs=self.epochs,
            rng=rng,
        )

    def _judge(self, client: ClientId, updates: Sequence[UpdateEntry]) -> list[str]:
        """Return a warning if the ledger did not keep all updates of a client.

        Raises:
            UnlearnRefusedError: If it kept too few.
        """
        part = coverage_of(updates)
        if part == 1:
            return []
        kept = f"only {part:.0%} of client {client!r:.80}'s share in the model was kept"
        if part < self.minimum_coverage:
            raise UnlearnRefusedError(
                f"{kept}, less than the {self.minimum_coverage:.0%} required; retrain "
                "without it, or lower minimum_coverage for an incomplete removal"
            )
        return [f"{kept}; the rest is estimated from the kept updates, or stays in"]


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
    """Return the current model minus the contributions of these updates.

    Kept updates stand for dropped ones: each counts with its share over the probability
    of keeping it.
    """
    current = ledger.final
    kept = [update for update in updates if update.kept]
    if not kept:
        return current
    departed = {n for n, c in ledger.clients().items() if c.state == "forgotten"}
    factors = []
    for update in kept:
        # When other clients left, the weights of the remaining updates grew.
        others = ledger.updates_in(update.round) if departed else ()
        gone = math.fsum(u.share for u in others if u.client in departed)
        factors.append(-update.weight / (1 - gone))
    refs = [VectorRef(update.round, update.client) for update in kept]
    difference: Flat = ledger.combine(refs, [factors]).sums[0]
    flat = current.params.flat + difference
    return Model(Params(current.params.layout, flat), current.buffers)
