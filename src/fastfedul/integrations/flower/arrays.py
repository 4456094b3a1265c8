"""Flower's arrays as models, and clients' replies as updates; nothing is trusted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from statistics import median
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message
from flwr.common.constant import SType

from fastfedul.errors import InvalidInputError
from fastfedul.ledger.checks import LARGEST_NORM
from fastfedul.params import Array, Flat, Params, norm
from fastfedul.records import ClientId, Model

# Beside larger weights the shares of the others would be lost to rounding.
_LEAST, _MOST = 1e-4, 1e10
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""How the names of arrays end that a network keeps but does not learn."""

IsBuffer = Callable[[str, Array], bool]
Buffers = Collection[str] | IsBuffer


@dataclass(frozen=True, slots=True)
class Received:
    """A reply that can be used.

    Attributes:
        client: Sender.
        message: As it came.
        weight: Number in proportion to its share.
        delta: Local minus global parameters.
        buffers: Its local buffers.
    """

    client: ClientId
    message: Message
    weight: float
    delta: Flat
    buffers: Mapping[str, Array]


class UnusableReplyError(InvalidInputError):
    """A reply that cannot go into the model; the message says why."""


def is_buffer(name: str, array: Array) -> bool:
    """Return whether an array is carried along rather than learned.

    >>> is_buffer("norm.running_mean", np.zeros(3)), is_buffer("w", np.zeros(3))
    (True, False)
    """
    return array.dtype.kind != "f" or name.endswith(STATISTICS)


def buffer_rule(buffers: Buffers | None) -> IsBuffer:
    """Return the rule for names that are listed, a rule itself, or the usual one."""
    if buffers is None:
        return is_buffer
    if callable(buffers):
        return buffers
    names = frozenset(buffers)
    return lambda name, array: array.dtype.kind != "f" or name in names


def to_model(record: ArrayRecord, rule: IsBuffer) -> Model:
    """Return Flower's arrays as a model of parameters and buffers."""
    arrays = {name: array.numpy() for name, array in record.items()}
    params = {n: a for n, a in arrays.items() if not rule(n, a)}
    buffers = {n: a for n, a in arrays.items() if rule(n, a)}
    return Model(Params.of(params), buffers)


def to_record(model: Model, order: Sequence[str]) -> ArrayRecord:
    """Return a model as Flower's arrays, in the order given."""
    arrays = {**model.params.exported(), **model.buffers}
    return ArrayRecord({name: FlowerArray(np.asarray(arrays[name])) for name in order})


def decoded(array: FlowerArray) -> Array:
    """Return an array as `array.numpy()` does, quickly for headers seen before.

    Reading a header takes longer than copying a small array, and all clients of a
    federation send the same ones.
    """
    data = array.data
    end = 10 + int.from_bytes(data[8:10], "little")
    if array.stype != SType.NUMPY or data[:8] != b"\x93NUMPY\x01\x00":
        return array.numpy()
    shape, fortran_order, dtype = _header(data[:end])
    if fortran_order or dtype.hasobject:
        return array.numpy()
    return np.frombuffer(data, dtype, math.prod(shape), end).reshape(shape)


@lru_cache(1024)
def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = BytesIO(data)
    np.lib.format.read_magic(file)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, fortran_order, dtype


def read_reply(
    client: ClientId, message: Message, before: Model, weight_key: str
) -> Received:
    """Return a client's update; the reply itself stays as it is.

    Raises:
        UnusableReplyError: If anything about it is wrong.
    """
    content = message.content
    if len(content.array_records) != 1 or len(content.metric_records) != 1:
        raise UnusableReplyError(
            "a reply has one ArrayRecord and one MetricRecord, not "
            f"{len(content.array_records)} and {len(content.metric_records)}"
        )
    [metrics] = content.metric_records.values()
    weight = metrics.get(weight_key)
    if not isinstance(weight, int | float) or not _LEAST <= weight <= _MOST:
        raise UnusableReplyError(f"its {weight_key} is {weight!r:.40}, no weight")
    [record] = content.array_records.values()
    try:
        arrays = {name: decoded(array) for name, array in record.items()}
    except Exception as error:  # Whatever a client sends must not stop the others.
        raise UnusableReplyError(f"its arrays cannot be read: {error}") from None
    delta, buffers = _compared(arrays, before)
    return Received(client, message, float(weight), delta, buffers)


def _compared(
    arrays: Mapping[str, Array], before: Model
) -> tuple[Flat, Mapping[str, Array]]:
    layout = before.params.layout
    learned = {n: a for n, a in arrays.items() if n not in before.buffers}
    try:
        flat = layout.flatten(learned)
    except InvalidInputError as error:
        raise UnusableReplyError(str(error)) from None
    buffers = {}
    for name, buffer in before.buffers.items():
        own = arrays.get(name)
        if own is None or own.shape != buffer.shape or own.dtype.kind not in "fiub":
            raise UnusableReplyError(f"its buffer {name!r:.80} is missing or differs")
        if not np.isfinite(own).all():
            raise UnusableReplyError(f"its buffer {name!r:.80} has NaN or infinity")
        buffers[name] = own
    with np.errstate(over="ignore", invalid="ignore"):
        flat -= before.params.flat
    if not np.isfinite(flat).all():
        raise UnusableReplyError("it has NaN or infinite values")
    return flat, buffers


def outliers(
    received: Sequence[Received], max_norm_ratio: float
) -> Mapping[ClientId, str]:
    """Return whose update stands out beyond all sense, with the reason.

    An update is held against the median norm of the round if at least three came. A
    client whose metrics have other names than most clients' would stop the others'
    from being averaged, so it is left out too.
    """
    found: dict[ClientId, str] = {}
    norms = {own.client: norm(own.delta) for own in received}
    typical = median(norms.values()) if len(norms) >= 3 else 0.0
    limit = min(max_norm_ratio * typical or math.inf, LARGEST_NORM)
    for client, size in norms.items():
        if size > limit:
            found[client] = (
                f"its update has norm {size:.3g}, the round's median is {typical:.3g}"
            )
    names = {own.client: _names_in(own.message) for own in received}
    usual = Counter(names[c] for c in sorted(names) if c not in found).most_common(1)
    for client, own_names in names.items():
        if client not in found and own_names != usual[0][0]:
            found[client] = "its records or metrics have other names than the others'"
    return found


def _names_in(message: Message) -> tuple[object, ...]:
    [(arrays, _)] = message.content.array_records.items()
    [(metrics, values)] = message.content.metric_records.items()
    kinds = ((k, len(v) if isinstance(v, list) else -1) for k, v in values.items())
    return arrays, metrics, tuple(sorted(kinds))


def disagreement(result: ArrayRecord, own: Params, step_norm: float) -> str:
    """Return how a strategy's result differs from the ledger's model; empty if not.

    Both are the same aggregation added up in different orders and precisions.
    """
    layout = own.layout
    try:
        arrays = {slot.name: decoded(result[slot.name]) for slot in layout.slots}
        flat = layout.flatten(arrays)
    except (KeyError, InvalidInputError) as error:
        return f"other arrays ({error})"
    coarsest = max(np.finfo(slot.dtype).eps for slot in layout.slots)
    rounding = 16 * max(float(coarsest), float(np.finfo(np.float32).eps))
    allowed = 1e-4 * step_norm + rounding * norm(own.flat)
    gap = norm(flat - own.flat)
    return "" if gap <= allowed else f"a distance of {gap:.3g}, allowed {allowed:.3g}"
