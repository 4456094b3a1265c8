"""The records that pass between the rooms; all are frozen, none knows a framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastfedul.limits import require_number, require_type
from fastfedul.params import Array, Params

ClientId = str
KeepUse = Literal["store", "aggregate"]
StorageDtype = Literal["float32", "bfloat16", "float16", "int8"]
History = Literal["rounds", "sums"]


@dataclass(frozen=True, slots=True, eq=False)
class ServerState:
    """State of a server optimizer.

    Attributes:
        steps: Number of steps that led to the state.
        vectors: Momentum and second moment, as far as the optimizer has them: a row
            each, in float32.
    """

    steps: int
    vectors: Array


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model: parameters that are learned, and buffers that are carried along.

    Attributes:
        params: Parameters that training learns and forgetting changes.
        buffers: Batch-norm statistics, counters and the like, in their own dtypes.
        server: State of the server optimizer; None if the server has none, or before
            its first step.
    """

    params: Params
    buffers: Mapping[str, Array] = field(default_factory=dict)
    server: ServerState | None = None

    def __post_init__(self) -> None:
        require_type(
            "a model's params", self.params, Params, "made with fastfedul.Params.of"
        )
        require_type(
            "a model's buffers", self.buffers, Mapping, "a mapping of names to arrays"
        )


_SMALLEST, _LARGEST, _LARGEST_BATCH = 1e-30, 1e30, 1e15
"""Limits of the settings of local training; a value beyond them is a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD:
    """Local training of a round's clients, from a source that the server trusts.

    Attributes:
        lr: Learning rate of the clients' SGD.
        momentum: Share of the last step's direction that SGD keeps, 0 to below 1.
        batch_size: Examples of one SGD step.
        epochs: Passes of a client over its examples; 0.5 for half of the batches.
    """

    lr: float
    momentum: float
    batch_size: int
    epochs: float

    def __post_init__(self) -> None:
        require_number("learning rate", self.lr, least=_SMALLEST, most=_LARGEST)
        require_number("momentum", self.momentum, least=0, below=1)
        require_number(
            "batch size", self.batch_size, least=1, most=_LARGEST_BATCH, whole=True
        )
        require_number("number of epochs", self.epochs, least=_SMALLEST, most=_LARGEST)

    @property
    def pull(self) -> float:
        """How strongly training pulls back a direction, per variance of the updates.

        With cross-entropy, a direction of curvature c scatters the clients' updates by
        lr^2 K (1 + epochs) c / batch_size in K steps and is pulled back by lr K c, so
        the ratio of the two is known without c. Momentum enlarges the learning rate.
        """
        lr = self.lr / (1 - self.momentum)
        return self.batch_size / (lr * (1 + self.epochs))


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralPrivacy:
    """Central differential privacy of a round: the server clipped and added noise.

    Attributes:
        clipping_norm: Largest length of an update in the round.
        noise_stdev: Standard deviation of the noise in each value of the model.
        next_clipping_norm: Largest length of an update in the next round.
    """

    clipping_norm: float
    noise_stdev: float
    next_clipping_norm: float

    def __post_init__(self) -> None:
        for norm in (self.clipping_norm, self.next_clipping_norm):
            require_number("clipping norm", norm, least=_SMALLEST, most=_LARGEST)
        require_number("noise", self.noise_stdev, least=0, most=_LARGEST)


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """One client's contribution to one round.

    Attributes:
        client: Stable name of the data owner, never a transport address.
        share: Share among all participants; the shares of a round sum to 1.
        delta: The update: local minus global parameters. None if nobody has it.
        keep_probability: Probability with which the ledger keeps the update.
        kept: Whether the ledger stores the update.
        buffers: Buffers of the local model; None if nobody has them. Either all
            updates of a round have them or none.
    """

    client: ClientId
    share: float
    delta: Params | None
    keep_probability: float = 1.0
    kept: bool = True
    buffers: Mapping[str, Array] | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of training, as the server saw it.

    Attributes:
        index: Number of the round, from 0 without gaps.
        updates: One for each participant, kept or not.
        step: The server's change of the model; None for the updates' weighted mean.
            With a server optimizer: the weighted mean that the optimizer gets.
        buffers: Buffers of the model after the round; None means unchanged.
        use: `store`: the server aggregated every update with its share. `aggregate`:
            it aggregated only the kept updates, each with its share divided by its
            probability.
        local: Local training of the clients; None if the server does not know it.
        noise: Noise that the server added to the model after the step; it belongs to
            no client, and forgetting leaves it as it is.
        privacy: Size of the clipping and of the noise; None without noise.
    """

    index: int
    updates: tuple[ClientUpdate, ...]
    step: Params | None = None
    buffers: Mapping[str, Array] | None = None
    use: KeepUse = "store"
    local: LocalSGD | None = None
    noise: Params | None = None
    privacy: CentralPrivacy | None = None


@dataclass(frozen=True, slots=True)
class RoundEntry:
    """A ledger's facts about a round, known without reading an array.

    Attributes:
        index: Number of the round.
        num_updates: Participants that are still in the ledger.
        use: As in `Round`.
        step_norm: Euclidean norm of the step; NaN if the ledger does not know it.
        previous_product: Inner product of the step with the step before; 0 at first.
        local: Local training of the clients; None if the server does not know it.
        num_kept: Participants whose update is stored; None if only the entries of the
            participants tell.
        privacy: Clipping and noise of the round; None if the server added no noise.
    """

    index: int
    num_updates: int
    use: KeepUse
    step_norm: float
    previous_product: float
    local: LocalSGD | None = None
    num_kept: int | None = None
    privacy: CentralPrivacy | None = None


@dataclass(frozen=True, slots=True)
class UpdateEntry:
    """A ledger's facts about one update, known without reading its array.

    Attributes:
        round: Number of the round.
        client: Name of the client.
        share: Share among the participants that the ledger has; they sum to 1.
        keep_probability: Probability with which the ledger keeps the update.
        kept: Whether the update is stored.
        entered: Whether the update went into the model.
        norm: Euclidean norm of the update; NaN if the server never had the update.
        step_product: Inner product with the round's step; None if unknown.
        summed: Whether the client's sum has the update, in a ledger of sums.
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
    """A ledger's facts about a client.

    Attributes:
        client: Name of the client.
        state: `active`; `forgotten`: out of the model, updates kept; `erased`: also
            out of the ledger.
        num_updates: Rounds with the client that the ledger still has.
        forgotten_at: Number of rounds recorded when the client was forgotten.
        num_kept: Number of the client's stored updates.
        num_summed: Number of updates in the client's vectors, in a ledger of sums.
        mean_share: Mean of the client's shares; None without a round.
        mean_norm: Mean length of the client's updates; None if no length is known.
        num_dropped: Number of the client's updates that the ledger gave up, for its
            budget or when it erased other clients.
    """

    client: ClientId
    state: ClientState
    num_updates: int
    forgotten_at: int | None
    num_kept: int = 0
    num_summed: int = 0
    mean_share: float | None = None
    mean_norm: float | None = None
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
        client: Client of the update; None for the step.
        other: Client whose update was subtracted, in a ledger that keeps pairs.
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
        client: Client of the first update.
        other: Client of the update that was subtracted.
        odds: Number of pairs of the round that this pair stands for: one over the
            probability of its draw.
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
        products: Inner products of the pairs that the caller named.
        bytes_read: Bytes read from memory or disk.
    """

    sums: Array
    products: tuple[float, ...]
    bytes_read: int


RequestState = Literal["waiting", "applied", "refused", "cancelled"]


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """A request to forget a client.

    Attributes:
        number: Number of the request; a ledger counts from 1.
        client: Client to forget; empty if a file of requests does not fit the ledger,
            whose request is refused.
        asked: Time of the request, in UTC, ISO 8601.
        reason: The reason in the words of the person who asked; None if none was given.
        state: `waiting`; `applied`: the client is out of the model; `refused`;
            `cancelled`.
        decided: Time at which the request stopped waiting.
        answer: Reason of a refusal.
        event: Number of the log entry that describes the forgetting.
        method: Name of the method to use; None for the operator's choice.
        settings: Settings of this method, as JSON values.
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
    """One entry of the ledger's log of forgettings and other changes.

    Attributes:
        time: Time of the change, in UTC, ISO 8601.
        kind: `forget`, `erase`, or `forget and erase`; `compact`; `drop`, of vectors
            for which the budget had no room.
        clients: Clients that the change concerns; none for `compact` and `drop`.
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
        number: Number of the entry, from 1.
        event: The change.
        digest: Digest of the entry in hexadecimal. The next entry holds it, so it
            stands for the whole log up to this entry.
    """

    number: int
    event: Event
    digest: str
