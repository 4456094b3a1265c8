"""Sums per client: forgetting from them is forgetting from every round, where exact."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    MemoryLedger,
    Model,
    Params,
    Round,
    UnlearnRefusedError,
    UnlearnRequest,
    erase,
    forget,
    verify,
)
from fastfedul.history.ledger import Ledger
from fastfedul.params import Flat
from fastfedul.rng import stream
from fastfedul.unlearn.from_sums import terms_of
from fastfedul.unlearn.skew import CoordinateTerms
from fastfedul.unlearn.tracing import leaving

SIZE = 30
NAMES = ("anna", "bela", "carl", "dora", "emil", "fred")
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout
COORDINATE = FastFedUL(skew="coordinate")
SEEDS = st.integers(0, 10_000)
LAW = settings(max_examples=10, deadline=None)


def rounds_of(
    seed: int,
    num_rounds: int = 9,
    *,
    everybody: bool = False,
    constant: bool = False,
    without: str | None = None,
) -> list[Round]:
    """Rounds with a common course; who is left out changes nobody else's update."""
    rng = stream(seed, "sums")
    fixed = rng.uniform(1, 4, len(NAMES))
    rounds = []
    for index in range(num_rounds):
        present = rng.random(len(NAMES)) < (2 if everybody else 0.6)
        present[rng.choice(len(NAMES), 3, replace=False)] = True
        varying = rng.uniform(1, 4, len(NAMES))
        weights = (fixed if constant else varying) * present
        common = rng.normal(size=SIZE)
        deltas = common + rng.normal(0, 1, (len(NAMES), SIZE))
        here = [i for i in range(len(NAMES)) if present[i] and NAMES[i] != without]
        total = sum(weights[i] for i in here)
        updates = tuple(
            ClientUpdate(
                NAMES[i],
                float(weights[i] / total),
                Params(LAYOUT, deltas[i].astype(np.float32)),
            )
            for i in here
        )
        rounds.append(Round(index, updates))
    return rounds


def in_memory(rounds: Sequence[Round]) -> MemoryLedger:
    ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)))
    for round_ in rounds:
        ledger.append(round_)
    return ledger


@contextmanager
def on_disk(rounds: Sequence[Round], **options: object) -> Iterator[DiskLedger]:
    with tempfile.TemporaryDirectory() as folder:
        start = Model(Params.zeros(LAYOUT))
        path = Path(folder, "ledger")
        with DiskLedger.create(path, start, **options) as ledger:  # type: ignore[arg-type]
            for round_ in rounds:
                ledger.append(round_)
            yield ledger
            assert verify(ledger).problems == ()
            assert verify(ledger).num_strays == 0


def terms(ledger: Ledger, *forget: str) -> CoordinateTerms:
    rounds = ledger.rounds()
    return terms_of(ledger, leaving(ledger, frozenset(forget), rounds), rounds)


def distance(found: Flat, expected: Flat) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@LAW
@given(seed=SEEDS, everybody=st.booleans(), constant=st.booleans())
def test_for_one_client_difference_and_spread_are_exact_whatever_its_shares(
    seed: int, everybody: bool, constant: bool
) -> None:
    rounds = rounds_of(seed, everybody=everybody, constant=constant)
    full = in_memory(rounds)
    with on_disk(rounds, history="sums", sums_every=4) as ledger:
        for name in ledger.clients():
            found, expected = terms(ledger, name), terms(full, name)
            assert distance(found.removed, expected.removed) < 1e-5
            np.testing.assert_allclose(
                found.spread, expected.spread, rtol=1e-4, atol=1e-4
            )
            undamped = FastFedUL(skew="coordinate", persistence=0)
            request = frozenset({name})
            one = undamped(UnlearnRequest(ledger, request)).delta.flat
            other = undamped(UnlearnRequest(full, request)).delta.flat
            assert distance(one, other) < 1e-3


@LAW
@given(seed=SEEDS)
def test_with_everybody_in_every_round_and_shares_that_never_vary_all_is_exact(
    seed: int,
) -> None:
    rounds = rounds_of(seed, everybody=True, constant=True)
    full = in_memory(rounds)
    with on_disk(rounds, history="sums") as ledger:
        for name in NAMES:
            request = frozenset({name})
            found = COORDINATE(UnlearnRequest(ledger, request))
            other = COORDINATE(UnlearnRequest(full, request))
            assert distance(found.delta.flat, other.delta.flat) < 1e-4
            assert found.coverage == 1
            assert not any("sums" in text for text in found.warnings)
        pair = frozenset(NAMES[1:3])
        joint, expected = terms(ledger, *pair), terms(full, *pair)
        assert distance(joint.removed, expected.removed) < 1e-4
        assert distance(joint.persistence, expected.persistence) < 1e-3


@LAW
@given(seed=SEEDS, count=st.integers(1, 3), constant=st.booleans())
def test_it_is_never_further_off_than_it_says(
    seed: int, count: int, constant: bool
) -> None:
    rounds = rounds_of(seed, constant=constant)
    full = in_memory(rounds)
    with on_disk(rounds, history="sums") as ledger:
        gone = NAMES[:count]
        try:
            found = terms(ledger, *gone)
        except UnlearnRefusedError:
            assume(False)
        expected = terms(full, *gone)
        said = said_of(found, "what is removed")
        off = np.linalg.norm(found.removed - expected.removed)
        assert off <= (said + 1e-4) * np.linalg.norm(found.removed)
        if count == 1:
            assert said == 0
        ordinary = said_of(found, "what an ordinary client accumulates")
        gap = np.sqrt(found.persistence.sum()) - np.sqrt(expected.persistence.sum())
        assert abs(gap) <= (ordinary + said + 1e-3) * np.sqrt(found.persistence.sum())


def said_of(found: CoordinateTerms, what: str) -> float:
    """Return how far off something may be, rounded up as far as it was rounded."""
    for text in found.notes:
        if what in text:
            return (float(text.rpartition(" ")[2].rstrip("%")) + 0.06) / 100
    return 0.0


@LAW
@given(seed=SEEDS, num_rounds=st.integers(1, 18), every=st.sampled_from([1, 3, 8]))
def test_compacting_gives_the_bits_of_having_trained_with_sums(
    seed: int, num_rounds: int, every: int
) -> None:
    rounds = rounds_of(seed, num_rounds)
    with (
        on_disk(rounds, sums_every=every) as full,
        on_disk(rounds, history="sums", sums_every=every) as sums,
    ):
        for stage in range(2):
            if stage == 0:
                full.compact()
            else:
                last = Round(num_rounds, rounds[0].updates)
                full.append(last)
                sums.append(last)
            assert full.chain == sums.chain
            assert full.scatter().tobytes() == sums.scatter().tobytes()
            for name in sums.clients():
                one, other = full.own_sums(name), sums.own_sums(name)
                assert one.difference.tobytes() == other.difference.tobytes()
                assert one.scatter.tobytes() == other.scatter.tobytes()
            assert full.final.params.flat.tobytes() == sums.final.params.flat.tobytes()


@LAW
@given(seed=SEEDS, late=st.booleans(), damping=st.sampled_from([0.0, 0.3]))
def test_erasing_leaves_the_sums_of_a_ledger_that_never_had_the_client(
    seed: int, late: bool, damping: float
) -> None:
    """With shares that never vary; the scatter of others is known up to a factor."""
    rounds = rounds_of(seed, everybody=True, constant=True)
    never = in_memory(rounds_of(seed, everybody=True, constant=True, without="bela"))
    share = next(u.share for u in rounds[0].updates if u.client == "bela")
    method = FastFedUL(skew="coordinate", spread=damping)
    with on_disk(rounds, history="sums", sums_every=4) as ledger:
        forget(ledger, ["bela"], method, erase=not late)
        if late:
            erase(ledger, ["bela"])
        assert ledger.events()[-1].details["sums_off"] == 0
        assert ledger.clients()["bela"].num_updates == 0
        for name in NAMES:
            if name != "bela":
                found, expected = ledger.own_sums(name), never.own_sums(name)
                assert distance(found.difference, expected.difference) < 1e-4
                left = expected.scatter * np.float32(1 - share)
                assert distance(found.scatter, left) < 0.5
        total = never.scatter() * np.float32(1 - share)
        assert distance(ledger.scatter(), total) < 1e-4
        found_terms, expected_terms = terms(ledger, "dora"), terms(never, "dora")
        assert distance(found_terms.removed, expected_terms.removed) < 1e-4
        assert distance(found_terms.persistence, expected_terms.persistence) < 1e-3


@LAW
@given(seed=SEEDS)
def test_after_an_erasure_sums_are_no_further_off_than_it_says(seed: int) -> None:
    rounds = rounds_of(seed)
    never = in_memory(rounds_of(seed, without="bela"))
    with on_disk(rounds, history="sums") as ledger:
        try:
            forget(ledger, ["bela"], COORDINATE, erase=True)
        except UnlearnRefusedError:
            # Somebody would have been alone in a round.
            assert any(len(round_.updates) == 3 for round_ in rounds)
            assert ledger.clients()["bela"].state == "active"
            return
        [event] = ledger.events()
        off = event.details["sums_off"]
        assert isinstance(off, float)
        for name in ledger.clients():
            if name != "bela":
                found = ledger.own_sums(name).difference
                gap = np.linalg.norm(found - never.own_sums(name).difference)
                assert gap <= (off + 1e-4) * np.linalg.norm(found)


@pytest.mark.parametrize("seed", range(4))
def test_forgotten_before_with_its_sums_kept_or_erased_the_next_answer_is_the_same(
    seed: int,
) -> None:
    rounds = rounds_of(seed, everybody=True, constant=True)
    answers = []
    for erased in (False, True):
        with on_disk(rounds, history="sums") as ledger:
            forget(ledger, ["anna"], COORDINATE, erase=erased)
            answers.append(COORDINATE(UnlearnRequest(ledger, frozenset({"carl"}))))
    full = in_memory(rounds)
    forget(full, ["anna"], COORDINATE)
    expected = COORDINATE(UnlearnRequest(full, frozenset({"carl"}))).delta.flat
    for answer in answers:
        assert distance(answer.delta.flat, expected) < 0.05
    assert distance(answers[0].delta.flat, answers[1].delta.flat) < 0.05
