"""CDP: find the channels that tell one class from the others, and cut them off.

Junxiao Wang, Song Guo, Xin Xie, Heng Qi: "Federated Unlearning via Class-Discriminative
Pruning", WWW 2022.

Each channel of a convolution is to a class what a word is to a text. With A the mean
rectified and pooled activation, a row per class i and a column per channel j of a
layer, and U the classes, the score of channel j for the class u to remove is TF IDF:

    TF_j = A[u, j] / sum of A[u],
    IDF_j = log((1 + |U|) / (1 + number of classes i with A[i, j] >= mean of A[i])).

The channels with the largest scores of all layers are set to zero for good, and the
clients that stay train on for some rounds to repair the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fastfedul.data.dataset import choose, to_model_input
from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Federation
from fastfedul.federation.local import LocalResult
from fastfedul.federation.rounds import model_after, run_rounds
from fastfedul.federation.trainer import ChannelTrainer, Labels
from fastfedul.methods.protocol import (
    Needs,
    RunFacts,
    UnlearnRequest,
    UnlearnResult,
    federation_of,
)
from fastfedul.params import Array, Layout, Params
from fastfedul.records import ClientId, Model
from fastfedul.rng import name_key, stream

Channel = tuple[str, int]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ClassActivity:
    """How active the channels are on average on images of each class.

    Attributes:
        classes: Class numbers, ascending; only those with an image.
        counts: Number of images of each.
        layers: A, by the name of the layer: a row per class, a column per channel.
    """

    classes: Labels
    counts: Labels
    layers: Mapping[str, Array]


def class_means(labels: Labels, channels: Mapping[str, Array]) -> ClassActivity:
    """Return the averages of one client's images; nothing finer leaves it."""
    classes, counts = np.unique(labels, return_counts=True)
    layers = {
        layer: np.stack(
            [rows[labels == label].mean(axis=0, dtype=np.float64) for label in classes]
        )
        for layer, rows in channels.items()
    }
    return ClassActivity(classes, counts, layers)


def joined(answers: Sequence[ClassActivity]) -> ClassActivity:
    """Return the averages over all clients' images.

    A class that a client lacks does not count as one on which nothing is active.
    """
    classes = np.unique(np.concatenate([answer.classes for answer in answers]))
    places = [np.searchsorted(classes, answer.classes) for answer in answers]
    counts = np.zeros(len(classes), np.int64)
    for place, answer in zip(places, answers, strict=True):
        counts[place] += answer.counts
    layers = {}
    for layer, rows in answers[0].layers.items():
        total = np.zeros((len(classes), rows.shape[1]))
        for place, answer in zip(places, answers, strict=True):
            total[place] += answer.layers[layer] * answer.counts[:, np.newaxis]
        layers[layer] = total / counts[:, np.newaxis]
    return ClassActivity(classes, counts, layers)


def channel_scores(rows: Array, target: int) -> Array:
    """Return TF IDF of each channel of a layer.

    Args:
        rows: A, a row per class and a column per channel.
        target: The row of the class to remove.

    >>> channel_scores(np.array([[1.0, 0.0], [1.0, 3.0]]), 1).round(3).tolist()
    [0.101, 0.304]
    """
    active = rows >= rows.mean(axis=1, keepdims=True)
    rarity = np.log((1 + len(rows)) / (1 + active.sum(axis=0)))
    whole = rows[target].sum()
    frequency = rows[target] / whole if whole > 0 else np.zeros(rows.shape[1])
    scores: Array = frequency * rarity
    return scores


def top_channels(scores: Mapping[str, Array], sparsity: float) -> tuple[Channel, ...]:
    """Return the channels with the largest scores of all layers; at least one."""
    channels = [(layer, j) for layer, own in scores.items() for j in range(len(own))]
    ranked = np.argsort(-np.concatenate(list(scores.values())), kind="stable")
    count = max(1, round(sparsity * len(channels)))
    return tuple(channels[place] for place in ranked[:count])


def channel_mask(layout: Layout, channels: Sequence[Channel]) -> Mask:
    """Return where the flat vector holds weights and biases of these channels."""
    names = {slot.name for slot in layout.slots}
    mask = np.zeros(layout.size, np.bool_)
    for layer, channel in channels:
        # A network that is nothing but a convolution has no name before the dot.
        for name in (f"{layer}.weight".lstrip("."), f"{layer}.bias".lstrip(".")):
            if name in names:
                slot, start = layout.place(name)
                size = slot.size // slot.shape[0]
                mask[start + channel * size : start + (channel + 1) * size] = True
    return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class CDP:
    """Cuts off the channels of the class that the attackers want, then repairs.

    Attributes:
        label: The class to remove. Against a backdoor, the one the attackers want.
        sparsity: Part of all channels to cut off, R, above 0 and below 1; at least
            one channel goes.
        rounds: Rounds of repair afterwards, without the clients to forget.
        lr: Learning rate of the repair; None for that of the federation.
        sample: Images of each client that its activations are averaged over.
    """

    label: int | None = None
    sparsity: float = 0.05
    rounds: int = 5
    lr: float | None = None
    sample: int = 64
    name: ClassVar[str] = "cdp"
    needs: ClassVar[Needs] = Needs(others=True)
    caveat: ClassVar[str] = (
        "cdp removes a class, not a client: the class that the attack wants, which an "
        "operator may not know."
    )

    def __post_init__(self) -> None:
        for name, fits, wanted in (
            ("label", self.label is None or self.label >= 0, "0 or more"),
            ("sparsity", 0 < self.sparsity < 1, "above 0 and below 1"),
            ("rounds", self.rounds >= 0, "0 or more"),
            ("lr", self.lr is None or 0 < self.lr < math.inf, "a number above 0"),
            ("sample", self.sample >= 1, "1 or more"),
        ):
            if not fits:
                value = getattr(self, name)
                raise InvalidInputError(f"{name} is {value}; choose {wanted}")

    @classmethod
    def defaults(cls, facts: RunFacts) -> dict[str, object]:
        """Return the attackers' class as the one to remove, if there is an attack."""
        return {} if facts.target_label is None else {"label": facts.target_label}

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model without the class's channels, after the repair."""
        federation = federation_of(request, self)
        if self.label is None:
            raise UnlearnRefusedError(
                "CDP removes a class, not a client; against a backdoor give the "
                "attack's target label"
            )
        model = request.ledger.final
        layout = model.params.layout
        channels = self._channels(self.label, federation, model, request.stayers)
        mask = channel_mask(layout, channels)
        pruned = Params(layout, np.where(mask, np.float32(0), model.params.flat))
        repaired = self._repair(request, federation, Model(pruned, model.buffers), mask)
        return UnlearnResult(
            params=repaired.params,
            clients=tuple(sorted(request.forget)),
            buffers=repaired.buffers,
            warnings=(
                f"CDP removes class {self.label}, not a client; against a backdoor "
                "this is the attack's label",
            ),
        )

    def _channels(
        self,
        label: int,
        federation: Federation,
        model: Model,
        stayers: Sequence[ClientId],
    ) -> tuple[Channel, ...]:
        """Return the channels to cut off, from one look at every client.

        Raises:
            UnlearnRefusedError: If there is no channel, or nobody knows the class.
        """
        trainer = federation.trainer
        if not isinstance(trainer, ChannelTrainer):
            raise UnlearnRefusedError(
                "CDP looks into convolutions, and this trainer cannot show them"
            )
        answers = []
        for name in stayers:
            data = federation.clients.at(name)
            # By chance and by class: a client's images may be sorted.
            rng = stream(federation.seed, "cdp sample", name_key(name))
            count = min(self.sample, data.num_examples)
            places = choose(data.labels, count, rng)
            active = trainer.channels(model, to_model_input(data.images[places]))
            answers.append(class_means(data.labels[places], active))
        activity = joined(answers)
        if not activity.layers:
            raise UnlearnRefusedError(
                "CDP cuts off channels of convolutions, and this model has none"
            )
        if label not in activity.classes:
            raise UnlearnRefusedError(
                f"CDP found no image of class {label} with the clients that stay; "
                "give a class they have, or a larger sample"
            )
        target = int(np.searchsorted(activity.classes, label))
        layers = activity.layers.items()
        scores = {layer: channel_scores(rows, target) for layer, rows in layers}
        return top_channels(scores, self.sparsity)

    def _repair(
        self, request: UnlearnRequest, federation: Federation, model: Model, mask: Mask
    ) -> Model:
        """Return the model after ordinary rounds in which the mask stays zero."""
        local = None
        if self.lr is not None:
            local = replace(federation.local, lr=self.lr)

        def work(
            model: Model, index: int, names: Sequence[ClientId]
        ) -> list[LocalResult]:
            # Nothing comes back to life: what a client sends is zero there as well.
            results = federation.clients.train(model, index, names, local)
            return [_masked(result, mask) for result in results]

        start = request.ledger.num_rounds
        rounds = run_rounds(
            work,
            federation.clients.sizes,
            federation.schedule,
            model=model,
            start=start,
            stop=start + self.rounds,
            absent=request.gone,
            scales=federation.scales,
        )
        return model_after(rounds, model)


def _masked(result: LocalResult, mask: Mask) -> LocalResult:
    flat = np.where(mask, np.float32(0), result.delta.flat)
    return LocalResult(Params(result.delta.layout, flat), result.buffers)
