"""Replies of Flower's nodes: all that a client sends enters the server here.

A reply is taken off the grid by itself, read, and checked by `federation/replies.py`.
The wrapped strategy gets messages made anew from the checked values, so no byte of a
client reaches it unchecked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

import httpx
import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fastfedul.federation.local import one_line
from fastfedul.federation.replies import (
    CheckedReply,
    Judgement,
    Metrics,
    Quarantined,
    UnusableReplyError,
    check_arrays,
    check_metrics,
    check_weight,
    form_of,
    judge,
    one_line_reason,
)
from fastfedul.integrations.flower.arrays import decoded
from fastfedul.integrations.flower.rounds import RoundSettings
from fastfedul.params import Array
from fastfedul.records import ClientId, Model

Sent = Sequence[tuple[Message, ClientId]]
"""The messages of a round, each with the client that gets it."""

Replies = Mapping[str, Message | UnusableReplyError]
"""Replies by the id of the server's message; an error if Flower cannot read one."""

_UNAVAILABLE = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
"""Errors of the SuperLink about a client that did not reply."""

T = TypeVar("T")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0
"""Seconds between two looks at the grid, as in Flower's own two grids."""


@dataclass(frozen=True, slots=True)
class JudgedReplies:
    """The replies of a round after all checks.

    Attributes:
        judgement: Usable replies, quarantined clients and capped weights.
        absent: Clients without a reply, and the reasons.
        messages: The usable replies as messages for the wrapped strategy.
    """

    judgement: Judgement
    absent: tuple[Quarantined, ...]
    messages: tuple[Message, ...]


def receive(grid: Grid, messages: Sequence[Message], timeout: float) -> Replies:
    """Return the replies to messages, which this sends; silent nodes are absent.

    Each reply is pulled by itself. So a reply that Flower cannot read harms no other
    reply, and a reply answers the message for which it was pulled, whatever it claims.
    """
    waiting = [message_id for message_id in grid.push_messages(messages) if message_id]
    found: dict[str, Message | UnusableReplyError] = {}
    began = time.monotonic()
    while waiting and (passed := time.monotonic() - began) < timeout:
        for message_id in waiting:
            try:
                pulled = list(grid.pull_messages([message_id]))
            except (httpx.HTTPError, OSError):
                raise  # The SuperLink is in trouble, not this reply.
            except Exception as error:
                found[message_id] = UnusableReplyError(
                    f"Flower cannot read its reply: {one_line(error)}"
                )
            else:
                if pulled:
                    found[message_id] = pulled[0]
        waiting = [message_id for message_id in waiting if message_id not in found]
        if waiting:
            # Looking costs a request per client, so long rounds are looked at less.
            pause = min(max(_SHORTEST_PAUSE, passed / 20), _LONGEST_PAUSE)
            time.sleep(min(pause, max(0.0, timeout - passed)))
    return found


def by_message(replies: Iterable[Message]) -> Replies:
    """Return replies by the messages that they say they answer; the first one counts.

    For loops that call the hooks of a strategy themselves; `receive` trusts no reply.
    """
    found: dict[str, Message | UnusableReplyError] = {}
    for reply in replies:
        found.setdefault(reply.metadata.reply_to_message_id, reply)
    return found


def judge_training(
    replies: Replies,
    sent: Sent,
    gone: Set[ClientId],
    before: Model,
    settings: RoundSettings,
) -> JudgedReplies:
    """Return the replies of a round of training after all checks.

    Args:
        replies: The replies that came.
        sent: The messages of the round.
        gone: Clients that were forgotten meanwhile.
        before: The model that the clients started from.
        settings: How rounds are made.
    """
    arrays: dict[ClientId, dict[str, FlowerArray]] = {}
    dtypes = {slot.name: np.dtype(slot.dtype) for slot in before.params.layout.slots}
    dtypes |= {name: buffer.dtype for name, buffer in before.buffers.items()}

    def read(client: ClientId, content: RecordDict) -> CheckedReply:
        name, record = _only("ArrayRecord", content.array_records)
        plain = {key: _plain(key, array) for key, array in record.items()}
        delta, buffers = check_arrays(plain, before)
        arrays[client] = {
            key: record[key]
            if own.dtype == dtypes[key]
            else FlowerArray(own.astype(dtypes[key]))
            for key, own in plain.items()
        }
        own_metrics, weight, metrics = _weighted_metrics(content, settings.weight_key)
        return CheckedReply(
            client=client,
            weight=weight,
            delta=delta,
            buffers=buffers,
            metrics=metrics,
            form=(name, own_metrics, form_of(metrics)),
        )

    return _judged(replies, sent, gone, read, arrays, settings)


def judge_evaluation(
    replies: Replies, sent: Sent, gone: Set[ClientId], settings: RoundSettings
) -> JudgedReplies:
    """Return the replies of an evaluation after all checks."""

    def read(client: ClientId, content: RecordDict) -> CheckedReply:
        name, weight, metrics = _weighted_metrics(content, settings.weight_key)
        form = (name, form_of(metrics))
        return CheckedReply(client=client, weight=weight, metrics=metrics, form=form)

    return _judged(replies, sent, gone, read, {}, settings)


def _judged(
    replies: Replies,
    sent: Sent,
    gone: Set[ClientId],
    read: Callable[[ClientId, RecordDict], CheckedReply],
    arrays: Mapping[ClientId, dict[str, FlowerArray]],
    settings: RoundSettings,
) -> JudgedReplies:
    """Return replies after all checks: each by itself, then all together."""
    checked: list[CheckedReply] = []
    bad: list[Quarantined] = []
    absent: list[Quarantined] = []
    for message, client in sent:
        reply = replies.get(message.metadata.message_id)
        if client in gone:
            why = "it was forgotten while its reply was under way"
            absent.append(Quarantined(client, why))
        elif reply is None:
            absent.append(Quarantined(client, "it sent no reply in time"))
        elif isinstance(reply, Message) and _is_unavailable(reply):
            absent.append(Quarantined(client, f"it failed: {_error_of(reply)}"))
        else:
            try:
                checked.append(read(client, content_of(reply)))
            except UnusableReplyError as error:
                bad.append(Quarantined(client, str(error)))
            except Exception as error:
                # Records of a hostile client may raise anything when they are read.
                bad.append(Quarantined(client, one_line(error)))
    judgement = judge(checked, bad, settings.limits)
    asked = {client: message for message, client in sent}
    messages = tuple(
        _remade(own, asked[own.client], arrays.get(own.client), settings.weight_key)
        for own in judgement.usable
    )
    return JudgedReplies(judgement, tuple(absent), messages)


def content_of(reply: Message | UnusableReplyError) -> RecordDict:
    """Return the content of a reply.

    Raises:
        UnusableReplyError: If the client failed, or Flower cannot read its reply.
    """
    if isinstance(reply, UnusableReplyError):
        raise reply
    if reply.has_error():
        raise UnusableReplyError(f"it failed: {_error_of(reply)}")
    return reply.content


def _is_unavailable(reply: Message) -> bool:
    return reply.has_error() and reply.error.code in _UNAVAILABLE


def _only(kind: str, records: Mapping[str, T]) -> tuple[str, T]:
    """Return the name of the only record of a kind, and the record."""
    found = list(records.items())
    if len(found) != 1:
        raise UnusableReplyError(f"it has {len(found)} records of {kind}, not one")
    return found[0]


def _plain(name: str, array: FlowerArray) -> Array:
    try:
        return decoded(array)
    except Exception as error:  # NumPy raises much when a header is nonsense.
        raise UnusableReplyError(
            f"its array {name!r:.80} cannot be read: {one_line(error)}"
        ) from None


def _weighted_metrics(
    content: RecordDict, weight_key: str
) -> tuple[str, float, Metrics]:
    """Return the name of the record of metrics, the weight, and the metrics."""
    name, record = _only("MetricRecord", content.metric_records)
    weight = check_weight(weight_key, record.get(weight_key))
    return name, weight, check_metrics(record)


def _remade(
    own: CheckedReply,
    message: Message,
    arrays: dict[str, FlowerArray] | None,
    weight_key: str,
) -> Message:
    """Return a checked reply as a message, with the weight that counts."""
    assert isinstance(own.form, tuple)
    metrics = dict(own.metrics)
    if metrics[weight_key] != own.weight:
        metrics[weight_key] = own.weight
    content = RecordDict({own.form[-2]: MetricRecord(metrics)})
    if arrays is not None:
        content[own.form[0]] = ArrayRecord(arrays)
    return Message(content=content, reply_to=message)


def _error_of(reply: Message) -> str:
    r"""Return the line of a trace with the error itself.

    A trace of Flower ends with `Exception occurred. Message: no data\n'>`.
    """
    lines = [line.strip() for line in str(reply.error.reason or "").splitlines()]
    told = [line for line in lines if line.strip("'>")] or ["no reason given"]
    text = told[-1].rpartition(" occurred. Message: ")[2].removesuffix("'>")
    return one_line_reason(text) or "no reason given"
