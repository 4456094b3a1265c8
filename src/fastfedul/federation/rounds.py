"""Federated training, round by round: who takes part, and the server's step.

Every draw has a random stream of its own, keyed by round and client. So a client that
is left out changes no other client's part, and a run can resume at any round.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import Aggregation, require_enough, rows_reader
from fastfedul.federation.local import LocalResult
from fastfedul.federation.replies import (
    CheckedReply,
    Judgement,
    Quarantined,
    ReplyLimits,
    RoundDiscardedError,
    UnusableReplyError,
    check_update,
    judge,
)
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.federation.trainer import TrainingError
from fastfedul.limits import require_choice, require_number
from fastfedul.params import Array, Params, scale, weighted_sum
from fastfedul.records import (
    ClientId,
    ClientUpdate,
    LocalSGD,
    Model,
    Round,
    ServerState,
)
from fastfedul.rng import name_key, stream

Weighting = Literal["size", "equal"]
WEIGHTINGS: tuple[Weighting, ...] = ("size", "equal")

_LIMITS = ReplyLimits(max_weight_ratio=None)
"""Limits of a round; the server knows the weights here, so none is capped."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Participants of a round, and their shares.

    Attributes:
        seed: Seed of the run.
        per_round: Number of clients drawn for a round; None for all.
        dropout: Probability that a drawn client misses the round.
        weighting: `size`: shares in proportion to the number of examples; `equal`:
            the same share for everybody.
    """

    seed: int
    per_round: int | None = None
    dropout: float = 0.0
    weighting: Weighting = "size"

    def __post_init__(self) -> None:
        require_number("seed", self.seed, least=0, whole=True)
        require_number(
            "number of clients a round", self.per_round, least=1, whole=True, unset=True
        )
        require_number("dropout", self.dropout, least=0, below=1)
        require_choice("weighting", self.weighting, WEIGHTINGS)


LocalWork = Callable[[Model, int, Sequence[ClientId]], Sequence[LocalResult]]
"""Trains clients from a model in the round of a number; answers in their order."""


@dataclass(frozen=True, slots=True)
class TrainedRound:
    """A round, and the model after it.

    Attributes:
        round: The round.
        model: The model after it.
        quarantined: Clients that trained and whose results the round leaves out.
    """

    round: Round
    model: Model
    quarantined: tuple[Quarantined, ...] = ()


def run_rounds(
    work: LocalWork,
    sizes: Mapping[ClientId, int],
    schedule: Schedule,
    *,
    model: Model,
    stop: int,
    start: int = 0,
    absent: Set[ClientId] = frozenset(),
    scales: Mapping[ClientId, float] | None = None,
    select: Callable[[Round], Round] | None = None,
    local: LocalSGD | None = None,
    rule: Aggregation | None = None,
    record: Callable[[Model, Round], Model] | None = None,
    optimizer: ServerOptimizer | None = None,
) -> Iterator[TrainedRound]:
    """Yield the rounds with the models after them; each round trains when it is due.

    The same arguments give the same rounds. A start at a later round, from the model
    before it, gives the same rounds from there on.

    Args:
        work: Trains the clients.
        sizes: Number of examples of every client, absent clients included.
        schedule: Participants of the rounds, and their shares.
        model: The model before the first of these rounds.
        stop: Number of the round to stop before.
        start: Number of the first round.
        absent: Clients to leave out. Their slots stay empty; a round for which no
            other client was drawn is drawn again.
        scales: Factors by which clients multiply their updates before sending.
        select: Marks the updates that the ledger keeps, and sets the round's `use`.
        local: How the clients train, for the record; None if unknown.
        rule: How the server aggregates; None for the weighted mean.
        record: Records a round and returns the model after it, such as the append of a
            ledger; None to compute the model alone.
        optimizer: The server optimizer, if `record` does not compute the model.

    Raises:
        RoundDiscardedError: If the results of more than half of a round's clients
            cannot be used, and a new draw does not help.
    """

    def sent(now: Model, index: int, names: Sequence[ClientId]) -> list[LocalResult]:
        found = zip(names, work(now, index, names), strict=True)
        factors = scales or {}
        return [
            replace(result, delta=_scaled(result.delta, factors.get(name)))
            for name, result in found
        ]

    for index in range(start, stop):
        judged = _judged(sent, tuple(sizes), schedule, model, index, absent)
        names = [reply.client for reply in judged.usable]
        shares = shares_of([sizes[name] for name in names], schedule.weighting)
        layout = model.params.layout
        updates = tuple(
            ClientUpdate(
                reply.client,
                share,
                Params(layout, reply.delta),
                buffers=reply.buffers or None,
            )
            for share, reply in zip(shares, judged.usable, strict=True)
            if reply.delta is not None
        )
        round_ = Round(index, updates, local=local)
        if select is not None:
            round_ = select(round_)
        if model.buffers:
            trained = [reply.buffers for reply in judged.usable]
            weights = buffer_weights(round_, rule)
            buffers = average_buffers(trained, weights, model.buffers)
            round_ = replace(round_, buffers=buffers)
        if record is not None:
            model = record(model, round_)
        else:
            model = advance(model, round_, rule, optimizer)
        yield TrainedRound(round_, model, judged.quarantined)


def judge_results(
    names: Sequence[ClientId], results: Sequence[LocalResult], before: Model
) -> Judgement:
    """Return the judgement of clients' results, given the model they started from."""
    replies, quarantined = [], []
    for name, result in zip(names, results, strict=True):
        try:
            delta, buffers = check_update(result.delta.flat, result.buffers, before)
        except UnusableReplyError as error:
            quarantined.append(Quarantined(name, str(error)))
        else:
            reply = CheckedReply(client=name, weight=1, delta=delta, buffers=buffers)
            replies.append(reply)
    return judge(replies, quarantined, _LIMITS)


def require_usable(
    names: Sequence[ClientId],
    results: Sequence[LocalResult],
    before: Model,
    index: int,
) -> Sequence[LocalResult]:
    """Return clients' results of a round, for a caller that needs all of them.

    Raises:
        TrainingError: If the server cannot use the result of a client.
    """
    for one in judge_results(names, results, before).quarantined:
        raise TrainingError(
            f"the training of {one.client} ran away in round {index}: {one.reason}; "
            "use a smaller learning rate"
        )
    return results


def _judged(
    work: LocalWork,
    clients: Sequence[ClientId],
    schedule: Schedule,
    model: Model,
    index: int,
    absent: Set[ClientId],
) -> Judgement:
    """Return the judgement of a round, drawn again as long as it cannot count."""
    tried: set[tuple[ClientId, ...]] = set()
    problem = ""
    for draw in range(_LIMITS.max_discards):
        names = participants(clients, schedule, index, absent, draw)
        if names in tried:
            # The same clients would train to the same results.
            continue
        tried.add(names)
        if problem:
            _log.warning("round %s is discarded and drawn again: %s", index, problem)
        judged = judge_results(names, work(model, index, names), model)
        problem = judged.objection(len(names), _LIMITS)
        if not problem:
            for one in judged.quarantined:
                _log.warning("round %s without %r: %s", index, one.client, one.reason)
            return judged
    raise RoundDiscardedError(
        f"round {index} was discarded in {_LIMITS.max_discards} draws: {problem}; use "
        "a smaller learning rate, or leave these clients out"
    )


def model_after(rounds: Iterable[TrainedRound], model: Model) -> Model:
    """Return the model after the last round; without a round, the given model."""
    for trained in rounds:
        model = trained.model
    return model


def participants(
    clients: Sequence[ClientId],
    schedule: Schedule,
    index: int,
    absent: Set[ClientId] = frozenset(),
    draw: int = 0,
) -> tuple[ClientId, ...]:
    """Return the participants of a round, sorted by name.

    The draw is over all clients, and each drops out on its own. So an absent client is
    missing and nothing else changes. A round without any participant is drawn again.

    Args:
        clients: Everybody, also absent clients.
        schedule: How the draw is made.
        index: Number of the round.
        absent: Clients that cannot take part.
        draw: How many draws of the round were discarded before.

    Raises:
        InvalidInputError: If all clients are absent, or the schedule draws more
            clients than there are.
    """
    if not set(clients) - absent:
        raise InvalidInputError("no client is left to train with")
    if (schedule.per_round or 0) > len(clients):
        raise InvalidInputError(
            f"cannot draw {schedule.per_round} of {len(clients)} clients a round; "
            f"choose at most {len(clients)}"
        )
    for attempt in itertools.count(draw):
        again = (attempt,) if attempt else ()
        drawn = _draw(clients, schedule, index, again)
        here = [
            name
            for name in drawn
            if name not in absent and not _drops_out(name, schedule, index, again)
        ]
        if here:
            return tuple(sorted(here))
    raise AssertionError("unreachable")


def shares_of(sizes: Sequence[int], weighting: Weighting) -> list[float]:
    """Return the shares of a round's participants; they sum to 1.

    >>> shares_of([1, 3], "size"), shares_of([1, 3], "equal")
    ([0.25, 0.75], [0.5, 0.5])
    """
    weights = [1] * len(sizes) if weighting == "equal" else list(sizes)
    total = sum(weights)
    return [weight / total for weight in weights]


def entered_weights(round_: Round) -> list[float]:
    """Return the weight with which each update of a round goes into the model."""
    if round_.use == "store":
        return [update.share for update in round_.updates]
    return [u.share / u.keep_probability if u.kept else 0.0 for u in round_.updates]


def buffer_weights(round_: Round, rule: Aggregation | None) -> list[float]:
    """Return the weight of each client's buffers in the buffers after a round.

    A rule that chooses among the updates chooses among the buffers with them.
    """
    if rule is None or rule.choose is None:
        return entered_weights(round_)
    rows = [update.delta.flat for update in round_.updates if update.delta is not None]
    shares = np.array([update.share for update in round_.updates])
    found = rule.chosen(rows_reader(rows), len(rows[0]), shares)
    return found.weights(len(shares))


def advance(
    model: Model,
    round_: Round,
    rule: Aggregation | None = None,
    optimizer: ServerOptimizer | None = None,
) -> Model:
    """Return the model after a round, equal to a ledger's model in every bit.

    The updates add up in the order of the clients' names.

    Args:
        model: The model before the round; an optimizer without a state starts anew.
        round_: The round.
        rule: How the server aggregates; None for the weighted mean.
        optimizer: The server optimizer; None for a server that adds the aggregate.
    """
    buffers = model.buffers if round_.buffers is None else round_.buffers
    ordered = sorted(
        zip(round_.updates, entered_weights(round_), strict=True),
        key=lambda pair: pair[0].client,
    )
    counted = [
        (u.delta, weight) for u, weight in ordered if weight and u.delta is not None
    ]
    if not counted:
        aggregate = np.zeros_like(model.params.flat)
    else:
        vectors = [delta.flat for delta, _ in counted]
        weights = [weight for _, weight in counted]
        if rule is None:
            aggregate = weighted_sum(vectors, weights)
        else:
            require_enough(rule.computable, len(vectors), round_.index)
            size = model.params.layout.size
            aggregate = rule.step(rows_reader(vectors), size, np.array(weights))
    if optimizer is None:
        params = Params(model.params.layout, model.params.flat + aggregate)
        return Model(params, buffers)
    state = model.server or optimizer.start(len(aggregate))
    after, step = optimizer.move(state.vectors, aggregate, state.steps)
    params = Params(model.params.layout, model.params.flat + step)
    return Model(params, buffers, ServerState(state.steps + 1, after))


def average_buffers(
    local: Sequence[Mapping[str, Array]],
    weights: Sequence[float],
    current: Mapping[str, Array],
) -> Mapping[str, Array]:
    """Return the buffers after a round.

    A floating-point buffer, such as a batch-norm statistic, becomes the weighted mean.
    A buffer of whole numbers, such as a counter, becomes the largest. Without any
    weight the buffers stay as they are.
    """
    counted = [
        (own, weight) for own, weight in zip(local, weights, strict=True) if weight
    ]
    total = sum(weight for _, weight in counted)
    if not counted:
        return current
    averaged: dict[str, Array] = {}
    for name, before in current.items():
        rows = [np.asarray(own[name]) for own, _ in counted]
        if before.dtype.kind == "f":
            mean = sum(
                row.astype(np.float64) * (weight / total)
                for row, (_, weight) in zip(rows, counted, strict=True)
            )
            averaged[name] = np.asarray(mean, before.dtype)
        else:
            averaged[name] = np.asarray(np.max(rows, axis=0), before.dtype)
    return averaged


def _draw(
    clients: Sequence[ClientId], schedule: Schedule, index: int, again: tuple[int, ...]
) -> Sequence[ClientId]:
    if schedule.per_round is None or schedule.per_round == len(clients):
        return clients
    rng = stream(schedule.seed, "draw", index, *again)
    places = rng.choice(len(clients), schedule.per_round, replace=False)
    return [clients[place] for place in places]


def _drops_out(
    client: ClientId, schedule: Schedule, index: int, again: tuple[int, ...]
) -> bool:
    if schedule.dropout == 0:
        return False
    rng = stream(schedule.seed, "dropout", index, name_key(client), *again)
    return bool(rng.random() < schedule.dropout)


def _scaled(delta: Params, factor: float | None) -> Params:
    return delta if factor is None else scale(delta, factor)
