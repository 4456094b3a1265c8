"""PGA: the client to forget climbs its own loss, then the others train on.

Anisa Halimi, Swanand Kadhe, Ambrish Rawat, Nathalie Baracaldo: "Federated Unlearning:
How to Efficiently Erase a Client in FL?", 2022 (UpML workshop at ICML; arXiv
2207.05521).

The ascent stays in a ball around the model of the others,
w_ref = (M_T - sum of a_u w_u) / (1 - sum of a_u): M_T is the current model, w_u a
target's last local model, and a_u its share among all clients that are still there,
whoever was drawn in a round. With equal shares and one target this is the paper's
(N M_T - w_u) / (N - 1). The squared radius is a third of the mean squared distance from
w_ref to ten random initial models, as in the authors' public code.

Several targets share one w_ref, without any of them, and one ball: they climb one after
the other in the order of their names, each from where the one before stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fastfedul.data.dataset import to_model_input
from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN
from fastfedul.federation.clients import Federation
from fastfedul.federation.rounds import (
    model_after,
    require_usable,
    run_rounds,
    shares_of,
)
from fastfedul.federation.trainer import (
    GradientTrainer,
    Inputs,
    Labels,
    LocalTraining,
    TrainingError,
)
from fastfedul.ledger.protocol import Ledger, params_at, vector
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.methods.protocol import (
    OLD_BUFFERS,
    Needs,
    UnlearnRequest,
    UnlearnResult,
    federation_of,
)
from fastfedul.params import Flat, Params, norm, weighted_sum
from fastfedul.records import ClientId, Model, UpdateEntry, VectorRef
from fastfedul.rng import name_key, stream

NUM_RANDOM_MODELS = 10
RADIUS_DIVISOR = 3
HELD_BACK = 0.1


@dataclass(frozen=True, slots=True)
class Ball:
    """Where the ascent must stay.

    Attributes:
        centre: The model of the others, w_ref.
        radius: Largest distance from it, the paper's delta.
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
    """Return what is left of a weighted mean without some of its parts.

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
    """Return the gradient, shortened if it is longer than that.

    >>> clip(np.float32([6, 8]), 5.0).tolist()
    [3.0, 4.0]
    """
    length = norm(gradient)
    return gradient if length <= largest else gradient * np.float32(largest / length)


@dataclass(frozen=True, slots=True, kw_only=True)
class PGA:
    """Lets the leaving client climb its own loss inside a ball around the others.

    The defaults are those of the authors' public code. A `distance_threshold` suits one
    kind of network; a warning says when it left no room for an ascent.

    Attributes:
        lr: Learning rate of the ascent.
        momentum: Its momentum.
        batch_size: Largest number of examples of a step. All batches of an epoch are of
            nearly the same size, since batch normalisation cannot use a single example.
        epochs: How often a target goes through its examples at most.
        clip_norm: Longest gradient of a step.
        radius: Of the ball, the paper's delta; None for the rule of the public code.
        distance_threshold: Squared distance to the target's last local model from which
            the ascent ends, looked at after every step; None for never.
        accuracy_floor: The paper's tau, 0 to 1: the ascent also ends when the accuracy
            on a tenth of the target's own examples, held back for this, falls below
            it; None for never.
        post_rounds: Rounds of ordinary training by the others afterwards.
        post_epochs: How often they go through their examples in each.
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
        if self.epochs < 1 or self.epochs != int(self.epochs):
            raise InvalidInputError(
                f"the ascent has {self.epochs} epochs; choose 1, 2 or more"
            )
        for name in ("clip_norm", "radius", "distance_threshold"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInputError(f"{name} is {value:g}; choose more than 0")
        if self.accuracy_floor is not None and not 0 <= self.accuracy_floor <= 1:
            raise InvalidInputError(
                f"the accuracy floor is {self.accuracy_floor:g}; choose from 0 to 1"
            )
        if self.post_rounds < 0:
            raise InvalidInputError(
                f"{self.post_rounds} rounds of post-training; choose 0 or more"
            )

    @property
    def needs(self) -> Needs:
        """The targets with their data, and the others unless nothing is trained after.

        A target's last stored update spares it a training, but it can do without.
        """
        return Needs(target=True, others=self.post_rounds > 0)

    def kept_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of each client's last update."""
        return len(ledger.clients()) * encoded_bytes(
            "float32", ledger.settings.layout.size
        )

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model after the targets' ascent and the others' post-training."""
        federation = federation_of(request, self)
        trainer = federation.trainer
        if not isinstance(trainer, GradientTrainer):
            raise UnlearnRefusedError(
                f"{PGA.name} needs gradients, and {type(trainer).__name__} gives none"
            )
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
        model = self._post_trained(request, federation, model)
        if model.buffers and not self.post_rounds:
            warnings.append(OLD_BUFFERS)
        return UnlearnResult(
            params=model.params,
            buffers=model.buffers,
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
            model: Where to start from. Its buffers stay as they are.
            ball: Where to stay.
            inputs: The target's images as a model sees them.
            labels: What the target trained them as.
            rng: For the order of the examples.

        Raises:
            TrainingError: If the ascent ran away within the ball.
        """
        velocity = np.zeros_like(ball.centre)
        num_batches = math.ceil(len(labels) / self.batch_size)
        for _ in range(self.epochs):
            for batch in np.array_split(rng.permutation(len(labels)), num_batches):
                _, gradient = trainer.gradient(model, inputs[batch], labels[batch])
                velocity = velocity * np.float32(self.momentum)
                velocity += clip(gradient, self.clip_norm)
                flat = ball.project(model.params.flat + velocity * np.float32(self.lr))
                if not np.isfinite(flat).all():
                    raise TrainingError(
                        "the ascent ran away: its model has infinite values; use a "
                        "smaller learning rate or radius"
                    )
                model = _moved(model, flat)
                yield model

    def _last_updates(
        self, request: UnlearnRequest, sizes: Mapping[ClientId, int]
    ) -> dict[ClientId, UpdateEntry]:
        """Return what each target last put into the model, or refuse the request."""
        ledger = request.ledger
        if ledger.settings.aggregation != MEAN:
            raise UnlearnRefusedError(
                f"{PGA.name} takes a client out of a mean, and this model was "
                f"aggregated by {ledger.settings.aggregation!r:.80}; retrain without "
                "the client"
            )
        if not request.stayers:
            raise UnlearnRefusedError(
                f"{PGA.name} needs other clients, and nobody stays"
            )
        clients = ledger.clients()
        found = {}
        for name in sorted(request.forget):
            if name in clients and clients[name].state != "active":
                raise InvalidInputError(
                    f"client {name!r:.80} is {clients[name].state} already"
                )
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
        """Return the model after one target's ascent, which is done at that target."""
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
        """Return how many of a target's examples only say when to stop."""
        return 0 if self.accuracy_floor is None else max(1, round(count * HELD_BACK))

    def _is_far(self, model: Model, own: Flat) -> bool:
        if self.distance_threshold is None:
            return False
        return norm(model.params.flat - own) ** 2 > self.distance_threshold

    def _post_trained(
        self, request: UnlearnRequest, federation: Federation, model: Model
    ) -> Model:
        clients = federation.clients
        local = replace(federation.local, epochs=self.post_epochs)
        start = request.ledger.num_rounds
        rounds = run_rounds(
            lambda now, index, names: clients.train(now, index, names, local),
            clients.sizes,
            federation.schedule,
            model=model,
            start=start,
            stop=start + self.post_rounds,
            absent=request.gone,
            scales=federation.scales,
        )
        return model_after(rounds, model)


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
    factor = np.float32(federation.scales.get(name, 1.0))
    return current.params.flat + trained.delta.flat * factor, (
        f"the last update of {name!r:.80} was not kept; it trained once more from the "
        "current model in its place",
    )


def _moved(model: Model, flat: Flat) -> Model:
    return Model(Params(model.params.layout, flat), model.buffers)
