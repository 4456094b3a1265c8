"""Replies of clients, checked: each comes out as a value to use or as a reason.

A server trusts no client. Every reply passes this module once, whichever framework
carried it: first alone, against the model that the server sent, then among the replies
of its round. An adapter of a framework only takes the framework's wrapping off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low

import numpy as np

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.params import Array, Flat, norm
from fastfedul.records import ClientId, Model

LARGEST_NORM = 1e18
"""Beyond this the squares of an update's values do not fit into float32."""

VARIANCES = ("running_var", "moving_variance")
"""How PyTorch and Keras end the names of buffers that are never negative."""

COUNTERS = ("num_batches_tracked",)
"""How PyTorch ends the names of buffers that count batches."""

LARGEST_GROWTH = 10**9
"""Batches that no client trains in one round; a larger jump of a counter is a lie."""

# Beside larger weights the shares of the other clients would be lost to rounding.
_LEAST_WEIGHT, _LARGEST_WEIGHT = 1e-4, 1e10

_ENOUGH_TO_COMPARE = 3
"""Replies from which on a median tells the usual size from an unusual one."""

_LONGEST_REASON = 200

MetricValue = int | float | list[int] | list[float]
Metrics = Mapping[str, MetricValue]


class UnusableReplyError(InvalidInputError):
    """A reply that cannot be used; the message says why."""


class RoundDiscardedError(FastFedULError):
    """A round had too few usable replies; nothing was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLimits:
    """Limits between a usual reply and a hostile one.

    Attributes:
        min_clients: Usable replies that a round needs.
        max_discards: Discarded rounds in a row after which a run ends.
        max_norm_ratio: How many times the round's median norm an update, or a client's
            buffers, may have.
        max_weight_ratio: How many times the round's median weight a client may have;
            None for any number.
    """

    min_clients: int = 1
    max_discards: int = 3
    max_norm_ratio: float = 1000.0
    max_weight_ratio: float | None = 100.0

    def __post_init__(self) -> None:
        for name, count in (
            ("min_clients", self.min_clients),
            ("max_discards", self.max_discards),
        ):
            if count < 1:
                raise InvalidInputError(f"{name} is {count}; choose 1 or more")
        for name, ratio in (
            ("max_norm_ratio", self.max_norm_ratio),
            ("max_weight_ratio", self.max_weight_ratio),
        ):
            if ratio is not None and not (math.isfinite(ratio) and ratio > 1):
                raise InvalidInputError(f"{name} is {ratio:g}; choose a number above 1")


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A client whose reply the round leaves out, and the reason in one line."""

    client: ClientId
    reason: str

    def __post_init__(self) -> None:
        # A reason may quote the client.
        object.__setattr__(self, "reason", one_line_reason(self.reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedReply:
    """A reply that passed the checks of a single reply.

    Attributes:
        client: Sender.
        weight: Number in proportion to its share.
        delta: Local minus global parameters; None in an evaluation.
        buffers: Its local buffers, in the dtypes of the model.
        metrics: Its metrics, all of them finite.
        form: Names of its parts; the replies of a round have one form.
    """

    client: ClientId
    weight: float
    delta: Flat | None = None
    buffers: Mapping[str, Array] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    form: Hashable = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The replies of a round after all checks.

    Attributes:
        usable: Replies to aggregate, sorted by client.
        quarantined: Clients that the round leaves out.
        capped: The weights before the cap, of usable replies that had a larger one.
    """

    usable: tuple[CheckedReply, ...]
    quarantined: tuple[Quarantined, ...]
    capped: Mapping[ClientId, float]

    def objection(self, num_asked: int, limits: ReplyLimits) -> str:
        """Return why the round cannot count, or nothing if it can.

        Args:
            num_asked: How many clients the server asked.
            limits: The limits of a round.
        """
        if 2 * len(self.quarantined) > num_asked:
            first = self.quarantined[0]
            return (
                f"the replies of {len(self.quarantined)} of {num_asked} clients cannot "
                f"be used, more than half; {first.client!r:.80}: {first.reason}"
            )
        if len(self.usable) < limits.min_clients:
            return (
                f"it brought {len(self.usable)} usable replies and needs "
                f"{limits.min_clients}"
            )
        return ""


def check_weight(name: str, given: object) -> float:
    """Return the weight of a client.

    Raises:
        UnusableReplyError: If it is no number, or far from any number of examples.
    """
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not (number and _LEAST_WEIGHT <= given <= _LARGEST_WEIGHT):  # type: ignore[operator]
        raise UnusableReplyError(
            f"its {name} is {given!r:.40}; a weight is a number from "
            f"{_LEAST_WEIGHT:g} to {_LARGEST_WEIGHT:g}"
        )
    return float(given)  # type: ignore[arg-type]


def check_metrics(given: Mapping[str, object]) -> dict[str, MetricValue]:
    """Return the metrics of a client: finite numbers, and lists of them.

    Raises:
        UnusableReplyError: If a metric is anything else.
    """
    found: dict[str, MetricValue] = {}
    for name, value in given.items():
        numbers = value if isinstance(value, list) else [value]
        if not isinstance(name, str) or not all(map(_is_finite_number, numbers)):
            raise UnusableReplyError(
                f"its metric {name!r:.80} is {value!r:.40}, no finite number"
            )
        found[name] = value  # type: ignore[assignment]
    return found


def form_of(metrics: Metrics) -> Hashable:
    """Return the names of metrics, and the lengths of those that are lists."""
    return tuple(
        (name, len(value) if isinstance(value, list) else -1)
        for name, value in sorted(metrics.items())
    )


def check_arrays(
    given: Mapping[str, Array], before: Model
) -> tuple[Flat, dict[str, Array]]:
    """Return the update and the buffers of a client that sent its local arrays.

    Args:
        given: The local parameters and buffers by name.
        before: The model that the client started from.

    Raises:
        UnusableReplyError: If a name, a shape, a dtype or a value is wrong.
    """
    learned = {n: a for n, a in given.items() if n not in before.buffers}
    try:
        flat = before.params.layout.flatten(learned)
    except InvalidInputError as error:
        raise UnusableReplyError(str(error)) from None
    with np.errstate(over="ignore", invalid="ignore"):
        flat -= before.params.flat
    return check_update(flat, given, before)


def check_update(
    delta: Flat, buffers: Mapping[str, Array], before: Model
) -> tuple[Flat, dict[str, Array]]:
    """Return the update and the buffers of a client, in the dtypes of the model.

    Args:
        delta: Local minus global parameters.
        buffers: The local buffers; other names are passed over.
        before: The model that the client started from.

    Raises:
        UnusableReplyError: If the model could not take them.
    """
    if not np.isfinite(delta).all():
        raise UnusableReplyError("its parameters have NaN or infinite values")
    if (size := norm(delta)) > LARGEST_NORM:
        raise UnusableReplyError(
            f"its update has norm {size:.3g}, and no update is longer than "
            f"{LARGEST_NORM:g}"
        )
    layout, start = before.params.layout, 0
    for slot in layout.slots:
        end = start + slot.size
        if slot.dtype == "float16":
            local = before.params.flat[start:end] + delta[start:end]
            with np.errstate(over="ignore"):
                fits = np.isfinite(local.astype(slot.dtype)).all()
            if not fits:
                raise UnusableReplyError(
                    f"its parameter {slot.name!r:.80} does not fit into float16"
                )
        start = end
    checked = {
        name: _checked_buffer(name, buffers.get(name), current)
        for name, current in before.buffers.items()
    }
    return delta, checked


def _checked_buffer(name: str, given: Array | None, current: Array) -> Array:
    """Return a client's buffer in the dtype of the model's."""
    what = f"its buffer {name!r:.80}"
    if given is None:
        raise UnusableReplyError(f"{what} is missing")
    own = np.asarray(given)
    if own.shape != current.shape or own.dtype.kind not in "fiub":
        raise UnusableReplyError(
            f"{what} is {own.dtype} of shape {own.shape}, not {current.dtype} of shape "
            f"{current.shape}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        stored = own.astype(current.dtype)
        if current.dtype.kind == "f":
            fits = bool((np.abs(stored) <= LARGEST_NORM).all())
        else:
            fits = bool((stored == own).all())
    if not fits:
        raise UnusableReplyError(
            f"{what} has values that are no {current.dtype} of a usual size"
        )
    if name.endswith(VARIANCES) and (stored < 0).any():
        raise UnusableReplyError(f"{what} is a variance below zero")
    if name.endswith(COUNTERS):
        # Compared in Python's numbers, which do not overflow.
        for old, new in zip(current.flat, stored.flat, strict=True):
            if not 0 <= int(new) <= int(old) + LARGEST_GROWTH:
                raise UnusableReplyError(f"{what} counts {int(new)} after {int(old)}")
    return stored


def judge(
    replies: Iterable[CheckedReply],
    quarantined: Iterable[Quarantined],
    limits: ReplyLimits,
) -> Judgement:
    """Return the judgement of a round, given its replies that passed one by one.

    Args:
        replies: Replies of different clients.
        quarantined: Clients whose replies did not pass.
        limits: The limits of a round.
    """
    ordered = sorted(replies, key=lambda reply: reply.client)
    unusual = _outliers(ordered, limits.max_norm_ratio)
    rest = [reply for reply in ordered if reply.client not in unusual]
    forms = Counter(reply.form for reply in rest).most_common(1)
    unusual |= {
        reply.client: "its records or metrics have other names than most replies"
        for reply in rest
        if reply.form != forms[0][0]
    }
    found = [*quarantined, *(Quarantined(c, why) for c, why in unusual.items())]
    usable = [reply for reply in rest if reply.client not in unusual]
    capped: dict[ClientId, float] = {}
    if usable and limits.max_weight_ratio is not None:
        most = limits.max_weight_ratio * median_low(reply.weight for reply in usable)
        capped = {own.client: own.weight for own in usable if own.weight > most}
        usable = [
            replace(own, weight=most) if own.client in capped else own for own in usable
        ]
    return Judgement(
        tuple(usable),
        tuple(sorted(found, key=lambda one: (one.client, one.reason))),
        capped,
    )


def one_line_reason(text: str) -> str:
    r"""Return a text of a client as one short line that no terminal obeys.

    >>> one_line_reason("no data\n\x1b[2Jtoday")
    'no data [2Jtoday'
    """
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * _LONGEST_REASON])
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"


def _outliers(
    replies: Sequence[CheckedReply], max_norm_ratio: float
) -> dict[ClientId, str]:
    """Return clients whose update or buffers are far longer than the usual ones."""
    updates = {r.client: norm(r.delta) for r in replies if r.delta is not None}
    buffers = {r.client: _norm_of_buffers(r.buffers) for r in replies if r.buffers}
    found: dict[ClientId, str] = {}
    for what, norms in (("its update has", updates), ("its buffers have", buffers)):
        if len(norms) < _ENOUGH_TO_COMPARE:
            continue
        typical = median(norms.values())
        limit = max_norm_ratio * typical or math.inf
        for client, size in norms.items():
            if size > limit and client not in found:
                found[client] = (
                    f"{what} norm {size:.3g}, the round's median is {typical:.3g}"
                )
    return found


def _norm_of_buffers(buffers: Mapping[str, Array]) -> float:
    """Return the Euclidean norm of all floating-point buffers."""
    rows = [b.astype(np.float64) for b in buffers.values() if b.dtype.kind == "f"]
    return math.sqrt(sum(float(np.vdot(row, row)) for row in rows))


def _is_finite_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Flower sends whole numbers in 64 bits.
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63
