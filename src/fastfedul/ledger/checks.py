"""Checks of a round before it is recorded, and the numbers derived from it.

Nothing is written until all of this has passed, in memory and on disk alike.
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import (
    MEAN,
    require_enough,
    resolve,
    rows_reader,
)
from fastfedul.federation.replies import LARGEST_NORM
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.ledger.store.model_arrays import supported_buffer
from fastfedul.ledger.store.streaming import run_blocks
from fastfedul.limits import require_choice, show
from fastfedul.params import (
    Array,
    Flat,
    Layout,
    Params,
    check_array_name,
    dot,
    show_names,
    weighted_sum,
)
from fastfedul.records import (
    CentralPrivacy,
    ClientId,
    ClientState,
    ClientUpdate,
    KeepUse,
    LocalSGD,
    Model,
    Round,
    ServerState,
)

STEP_TOLERANCE = 1e-4
"""How far, relative to its norm, a step may be from the updates' weighted mean."""

_LARGEST_DOUBLE = sys.float_info.max
_SHARE_TOLERANCE = 1e-6
_LONGEST_NAME = 65_536


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """An update with its norm and its inner product with the round's step."""

    client: ClientId
    share: float
    keep_probability: float
    kept: bool
    vector: Flat | None
    norm: float
    step_product: float | None


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """A round that passed every check, ready to be stored."""

    index: int
    use: KeepUse
    updates: tuple[RecordedUpdate, ...]
    step: Flat
    step_norm: float
    previous_product: float
    model: Model
    local: LocalSGD | None
    noise: Flat | None
    privacy: CentralPrivacy | None
    buffers: Mapping[ClientId, Mapping[str, Array]]


def prepare(
    round_: Round,
    settings: LedgerSettings,
    *,
    current: Model,
    num_rounds: int,
    previous_step: Flat | None,
    state_of: Callable[[ClientId], ClientState | None],
) -> RecordedRound:
    """Return the round as it will be stored.

    Args:
        round_: The round that the caller hands in.
        settings: Settings of the ledger.
        current: The model before the round.
        num_rounds: How many rounds the ledger has.
        previous_step: The last round's step, None before the first.
        state_of: Gives a client's state, None for one never seen.

    Raises:
        InvalidInputError: If anything about the round is wrong.
    """
    round_ = require_round(round_)
    if not isinstance(round_.index, int | np.integer):
        raise InvalidInputError(
            f"the number of a round is a whole number, not {show(round_.index)}"
        )
    index = int(round_.index)
    if index != num_rounds:
        raise InvalidInputError(
            f"round {show(index)} is out of order; the next one is {num_rounds}"
        )
    require_choice("use of a round", round_.use, ("store", "aggregate"))
    layout = settings.layout
    if settings.aggregation != MEAN and round_.use == "aggregate":
        raise InvalidInputError("aggregating a sample needs the weighted mean")
    for update in round_.updates:
        check_name(update.client)
    updates = sorted(round_.updates, key=lambda update: update.client)
    _check_participants(updates, state_of)
    vectors = [_vector(update, layout, round_.index) for update in updates]
    if settings.history == "sums":
        updates = _check_summable(round_, updates)
    given = None if round_.step is None else _flat(round_.step, layout, "the step")
    found = _measure(round_, updates, vectors, given, previous_step, current, settings)
    noise, noisy = _noise(round_, layout), found.model
    if noise is not None:
        noisy = noisy + noise
        if not np.isfinite(noisy).all():
            raise InvalidInputError(f"the noise of round {index} is infinite")
    return RecordedRound(
        index=index,
        use=round_.use,
        updates=tuple(
            RecordedUpdate(
                str(update.client),
                float(update.share),
                float(update.keep_probability) + 0.0,  # no negative zero
                bool(update.kept),
                vector,
                math.sqrt(found.squares[i]) if vector is not None else math.nan,
                found.products[i] if vector is not None else None,
            )
            for i, (update, vector) in enumerate(zip(updates, vectors, strict=True))
        ),
        step=found.step,
        step_norm=math.sqrt(found.squares[-1]),
        previous_product=found.previous,
        model=Model(
            Params(layout, noisy),
            check_buffers(round_, current, layout),
            found.server,
        ),
        local=_local(round_.local),
        noise=noise,
        privacy=round_.privacy,
        buffers=_sent_buffers(updates, current, layout),
    )


def require_round(given: object) -> Round:
    """Return a round of the right types; a generator of updates is read out.

    Raises:
        InvalidInputError: If something is of a wrong type.
    """
    if not isinstance(given, Round):
        raise InvalidInputError(
            f"a round is a fastfedul.Round, not a {type(given).__name__}"
        )
    try:
        updates = tuple(given.updates)
    except TypeError:
        raise InvalidInputError("the updates of a round are a tuple of them") from None
    for update in updates:
        if not isinstance(update, ClientUpdate):
            raise InvalidInputError(
                f"an update is a fastfedul.ClientUpdate, not a {type(update).__name__}"
            )
        name = show(update.client)
        for what in ("share", "keep_probability"):
            value = getattr(update, what)
            number = isinstance(value, int | float | np.integer | np.floating)
            if not number or abs(value) > _LARGEST_DOUBLE:
                raise InvalidInputError(
                    f"the {what.replace('_', ' ')} of client {name} is a number, not "
                    f"{show(value)}"
                )
        if not isinstance(update.kept, bool | np.bool_):
            raise InvalidInputError(
                f"kept of client {name} is True or False, not {show(update.kept)}"
            )
    if given.local is not None and not isinstance(given.local, LocalSGD):
        raise InvalidInputError(
            f"local training is a fastfedul.LocalSGD, not {show(given.local)}"
        )
    if given.privacy is not None and not isinstance(given.privacy, CentralPrivacy):
        raise InvalidInputError(
            f"privacy is a fastfedul.CentralPrivacy, not {show(given.privacy)}"
        )
    return replace(given, updates=updates)


def _noise(round_: Round, layout: Layout) -> Flat | None:
    """Return the noise that the server added in a round; None if it added none."""
    if (round_.noise is None) != (round_.privacy is None):
        raise InvalidInputError(
            f"round {round_.index} has noise without its size, or the size alone; give "
            "noise and privacy together"
        )
    return None if round_.noise is None else _flat(round_.noise, layout, "the noise")


def _local(given: LocalSGD | None) -> LocalSGD | None:
    """Return local training in the types that a row gives back."""
    if given is None:
        return None
    return LocalSGD(
        lr=float(given.lr),
        momentum=float(given.momentum) + 0.0,  # no negative zero
        batch_size=int(given.batch_size),
        epochs=float(given.epochs),
    )


def check_name(client: ClientId) -> None:
    """Raise unless a client name is text that can be stored and has one spelling."""
    if not isinstance(client, str) or not client:
        raise InvalidInputError(f"a client name is text, not {show(client)}")
    try:
        size = len(client.encode())
    except UnicodeEncodeError:
        raise InvalidInputError(
            f"the client name {client!r:.80} is not valid Unicode"
        ) from None
    if size > _LONGEST_NAME:
        raise InvalidInputError(
            f"a client name has {size} bytes; at most {_LONGEST_NAME} are allowed"
        )
    composed = unicodedata.normalize("NFC", client)
    if composed != client:
        # Two spellings that look the same would be two clients.
        raise InvalidInputError(
            f"the client name {client!a:.80} is not in Unicode's form NFC; write "
            f"{composed!r:.80}, which is {composed!a:.80}"
        )


def check_buffers(round_: Round, current: Model, layout: Layout) -> Mapping[str, Array]:
    """Return the buffers after a round, checked against the model's buffers."""
    if round_.buffers is None:
        return current.buffers
    if not isinstance(round_.buffers, Mapping):
        raise InvalidInputError(
            f"buffers are a mapping of names to arrays, not {show(round_.buffers)}"
        )
    if set(round_.buffers) != set(current.buffers):
        wrong = set(round_.buffers) ^ set(current.buffers)
        raise InvalidInputError(f"buffer names differ: {show_names(wrong)}")
    return require_buffers(round_.buffers, layout)


def _sent_buffers(
    updates: Sequence[ClientUpdate], current: Model, layout: Layout
) -> Mapping[ClientId, Mapping[str, Array]]:
    """Return copies of the clients' buffers, checked against the model's buffers."""
    sent = {u.client: u.buffers for u in updates if u.buffers is not None}
    if not sent or not current.buffers:
        return {}
    found = {}
    for update in updates:
        who = f"client {update.client!r:.80}"
        own = sent.get(update.client)
        if own is None:
            raise InvalidInputError(
                f"{who} has no buffers and other clients of the round have some; give "
                "those of all clients, or of none"
            )
        if not isinstance(own, Mapping) or set(own) != set(current.buffers):
            raise InvalidInputError(f"{who} has other buffers than the model")
        copies = require_buffers(own, layout)
        for name, before in current.buffers.items():
            buffer = copies[name]
            if buffer.shape != before.shape or buffer.dtype != before.dtype:
                raise InvalidInputError(
                    f"the buffer {name!r} of {who} has another shape or dtype than the "
                    "model's"
                )
            if buffer.dtype.kind == "f" and not np.isfinite(buffer).all():
                raise InvalidInputError(
                    f"the buffer {name!r} of {who} has NaN or infinite values; leave "
                    "the client out of the round"
                )
        found[str(update.client)] = copies
    return found


def require_buffers(buffers: Mapping[str, Array], layout: Layout) -> dict[str, Array]:
    """Return copies of buffers whose names and dtypes can be stored."""
    parameters = {slot.name for slot in layout.slots}
    for name, buffer in buffers.items():
        check_array_name(name)
        if name in parameters:
            raise InvalidInputError(f"{name!r} is both a parameter and a buffer")
        if not supported_buffer(np.asarray(buffer)):
            raise InvalidInputError(
                f"buffer {name!r} has dtype {np.asarray(buffer).dtype}, "
                "which cannot be stored"
            )
    native = {name: np.asarray(buffer) for name, buffer in buffers.items()}
    return {name: np.array(b, b.dtype.newbyteorder("=")) for name, b in native.items()}


def own_copy(model: Model) -> Model:
    """Return a model that somebody else may change."""
    flat = model.params.flat.copy()
    buffers = {name: np.array(buffer) for name, buffer in model.buffers.items()}
    return Model(Params(model.params.layout, flat), buffers, model.server)


def cleaned_model(current: Model, delta: Flat, cleaned: Model | None) -> Model:
    """Return the model after a forgetting, checked.

    Args:
        current: The model before.
        delta: Cleaned minus current parameters.
        cleaned: The model after; None for the current one moved by delta.

    Raises:
        InvalidInputError: If it is infinite, or of another shape.
    """
    layout = current.params.layout
    if cleaned is None:
        with np.errstate(over="ignore", invalid="ignore"):
            cleaned = Model(
                Params(layout, current.params.flat + delta), current.buffers
            )
    if (cleaned.server is None) != (current.server is None):
        raise InvalidInputError(
            "the ledger has a server optimizer, so a cleaned model needs the state of "
            "the server without the clients; use a method that gives it"
            if current.server
            else "the ledger has no server optimizer, and the cleaned model a state"
        )
    if cleaned.server is not None and current.server is not None:
        _check_state(cleaned.server, current.server)
    if cleaned.params.layout != layout or set(cleaned.buffers) != set(current.buffers):
        raise InvalidInputError(
            "the cleaned model has other arrays than the current one"
        )
    if not np.isfinite(cleaned.params.flat).all():
        raise InvalidInputError("forgetting would make the model infinite")
    buffers = require_buffers(cleaned.buffers, layout)
    return Model(cleaned.params, buffers, cleaned.server)


def _check_state(cleaned: ServerState, current: ServerState) -> None:
    """Raise unless the state of the server after a forgetting can be used."""
    if np.shape(cleaned.vectors) != current.vectors.shape:
        raise InvalidInputError(
            "the cleaned server state has other vectors than the current one"
        )
    if not np.isfinite(cleaned.vectors).all() or cleaned.steps < 0:
        raise InvalidInputError("forgetting would make the server's state infinite")


def _check_participants(
    updates: list[ClientUpdate], state_of: Callable[[ClientId], ClientState | None]
) -> None:
    if not updates:
        raise InvalidInputError("a round needs at least one participant")
    seen: set[ClientId] = set()
    for update in updates:
        name = f"{update.client!r:.80}"
        if update.client in seen:
            raise InvalidInputError(f"client {name} appears twice in the round")
        seen.add(update.client)
        if state_of(update.client) in ("forgotten", "erased"):
            raise InvalidInputError(
                f"client {name} was forgotten and cannot take part again"
            )
        if not (math.isfinite(update.share) and 0 < update.share <= 1 + 1e-9):
            raise InvalidInputError(
                f"the share of client {name} is {update.share}; shares are in (0, 1]"
            )
        probability = update.keep_probability
        if not (0 <= probability <= 1) or (update.kept and probability == 0):
            raise InvalidInputError(
                f"the keep probability of client {name} is {probability}"
            )
    shares = [update.share for update in updates]
    if abs(math.fsum(shares) - 1) > _SHARE_TOLERANCE:
        raise InvalidInputError(
            f"the shares of the round sum to {math.fsum(shares)}, not to 1"
        )
    # Else, without some clients, 1 minus their shares could be 0 or less and stand for
    # the shares of the others. The sum is taken with -1 in it, lest it round to 1.
    gap = abs(math.fsum([*shares, -1.0]))
    smallest = min(updates, key=lambda update: update.share)
    if gap > smallest.share / 2:
        raise InvalidInputError(
            f"the shares of the round are {gap:.3g} away from a sum of 1, and that of "
            f"client {smallest.client!r:.80} is only {smallest.share:.3g}; give exact "
            "shares, or leave it out of the round"
        )


def _check_summable(round_: Round, updates: list[ClientUpdate]) -> list[ClientUpdate]:
    """Return the updates as a history of sums records them: none kept for itself."""
    if round_.use == "aggregate":
        raise InvalidInputError(
            "a history of sums needs rounds in which every update counts; use store"
        )
    for update in updates:
        if update.delta is None:
            raise InvalidInputError(
                f"a history of sums needs every update, and that of client "
                f"{update.client!r:.80} in round {round_.index} is missing"
            )
    return [replace(update, kept=False, keep_probability=1.0) for update in updates]


def _vector(update: ClientUpdate, layout: Layout, index: int) -> Flat | None:
    if update.delta is None:
        if update.kept:
            raise InvalidInputError(
                f"client {update.client!r:.80} is to be kept in round {index} "
                "but has no update"
            )
        return None
    return _flat(update.delta, layout, f"the update of client {update.client!r:.80}")


def _flat(value: Mapping[str, Array], layout: Layout, what: str) -> Flat:
    flat = getattr(value, "flat", None)
    if flat is not None and getattr(value, "layout", None) == layout:
        return np.ascontiguousarray(flat)
    try:
        return layout.flatten(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{what}: {error}") from None
    except (TypeError, ValueError, AttributeError):
        raise InvalidInputError(
            f"{what} is a mapping of names to arrays, not {show(value)}"
        ) from None


@dataclass(frozen=True, slots=True)
class _Measured:
    """The vectors and numbers that follow from a round's updates.

    Attributes:
        step: The step, a vector of the ledger's own.
        model: The parameters after the round.
        squares: Squared length of each update, then of the step.
        products: Inner product of each update with the step.
        previous: Inner product of the step with the last round's step.
        server: State of the server optimizer after the round, if there is one.
    """

    step: Flat
    model: Flat
    squares: list[float]
    products: list[float]
    previous: float
    server: ServerState | None


def _measure(
    round_: Round,
    updates: list[ClientUpdate],
    vectors: list[Flat | None],
    given: Flat | None,
    previous_step: Flat | None,
    before: Model,
    settings: LedgerSettings,
) -> _Measured:
    """Return the step, the new model and their numbers, from one pass over the vectors.

    Each block of each vector comes from memory once: the step, the model and all
    numbers are made while the processor's cache holds the block.
    """
    size = settings.layout.size
    expected = _expected(round_, updates, vectors, settings)
    if expected is None and given is None:
        raise InvalidInputError(
            f"round {round_.index} needs its step, because updates are missing"
        )
    present = [(i, vector) for i, vector in enumerate(vectors) if vector is not None]
    num_blocks = -(-size // BLOCK_VALUES)
    # Of equal width, or one thread would do nearly all of a model of two blocks.
    width = -(-size // max(1, num_blocks))
    # One piece of memory for both: NumPy takes huge pages for large pieces only, and
    # at a million parameters small pages would take longer than the arithmetic.
    step, model = np.empty((2, size), np.float32)
    squares = np.zeros((num_blocks, len(vectors) + 1))
    products = np.zeros((num_blocks, len(vectors)))
    others = np.zeros((num_blocks, 2))
    finite = np.zeros(num_blocks, bool)
    current, optimizer = before.params.flat, settings.optimizer
    state = after = None
    if optimizer is not None:
        state = before.server or optimizer.start(size)
        after = np.empty_like(state.vectors)

    def work(blocks: Iterable[int]) -> None:
        # Inside the thread: the setting does not reach threads from outside.
        with np.errstate(over="ignore", invalid="ignore"):
            for block in blocks:
                measure(block)

    def measure(block: int) -> None:
        part = slice(block * width, (block + 1) * width)
        piece = step[part]
        if given is not None:
            piece[...] = given[part]
        if expected is not None:
            wanted = expected(part)
            if given is None:
                piece[...] = wanted
            else:
                gap = piece - wanted
                others[block, 0] = dot(gap, gap)
        squares[block, -1] = dot(piece, piece)
        for i, vector in present:
            own = vector[part]
            squares[block, i] = dot(own, own)
            products[block, i] = dot(own, piece)
        if previous_step is not None:
            others[block, 1] = dot(previous_step[part], piece)
        moved = piece
        if optimizer is not None and state is not None and after is not None:
            own, moved = optimizer.move(state.vectors[:, part], piece, state.steps)
            after[:, part] = own
            finite[block] = np.isfinite(own).all()
        else:
            finite[block] = True
        np.add(current[part], moved, out=model[part])
        finite[block] &= np.isfinite(model[part]).all()

    run_blocks(work, num_blocks)
    totals = squares.sum(axis=0).tolist()
    gap, previous = others.sum(axis=0).tolist()
    _check_finite(updates, totals, round_.index)
    if not gap <= STEP_TOLERANCE**2 * totals[-1]:
        raise InvalidInputError(
            f"the step of round {round_.index} differs from the "
            f"{settings.aggregation} of its updates by {math.sqrt(gap):.3g} "
            f"at a norm of {math.sqrt(totals[-1]):.3g};"
            " if it is another aggregation, name it when the ledger is created"
        )
    if not finite.all():
        raise InvalidInputError(f"round {round_.index} makes the model infinite")
    server = None
    if state is not None and after is not None:
        server = ServerState(state.steps + 1, after)
    numbers = products.sum(axis=0).tolist()
    return _Measured(step, model, totals, numbers, previous, server)


def _check_finite(updates: list[ClientUpdate], totals: list[float], index: int) -> None:
    for update, total in zip(updates, totals, strict=False):
        if not math.isfinite(total):
            raise InvalidInputError(
                f"client {update.client!r:.80} sent NaN or infinite values in round "
                f"{index}; leave it out of the round"
            )
        if total > LARGEST_NORM**2:
            raise InvalidInputError(
                f"client {update.client!r:.80} sent an update of norm "
                f"{math.sqrt(total):.3g} in round {index}, which no training gives; "
                "leave it out of the round"
            )
    if not math.isfinite(totals[-1]):
        raise InvalidInputError(f"the step of round {index} has NaN or infinite values")


def _entered(update: ClientUpdate, round_: Round) -> float:
    """Return the weight with which an update went into the model."""
    if round_.use == "store":
        return update.share
    return update.share / update.keep_probability if update.kept else 0.0


def _expected(
    round_: Round,
    updates: list[ClientUpdate],
    vectors: list[Flat | None],
    settings: LedgerSettings,
) -> Callable[[slice], Flat] | None:
    """Return a function of a slice that gives the right step; None if unknowable."""
    weights = [_entered(update, round_) for update in updates]
    rows = [v for v, w in zip(vectors, weights, strict=True) if w and v is not None]
    factors = [weight for weight in weights if weight]
    if len(rows) < len(factors):
        return None
    if not rows:
        zeros = np.zeros(settings.layout.size, np.float32)
        return lambda part: zeros[part]
    if settings.aggregation == MEAN:
        return lambda part: weighted_sum([row[part] for row in rows], factors)
    rule = resolve(settings.aggregation, settings.custom)
    require_enough(rule.computable, len(rows), round_.index)
    shares = np.array([update.share for update in updates])
    if rule.coordinatewise:
        found = rule.chosen(rows_reader(rows), settings.layout.size, shares)
        read = rows_reader([rows[place] for place in found.places])
        return lambda part: np.asarray(
            rule.function(read(part.start, part.stop), found.shares), np.float32
        )
    whole = rule.step(rows_reader(rows), settings.layout.size, shares)
    return lambda part: whole[part]
