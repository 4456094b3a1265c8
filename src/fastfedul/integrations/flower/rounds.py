"""One round: from Flower's replies to the ledger's round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Message

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import MEAN, resolve
from fastfedul.federation.rounds import average_buffers, entered_weights
from fastfedul.integrations.flower.arrays import (
    Received,
    UnusableReplyError,
    outliers,
    read_reply,
)
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from fastfedul.params import Flat, Params, weighted_sum
from fastfedul.records import (
    ClientId,
    ClientUpdate,
    KeepUse,
    LocalSGD,
    Model,
    Round,
    StorageDtype,
)

Sent = Sequence[tuple[Message, ClientId]]
"""The messages of a round, and to whom."""

_LOCAL_KEYS = {
    "lr": "lr",
    "momentum": "momentum",
    "batch-size": "batch_size",
    "local-epochs": "epochs",
}
"""Keys of a config record that say how to train, as Flower's examples name them."""

Problems = Sequence[tuple[ClientId, str]]
"""Clients that could not take part in a round, and the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """How rounds are made and stored.

    Attributes:
        aggregation: The ledger's name of it.
        keep: Policy by which updates are kept.
        dtype: How the ledger stores updates.
        budget: Bytes that the ledger may take; None for any number.
        min_clients: Usable updates that a round needs.
        max_norm_ratio: How many times the median norm an update may have.
        weight_key: The metric that shares go by.
    """

    aggregation: str
    keep: Keep
    dtype: StorageDtype
    budget: int | None
    min_clients: int
    max_norm_ratio: float
    weight_key: str

    @classmethod
    def parse(
        cls,
        *,
        aggregation: str,
        keep: str,
        keep_use: KeepUse,
        dtype: StorageDtype,
        min_clients: int,
        max_norm_ratio: float,
        weight_key: str,
        seed: int,
        budget: int | None = None,
    ) -> RoundSettings:
        """Return the settings, all of them checked."""
        policy = Keep.parse(keep, use=keep_use, seed=seed)
        if aggregation != MEAN and (policy.policy != "all" or keep_use != "store"):
            raise InvalidInputError(
                f"a {aggregation} can only be replayed with every update; "
                'use keep="all" and keep_use="store"'
            )
        if dtype not in STORAGE_DTYPES:
            raise InvalidInputError(
                f"dtype is {dtype!r:.40}; choose {', '.join(STORAGE_DTYPES)}"
            )
        if min_clients < 1:
            raise InvalidInputError(f"min_clients is {min_clients}; choose 1 or more")
        if not (math.isfinite(max_norm_ratio) and max_norm_ratio > 1):
            raise InvalidInputError(
                f"max_norm_ratio is {max_norm_ratio:g}; choose a number above 1"
            )
        return cls(
            aggregation=aggregation,
            keep=policy,
            dtype=dtype,
            budget=budget,
            min_clients=min_clients,
            max_norm_ratio=max_norm_ratio,
            weight_key=weight_key,
        )


def sort_replies(
    replies: Sequence[Message],
    sent: Sent,
    gone: Set[ClientId],
    before: Model,
    settings: RoundSettings,
) -> tuple[Sequence[Received], Problems]:
    """Return usable updates, sorted by client, and who failed with the reason.

    A reply is matched with what it answers, not with where it seems to come from: an
    error about a dead node is sent by the SuperLink. A node that stays silent sends
    no reply at all. A reply to anything but this round's messages is passed over.
    """
    asked = {message.metadata.message_id: client for message, client in sent}
    silent = set(asked.values())
    problems: list[tuple[ClientId, str]] = []
    received: dict[ClientId, Received] = {}
    for reply in replies:
        client = asked.get(reply.metadata.reply_to_message_id)
        if client is None or client not in silent:
            continue
        silent.discard(client)
        if reply.has_error():
            problems.append((client, f"it failed: {_short(reply.error.reason)}"))
        elif client in gone:
            problems.append((client, "it was forgotten while its reply was under way"))
        else:
            try:
                received[client] = read_reply(
                    client, reply, before, settings.weight_key
                )
            except UnusableReplyError as error:
                problems.append((client, str(error)))
    problems += [(client, "it sent no reply in time") for client in silent]
    usable = [received[client] for client in sorted(received)]
    excluded = outliers(usable, settings.max_norm_ratio)
    problems += excluded.items()
    return [r for r in usable if r.client not in excluded], sorted(problems)


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
    usable: Sequence[Received],
    before: Model,
    settings: RoundSettings,
    trained: LocalSGD | None = None,
) -> Round:
    """Return the round as the ledger records it."""
    total = sum(own.weight for own in usable)
    layout = before.params.layout
    updates = tuple(
        ClientUpdate(own.client, own.weight / total, Params(layout, own.delta))
        for own in usable
    )
    round_ = settings.keep(Round(index, updates, local=trained))
    if not before.buffers:
        return round_
    local = [own.buffers for own in usable]
    averaged = average_buffers(local, entered_weights(round_), before.buffers)
    return replace(round_, buffers=averaged)


def expected_step(round_: Round, settings: RoundSettings) -> Flat:
    """Return the step that the ledger will add to the model."""
    rows = [update.delta.flat for update in round_.updates if update.delta is not None]
    if settings.aggregation == MEAN:
        return weighted_sum(rows, entered_weights(round_))
    rule = resolve(settings.aggregation, {})
    shares = np.array([update.share for update in round_.updates])
    return np.asarray(rule.function(np.stack(rows), shares), np.float32)


def _short(reason: str | None) -> str:
    r"""Return the line of a trace with the error itself, safe to print.

    >>> _short("Traceback:\n  File ...\nException occurred. Message: no data\n'>")
    'no data'
    """
    lines = [line.strip() for line in (reason or "").splitlines()]
    told = [line for line in lines if line.strip("'>")] or ["no reason given"]
    text = told[-1].rpartition(" occurred. Message: ")[2].removesuffix("'>")
    text = "".join(letter for letter in text if letter.isprintable())
    return text if len(text) <= 200 else text[:197] + "..."
