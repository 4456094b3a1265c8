"""Rounds of the ledger, made from checked replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Message

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import MEAN, named_rule, rows_reader
from fastfedul.federation.replies import CheckedReply, ReplyLimits
from fastfedul.federation.rounds import (
    average_buffers,
    buffer_weights,
    entered_weights,
)
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from fastfedul.params import Flat, Params, weighted_sum
from fastfedul.records import (
    ClientUpdate,
    LocalSGD,
    Model,
    Round,
    StorageDtype,
)

_LOCAL_KEYS = {
    "lr": "lr",
    "momentum": "momentum",
    "batch-size": "batch_size",
    "local-epochs": "epochs",
}
"""Keys of a config record that say how to train, as Flower's examples name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """How rounds are made and stored.

    Attributes:
        aggregation: The ledger's name of it.
        keep: Policy by which updates are kept.
        dtype: How the ledger stores updates.
        budget: Bytes that the ledger may take; None for any number.
        arrays: Where the array files of a new ledger lie; None for its own folder.
        weight_key: The metric that is a client's weight.
        limits: Limits between a usual reply and a hostile one.
        optimizer: The server optimizer; None for a server that adds the aggregate.
    """

    aggregation: str = MEAN
    keep: Keep = field(default_factory=lambda: Keep.parse("all"))
    dtype: StorageDtype = "float32"
    budget: int | None = None
    arrays: str | None = None
    weight_key: str = "num-examples"
    limits: ReplyLimits = field(default_factory=ReplyLimits)
    optimizer: ServerOptimizer | None = None

    def __post_init__(self) -> None:
        whole = self.keep.policy == "all" and self.keep.use == "store"
        if self.aggregation != MEAN and not whole:
            raise InvalidInputError(
                f"a {self.aggregation} can only be replayed with every update; "
                'use keep="all" and keep_use="store"'
            )
        if self.optimizer is not None and self.keep.history == "sums":
            raise InvalidInputError(
                f"the server optimizer {self.optimizer.name} is replayed from the mean "
                'of every round, and keep="sums" keeps none; use keep="all"'
            )
        if self.dtype not in STORAGE_DTYPES:
            raise InvalidInputError(
                f"dtype is {self.dtype!r:.40}; choose {', '.join(STORAGE_DTYPES)}"
            )


def local_training(
    messages: Iterable[Message], usual: LocalSGD | None
) -> LocalSGD | None:
    """Return how clients are told to train; None if the server does not tell them all.

    Only the server's own messages count, never a client's word.

    Args:
        messages: The messages that ask for training.
        usual: Local training if a message does not name one.

    Raises:
        InvalidInputError: If a learning rate, momentum, batch size or number of epochs
            makes no sense.
    """
    told: set[LocalSGD | None] = set()
    for message in messages:
        found: dict[str, Any] = {}
        for record in message.content.config_records.values():
            for key, name in _LOCAL_KEYS.items():
                value = record.get(key)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    found[name] = value
        if usual is not None:
            told.add(replace(usual, **found))
        else:
            whole = len(found) == len(_LOCAL_KEYS)
            told.add(LocalSGD(**found) if whole else None)
    return told.pop() if len(told) == 1 else None


def make_round(
    index: int,
    usable: Sequence[CheckedReply],
    before: Model,
    settings: RoundSettings,
    trained: LocalSGD | None = None,
) -> Round:
    """Return the round as the ledger records it.

    Args:
        index: Number of the round.
        usable: Replies of all clients that count.
        before: The model that the clients started from.
        settings: How rounds are made.
        trained: How the clients trained; None if the server does not know.
    """
    total = sum(own.weight for own in usable)
    layout = before.params.layout
    updates = tuple(
        ClientUpdate(
            own.client,
            own.weight / total,
            Params(layout, own.delta),
            buffers=own.buffers or None,
        )
        for own in usable
        if own.delta is not None
    )
    round_ = settings.keep(Round(index, updates, local=trained))
    if not before.buffers:
        return round_
    local = [own.buffers for own in usable]
    weights = buffer_weights(round_, named_rule(settings.aggregation, {}))
    averaged = average_buffers(local, weights, before.buffers)
    return replace(round_, buffers=averaged)


def expected_step(round_: Round, settings: RoundSettings) -> Flat:
    """Return the aggregate of a round: the step, unless the server optimizes."""
    rows = [update.delta.flat for update in round_.updates if update.delta is not None]
    rule = named_rule(settings.aggregation, {})
    if rule is None:
        return weighted_sum(rows, entered_weights(round_))
    shares = np.array([update.share for update in round_.updates])
    return rule.step(rows_reader(rows), len(rows[0]), shares)
