"""Measured skew: the paper's recursion with the others' reaction measured.

An extension of our own of Fast-FedUL's recursion. The paper models how the clients that
stay react to the cleaned model by one number for all parameters. A server with clean
images of its own can measure the reaction instead:

    D_0 = 0,   D_{t+1} = D_t + [U_S(M_t + D_t) - U_S(M_t)] + gamma_t

M_t is the model before round t. Gamma_t is the step of round t without the forgotten
clients minus the real step. U_S(M) is a local update, local minus start, on images of
the server. Both updates of a round see the same batches in the same order, so whatever
does not depend on the model cancels. The cleaned model is M_T + D_T.

Without the forgotten clients a round's step is the mean update of the clients that
stay. So the whole difference counts, and no share scales it. A round in which nobody
else took part would not have happened: there the server measures no reaction.

The server trains as a client does: the same learning rate, momentum, weight decay and
batch size. Its images need no labels. They get the answers of the current model M_T as
soft labels, and the server takes as many steps in a round as an average client takes,
whatever the number of its images. No client is asked.
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
from fastfedul.federation.clients import Federation
from fastfedul.federation.trainer import (
    GradientTrainer,
    Inputs,
    LocalTraining,
    TrainingError,
)
from fastfedul.ledger.protocol import Ledger, models
from fastfedul.methods.fast_fedul.cleaning import cleaned_steps
from fastfedul.methods.fast_fedul.removal import coverages, judge
from fastfedul.methods.fast_fedul.tracing import Leaving, gamma_factors, leaving
from fastfedul.methods.kd import Probabilities, soft_labels
from fastfedul.methods.protocol import (
    Needs,
    UnlearnRequest,
    UnlearnResult,
    federation_of,
)
from fastfedul.params import Flat, Params
from fastfedul.records import Model, VectorRef
from fastfedul.rng import stream

NAME = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hyperparameters of the method; a call does the work and keeps no state.

    Attributes:
        temperature: Divides the logits of both models before the softmax. At 1 the
            loss is the clients' own, with soft labels.
        steps: Local steps of the server in a round; None for the mean number of steps
            of the clients that stay, rounded. Every client counts alike in it.
        minimum_coverage: If the ledger kept less than this part of a client's share in
            the model, the method refuses.
    """

    temperature: float = 1.0
    steps: int | None = None
    minimum_coverage: float = 0.2
    name: ClassVar[str] = NAME
    needs: ClassVar[Needs] = Needs(history=True, server_data=True)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InvalidInputError(
                f"the temperature is {self.temperature:g}; choose a number above 0"
            )
        if self.steps is not None and (self.steps < 1 or self.steps != int(self.steps)):
            raise InvalidInputError(
                f"the server takes {self.steps} steps in a round; choose 1 or more"
            )
        if not 0 <= self.minimum_coverage <= 1:
            raise InvalidInputError(
                f"the minimum coverage is from 0 to 1, not {self.minimum_coverage}"
            )

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the current model plus the measured difference.

        Raises:
            UnlearnRefusedError: If the history, the federation or its trainer does not
                have what the method needs.
            TrainingError: If the difference grew without limit.
        """
        federation = federation_of(request, self)
        trainer = federation.trainer
        if not isinstance(trainer, GradientTrainer):
            raise UnlearnRefusedError(
                f"{NAME} needs gradients, and {type(trainer).__name__} gives none; use "
                "a trainer with a gradient, or forget with fast-fedul"
            )
        ledger = request.ledger
        _check(ledger)
        with ledger.snapshot():
            current = ledger.final
            removal = leaving(ledger, request.forget, ledger.rounds())
            covered = coverages(request.forget, removal)
            warnings = judge(covered, self.minimum_coverage, ledger)
            inputs = federation.server
            server = ServerTraining(
                trainer=trainer,
                inputs=inputs,
                answers=soft_labels(trainer.predict(current, inputs), self.temperature),
                temperature=self.temperature,
                local=federation.local,
                steps=self._steps(request, federation),
                seed=federation.seed,
            )
            difference = measured_difference(ledger, removal, server)
        flat = current.params.flat + difference
        return UnlearnResult(
            params=Params(current.params.layout, flat),
            clients=tuple(sorted(request.forget)),
            warnings=warnings,
        )

    def _steps(self, request: UnlearnRequest, federation: Federation) -> int:
        """Return how many local steps the server takes in a round."""
        if self.steps is not None:
            return self.steps
        sizes = federation.clients.sizes
        staying = [sizes[name] for name in request.stayers if name in sizes]
        if not staying and request.stayers:
            raise UnlearnRefusedError(
                f"{NAME} cannot tell how many steps a client takes, because no client "
                "that stays is in this federation; set the number of steps"
            )
        taken = [client_steps(size, federation.local) for size in staying]
        # Where nobody stays, nobody reacts, and the number does not matter.
        return round(sum(taken) / len(taken)) if taken else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTraining:
    """Local training on the server's images, as a client would do it.

    Attributes:
        trainer: Gives the gradients.
        inputs: The server's images as a model sees them.
        answers: Soft labels, a row of class probabilities for each image.
        temperature: Divides the logits before the softmax.
        local: How a client trains; its epochs do not count here.
        steps: How many steps a local update has.
        seed: Seed of the run, for the order of the images.
    """

    trainer: GradientTrainer
    inputs: Inputs
    answers: Probabilities
    temperature: float
    local: LocalTraining
    steps: int
    seed: int

    def reaction(self, model: Model, difference: Flat, index: int) -> Flat:
        """Return how much a local update changes if the model is moved.

        Args:
            model: The model before the round, M_t.
            difference: How far the model is moved, D_t.
            index: Number of the round; it decides the order of the images.
        """
        moved = Params(model.params.layout, model.params.flat + difference)
        changed = self.update(Model(moved, model.buffers), index)
        return changed - self.update(model, index)

    def update(self, model: Model, index: int) -> Flat:
        """Return a local update in a round: local minus given parameters.

        The buffers, such as the statistics of batch normalisation, stay as they are.
        """
        # The gradient at temperature T shrinks with T^2.
        rate = np.float32(self.local.lr * self.temperature**2)
        decay = np.float32(self.local.weight_decay / self.temperature**2)
        momentum = np.float32(self.local.momentum)
        layout, start = model.params.layout, model.params.flat
        moved = np.zeros_like(start)
        velocity = np.zeros_like(start)
        for batch in self._batches(index):
            here = start + moved
            _, gradient = self.trainer.gradient(
                Model(Params(layout, here), model.buffers),
                self.inputs[batch],
                self.answers[batch],
                self.temperature,
            )
            if decay:
                gradient = gradient + decay * here
            velocity = velocity * momentum + gradient
            moved = moved - velocity * rate
        return moved

    def _batches(self, index: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the batches of a round, each pass in an order of its own.

        All batches of a pass are of nearly the same size, at most a client's.
        """
        rng = stream(self.seed, "measured skew", index)
        count = len(self.inputs)
        num_batches = math.ceil(count / self.local.batch_size)
        left = self.steps
        while left > 0:
            batches = np.array_split(rng.permutation(count), num_batches)[:left]
            yield from batches
            left -= len(batches)


def measured_difference(
    ledger: Ledger, removal: Leaving, server: ServerTraining
) -> Flat:
    """Return D_T, cleaned minus current model.

    Args:
        ledger: The history, of weighted means.
        removal: Clients that leave, by round.
        server: Measures the reaction of the clients that stay.

    Raises:
        TrainingError: If the difference grew without limit.
    """
    rounds = ledger.rounds()
    difference = np.zeros(ledger.settings.layout.size, np.float32)
    if not removal.rounds:
        return difference
    parts = _gamma_parts(removal)
    buffers = ledger.final.buffers
    # The last of the models is the current one, which no round follows.
    for step, params in zip(
        cleaned_steps(removal, rounds), models(ledger), strict=False
    ):
        # Up to the first round of a leaver the difference is 0: nothing to react to.
        if step.num_left > 0 and difference.any():
            model = Model(params, buffers)
            difference = difference + server.reaction(model, difference, step.index)
        if step.index in parts:
            refs, factors = parts[step.index]
            difference = difference + ledger.combine(refs, [factors]).sums[0]
        if not np.isfinite(difference).all():
            raise TrainingError(
                f"the measured difference ran away in round {step.index}: it has "
                "infinite values; set fewer steps, or give the server more images"
            )
    return difference


def client_steps(size: int, local: LocalTraining) -> int:
    """Return how many steps a client with so many examples takes in a round.

    A single example that is left over joins the batch before.

    >>> client_steps(64, LocalTraining(batch_size=32, epochs=2))
    4
    >>> client_steps(65, LocalTraining(batch_size=32, epochs=2))
    4
    >>> client_steps(66, LocalTraining(batch_size=32, epochs=1.5))
    5
    """
    batches = math.ceil(size / local.batch_size)
    if batches > 1 and size % local.batch_size == 1:
        batches -= 1
    return math.ceil(local.epochs * batches)


def _gamma_parts(
    removal: Leaving,
) -> Mapping[int, tuple[Sequence[VectorRef], Sequence[float]]]:
    """Return, by round, the stored vectors of gamma and their factors."""
    found: dict[int, tuple[list[VectorRef], list[float]]] = {}
    for ref, factor in zip(*gamma_factors(removal), strict=True):
        refs, factors = found.setdefault(ref.round, ([], []))
        refs.append(ref)
        factors.append(factor)
    return found


def _check(ledger: Ledger) -> None:
    """Refuse a history without the models and gammas of rounds."""
    if ledger.settings.history == "sums":
        raise UnlearnRefusedError(
            f"{NAME} needs the model before every round, and this ledger keeps sums; "
            "train with --keep all, or forget with fast-fedul"
        )
    if ledger.settings.aggregation != MEAN:
        raise UnlearnRefusedError(
            f"{NAME} takes a client out of a mean, and this model was aggregated by "
            f"{ledger.settings.aggregation!r:.80}; retrain without the client"
        )
