"""Further measures: all sevens, searched splits, drawn samples, Lemma 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import Keep, UnlearnRequest
from fastfedul.data.attacks.edge_cases import is_copied
from fastfedul.ledger.views import KeptView
from fastfedul.methods.registry import find_method
from fastfedul.runs.config import RunConfig
from fastfedul.runs.preparation import prepare
from paper.cells import Cell, CellStore
from paper.lemma import condition, keeping_by_round
from paper.measures import (
    EDITION,
    DrawnSample,
    split_facts,
    unseen_sevens,
    without_draw,
)
from paper.running import compute, is_missing
from paper.settings import setting_of
from tests.support.by_hand import Updates, ledger_from, params

pytest.importorskip("torch", reason="preparing a run needs the extra torch")

ROUNDS: list[Updates] = [
    {"a": (0.25, (8, 0)), "b": (0.25, (0, 1)), "c": (0.5, (1, 1))},
    {"a": (0.25, (1, 0)), "b": (0.25, (0, 6)), "c": (0.5, (2, 1))},
    {"b": (0.5, (0, 6)), "c": (0.5, (2, 1))},
]


def test_all_sevens_are_several_hundred_and_nobody_has_them(
    data_file: Callable[[str], Path],
) -> None:
    for name in ("mnist.npz", "ardis.npz"):
        data_file(name)
    prepared = prepare(setting_of("standard", "mnist").config("edge-case", 0))
    sevens = unseen_sevens(prepared)
    assert sevens is not None
    assert len(sevens) == 350
    owned = np.concatenate([data.images for data in prepared.clients[:1]])
    assert not is_copied(sevens[::10], owned).any()
    distinct = {picture.tobytes() for picture in sevens}
    assert {p.tobytes() for p in prepared.backdoor.images} <= distinct
    pixel = prepare(setting_of("standard", "mnist").config("pixel", 0))
    assert unseen_sevens(pixel) is None


def test_a_split_by_ratio_tells_the_ratio_it_reached() -> None:
    setting = setting_of("smoke", "digits")
    found = split_facts(prepare(setting.config("pixel", 0, "ratio:4")))
    assert found["class_ratio"] == pytest.approx(4, rel=0.1)
    assert found["concentration"] > 0
    assert split_facts(prepare(setting.config("pixel", 0))) == {}


def test_a_sample_is_drawn_before_the_method_is_called() -> None:
    request = UnlearnRequest(ledger_from(params(0, 0), *ROUNDS), frozenset({"a"}))
    method = find_method("fast-fedul-paper", {"keep": "optimal:2", "keep_seed": 3})
    drawn, sampled = without_draw(method, request)
    assert isinstance(sampled.ledger, DrawnSample)
    again = KeptView(request.ledger, Keep("optimal", 2, seed=3))
    for name in "abc":
        assert sampled.ledger.updates_of(name) == again.updates_of(name)
    found, expected = drawn(sampled), method(request)
    assert np.array_equal(found.params.flat, expected.params.flat)
    whole = find_method("fast-fedul-paper")
    assert without_draw(whole, request) == (whole, request)


def test_keeping_is_told_round_by_round() -> None:
    ledger = ledger_from(params(0, 0), *ROUNDS)
    found = keeping_by_round(ledger, Keep("optimal", 1), ("a",))
    # Shares times norms: 2, 0.25, 0.5 sqrt 2; then 0.25, 1.5, 0.5 sqrt 5.
    first = np.array([2, 0.25, np.sqrt(0.5)])
    second = np.array([0.25, 1.5, np.sqrt(1.25)])
    own = [first[0] / first.sum(), second[0] / second.sum()]
    np.testing.assert_allclose(found["attacker"], own, rtol=1e-6)
    np.testing.assert_allclose(found["honest"], (1 - np.array(own)) / 2, rtol=1e-6)
    assert found["largest"] == [True, False]


@pytest.mark.parametrize("attack", ["pixel", "edge-case"])
def test_the_condition_of_lemma_3_is_tried_on_every_feature(attack: str) -> None:
    prepared = prepare(RunConfig(data="digits", attack=attack))
    found = condition(prepared, prepared.trainer.initial(0))
    assert found["num_features"] == 64 * found["num_pairs"]
    assert 0 <= found["features"] < found["num_features"]
    # A feature that is 0 for both pictures cannot fulfil it.
    assert found["pairs"] == 0
    assert found["xi"] == pytest.approx({"pixel": 20 / 44, "edge-case": 0.2}[attack])


def test_older_results_are_missing_only_if_they_are_wanted_again(
    tmp_path: Path,
) -> None:
    store = CellStore(tmp_path)
    old, new, none = (Cell(RunConfig(seed=seed), "kd") for seed in range(3))
    store.write(old, {"main": 0.5})
    store.write(new, {"main": 0.5, "edition": EDITION})
    assert [is_missing(cell, store) for cell in (old, new, none)] == [
        False,
        False,
        True,
    ]
    wanted = [is_missing(cell, store, again=True) for cell in (old, new, none)]
    assert wanted == [True, False, True]


@pytest.mark.slow
def test_beside_other_programs_earlier_times_are_kept(tmp_path: Path) -> None:
    small = {"data": "digits", "train_size": 200, "rounds": 2, "epochs": 1}
    run = RunConfig.from_options(**small, clients=4, attack="pixel", workers=1)
    fast, again = Cell(run, "fast-fedul-2"), Cell(run, "retrained")
    cells, runs = (fast, again), tmp_path / "runs"
    store = CellStore(tmp_path / "results")
    store.write(fast, {"main": 0.5, "seconds": 123.0, "peak_bytes": 7})

    def missing(*, timed: bool) -> list[Cell]:
        return [c for c in cells if is_missing(c, store, again=True, timed=timed)]

    def computed(*, timed: bool) -> list[dict[str, Any]]:
        todo = missing(timed=timed)
        compute(todo, store, runs, lambda *_: None, keep_runs=not timed, timed=timed)
        return [store.read(cell) or {} for cell in cells]

    first, second = computed(timed=False)
    assert (first["seconds"], first["peak_bytes"]) == (123.0, 7)
    assert first["main_total"] > 0
    assert second["seconds"] is None
    assert missing(timed=False) == []
    assert missing(timed=True) == [*cells]

    newer, newest = computed(timed=True)
    assert missing(timed=True) == []
    assert newer["main_count"] == first["main_count"]
    assert newer["seconds"] < 123
    assert newest["seconds"] > 0
