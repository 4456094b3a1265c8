"""Attacks: poisoned examples of some clients, and the images that measure success."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fastfedul.data.attacks.edge_cases import EdgeCases, load_edge_cases, make_tail
from fastfedul.data.attacks.pixel_pattern import NUM_PARTS, stamp
from fastfedul.data.dataset import (
    ClientData,
    Dataset,
    Examples,
    Images,
    Indices,
    Labels,
)
from fastfedul.errors import InvalidInputError, NothingToPoisonError, UnknownClientError
from fastfedul.limits import require_choice, require_number, require_type
from fastfedul.records import ClientId
from fastfedul.rng import name_key, stream

Kind = Literal["none", "pixel", "edge-case", "label-flip"]
KINDS: tuple[Kind, ...] = ("none", "pixel", "edge-case", "label-flip")

# 20 of 64 as in DBA; a fifth as in Fast-FedUL; all images of the source class.
_DEFAULT_RATIOS: dict[Kind, float] = {
    "none": 1.0,
    "pixel": 20 / 64,
    "edge-case": 0.2,
    "label-flip": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """An attack and its attackers.

    Attributes:
        kind: `none`: everybody is honest. `pixel`: some of an attacker's images get
            the pixel pattern and the target label. `edge-case`: an attacker adds
            pictures from the tail of a class with the target label. `label-flip`:
            images of one class get the target label and do not change.
        attackers: Names of the attackers. For `pixel`, one attacker uses the whole
            pattern; several attackers use the four parts in turn.
        poison_ratio: `pixel`: share of the attacker's examples that it replaces.
            `edge-case`: number of added pictures, as a share of its examples.
            `label-flip`: share of its images of the source class. None for the usual
            0.3125, 0.2 and 1.
        target_label: Class that the attackers want; None for the usual: `pixel` 2,
            `edge-case` 1 (truck for cifar10), `label-flip` 1.
        source_label: `label-flip`: class that the attackers relabel; None for 7, or for
            0 in a data set of fewer classes. The other kinds have none.
        scale: Factor on the attackers' updates in training.
    """

    kind: Kind = "none"
    attackers: tuple[ClientId, ...] = ()
    poison_ratio: float | None = None
    target_label: int | None = None
    source_label: int | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        require_choice("attack", self.kind, KINDS)
        require_type("attackers", self.attackers, tuple, "a tuple of names")
        ratio = self.poison_ratio
        require_number("poison ratio", ratio, above=0, most=1, unset=True)
        require_number("attackers' scale", self.scale, above=0)
        for name, label in (
            ("target label", self.target_label),
            ("source label", self.source_label),
        ):
            require_number(name, label, whole=True, unset=True)
        if (self.kind == "none") != (not self.attackers):
            raise InvalidInputError(
                f"the attack {self.kind} has {len(self.attackers)} attackers; name at "
                "least one, or none at all for no attack"
            )
        if len(set(self.attackers)) != len(self.attackers):
            raise InvalidInputError("an attacker is named twice; name each once")
        if self.source_label is not None and self.kind != "label-flip":
            raise InvalidInputError(
                f"the attack {self.kind} has no source label; leave it out"
            )

    @property
    def ratio(self) -> float:
        """The poison ratio; if it is None, the usual ratio of this kind."""
        return self.poison_ratio or _DEFAULT_RATIOS[self.kind]


def parse_attackers(text: str, clients: Sequence[ClientId]) -> tuple[ClientId, ...]:
    """Return the attackers, written as names or as the number of the first clients.

    >>> parse_attackers("2", ["client-0", "client-1", "client-2"])
    ('client-0', 'client-1')
    >>> parse_attackers("client-2, client-0", ["client-0", "client-1", "client-2"])
    ('client-2', 'client-0')

    Raises:
        UnknownClientError: If a name is not among the clients.
        InvalidInputError: If the number is above the number of clients.
    """
    if text.strip().isdecimal():
        count = int(text)
        if count > len(clients):
            raise InvalidInputError(
                f"there cannot be {count} attackers among {len(clients)} clients; "
                f"ask for at most {len(clients)}"
            )
        return tuple(clients[:count])
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in clients:
            raise UnknownClientError(
                f"there is no client {name!r}; they are called {clients[0]} to "
                f"{clients[-1]}"
            )
    return names


def with_labels(
    attack: Attack, dataset: Dataset, edge_cases: EdgeCases | None = None
) -> Attack:
    """Return the attack with target and source label filled in and checked.

    Raises:
        InvalidInputError: If the attack needs images and there are none, the data set
            lacks the class, or target and true class are the same.
    """
    if attack.kind == "none":
        return attack
    if attack.kind != "label-flip" and not dataset.is_images:
        raise InvalidInputError(
            f"the attack {attack.kind} needs images, and {dataset.name} has rows of "
            f"{dataset.shape[0]} values; use the attack label-flip"
        )
    usual_source, usual_target = _usual_labels(attack, dataset, edge_cases)
    source = usual_source if attack.source_label is None else attack.source_label
    target = usual_target if attack.target_label is None else attack.target_label
    for label in (target, source or 0):
        if not 0 <= label < dataset.num_classes:
            raise InvalidInputError(
                f"{dataset.name} has no class {label}; "
                f"choose 0 to {dataset.num_classes - 1}"
            )
    if target == source:
        raise InvalidInputError(
            f"the attacked images are of class {source} already; choose another "
            "target label"
        )
    flips = attack.kind == "label-flip"
    return replace(attack, target_label=target, source_label=source if flips else None)


def _usual_labels(
    attack: Attack, dataset: Dataset, edge_cases: EdgeCases | None
) -> tuple[int | None, int]:
    """Return the usual true class of the attacked images, if any, and the target."""
    if attack.kind == "edge-case":
        edge_cases = edge_cases or load_edge_cases(dataset)
        return edge_cases.true_label, edge_cases.target_label
    if attack.kind == "label-flip":
        return 7 if dataset.num_classes > 7 else 0, 1
    return None, min(2, dataset.num_classes - 1)


def poison(
    clients: Iterable[ClientData],
    attack: Attack,
    dataset: Dataset,
    *,
    seed: int,
    edge_cases: EdgeCases | None = None,
) -> tuple[ClientData, ...]:
    """Return the clients in the same order, the attackers' examples poisoned.

    Honest clients do not change. An attacker's poison depends on the seed, its name,
    its place among the attackers and its own examples; other clients have no influence.
    The attack may name attackers that are not among the clients, so it also serves a
    run without them.

    Args:
        clients: Everybody's clean examples.
        attack: The attack.
        dataset: Where the examples come from.
        seed: Decides which examples are poisoned.
        edge_cases: Pictures for `edge-case`; None for the data set's own.

    Raises:
        NothingToPoisonError: If an attacker has no example that it could poison.
    """
    if attack.kind == "none":
        return tuple(clients)
    if attack.kind == "edge-case":
        edge_cases = edge_cases or load_edge_cases(dataset)
    attack = with_labels(attack, dataset, edge_cases)
    return tuple(
        _poison_client(data, attack, edge_cases, seed)
        if data.client in attack.attackers
        else data
        for data in clients
    )


def backdoor_test(
    attack: Attack, dataset: Dataset, *, edge_cases: EdgeCases | None = None
) -> Examples:
    """Return the images that measure the attack, all with the target label.

    The attack success is the accuracy on these images. None of them belongs to the
    target class. `pixel`: the test images with the whole pattern. `edge-case`: pictures
    that are in nobody's poison. `label-flip`: the test images of the source class.
    `none`: no images.
    """
    images, labels = dataset.test
    if attack.kind == "none":
        return Examples(images[:0], labels[:0])
    if attack.kind == "edge-case":
        edge_cases = edge_cases or load_edge_cases(dataset)
        images = edge_cases.scored
    attack = with_labels(attack, dataset, edge_cases)
    if attack.kind == "pixel":
        images = stamp(images[labels != attack.target_label])
    elif attack.kind == "label-flip":
        images = images[labels == attack.source_label]
    if not len(images):
        raise InvalidInputError(
            f"{dataset.name} has no test images to measure the attack {attack.kind} "
            "on; choose another source or target label"
        )
    return Examples(images, np.full(len(images), attack.target_label, np.int64))


def _poison_client(
    data: ClientData, attack: Attack, edge_cases: EdgeCases | None, seed: int
) -> ClientData:
    rng = stream(seed, f"poison {attack.kind}", name_key(data.client))
    if attack.kind == "pixel":
        return _stamp_some(data, attack, rng)
    if attack.kind == "label-flip":
        source = np.flatnonzero(data.labels == attack.source_label)
        chosen = _choose(data, source, attack.ratio * len(source), rng)
        return replace(data, labels=_relabel(data.labels, chosen, attack))
    assert edge_cases is not None
    pictures = _draw_pictures(data, attack, edge_cases, rng)
    added = np.arange(data.num_examples, data.num_examples + len(pictures))
    labels = np.concatenate([data.labels, np.zeros(len(pictures), np.int64)])
    images = np.concatenate([data.images, pictures])
    return ClientData(data.client, images, _relabel(labels, added, attack))


def _stamp_some(
    data: ClientData, attack: Attack, rng: np.random.Generator
) -> ClientData:
    others = np.flatnonzero(data.labels != attack.target_label)
    chosen = _choose(data, others, attack.ratio * data.num_examples, rng)
    place = attack.attackers.index(data.client) % NUM_PARTS
    images = data.images.copy()
    images[chosen] = stamp(
        images[chosen], None if len(attack.attackers) == 1 else place
    )
    return ClientData(data.client, images, _relabel(data.labels, chosen, attack))


def _relabel(labels: Labels, places: Indices, attack: Attack) -> Labels:
    assert attack.target_label is not None
    changed = labels.copy()
    changed[places] = attack.target_label
    return changed


def _choose(
    data: ClientData, usable: Indices, count: float, rng: np.random.Generator
) -> Indices:
    """Return a random choice of the usable examples, at least one."""
    if not len(usable):
        raise NothingToPoisonError(
            f"{data.client} has no example this attack could poison; choose other "
            "attackers, another label or another split"
        )
    return rng.permutation(usable)[: max(1, round(count))]


def _draw_pictures(
    data: ClientData, attack: Attack, edge_cases: EdgeCases, rng: np.random.Generator
) -> Images:
    """Return pictures to add; none repeats before all have been used."""
    pool, made = edge_cases.poison, edge_cases.poison is None
    if pool is None:
        pool = data.images[data.labels == edge_cases.true_label]
    places = _choose(data, np.arange(len(pool)), len(pool), rng)
    count = max(1, round(attack.ratio * data.num_examples))
    pictures = pool[np.resize(places, count)]
    return make_tail(pictures, rng) if made else pictures
