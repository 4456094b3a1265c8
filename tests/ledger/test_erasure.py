from __future__ import annotations

import itertools
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul import (
    Aggregation,
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    LedgerReader,
    LocalSGD,
    MemoryLedger,
    Model,
    NoSkew,
    Params,
    Round,
    Scalar,
    UnlearnRefusedError,
    UnlearnRequest,
    erase,
    forget,
    params_at,
    read_round,
    verify,
)
from fastfedul.ledger import recording
from fastfedul.ledger.protocol import models, vector
from fastfedul.ledger.store import codec
from fastfedul.ledger.store.schema import COLUMNS
from fastfedul.params import Flat, Layout
from fastfedul.records import History, StorageDtype, VectorRef
from fastfedul.rng import stream
from tests.conftest import error_bound

Floats = npt.NDArray[np.float64]
WritableLedger = MemoryLedger | DiskLedger
Maker = Callable[..., WritableLedger]

LAYOUT = Layout.of({"weight": np.zeros((5, 6)), "bias": np.zeros(7)})
CLIENTS = ("anna", "bela", "carl", "dora", "emil")
TARGET = "bela"
LOCAL = LocalSGD(lr=0.1, momentum=0.9, batch_size=32, epochs=2)


# Histories, and what they amount to in float64.


def normal(*key: int, size: int = LAYOUT.size) -> Flat:
    return stream(8, "erasure", *key).normal(size=size).astype(np.float32)


def initial(layout: Layout = LAYOUT) -> Model:
    return Model(Params(layout, normal(0, size=layout.size)), {"n": np.array([1, 2])})


def history(
    num_rounds: int = 8,
    *,
    layout: Layout = LAYOUT,
    partial: bool = True,
    drop: bool = False,
    seed: int = 0,
) -> list[Round]:
    """Rounds of weighted clients; some stay away, some updates are dropped."""
    rng = stream(seed, "history")
    rounds = []
    for index in range(num_rounds):
        present = rng.random(len(CLIENTS)) < (0.7 if partial else 2)
        present[index % len(CLIENTS)] = present[(index + 2) % len(CLIENTS)] = True
        weights = rng.uniform(0.5, 3, len(CLIENTS)) * present
        shares = weights / weights.sum()
        dropped = drop * (rng.random(len(CLIENTS)) < 0.3)
        updates = tuple(
            ClientUpdate(
                name,
                float(shares[i]),
                Params(layout, normal(seed + 1, index, i, size=layout.size)),
                keep_probability=0.7 if drop else 1.0,
                kept=not dropped[i],
            )
            for i, name in enumerate(CLIENTS)
            if present[i]
        )
        rounds.append(Round(index, updates))
    return rounds


def flat_of(update: ClientUpdate) -> Floats:
    assert update.delta is not None
    return update.delta.flat.astype(np.float64)


def mean_without(round_: Round, gone: frozenset[str]) -> Floats:
    """What the server would have added without some clients, all updates known."""
    rest = [update for update in round_.updates if update.client not in gone]
    total = np.zeros(len(flat_of(round_.updates[0])))
    shares = sum(update.share for update in rest)
    for update in rest:
        total += update.share / shares * flat_of(update)
    return total


def difference(rounds: Sequence[Round], gone: frozenset[str], damping: float) -> Floats:
    """The recursion of METHOD.md 2 for histories in which everything was kept."""
    delta = np.zeros(len(flat_of(rounds[0].updates[0])))
    for round_ in rounds:
        gamma = mean_without(round_, gone) - mean_without(round_, frozenset())
        delta = (1 - damping) * delta + gamma
    return delta


def recorded(ledger: WritableLedger, rounds: Sequence[Round]) -> list[Flat]:
    """Append rounds; return the model before each of them and after the last."""
    found = [ledger.final.params.flat.copy()]
    for round_ in rounds:
        ledger.append(round_)
        found.append(ledger.final.params.flat.copy())
    return found


def steps_of(ledger: WritableLedger | LedgerReader) -> list[Flat]:
    return [vector(ledger, VectorRef(i)) for i in range(ledger.num_rounds)]


def close_to(found: Any, expected: Any, scale: float = 1) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * scale)


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Makes ledgers of one kind; dtypes and the like count on disk only."""
    made: list[DiskLedger] = []
    numbers = itertools.count()

    def create(model: Model | None = None, **options: Any) -> WritableLedger:
        model = model or initial()
        common = {k: options.pop(k) for k in ("aggregation", "custom") if k in options}
        if request.param == "memory":
            return MemoryLedger.create(model, **common)
        path = tmp_path / f"ledger-{next(numbers)}"
        made.append(DiskLedger.create(path, model, **common, **options))
        return made[-1]

    yield create
    for ledger in made:
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0
        ledger.close()


def assert_adds_up(ledger: WritableLedger) -> None:
    """The initial model, all steps and all adjustments give the model now."""
    total = ledger.initial.params.flat.astype(np.float64)
    for step in steps_of(ledger):
        total += step
    for adjustment in ledger.adjustments().values():
        total += adjustment
    close_to(ledger.final.params.flat, total, scale=10)


# What is left of an erased client.


def runs_of(vectors: Sequence[npt.NDArray[Any]], length: int = 32) -> list[bytes]:
    """Stretches of bytes by which a vector is recognised wherever it begins."""
    runs = []
    for array in vectors:
        data = array.tobytes()
        runs += [data[i : i + length] for i in range(0, len(data) - length, length)]
    return [run for run in runs if len(set(run)) > 8]


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_of_an_erased_client_is_left_on_disk(
    dtype: StorageDtype, at_once: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    rounds = history(8, drop=True)
    with DiskLedger.create(path, initial(), update_dtype=dtype) as ledger:
        recorded(ledger, rounds[:6])
        vectors = [u.delta.flat for u in updates_of(rounds[:6]) if u.delta is not None]
        encoded = [codec.encode(vector, dtype).values for vector in vectors]
        assert_erasure_leaves_nothing(
            ledger, [*vectors, *encoded], rounds[6:], at_once=at_once
        )


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_of_an_erased_client_is_left_in_sums_and_pairs(
    dtype: StorageDtype, at_once: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    rounds = history(8, partial=False)
    with DiskLedger.create(
        path, initial(), history="sums", update_dtype=dtype
    ) as ledger:
        recorded(ledger, rounds[:6])
        own = [u.delta.flat for u in updates_of(rounds[:6]) if u.delta is not None]
        refs = [
            VectorRef(pair.round, pair.client, pair.other)
            for pair in ledger.pairs()
            if TARGET in (pair.client, pair.other)
        ]
        assert len(refs) > 5
        differences = [vector(ledger, ref) for ref in refs]
        encoded = [codec.encode(pair, dtype).values for pair in differences]
        assert_erasure_leaves_nothing(
            ledger,
            [*own, ledger.own_difference(TARGET), *differences, *encoded],
            rounds[6:],
            at_once=at_once,
        )
        assert all(TARGET not in (p.client, p.other) for p in ledger.pairs())
        assert verify(ledger).problems == ()


def updates_of(rounds: Sequence[Round]) -> list[ClientUpdate]:
    """What the target sent in some rounds."""
    return [u for round_ in rounds for u in round_.updates if u.client == TARGET]


def assert_erasure_leaves_nothing(
    ledger: DiskLedger,
    vectors: Sequence[npt.NDArray[Any]],
    later: Sequence[Round],
    *,
    at_once: bool,
) -> None:
    """Erase the target; no byte of the vectors is there then, nor after more rounds."""
    path = ledger.path
    tells = runs_of(vectors)
    in_index = traces_in_index(path)
    before = contents(path)
    assert sum(any(run in data for data in before.values()) for run in tells) > 2
    assert all(trace in before["index.sqlite"] for trace in in_index)
    if at_once:
        forget(ledger, [TARGET], erase=True)
    else:
        forget(ledger, [TARGET], erase=False)
        erase(ledger, [TARGET])
    after_erasure = contents(path)
    recorded(ledger, [without(round_, {TARGET}) for round_ in later])
    for found in (after_erasure, contents(path)):
        for name, data in found.items():
            assert not any(run in data for run in tells), name
        assert not any(trace in found["index.sqlite"] for trace in in_index)
        assert not any(name.endswith(("-journal", "-wal")) for name in found)


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


def traces_in_index(path: Path) -> list[bytes]:
    """Digests and numbers of the target's updates and pairs, as SQLite stores them."""
    index = sqlite3.connect(path / "index.sqlite")
    rows = index.execute(
        "SELECT array, norm, step_product, updates.digest FROM updates JOIN clients "
        "ON clients.id = updates.client WHERE name = ?",
        (TARGET,),
    ).fetchall()
    pairs = index.execute(
        "SELECT array, priority, pairs.digest FROM pairs JOIN clients "
        "ON clients.id IN (pairs.client, pairs.other) WHERE name = ?",
        (TARGET,),
    ).fetchall()
    sums = index.execute(
        "SELECT difference FROM clients WHERE name = ?", (TARGET,)
    ).fetchall()
    index.close()
    traces: list[bytes] = [array for (array,) in sums if array is not None]
    for array, priority, digest in pairs:
        traces += [array, struct.pack(">d", priority), digest]
    for array, norm, product, digest in rows:
        traces += [] if array is None else [array]
        traces += [struct.pack(">d", norm), struct.pack(">d", product), digest]
    return traces


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_an_erased_name_remains_in_clients_and_events_alone(
    kind: History, tmp_path: Path
) -> None:
    name = "a name that nobody else has"
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial(), history=kind) as ledger:
        for round_ in history(4, partial=False):
            renamed = tuple(
                replace(u, client=name) if u.client == TARGET else u
                for u in round_.updates
            )
            ledger.append(replace(round_, updates=renamed))
        forget(ledger, [name], erase=True)
    index = sqlite3.connect(path / "index.sqlite")
    places = set()
    for table, columns in COLUMNS.items():
        for column in (c.split()[0] for c in columns):
            values = index.execute(f"SELECT {column} FROM {table}").fetchall()
            if any(name in str(value) for (value,) in values):
                places.add((table, column))
    [(number, state, count, difference)] = index.execute(
        "SELECT id, state, num_updates, difference FROM clients WHERE name = ?",
        (name,),
    ).fetchall()
    left = index.execute(
        "SELECT count(*) FROM updates WHERE client = ?1 "
        "UNION ALL SELECT count(*) FROM pairs WHERE ?1 IN (client, other)",
        (number,),
    ).fetchall()
    index.close()
    assert places == {("clients", "name"), ("events", "clients")}
    assert (state, count, difference) == ("erased", 0, None)
    assert left == [(0,), (0,)]
    for file in (path / "arrays").iterdir():
        assert name.encode() not in file.read_bytes()


def test_an_update_that_two_clients_share_outlives_the_erasure_of_one(
    make: Maker,
) -> None:
    ledger = make()
    same = Params(LAYOUT, normal(50))
    ledger.append(
        Round(0, tuple(ClientUpdate(name, 0.25, same) for name in CLIENTS[:4]))
    )
    forget(ledger, [TARGET], erase=True)
    for update in read_round(ledger, 0).updates:
        assert update.delta is not None
        np.testing.assert_array_equal(update.delta.flat, same.flat)


def test_the_log_says_what_was_done(make: Maker) -> None:
    ledger = make()
    recorded(ledger, history(4))
    forget(ledger, ["emil", "anna"], FastFedUL(skew=Scalar(0.25)), erase=False)
    erase(ledger, ["anna", "emil"])
    forget(ledger, [TARGET], FastFedUL(skew=Scalar(0.5)), erase=True)
    events = ledger.events()
    assert [event.kind for event in events] == ["forget", "erase", "forget and erase"]
    assert events[0].clients == events[1].clients == ("anna", "emil")
    assert events[2].clients == (TARGET,)
    settings: Any = events[0].details["settings"]
    assert settings["damping"] == 0.25
    assert events[2].details["method"] == "fast-fedul"
    states = {name: entry.state for name, entry in ledger.clients().items()}
    assert states["anna"] == states["emil"] == states[TARGET] == "erased"
    assert states["carl"] == states["dora"] == "active"
    assert ledger.clients()[TARGET].forgotten_at == 4


# The history is that of a training in which the client never took part.


@pytest.mark.parametrize("damping", [0.0, 0.07, 1.0])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_rewritten_history_is_the_one_without_the_client(
    make: Maker, damping: float, at_once: bool
) -> None:
    ledger = make()
    rounds = history(8)
    before = recorded(ledger, rounds)
    if at_once:
        forget(ledger, [TARGET], FastFedUL(skew=Scalar(damping)), erase=True)
    else:
        forget(ledger, [TARGET], FastFedUL(skew=Scalar(damping)), erase=False)
        erase(ledger, [TARGET])
    gone = frozenset({TARGET})
    close_to(ledger.final.params.flat, before[-1] + difference(rounds, gone, damping))
    model = ledger.initial.params.flat.astype(np.float64)
    steps = steps_of(ledger)
    for index, round_ in enumerate(rounds):
        close_to(params_at(ledger, index).flat, model)
        close_to(steps[index], mean_without(round_, gone))
        model += mean_without(round_, gone)
        entry = ledger.rounds()[index]
        share = sum(u.share for u in round_.updates if u.client == TARGET)
        assert entry.removed_share == pytest.approx(share, abs=1e-12)
        stayed = {u.client: u.share for u in round_.updates if u.client != TARGET}
        assert entry.num_updates == len(stayed)
        assert {u.client: u.share for u in ledger.updates_in(index)} == stayed
        today = read_round(ledger, index)
        assert sum(u.share for u in today.updates) == pytest.approx(1, abs=1e-9)
        assert entry.step_norm == pytest.approx(np.linalg.norm(steps[index]), rel=1e-5)
        if index:
            product = float(steps[index - 1].astype(np.float64) @ steps[index])
            assert entry.previous_product == pytest.approx(product, rel=1e-4, abs=1e-4)
    np.testing.assert_array_equal(params_at(ledger, 8).flat, ledger.final.params.flat)
    assert ledger.updates_of(TARGET) == ()
    assert_adds_up(ledger)
    with pytest.raises(InvalidInputError, match=f"'{TARGET}' was forgotten"):
        ledger.append(replace(history(9, partial=False)[8], index=8))


def test_rounds_without_the_client_stay_as_they_were_to_the_last_bit(
    make: Maker,
) -> None:
    ledger = make()
    rounds = history(8)
    recorded(ledger, rounds)
    before = steps_of(ledger)
    away = [r.index for r in rounds if all(u.client != TARGET for u in r.updates)]
    assert away
    forget(ledger, [TARGET], erase=True)
    after = steps_of(ledger)
    for index in away:
        np.testing.assert_array_equal(after[index], before[index])
        assert ledger.rounds()[index].removed_share == 0


def test_the_updates_of_those_who_stay_are_untouched(make: Maker) -> None:
    ledger = make(update_dtype="int8")
    rounds = history(8, drop=True)
    recorded(ledger, rounds)

    def kept() -> dict[tuple[int, str], bytes]:
        return {
            (index, update.client): update.delta.flat.tobytes()
            for index in range(8)
            for update in read_round(ledger, index).updates
            if update.client != TARGET and update.delta is not None
        }

    def entries() -> list[object]:
        return [
            (u.round, u.client, u.share, u.keep_probability, u.kept, u.entered, u.norm)
            for index in range(8)
            for u in ledger.updates_in(index)
            if u.client != TARGET
        ]

    before = kept(), entries()
    forget(ledger, [TARGET], FastFedUL(minimum_coverage=0), erase=True)
    assert (kept(), entries()) == before


def test_a_model_before_a_forgetting_is_still_what_the_server_had(
    make: Maker,
) -> None:
    ledger = make()
    rounds = history(8)
    had = recorded(ledger, rounds[:5])
    forget(ledger, [TARGET], erase=False)
    cleaned = ledger.final.params.flat.copy()
    later = [without(r, {TARGET}) for r in rounds[5:]]
    had[5:] = recorded(ledger, later)
    np.testing.assert_array_equal(had[5], cleaned)
    for index, expected in enumerate(had):
        np.testing.assert_array_equal(params_at(ledger, index).flat, expected)
    assert_adds_up(ledger)


def without(round_: Round, gone: set[str]) -> Round:
    """The round as it is when some clients stay away from the start."""
    rest = [u for u in round_.updates if u.client not in gone]
    total = sum(update.share for update in rest)
    return replace(
        round_, updates=tuple(replace(u, share=u.share / total) for u in rest)
    )


def test_a_model_between_two_forgettings_at_one_time_is_what_the_server_had(
    make: Maker,
) -> None:
    ledger = make()
    rounds = history(8)
    recorded(ledger, rounds[:5])
    forget(ledger, [TARGET], erase=False)
    forget(ledger, ["emil"], erase=False)
    cleaned = ledger.final.params.flat.copy()
    ledger.append(without(rounds[5], {TARGET, "emil"}))
    np.testing.assert_allclose(params_at(ledger, 5).flat, cleaned, rtol=1e-5)


def test_a_late_erasure_changes_no_model_since_the_forgetting(make: Maker) -> None:
    ledger = make()
    rounds = history(9)
    recorded(ledger, rounds[:5])
    forget(ledger, [TARGET], FastFedUL(skew=Scalar(0.3)), erase=False)
    recorded(ledger, [without(r, {TARGET}) for r in rounds[5:]])
    before = [params.flat.copy() for params in models(ledger)]
    final = ledger.final.params.flat.tobytes()
    erase(ledger, [TARGET])
    assert ledger.final.params.flat.tobytes() == final
    after = [params.flat for params in models(ledger)]
    for index in range(5, 10):
        close_to(after[index], before[index], scale=10)
    model = ledger.initial.params.flat.astype(np.float64)
    for index in range(5):
        close_to(after[index], model)
        model += mean_without(rounds[index], frozenset({TARGET}))
    assert_adds_up(ledger)


def test_forgetting_and_erasing_later_equals_doing_both_at_once(make: Maker) -> None:
    rounds = history(8)
    one, other = make(), make()
    for ledger in (one, other):
        recorded(ledger, rounds)
    forget(one, [TARGET, "dora"], erase=True)
    forget(other, [TARGET, "dora"], erase=False)
    forgotten = other.final.params.flat.tobytes()
    erase(other, [TARGET, "dora"])
    assert other.final.params.flat.tobytes() == forgotten
    assert one.final.params.flat.tobytes() == forgotten
    assert one.rounds() == other.rounds()
    for mine, yours in zip(steps_of(one), steps_of(other), strict=True):
        np.testing.assert_array_equal(mine, yours)
    for one_model, other_model in zip(models(one), models(other), strict=True):
        np.testing.assert_array_equal(one_model.flat, other_model.flat)
    if isinstance(one, DiskLedger) and isinstance(other, DiskLedger):
        assert one.chain == other.chain


def test_clients_forgotten_at_different_times_are_erased_one_by_one(
    make: Maker,
) -> None:
    ledger = make()
    rounds = history(8)
    recorded(ledger, rounds[:4])
    forget(ledger, [TARGET], erase=False)
    recorded(ledger, [without(r, {TARGET}) for r in rounds[4:6]])
    forget(ledger, ["emil"], erase=False)
    recorded(ledger, [without(r, {TARGET, "emil"}) for r in rounds[6:]])
    final = ledger.final.params.flat.tobytes()
    with pytest.raises(InvalidInputError, match="forgotten together"):
        erase(ledger, [TARGET, "emil"])
    erase(ledger, ["emil"])
    erase(ledger, [TARGET])
    assert ledger.final.params.flat.tobytes() == final
    for index, round_ in enumerate(rounds):
        rest = frozenset({TARGET, "emil"})
        close_to(steps_of(ledger)[index], mean_without(round_, rest), scale=5)
    assert_adds_up(ledger)


# One after the other equals both at once.


@pytest.mark.parametrize("damping", [0.0, 0.07])
@pytest.mark.parametrize("first_erased", [False, True])
@pytest.mark.parametrize("second_erased", [False, True])
def test_one_after_the_other_equals_both_at_once(
    make: Maker, damping: float, first_erased: bool, second_erased: bool
) -> None:
    method = FastFedUL(skew=Scalar(damping))
    rounds = history(8)
    together, apart = make(), make()
    for ledger in (together, apart):
        before = recorded(ledger, rounds)[-1]
    forget(together, [TARGET, "dora"], method, erase=True)
    forget(apart, [TARGET], method, erase=first_erased)
    forget(apart, ["dora"], method, erase=second_erased)
    both = frozenset({TARGET, "dora"})
    close_to(together.final.params.flat, before + difference(rounds, both, damping))
    close_to(apart.final.params.flat, together.final.params.flat, scale=5)
    for name, erased in ((TARGET, first_erased), ("dora", second_erased)):
        if not erased:
            erase(apart, [name])
    close_to(apart.final.params.flat, together.final.params.flat, scale=5)
    for mine, yours in zip(steps_of(apart), steps_of(together), strict=True):
        close_to(mine, yours, scale=5)
    for one_entry, other_entry in zip(apart.rounds(), together.rounds(), strict=True):
        assert one_entry.num_updates == other_entry.num_updates
        assert one_entry.removed_share == pytest.approx(
            other_entry.removed_share, abs=1e-12
        )
    for one_model, other_model in zip(models(apart), models(together), strict=True):
        close_to(one_model.flat, other_model.flat, scale=5)
    assert_adds_up(apart)
    assert_adds_up(together)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    damping=st.floats(0, 1),
    order=st.permutations(CLIENTS),
    cuts=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    erased=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    drop=st.booleans(),
)
def test_any_sequence_of_requests_equals_one_for_all_of_them(
    seed: int,
    damping: float,
    order: list[str],
    cuts: tuple[int, int],
    erased: tuple[bool, bool, bool],
    drop: bool,
) -> None:
    method = FastFedUL(skew=Scalar(damping), minimum_coverage=0)
    rounds = history(6, drop=drop, seed=seed)
    seen = {u.client for round_ in rounds for u in round_.updates}
    order = [name for name in order if name in seen]
    first, second = cuts[0], cuts[0] + cuts[1]
    groups = [order[:first], order[first:second], order[second : second + 1]]
    together, apart = MemoryLedger.create(initial()), MemoryLedger.create(initial())
    for ledger in (together, apart):
        recorded(ledger, rounds)
    for group, erase_it in zip(groups, erased, strict=True):
        if group:
            forget(apart, group, method, erase=erase_it)
    forget(together, [name for group in groups for name in group], method, erase=False)
    close_to(apart.final.params.flat, together.final.params.flat, scale=20)
    assert_adds_up(apart)


def test_the_standard_error_is_the_same_whether_the_first_was_erased_or_not(
    make: Maker,
) -> None:
    rounds = history(8, drop=True)
    method = FastFedUL(minimum_coverage=0)
    found = []
    for erased in (False, True):
        ledger = make()
        recorded(ledger, rounds)
        forget(ledger, [TARGET], method, erase=erased)
        result = method(UnlearnRequest(ledger, frozenset({"dora"})))
        assert result.standard_error is not None
        found.append(result.standard_error)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


# Rounds in which nobody is left.


def alone(index: int, *names: str) -> Round:
    share = 1 / len(names)
    return Round(
        index,
        tuple(
            ClientUpdate(name, share, Params(LAYOUT, normal(60, index, i)))
            for i, name in enumerate(names)
        ),
    )


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_a_round_with_nobody_else_stays_as_an_empty_round(
    make: Maker, damping: float
) -> None:
    ledger = make()
    method = FastFedUL(skew=Scalar(damping))
    ledger.append(alone(0, "anna", TARGET))
    ledger.append(alone(1, TARGET))
    ledger.append(alone(2, "anna", "carl"))
    gammas = [
        normal(60, 0, 0).astype(np.float64) * 0.5 - normal(60, 0, 1) * 0.5,
        -normal(60, 1, 0).astype(np.float64),
        np.zeros(LAYOUT.size),
    ]
    expected = ledger.final.params.flat.astype(np.float64)
    expected += sum((1 - damping) ** (2 - t) * gamma for t, gamma in enumerate(gammas))
    forget(ledger, [TARGET], method, erase=True)
    close_to(ledger.final.params.flat, expected)
    empty = ledger.rounds()[1]
    assert (empty.num_updates, empty.removed_share, empty.step_norm) == (0, 1.0, 0.0)
    np.testing.assert_array_equal(steps_of(ledger)[1], 0)
    assert ledger.updates_in(1) == ()
    assert read_round(ledger, 1).updates == ()
    assert ledger.num_rounds == 3
    assert_adds_up(ledger)
    forget(ledger, ["carl"], method, erase=True)
    ledger.append(alone(3, "anna"))
    forget(ledger, ["anna"], method, erase=True)
    assert [entry.num_updates for entry in ledger.rounds()] == [0, 0, 0, 0]
    for step in steps_of(ledger):
        np.testing.assert_array_equal(step, 0)
    assert_adds_up(ledger)


def test_a_round_is_empty_once_the_last_of_its_clients_is_erased(make: Maker) -> None:
    ledger = make()
    rounds = history(4, partial=False)
    recorded(ledger, rounds)
    method = FastFedUL(skew=NoSkew())
    for name in CLIENTS:
        forget(ledger, [name], method, erase=True)
    for entry in ledger.rounds():
        assert (entry.num_updates, entry.removed_share) == (0, 1.0)
    close_to(ledger.final.params.flat, ledger.initial.params.flat, scale=10)
    np.testing.assert_array_equal(params_at(ledger, 3).flat, initial().params.flat)


# What forgetting one client alone takes.


def own_differences(rounds: Sequence[Round]) -> dict[str, Floats]:
    """How far all rounds together would have gone elsewhere without each client."""
    names = {u.client for round_ in rounds for u in round_.updates}
    return {name: difference(rounds, frozenset({name}), 0.0) for name in names}


def assert_differences_are(ledger: WritableLedger, rounds: Sequence[Round]) -> None:
    expected = own_differences(rounds)
    assert set(expected) == set(ledger.clients())
    for name, own in expected.items():
        close_to(ledger.own_difference(name), own, scale=5)


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_clients_own_difference_is_that_of_its_rounds(
    make: Maker, kind: History
) -> None:
    rounds = history(10)
    ledger = make(history=kind)
    for round_ in rounds:
        ledger.append(round_)
        assert_differences_are(ledger, rounds[: round_.index + 1])


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_clients_own_difference_is_right_beyond_the_first_block(
    make: Maker, kind: History
) -> None:
    layout = Layout.of({"w": np.zeros(70_000)})
    rounds = history(5, layout=layout)
    ledger = make(initial(layout), history=kind)
    recorded(ledger, rounds)
    assert_differences_are(ledger, rounds)


def test_a_dropped_update_counts_as_far_as_those_that_were_kept_stand_for_it(
    make: Maker,
) -> None:
    """The same as forgetting the client without any skew."""
    ledger = make()
    recorded(ledger, history(8, drop=True))
    method = FastFedUL(skew=NoSkew(), minimum_coverage=0)
    for name in CLIENTS:
        expected = method(UnlearnRequest(ledger, frozenset({name}))).delta.flat
        close_to(ledger.own_difference(name), expected)


@pytest.mark.parametrize("at_once", [True, False])
def test_after_an_erasure_own_differences_are_those_of_a_training_without_it(
    make: Maker, at_once: bool
) -> None:
    ledger = make()
    rounds = history(10)
    recorded(ledger, rounds[:7])
    forget(ledger, [TARGET], FastFedUL(skew=Scalar()), erase=at_once)
    if not at_once:
        erase(ledger, [TARGET])
    later = [without(round_, {TARGET}) for round_ in rounds[7:]]
    recorded(ledger, later)
    assert not ledger.own_difference(TARGET).any()
    never = own_differences([without(round_, {TARGET}) for round_ in rounds])
    for name, expected in never.items():
        close_to(ledger.own_difference(name), expected, scale=5)


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_forgotten_client_keeps_its_difference_until_it_is_erased(
    make: Maker, kind: History
) -> None:
    ledger = make(history=kind)
    rounds = history(5)
    recorded(ledger, rounds)
    forget(ledger, [TARGET], erase=False)
    assert_differences_are(ledger, rounds)
    later = [without(r, {TARGET}) for r in history(8)[5:]]
    recorded(ledger, later)
    assert_differences_are(ledger, [*rounds, *later])


# Shares that leave nothing for the others, as older ledgers may have them.


@pytest.mark.parametrize("shares", [(1.0, 1e-9), (1.0000000005, 1e-10)])
@pytest.mark.parametrize("aggregation", ["mean", "median"])
def test_a_round_whose_others_have_no_share_left_is_refused_in_words(
    shares: tuple[float, float],
    aggregation: str,
    make: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = make(aggregation=aggregation)
    delta = Params(LAYOUT, normal(1))
    updates = tuple(
        ClientUpdate(name, share, delta)
        for name, share in zip("ab", shares, strict=True)
    )
    with monkeypatch.context() as older:
        older.setattr(recording, "_check_participants", lambda *_: None)
        ledger.append(Round(0, updates))
    before = ledger.final.params.flat.copy()
    with pytest.raises(UnlearnRefusedError, match="for the others in round 0"):
        forget(ledger, ["a"], erase=True)
    assert np.array_equal(ledger.final.params.flat, before)
    assert ledger.clients()["a"].state == "active"
    assert ledger.clients()["b"].state == "active"


# Stored in fewer bits.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_erasing_from_fewer_bits_gives_the_exact_history_within_their_bound(
    make: Maker, dtype: StorageDtype
) -> None:
    ledger = make(update_dtype=dtype)
    rounds = history(6)
    recorded(ledger, rounds)
    forget(ledger, [TARGET], FastFedUL(skew=Scalar(0.1)), erase=True)
    for index, round_ in enumerate(rounds):
        bound = np.full(LAYOUT.size, 2e-5)
        for update in round_.updates:
            if update.client == TARGET:
                assert update.delta is not None
                factor = update.share / (1 - update.share)
                bound += factor * error_bound(update.delta.flat, dtype)
        error = steps_of(ledger)[index] - mean_without(round_, frozenset({TARGET}))
        assert (np.abs(error) <= bound).all()
    assert_adds_up(ledger)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_steps_in_fewer_bits_add_up_within_their_bound_after_an_erasure(
    make: Maker, dtype: StorageDtype
) -> None:
    ledger = make(step_dtype=dtype)
    rounds = history(6)
    recorded(ledger, rounds)
    forget(ledger, [TARGET], FastFedUL(skew=Scalar(0.1)), erase=True)
    bound = np.full(LAYOUT.size, 1e-4)
    total = ledger.initial.params.flat.astype(np.float64)
    for round_, step in zip(rounds, steps_of(ledger), strict=True):
        exact = mean_without(round_, frozenset()).astype(np.float32)
        bound += 2 * error_bound(exact, dtype)
        bound += 2 * error_bound(step, dtype)
        total += step
    for adjustment in ledger.adjustments().values():
        total += adjustment
    assert (np.abs(ledger.final.params.flat - total) <= bound).all()


# Aggregations that are replayed.


def third_largest(updates: npt.NDArray[Any], shares: npt.NDArray[Any]) -> Any:
    return np.sort(updates, axis=0)[len(updates) // 2] * np.float32(len(shares))


REPLAYED: dict[str, dict[str, Any]] = {
    "median": {"aggregation": "median"},
    "trimmed": {"aggregation": "trimmed-mean:0.2"},
    "custom": {
        "aggregation": "third",
        "custom": {"third": Aggregation(third_largest)},
    },
}


@pytest.mark.parametrize("options", REPLAYED.values(), ids=REPLAYED)
def test_erasing_from_a_replayed_aggregation_gives_the_history_without_the_client(
    make: Maker, options: dict[str, Any]
) -> None:
    rounds = history(6)
    ledger, never = make(**options), make(**options)
    recorded(ledger, rounds)
    recorded(never, [without(r, {TARGET, "emil"}) for r in rounds])
    method = FastFedUL(skew=NoSkew())
    forget(ledger, [TARGET], method, erase=True)
    forget(ledger, ["emil"], method, erase=False)
    close_to(ledger.final.params.flat, never.final.params.flat, scale=5)
    erase(ledger, ["emil"])
    for mine, yours in zip(steps_of(ledger), steps_of(never), strict=True):
        np.testing.assert_array_equal(mine, yours)
    assert_adds_up(ledger)


def test_an_erasure_that_cannot_be_replayed_changes_nothing(make: Maker) -> None:
    ledger = make(aggregation="median")
    rounds = history(4, partial=False)
    recorded(ledger, rounds[:3])
    first, *rest = rounds[3].updates
    dropped = replace(first, kept=False, keep_probability=0.5)
    ledger.append(replace(rounds[3], updates=(dropped, *rest)))

    def state() -> tuple[object, ...]:
        return (
            ledger.final.params.flat.tobytes(),
            [step.tobytes() for step in steps_of(ledger)],
            ledger.rounds(),
            dict(ledger.clients()),
            {i: a.tobytes() for i, a in ledger.adjustments().items()},
            ledger.events(),
        )

    before = state()
    with pytest.raises(UnlearnRefusedError, match="round 3"):
        forget(ledger, [TARGET], erase=True)
    assert state() == before
    with pytest.raises(UnlearnRefusedError, match="round 3"):
        ledger.commit_forgetting([TARGET], normal(1), {}, erase=True)
    assert state() == before


# The chain.


def test_the_order_in_which_updates_are_handed_in_is_irrelevant(make: Maker) -> None:
    rounds = history(5, drop=True)
    one, other = make(), make()
    recorded(one, rounds)
    recorded(other, [replace(r, updates=r.updates[::-1]) for r in rounds])
    assert one.final.params.flat.tobytes() == other.final.params.flat.tobytes()
    assert one.rounds() == other.rounds()
    assert one.clients() == other.clients()
    if isinstance(one, DiskLedger) and isinstance(other, DiskLedger):
        assert one.chain == other.chain


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
def test_an_interrupted_ledger_is_the_same_as_an_uninterrupted_one(
    dtype: StorageDtype, tmp_path: Path
) -> None:
    rounds = history(6, drop=True)
    options: dict[str, Any] = {"update_dtype": dtype, "step_dtype": dtype}
    with DiskLedger.create(tmp_path / "one", initial(), **options) as ledger:
        recorded(ledger, rounds[:4])
        forget(ledger, [TARGET], FastFedUL(minimum_coverage=0), erase=True)
        recorded(ledger, [without(r, {TARGET}) for r in rounds[4:]])
        chain = ledger.chain
        final = ledger.final.params.flat.tobytes()
    DiskLedger.create(tmp_path / "other", initial(), **options).close()
    for round_ in rounds[:4]:
        with DiskLedger(tmp_path / "other") as ledger:
            ledger.append(round_)
    with DiskLedger(tmp_path / "other") as ledger:
        forget(ledger, [TARGET], FastFedUL(minimum_coverage=0), erase=True)
    for round_ in rounds[4:]:
        with DiskLedger(tmp_path / "other") as ledger:
            ledger.append(without(round_, {TARGET}))
    with LedgerReader(tmp_path / "other") as reader:
        assert reader.chain == chain
        assert reader.final.params.flat.tobytes() == final


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
def test_numbers_about_a_round_do_not_depend_on_interruptions(
    dtype: StorageDtype, tmp_path: Path
) -> None:
    rounds = history(4)
    with DiskLedger.create(tmp_path / "one", initial(), step_dtype=dtype) as ledger:
        recorded(ledger, rounds)
        expected = ledger.rounds()
    DiskLedger.create(tmp_path / "other", initial(), step_dtype=dtype).close()
    for round_ in rounds:
        with DiskLedger(tmp_path / "other") as ledger:
            ledger.append(round_)
    with LedgerReader(tmp_path / "other") as reader:
        assert reader.rounds() == expected


def different_histories() -> dict[str, Callable[[Round], Round]]:
    def change(round_: Round, **changes: Any) -> Round:
        first, *rest = round_.updates
        return replace(round_, updates=(replace(first, **changes), *rest))

    return {
        "the same": lambda round_: round_,
        "another name": lambda round_: change(round_, client="somebody else"),
        "another probability": lambda round_: change(round_, keep_probability=0.9),
        "one dropped": lambda round_: change(round_, kept=False),
        "another use": lambda round_: replace(round_, use="aggregate"),
        "known training": lambda round_: replace(round_, local=LOCAL),
        "another training": lambda round_: replace(
            round_, local=replace(LOCAL, lr=0.2)
        ),
        "another update": lambda round_: change(
            round_, delta=Params(LAYOUT, normal(70))
        ),
    }


def test_the_chain_tells_every_two_histories_apart(tmp_path: Path) -> None:
    chains = {}
    for number, (name, change) in enumerate(different_histories().items()):
        path = tmp_path / str(number)
        with DiskLedger.create(path, initial()) as ledger:
            rounds = history(3)
            ledger.append(change(rounds[0]))
            recorded(ledger, rounds[1:])
            chains[name] = ledger.chain
    dtypes: tuple[StorageDtype, ...] = ("float16", "int8")
    for dtype in dtypes:
        with DiskLedger.create(
            tmp_path / dtype, initial(), update_dtype=dtype
        ) as ledger:
            recorded(ledger, history(3))
            chains[dtype] = ledger.chain
    assert len(set(chains.values())) == len(chains)


def test_memory_and_disk_agree_after_everything(tmp_path: Path) -> None:
    memory = MemoryLedger.create(initial())
    rounds = history(8, drop=True)
    method = FastFedUL(minimum_coverage=0, skew=Scalar(0.2))
    with DiskLedger.create(tmp_path / "ledger", initial()) as disk:
        for ledger in (memory, disk):
            recorded(ledger, rounds[:4])
            forget(ledger, [TARGET], method, erase=False)
            recorded(ledger, [without(r, {TARGET}) for r in rounds[4:]])
            forget(ledger, ["emil"], method, erase=True)
            erase(ledger, [TARGET])
        assert memory.clients() == disk.clients()
        close_to(memory.final.params.flat, disk.final.params.flat)
        for one_model, other_model in zip(models(memory), models(disk), strict=True):
            close_to(one_model.flat, other_model.flat)
        for one_entry, other_entry in zip(memory.rounds(), disk.rounds(), strict=True):
            assert one_entry.num_updates == other_entry.num_updates
            assert one_entry.removed_share == pytest.approx(other_entry.removed_share)
            assert one_entry.step_norm == pytest.approx(other_entry.step_norm, rel=1e-5)
            assert one_entry.previous_product == pytest.approx(
                other_entry.previous_product, rel=1e-4, abs=1e-4
            )
        for index in range(8):
            for one_update, other_update in zip(
                memory.updates_in(index), disk.updates_in(index), strict=True
            ):
                assert (one_update.client, one_update.share, one_update.kept) == (
                    other_update.client,
                    other_update.share,
                    other_update.kept,
                )
                assert (one_update.step_product is None) == (
                    other_update.step_product is None
                )
        for name in CLIENTS:
            own, same = memory.own_difference(name), disk.own_difference(name)
            close_to(own, same)
