"""Krum, Multi-Krum and Bulyan: by hand, in blocks, and the names they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    InvalidInputError,
    MemoryLedger,
    Model,
    Params,
    Round,
)
from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.aggregation import resolve, rows_reader
from fastfedul.federation.rounds import buffer_weights
from fastfedul.forgetting.service import forget
from fastfedul.runs.config import RunConfig

RULES = ["krum:1", "krum:0", "multi-krum:2:3", "multi-krum:0:5", "bulyan:1", "bulyan:0"]


def rows_of(count: int, seed: int, size: int = 40) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(count)]


def round_of(*vectors: Any) -> Round:
    shares = np.arange(1, len(vectors) + 1) / sum(range(1, len(vectors) + 1))
    return Round(
        0,
        tuple(
            ClientUpdate(
                f"c{i}", float(share), Params.of({"w": np.asarray(vector, np.float32)})
            )
            for i, (share, vector) in enumerate(zip(shares, vectors, strict=True))
        ),
    )


def test_krum_by_hand() -> None:
    values = [[0.0, 0.0], [1.0, 0.0], [0.0, 3.0], [50.0, 50.0]]
    rule, shares = resolve("krum:1", {}), np.full(4, 0.25)
    rows = list(np.array(values, np.float32))
    # One neighbour counts. The first two have the same score, so the first is chosen.
    np.testing.assert_array_equal(rule.step(rows_reader(rows), 2, shares), [0, 0])
    two = resolve("multi-krum:1:2", {}).chosen(rows_reader(rows), 2, shares)
    assert two.weights(4) == [0.5, 0.5, 0, 0]


def test_a_rule_gives_the_same_in_blocks_as_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, shares = rows_of(9, 3, size=101), np.full(9, 1 / 9)
    for name in (*RULES, "median"):
        rule = resolve(name, {})
        whole = rule.step(rows_reader(rows), 101, shares)
        monkeypatch.setattr("fastfedul.federation.aggregation._BLOCK_VALUES", 10)
        np.testing.assert_array_equal(rule.step(rows_reader(rows), 101, shares), whole)
        monkeypatch.undo()


def test_buffers_are_those_of_the_chosen_clients() -> None:
    round_ = round_of([0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [9.0, 9.0])
    found = buffer_weights(round_, resolve("multi-krum:1:3", {}))
    np.testing.assert_allclose(found, [1 / 6, 2 / 6, 3 / 6, 0])
    np.testing.assert_allclose(buffer_weights(round_, None), [0.1, 0.2, 0.3, 0.4])
    median = buffer_weights(round_, resolve("median", {}))
    np.testing.assert_allclose(median, [0.1, 0.2, 0.3, 0.4])


def test_a_round_with_too_few_updates_is_refused() -> None:
    ledger = MemoryLedger.create(
        Model(Params.of({"w": np.zeros(2, np.float32)})), aggregation="bulyan:1"
    )
    few = rows_of(6, 0, size=2)
    with pytest.raises(InvalidInputError, match="needs 7 updates, and round 0 has 6"):
        ledger.append(round_of(*few))
    assert ledger.num_rounds == 0
    ledger.append(round_of(*rows_of(7, 0, size=2)))
    with pytest.raises(UnlearnRefusedError, match="round 0 has 6 without the clients"):
        forget(ledger, ["c0"])
    assert ledger.clients()["c0"].state == "active"


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("krum:0", 3),
        ("krum:1", 5),
        ("krum:99", 201),
        ("multi-krum:1:3", 5),
        ("multi-krum:1:9", 10),
        ("bulyan:1", 7),
    ],
)
def test_training_needs_as_many_clients_as_the_rule_promises(
    name: str, least: int
) -> None:
    config = RunConfig.from_options(aggregation=name, clients=least)
    config.check_clients([f"client-{i}" for i in range(least)])
    with pytest.raises(InvalidInputError, match=f"needs {least} clients a round"):
        config.check_clients([f"client-{i}" for i in range(least - 1)])


def test_krum_is_replayed_although_too_few_are_left_for_its_promise() -> None:
    start = Model(Params.of({"w": np.zeros(2, np.float32)}))
    ledger = MemoryLedger.create(start, aggregation="krum:1")
    ledger.append(round_of(*rows_of(5, 0, size=2)))
    forget(ledger, ["c0"])
    assert ledger.clients()["c0"].state != "active"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("krum", "needs a whole number after a colon; write krum:1"),
        ("krum:-1", "write krum:1"),
        ("krum:1:2", "write krum:1"),
        ("krum:١", "write krum:1"),
        ("multi-krum:1", "needs whole numbers after a colon; write multi-krum:1:3"),
        ("multi-krum:1:0", "chooses no update; write multi-krum:1:1 or more"),
        ("bulyan:x", "write bulyan:1"),
        ("median:1", "is unknown; choose mean"),
    ],
)
def test_a_name_that_cannot_be_read_says_how_to_write_it(name: str, match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        resolve(name, {})
