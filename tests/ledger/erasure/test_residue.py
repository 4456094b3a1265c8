"""Attacks on the last digits of rewritten steps and parts.

The ledger has the others' updates, so that it shows to the last bit by how much a step
is another one than their mean. This rest must not point to the update that was erased,
nor tell which of its values were 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    Keep,
    Model,
    Params,
    Round,
    Scalar,
    ServerOptimizer,
    forget,
)
from fastfedul.ledger.protocol import vector
from fastfedul.ledger.rounding import without_residue
from fastfedul.records import StorageDtype, VectorRef
from fastfedul.rng import stream
from tests.support.histories import (
    TARGET,
    Maker,
    history,
    recorded,
    steps_of,
    without,
)

Floats = npt.NDArray[np.float64]
SIZE = 12_000
ROUNDS = 6
NAMES = ("a", "b", "c")
LEAVER = "b"
WITHOUT_MINIMUM = FastFedUL(minimum_coverage=0)


def rounds_of(keep: Keep, *, sparse: bool, equal: bool = False) -> list[Round]:
    """Three clients; where sparse, each has other values, and the leaver's are large.

    With a policy that keeps a sample, c's update is never kept.
    """
    found = []
    for index in range(ROUNDS):
        rng = stream(11, "residue", index)
        shares = rng.integers(50, 500, 3) / 1.0
        shares = np.ones(3) / 3 if equal else shares / shares.sum()
        updates = []
        for name, share in zip(NAMES, shares, strict=True):
            values = rng.normal(0, 0.01, SIZE)
            if sparse:
                there = rng.random(SIZE) < (0.05 if name == LEAVER else 0.3)
                values *= there * (10 if name == LEAVER else 1)
            update = Params.of({"w": values.astype(np.float32)})
            kept = keep.policy == "all" or name != "c"
            updates.append(ClientUpdate(name, float(share), update, float(kept), kept))
        found.append(Round(index, tuple(updates)))
    return found


def rests(
    path: Path, rounds: list[Round], method: FastFedUL, **options: Any
) -> list[Floats]:
    """What the others' updates do not explain in each round after an erasure."""
    start = Model(Params.of({"w": stream(12, "start").normal(size=SIZE)}))
    with DiskLedger.create(path, start, **options) as ledger:
        for round_ in rounds:
            ledger.append(round_)
        forget(ledger, [LEAVER], method, erase=True, key=None)
        return [
            vector(ledger, VectorRef(index))
            - np.sum(
                [
                    u.share * vector(ledger, VectorRef(index, u.client)).astype(float)
                    for u in ledger.updates_in(index)
                    if u.kept
                ],
                axis=0,
            )
            for index in range(ROUNDS)
        ]


def mean_square_cosine(found: list[Floats], rounds: list[Round]) -> float:
    squares: list[float] = []
    for rest, round_ in zip(found, rounds, strict=True):
        own = leavers(round_)
        length = np.linalg.norm(rest) * np.linalg.norm(own)
        squares.append(float(rest @ own / length) ** 2 if length else 0.0)
    return float(np.mean(squares))


def leavers(round_: Round) -> Floats:
    [own] = [u.delta for u in round_.updates if u.client == LEAVER]
    assert own is not None
    return own.flat.astype(np.float64)


def area(found: list[Floats], rounds: list[Round]) -> float:
    """How well the size of the rest tells where the leaver's values are not 0."""
    areas = []
    for rest, round_ in zip(found, rounds, strict=True):
        own = leavers(round_) != 0
        _, places, sizes = np.unique(
            np.abs(rest), return_inverse=True, return_counts=True
        )
        # Equal values share the mean of their ranks.
        ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[places]
        count = own.sum()
        above = ranks[own].sum() - count * (count + 1) / 2
        areas.append(above / (count * (SIZE - count)))
    return float(np.mean(areas))


def assert_chance(found: list[Floats], rounds: list[Round], *, sparse: bool) -> None:
    # Squared cosines have the mean 1/d and deviation √2/d; 5 deviations are allowed.
    assert mean_square_cosine(found, rounds) < (1 + 5 * (2 / ROUNDS) ** 0.5) / SIZE
    if sparse:
        # Deviation of an area: about √(1 / 12 / values); 5 of them again.
        values = sum(np.count_nonzero(leavers(round_)) for round_ in rounds)
        assert abs(area(found, rounds) - 0.5) < 5 * (1 / 12 / values) ** 0.5


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("dtype", "optimizer", "damping"),
    [
        ("float32", None, 0.0),
        ("int8", None, 0.0),
        ("float32", "momentum", 0.07),
        ("float32", "adam", 0.0),
    ],
)
def test_the_rest_of_a_rewritten_step_tells_nothing(
    dtype: StorageDtype,
    optimizer: str | None,
    damping: float,
    sparse: bool,
    tmp_path: Path,
) -> None:
    rounds = rounds_of(Keep(), sparse=sparse)
    server = ServerOptimizer.make(optimizer, lr=0.5) if optimizer else None
    options = {"update_dtype": dtype, "optimizer": server}
    method = FastFedUL(skew=Scalar(damping))
    found = rests(tmp_path / "ledger", rounds, method, **options)
    assert_chance(found, rounds, sparse=sparse)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_rest_of_a_step_of_a_sample_tells_nothing(
    sparse: bool, dtype: StorageDtype, tmp_path: Path
) -> None:
    """Even for an attacker who knows the update that was not kept."""
    rounds = rounds_of(Keep.parse("top:2"), sparse=sparse)
    options = {"update_dtype": dtype, "step_dtype": dtype}
    found = rests(tmp_path / "ledger", rounds, WITHOUT_MINIMUM, **options)
    for rest, round_ in zip(found, rounds, strict=True):
        vectors = {u.client: u.delta.flat for u in round_.updates if u.delta}
        share = {u.client: u.share for u in round_.updates}
        if sparse:
            nobody = (vectors["a"] == 0) & (vectors["c"] == 0)
            assert np.count_nonzero(vectors[LEAVER][nobody]) > 200
            assert not rest[nobody].any()
        # `rests` took a's update with the whole weight: it is the only kept one.
        left = share["a"] + share["c"]
        rest -= share["c"] / left * vectors["c"]
    if dtype == "float32" and not sparse:
        assert_chance(found, rounds, sparse=False)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("sums_from", [1, 50])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_rest_of_corrected_sums_and_parts_tells_nothing(
    sparse: bool, equal: bool, sums_from: int, dtype: StorageDtype, tmp_path: Path
) -> None:
    """The others' deviations from a step, by their shares, add up to 0."""
    rounds = rounds_of(Keep(), sparse=sparse, equal=equal)
    start = Model(Params.of({"w": stream(12, "start").normal(size=SIZE)}))
    options: Any = {"history": "sums", "sums_from": sums_from, "update_dtype": dtype}
    found = []
    for round_ in rounds:
        path = tmp_path / str(round_.index)
        with DiskLedger.create(path, start, **options) as ledger:
            ledger.append(replace(round_, index=0))
            forget(ledger, [LEAVER], WITHOUT_MINIMUM, erase=True, key=None)
            [event] = ledger.events()
            assert event.details["sums_given_up"] == 0
            found.append(
                np.sum(
                    [
                        (1 - u.share) * ledger.own_difference(u.client).astype(float)
                        for u in ledger.updates_in(0)
                    ],
                    axis=0,
                )
            )
    assert_chance(found, rounds, sparse=sparse)


def test_a_value_that_only_the_leaver_had_becomes_a_zero() -> None:
    """Also if the step was rounded down and the quotient is not exact."""
    rng = stream(13, "zeros")
    for share in rng.uniform(0.01, 0.99, 50):
        own = rng.normal(0, 0.01, 1000).astype(np.float32)
        step = np.float32(share) * own
        factors = [1 / (1 - share), -float(np.float32(share)) / (1 - share)]
        assert (step * factors[0] + own * factors[1]).any()
        for bits in (6, 9, 16):
            assert not without_residue([step, own], factors, bits).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("policy", ["all", "optimal:9"])
def test_the_steps_are_to_the_last_bit_those_of_a_ledger_without_the_client(
    make: Maker, policy: str, dtype: StorageDtype
) -> None:
    """Where stored updates are rounded, of a ledger that got the rounded ones."""
    keep = Keep.parse(policy, use="store" if policy == "all" else "aggregate")
    erased, never = make(update_dtype=dtype), make(update_dtype=dtype)
    rounds = [keep(round_) for round_ in history(8)]
    recorded(erased, rounds)
    stored = {
        (index, u.client): vector(erased, VectorRef(index, u.client))
        for index in range(8)
        for u in erased.updates_in(index)
    }
    forget(erased, [TARGET], WITHOUT_MINIMUM, erase=True)
    for round_ in rounds:
        left = without(round_, {TARGET})
        shares = {u.client: u.share for u in erased.updates_in(round_.index)}
        there = any(u.client == TARGET for u in round_.updates)
        updates = []
        for u in left.updates:
            assert u.delta is not None
            flat = stored[round_.index, u.client] if there else u.delta.flat
            own = Params(u.delta.layout, flat)
            updates.append(
                ClientUpdate(u.client, shares[u.client], own, u.keep_probability)
            )
        never.append(Round(round_.index, tuple(updates), use=round_.use))
    for mine, yours in zip(steps_of(erased), steps_of(never), strict=True):
        np.testing.assert_array_equal(mine, yours)
