"""The records that flow between the stages; all frozen, none knows a framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastfedul.errors import InvalidInputError
from fastfedul.params import Array, Params

ClientId = str
KeepUse = Literal["store", "aggregate"]
StorageDtype = Literal["float32", "bfloat16", "float16", "int8"]
History = Literal["rounds", "sums"]


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model: parameters that are learned, and buffers that are carried along.

    Attributes:
        params: What updates, norms and removal are about.
        buffers: Batch-norm statistics, counters and the like, in their own dtypes.
    """

    params: Params
    buffers: Mapping[str, Array] = field(default_factory=dict)


_SMALLEST, _LARGEST, _LARGEST_BATCH = 1e-30, 1e30, 10**15
"""Settings of local training beyond these are mistakes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD:
    """How the clients of a round trained, from a source that the server trusts.

    Attributes:
        lr: Learning rate of the clients' SGD.
        momentum: Share of the last step's direction that SGD keeps, 0 to below 1.
        batch_size: Examples of one SGD step.
        epochs: How often a client went through its examples.
    """

    lr: float
    momentum: float
    batch_size: int
    epochs: float

    def __post_init__(self) -> None:
        for name, given in (
            ("learning rate", self.lr),
            ("momentum", self.momentum),
            ("batch size", self.batch_size),
            ("number of epochs", self.epochs),
        ):
            number = isinstance(given, int | float) and not isinstance(given, bool)
            low = 0.0 if name == "momentum" else _SMALLEST
            high = _LARGEST_BATCH if name == "batch size" else _LARGEST
            if not (number and low <= given <= high):
                raise InvalidInputError(
                    f"the {name} of local training is {given!r:.40}; give a number "
                    f"{'of 0 or more' if low == 0 else 'above 0'}, or leave local "
                    "training unknown"
                )
        if self.batch_size != int(self.batch_size):
            raise InvalidInputError(
                f"the batch size of local training is {self.batch_size}; give a whole "
                "number, or leave local training unknown"
            )
        if not 0 <= self.momentum < 1:
            raise InvalidInputError(
                f"the momentum of local training is {self.momentum}; give 0 or more "
                "and below 1, or leave local training unknown"
            )

    @property
    def pull(self) -> float:
        """How strongly training pulls back a direction, per variance of the updates.

        With cross-entropy, a direction of curvature c scatters the clients' updates by
        lr^2 K (1 + epochs) c / batch_size in K steps and is pulled back by lr K c, so
        the ratio of the two is known without c. Momentum enlarges the learning rate.
        """
        lr = self.lr / (1 - self.momentum)
        return self.batch_size / (lr * (1 + self.epochs))


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """What one client contributed to one round.

    Attributes:
        client: Stable identity of the data owner, never a transport address.
        share: Share among all participants; the shares of a round sum to 1.
        delta: Local minus global parameters, or None when nobody has it any more.
        keep_probability: Probability with which the update was to be kept.
        kept: Whether the ledger stores the update.
    """

    client: ClientId
    share: float
    delta: Params | None
    keep_probability: float = 1.0
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Round:
    """One round of training, as the server saw it.

    Attributes:
        index: Number of the round, from 0 without gaps.
        updates: Every participant, whether its update is kept or not.
        step: What the server added to the model; None means the weighted mean.
        buffers: Buffers of the model after the round; None means unchanged.
        use: `store`: everybody was aggregated with its share. `aggregate`: only the
            kept updates were, each with its share divided by its probability.
        local: How the clients trained; None if the server does not know.
    """

    index: int
    updates: tuple[ClientUpdate, ...]
    step: Params | None = None
    buffers: Mapping[str, Array] | None = None
    use: KeepUse = "store"
    local: LocalSGD | None = None


@dataclass(frozen=True, slots=True)
class RoundEntry:
    """What a ledger knows of a round without reading an array.

    Attributes:
        index: Number of the round.
        num_updates: Participants that are still part of the history.
        removed_share: Share of the erased clients among the original participants.
        use: As in `Round`.
        step_norm: Euclidean norm of the step; NaN where it is not known any more.
        previous_product: Inner product of the step with the step before; 0 at first.
        local: How the clients trained; None if the server does not know.
        num_kept: Participants of the history whose update is stored; None if only a
            look at the participants tells.
    """

    index: int
    num_updates: int
    removed_share: float
    use: KeepUse
    step_norm: float
    previous_product: float
    local: LocalSGD | None = None
    num_kept: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateEntry:
    """What a ledger knows of one client's part in one round without its array.

    Attributes:
        round: Number of the round.
        client: Who it was.
        share: Share among the original participants, erased ones included.
        keep_probability: Probability with which the update was to be kept.
        kept: Whether the update is stored.
        entered: Whether the update went into the model.
        norm: Euclidean norm of the update; NaN when the server never had it.
        step_product: Inner product with the round's step; None when not known.
        summed: Whether the update is in the client's sum, in a ledger that keeps
            nothing else of it.
    """

    round: int
    client: ClientId
    share: float
    keep_probability: float
    kept: bool
    entered: bool
    norm: float
    step_product: float | None
    summed: bool = False

    @property
    def weight(self) -> float:
        """Weight of a kept update: its share over its probability; 0 if dropped."""
        return self.share / self.keep_probability if self.kept else 0.0


ClientState = Literal["active", "forgotten", "erased"]


@dataclass(frozen=True, slots=True)
class ClientEntry:
    """What a ledger knows of a client.

    Attributes:
        client: Its name.
        state: `active`; `forgotten`: out of the model, history kept; `erased`: also
            out of the history.
        num_updates: Rounds it took part in that are still in the history.
        forgotten_at: Number of rounds recorded when it was forgotten.
        num_kept: Updates of it that are stored.
        num_summed: Updates of it that are in its vectors, in a ledger of sums.
        mean_share: Mean of its shares; None if it took part in no round.
        mean_norm: Mean length of its updates; None if no length is known.
        difference_off: How far its sum may be off by erasures of others, as a length.
        num_dropped: Updates of it that gave way to the ledger's budget.
    """

    client: ClientId
    state: ClientState
    num_updates: int
    forgotten_at: int | None
    num_kept: int = 0
    num_summed: int = 0
    mean_share: float | None = None
    mean_norm: float | None = None
    difference_off: float = 0.0
    num_dropped: int = 0


ModelOrigin = Literal["initial", "round", "forgetting"]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that a ledger has or had, without its values.

    Attributes:
        number: Models of a ledger count from 1; each was made from the one before it.
        digest: BLAKE3 digest of the model's file, in hexadecimal.
        parent: Digest of the model it was made from; None for the initial model.
        origin: How it was made.
        at: Number of the round, or of the log's entry for a forgetting; 0 for the
            initial model.
    """

    number: int
    digest: str
    parent: str | None
    origin: ModelOrigin
    at: int


@dataclass(frozen=True, slots=True)
class VectorRef:
    """Names one stored vector of a round.

    Attributes:
        round: Number of the round.
        client: Whose update it is; None for the step.
        other: Whose update was taken off that, in a ledger that keeps pairs.
    """

    round: int
    client: ClientId | None = None
    other: ClientId | None = None

    def __str__(self) -> str:
        if self.client is None:
            return f"round {self.round}, step"
        if self.other is not None:
            return (
                f"round {self.round}, pair {self.client!r:.80} and {self.other!r:.80}"
            )
        return f"round {self.round}, client {self.client!r:.80}"


@dataclass(frozen=True, slots=True)
class PairEntry:
    """A difference of two clients' updates of one round that a ledger of sums keeps.

    Attributes:
        round: Number of the round.
        client: Whose update comes first.
        other: Whose update was taken off that.
        odds: How many pairs of its round it stands for, by how it was drawn.
    """

    round: int
    client: ClientId
    other: ClientId
    odds: float


@dataclass(frozen=True, slots=True)
class Combination:
    """Linear combinations of stored vectors, from one pass over them.

    Attributes:
        sums: One row per row of coefficients.
        products: Inner products of the pairs that were asked for.
        bytes_read: Bytes read from memory or disk.
    """

    sums: Array
    products: tuple[float, ...]
    bytes_read: int


RequestState = Literal["waiting", "applied", "refused", "cancelled"]


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """Somebody asked for a client to be forgotten.

    Attributes:
        number: Requests of a ledger count from 1.
        client: Who is to be forgotten.
        asked: When it was asked, in UTC, ISO 8601.
        reason: Why, in the words of whoever asked.
        state: `waiting`; `applied`: the client is out of the model; `refused`;
            `cancelled`.
        decided: When it stopped waiting.
        answer: Why it was refused.
        event: Number of the entry of the log that says how it was applied.
        method: Name of the method that was asked for; None for the operator's choice.
        settings: Settings of that method, as JSON values.
    """

    number: int
    client: ClientId
    asked: str
    reason: str | None
    state: RequestState
    decided: str | None
    answer: str | None
    event: int | None
    method: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the log of what was forgotten or dropped.

    Attributes:
        time: When, in UTC, ISO 8601.
        kind: `forget`, `erase`, or `forget and erase`; `compact`; `drop`, of vectors
            for which the budget had no room.
        clients: Whom; nobody for `compact` and `drop`.
        details: Method, settings, rounds, coverage and digests, as JSON values.
    """

    time: str
    kind: str
    clients: tuple[ClientId, ...]
    details: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An event with its place in the log on disk.

    Attributes:
        number: Entries count from 1.
        event: What happened.
        digest: Digest of the entry in hexadecimal; the next entry holds it, so that
            it stands for the whole log up to here.
    """

    number: int
    event: Event
    digest: str
