"""PGA: the client to forget climbs its own loss, then the others train on.

Anisa Halimi, Swanand Kadhe, Ambrish Rawat, Nathalie Baracaldo: "Federated Unlearning:
How to Efficiently Erase a Client in FL?", 2022 (UpML workshop at ICML; arXiv
2207.05521).

The ascent stays in a ball around the model of the others,
w_ref = (M_T - sum of a_u w_u) / (1 - sum of a_u). M_T is the current model, w_u a
target's last local model, and a_u its share among all active clients. With equal shares
and one target this is the paper's (N M_T - w_u) / (N - 1). The squared radius is a
third of the mean squared distance from w_ref to ten random initial models, as in the
authors' public code.

Several targets share one w_ref, without any of them, and one ball. They climb one after
the other in the order of their names; each starts where the target before stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from fastfedul.data.dataset import Indices, to_model_input
from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.clients import Federation
from fastfedul.federation.rounds import require_usable, shares_of
from fastfedul.federation.trainer import (
    GradientTrainer,
    Inputs,
    Labels,
    LocalTraining,
)
from fastfedul.ledger.protocol import Ledger, params_at, vector
from fastfedul.limits import require_number
from fastfedul.methods.protocol import (
    Needs,
    UnlearnRequest,
    UnlearnResult,
    federation_of,
    require_active,
    require_mean,
    vector_bytes,
)
from fastfedul.methods.steps import gradient_trainer, momentum_steps, train_on
from fastfedul.params import Flat, Params, norm, scale, weighted_sum
from fastfedul.records import ClientId, Model, UpdateEntry, VectorRef
from fastfedul.rng import name_key, stream

NUM_RANDOM_MODELS = 10
RADIUS_DIVISOR = 3
"""Number of random models and divisor of the radius in the authors' public code."""

HELD_BACK = 0.1
"""Part of a target's examples that only say when its ascent ends."""


@dataclass(frozen=True, slots=True)
class Ball:
    """Ball that the ascent must not leave.

    Attributes:
        centre: The model of the others, w_ref.
        radius: Largest distance from the centre, the paper's delta.
    """

    centre: Flat
    radius: float

    def project(self, flat: Flat) -> Flat:
        """Return the nearest point of the ball.

        >>> Ball(np.float32([1, 0]), 5.0).project(np.float32([7, 8])).tolist()
        [4.0, 4.0]
        """
        offset = flat - self.centre
        distance = norm(offset)
        if distance <= self.radius:
            return flat
        return self.centre + offset * np.float32(self.radius / distance)


def reference_model(
    current: Flat, local: Sequence[Flat], shares: Sequence[float]
) -> Flat:
    """Return a weighted mean without some of its parts.

    >>> reference_model(np.float32([3]), [np.float32([6])], [0.25]).tolist()
    [2.0]
    """
    left = 1 - math.fsum(shares)
    weights = [1 / left, *(-share / left for share in shares)]
    return weighted_sum([current, *local], weights)


def ball_radius(centre: Flat, random_models: Sequence[Flat]) -> float:
    """Return the paper's delta: its square is a third of the mean squared distance."""
    squared = [norm(flat - centre) ** 2 for flat in random_models]
    return math.sqrt(math.fsum(squared) / len(squared) / RADIUS_DIVISOR)


def clip(gradient: Flat, largest: float) -> Flat:
    """Return the gradient, shortened to the largest length if it is longer.

    >>> clip(np.float32([6, 8]), 5.0).tolist()
    [3.0, 4.0]
    """
    length = norm(gradient)
    return gradient if length <= largest else gradient * np.float32(largest / length)


@dataclass(frozen=True, slots=True, kw_only=True)
class PGA:
    """Lets the leaving client climb its own loss inside a ball around the others.

    The defaults come from the authors' public code. A `distance_threshold` suits one
    kind of network; a warning says when it left no room for an ascent.

    Attributes:
        lr: Learning rate of the ascent.
        momentum: Momentum of the ascent.
        batch_size: Largest number of examples of a step.
        epochs: Most passes of a target over its examples.
        clip_norm: Longest gradient of a step.
        radius: Radius of the ball, the paper's delta; None for the rule of the public
            code.
        distance_threshold: Squared distance to the target's last local model at which
            the ascent ends; None for no such end.
        accuracy_floor: The paper's tau, 0 to 1. The ascent also ends when the accuracy
            on a tenth of the target's own examples, held back for this, falls below
            the floor; None for no such end.
        post_rounds: Rounds of ordinary training by the other clients afterwards.
        post_epochs: Passes of a client over its examples in each of these rounds.
    """

    lr: float = 0.01
    momentum: float = 0.9
    batch_size: int = 128
    epochs: int = 5
    clip_norm: float = 5.0
    radius: float | None = None
    distance_threshold: float | None = 2.2
    accuracy_floor: float | None = None
    post_rounds: int = 10
    post_epochs: float = 1
    name: ClassVar[str] = "pga"

    def __post_init__(self) -> None:
        LocalTraining(batch_size=self.batch_size, lr=self.lr, momentum=self.momentum)
        LocalTraining(epochs=self.post_epochs)
        require_number("number of epochs", self.epochs, least=1, whole=True)
        require_number("clip_norm", self.clip_norm, above=0)
        require_number("radius", self.radius, above=0, unset=True)
        threshold = self.distance_threshold
        require_number("distance_threshold", threshold, above=0, unset=True)
        floor = self.accuracy_floor
        require_number("accuracy_floor", floor, least=0, most=1, unset=True)
        require_number("post_rounds", self.post_rounds, least=0, whole=True)

    @property
    def needs(self) -> Needs:
        """The targets, and the other clients if there are rounds afterwards.

        A target whose last update is not stored trains once more.
        """
        return Needs(target=True, others=self.post_rounds > 0)

    def kept_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of each client's last update."""
        return vector_bytes(ledger, len(ledger.clients()))

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model after the targets' ascent and the others' post-training."""
        federation = federation_of(request, self)
        trainer = gradient_trainer(federation, self)
        local: dict[ClientId, Flat] = {}
        warnings: list[str] = []
        with request.ledger.snapshot():
            model = request.ledger.final
            updates = self._last_updates(request, federation.clients.sizes)
            for name, last in updates.items():
                local[name], notes = _last_local(request, federation, last)
                warnings += notes
        ball = self._ball(request, federation, local)
        model = _moved(model, ball.centre)
        for name, own in local.items():
            if self._is_far(model, own):
                warnings.append(
                    f"the ascent at {name!r:.80} began beyond the distance threshold, "
                    "so it ended after one step; choose a larger distance_threshold, "
                    "or None"
                )
            model = self._ascended(federation, trainer, model, ball, name, own)
        further = replace(federation.local, epochs=self.post_epochs)
        work = partial(federation.clients.train, local=further)
        model = train_on(request, federation, model, self.post_rounds, work)
        return UnlearnResult(
            params=model.params,
            buffers=model.buffers if self.post_rounds else None,
            clients=tuple(local),
            warnings=tuple(warnings),
        )

    def ascend(
        self,
        trainer: GradientTrainer,
        model: Model,
        ball: Ball,
        inputs: Inputs,
        labels: Labels,
        rng: np.random.Generator,
    ) -> Iterator[Model]:
        """Yield the model after each step up the loss; it never leaves the ball.

        Args:
            trainer: Gives the gradients.
            model: Model to start from.
            ball: The ball.
            inputs: The target's images as a model sees them.
            labels: The labels with which the target trained.
            rng: Decides the order of the examples.
        """

        def uphill(now: Model, batch: Indices) -> Flat:
            _, gradient = trainer.gradient(now, inputs[batch], labels[batch])
            return clip(gradient, self.clip_norm)

        return momentum_steps(
            model,
            uphill,
            len(labels),
            rate=self.lr,
            momentum=self.momentum,
            batch_size=self.batch_size,
            epochs=self.epochs,
            rng=rng,
            project=ball.project,
        )

    def _last_updates(
        self, request: UnlearnRequest, sizes: Mapping[ClientId, int]
    ) -> dict[ClientId, UpdateEntry]:
        """Return each target's last update in the model, or refuse the request."""
        ledger = request.ledger
        require_mean(self.name, ledger)
        if not request.stayers:
            raise UnlearnRefusedError(
                f"{self.name} needs other clients, and nobody stays"
            )
        require_active(request)
        found = {}
        for name in sorted(request.forget):
            entered = [update for update in ledger.updates_of(name) if update.entered]
            if not entered:
                raise UnlearnRefusedError(
                    f"nothing of client {name!r:.80} is in the model, so there is "
                    "nothing to forget"
                )
            if sizes[name] <= self._num_held(sizes[name]):
                raise UnlearnRefusedError(
                    f"client {name!r:.80} has too few examples to climb on, "
                    f"{sizes[name]}; retrain without it"
                )
            found[name] = max(entered, key=lambda update: update.round)
        return found

    def _ball(
        self,
        request: UnlearnRequest,
        federation: Federation,
        local: Mapping[ClientId, Flat],
    ) -> Ball:
        sizes = federation.clients.sizes
        left_before = request.gone - request.forget
        there = [name for name in sizes if name not in left_before]
        shares = dict(
            zip(
                there,
                shares_of([sizes[n] for n in there], federation.schedule.weighting),
                strict=True,
            )
        )
        centre = reference_model(
            request.ledger.final.params.flat,
            list(local.values()),
            [shares[name] for name in local],
        )
        if self.radius is not None:
            return Ball(centre, self.radius)
        seeds = stream(federation.seed, "pga radius").integers(
            2**31, size=NUM_RANDOM_MODELS
        )
        initial = federation.trainer.initial
        random_models = [initial(int(seed)).params.flat for seed in seeds]
        return Ball(centre, ball_radius(centre, random_models))

    def _ascended(
        self,
        federation: Federation,
        trainer: GradientTrainer,
        model: Model,
        ball: Ball,
        name: ClientId,
        own: Flat,
    ) -> Model:
        """Return the model after one target's ascent, computed at this target."""
        data = federation.clients.at(name)
        inputs, labels = to_model_input(data.images), data.labels
        rng = stream(federation.seed, "pga ascent", name_key(name))
        order = rng.permutation(len(labels))
        held, rest = np.split(order, [self._num_held(len(labels))])
        steps = self.ascend(trainer, model, ball, inputs[rest], labels[rest], rng)
        for model in steps:
            if self._is_far(model, own):
                break
            if self.accuracy_floor is not None:
                answers = trainer.predict(model, inputs[held]).argmax(axis=1)
                if np.mean(answers == labels[held]) < self.accuracy_floor:
                    break
        return model

    def _num_held(self, count: int) -> int:
        """Return the number of a target's examples that only say when to stop."""
        return 0 if self.accuracy_floor is None else max(1, round(count * HELD_BACK))

    def _is_far(self, model: Model, own: Flat) -> bool:
        if self.distance_threshold is None:
            return False
        return norm(model.params.flat - own) ** 2 > self.distance_threshold


def _last_local(
    request: UnlearnRequest, federation: Federation, last: UpdateEntry
) -> tuple[Flat, tuple[str, ...]]:
    """Return a target's last local model, and a warning if it had to train again."""
    ledger, name = request.ledger, last.client
    if last.kept:
        before = params_at(ledger, last.round).flat
        return before + vector(ledger, VectorRef(last.round, name)), ()
    current = ledger.final
    index = ledger.num_rounds
    results = federation.clients.train(current, index, [name])
    (trained,) = require_usable([name], results, current, index)
    update = scale(trained.delta, federation.scales.get(name, 1.0))
    return current.params.flat + update.flat, (
        f"the last update of {name!r:.80} was not kept; it trained once more from the "
        "current model in its place",
    )


def _moved(model: Model, flat: Flat) -> Model:
    return Model(Params(model.params.layout, flat), model.buffers)
