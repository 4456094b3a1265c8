"""Further measures of a run and of a model, beside main and backdoor accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fastfedul.data.attacks.edge_cases import is_copied
from fastfedul.data.dataset import Images, to_model_input
from fastfedul.data.npz import read_dataset
from fastfedul.data.partition import assign, class_ratio, find_concentration
from fastfedul.data.sources import find_source, require
from fastfedul.ledger.views import KeptView
from fastfedul.methods.fast_fedul.removal import Removal, finite
from fastfedul.methods.fast_fedul.variants import OnSample
from fastfedul.methods.protocol import Method, UnlearnRequest, UnlearnResult
from fastfedul.records import Model, UpdateEntry
from fastfedul.runs.preparation import Prepared

EDITION = 2
"""Raised when results get further measures; `--again` computes older results again."""

_SEVEN = 7


def unseen_sevens(prepared: Prepared) -> Images | None:
    """Return all ARDIS sevens that no client has; None where the attack uses none.

    The test part alone has 76 pictures. The sevens of the training part that the
    attacker did not draw are as unknown to the model. A picture that equals or nearly
    equals one of the attacker's, also turned, does not count.
    """
    if prepared.attack.kind != "edge-case" or prepared.dataset.name != "mnist":
        return None
    ardis = read_dataset(require(find_source("ardis")), "ardis")
    pool = ardis.train_images[ardis.train_labels == _SEVEN]
    scored = prepared.backdoor.images
    owned = [
        d.images for d in prepared.clients if d.client in prepared.attack.attackers
    ]
    known = np.concatenate([*owned, scored])
    return np.concatenate([scored, pool[~is_copied(pool, known)]])


def score_sevens(
    prepared: Prepared, sevens: Images | None, model: Model
) -> dict[str, Any]:
    """Return how many of the sevens the model takes for the attacker's class."""
    if sevens is None:
        return {}
    logits = prepared.trainer.predict(model, to_model_input(sevens))
    hits = int((logits.argmax(axis=1) == prepared.attack.target_label).sum())
    total = len(sevens)
    return {"sevens": hits / total, "sevens_count": hits, "sevens_total": total}


def split_facts(prepared: Prepared) -> dict[str, Any]:
    """Return the concentration and the ratio of a split by ratio; else nothing."""
    config = prepared.config
    split = config.data.split
    if split.kind != "ratio":
        return {}
    labels, number = prepared.dataset.train_labels, len(prepared.clients)
    owned = assign(labels, number, split, config.seed)
    classes = prepared.dataset.num_classes
    counts = np.array([np.bincount(labels[own], minlength=classes) for own in owned])
    return {
        "concentration": find_concentration(labels, number, split.value, config.seed),
        "class_ratio": class_ratio(counts),
    }


def removal_facts(done: UnlearnResult) -> Mapping[str, Any]:
    """Return coverage, skew and bound of a result of Fast-FedUL; else nothing."""
    if not isinstance(done, Removal):
        return {}
    skew = {"name": done.skew.name, **done.skew.settings()}
    reaction = {} if done.reaction is None else {"reaction": asdict(done.reaction)}
    return {
        "coverage": done.coverage,
        "skew": skew,
        "bound": finite(done.bound.value),
        "lipschitz": finite(done.bound.lipschitz),
        **reaction,
    }


@dataclass(slots=True)
class DrawnSample(KeptView):
    """A sample of the updates that is drawn once, when the view is made."""

    drawn: Mapping[int, tuple[UpdateEntry, ...]]

    @classmethod
    def of(cls, request: UnlearnRequest, method: OnSample) -> DrawnSample:
        """Return the sample that a method would draw from the ledger of a request."""
        view = KeptView(request.ledger, method.keep)
        indices = [round_.index for round_ in view.rounds()]
        drawn = {index: tuple(view.updates_in(index)) for index in indices}
        return cls(request.ledger, method.keep, drawn)

    def updates_in(self, index: int) -> tuple[UpdateEntry, ...]:
        """Return the participants of a round, with the updates that were kept."""
        return self.drawn[index]


def without_draw(
    method: Method, request: UnlearnRequest
) -> tuple[Method, UnlearnRequest]:
    """Return a method and a request whose time does not include drawing a sample.

    A server draws the sample while it trains, so the draw is no part of forgetting.
    """
    if not isinstance(method, OnSample):
        return method, request
    view = DrawnSample.of(request, method)
    return method.method, UnlearnRequest(view, request.forget, request.federation)
