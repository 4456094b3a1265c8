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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fastfedul.data.dataset import choose, to_model_input
from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.clients import Federation
from fastfedul.federation.local import LocalResult
from fastfedul.federation.trainer import ChannelTrainer, Labels
from fastfedul.limits import require_number
from fastfedul.methods.protocol import (
    Needs,
    RunFacts,
    UnlearnRequest,
    UnlearnResult,
    federation_of,
)
from fastfedul.methods.steps import train_on
from fastfedul.params import Array, Layout, Params
from fastfedul.records import ClientId, Model
from fastfedul.rng import name_key, stream

Channel = tuple[str, int]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ClassActivity:
    """Mean activity of the channels on the images of each class.

    Attributes:
        classes: Numbers of the classes with an image, ascending.
        counts: Number of images of each class.
        layers: A, by the name of the layer: a row per class, a column per channel.
    """

    classes: Labels
    counts: Labels
    layers: Mapping[str, Array]


def class_means(labels: Labels, channels: Mapping[str, Array]) -> ClassActivity:
    """Return the means over one client's images; nothing finer leaves the client."""
    classes, counts = np.unique(labels, return_counts=True)
    layers = {
        layer: np.stack(
            [rows[labels == label].mean(axis=0, dtype=np.float64) for label in classes]
        )
        for layer, rows in channels.items()
    }
    return ClassActivity(classes, counts, layers)


def joined(answers: Sequence[ClassActivity]) -> ClassActivity:
    """Return the means over all clients' images.

    A client without images of a class has no influence on the mean of this class.
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
    """Return a mask of the weights and biases of these channels in the flat vector."""
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
        label: The class to remove; against a backdoor, the attackers' target class.
        sparsity: Part of all channels to cut off, R, above 0 and below 1; at least
            one channel.
        rounds: Rounds of repair afterwards, without the clients to forget.
        lr: Learning rate of the repair; None for the federation's own.
        sample: Number of images of each client for its mean activity.
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
        require_number("label", self.label, least=0, whole=True, unset=True)
        require_number("sparsity", self.sparsity, above=0, below=1)
        require_number("number of rounds", self.rounds, least=0, whole=True)
        require_number("learning rate", self.lr, above=0, unset=True)
        require_number("sample", self.sample, least=1, whole=True)

    @classmethod
    def defaults(cls, facts: RunFacts) -> dict[str, object]:
        """Return the attackers' class as the class to remove, if there is an attack."""
        return {} if facts.target_label is None else {"label": facts.target_label}

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model without the class's channels, after the repair."""
        federation = federation_of(request, self)
        if self.label is None:
            raise UnlearnRefusedError(
                "cdp removes a class, not a client; against a backdoor give the "
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
                f"cdp removes class {self.label}, not a client; against a backdoor "
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
        """Return the channels to cut off, from one call to every client that stays.

        Raises:
            UnlearnRefusedError: If there is no channel, or no image of the class.
        """
        trainer = federation.trainer
        if not isinstance(trainer, ChannelTrainer):
            raise UnlearnRefusedError(
                "cdp looks into convolutions, and this trainer cannot show them"
            )
        answers = []
        for name in stayers:
            data = federation.clients.at(name)
            # A random choice by class, because a client's images may be sorted.
            rng = stream(federation.seed, "cdp sample", name_key(name))
            count = min(self.sample, data.num_examples)
            places = choose(data.labels, count, rng)
            active = trainer.channels(model, to_model_input(data.images[places]))
            answers.append(class_means(data.labels[places], active))
        activity = joined(answers)
        if not activity.layers:
            raise UnlearnRefusedError(
                "cdp cuts off channels of convolutions, and this model has none"
            )
        if label not in activity.classes:
            raise UnlearnRefusedError(
                f"cdp found no image of class {label} with the clients that stay; "
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
            results = federation.clients.train(model, index, names, local)
            return [_masked(result, mask) for result in results]

        return train_on(request, federation, model, self.rounds, work)


def _masked(result: LocalResult, mask: Mask) -> LocalResult:
    flat = np.where(mask, np.float32(0), result.delta.flat)
    return LocalResult(Params(result.delta.layout, flat), result.buffers)
