"""Hundreds of hostile replies in a real simulation: the honest clients go on."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fastfedul import LedgerReader
from fastfedul import verify as verify_ledger
from tests.support.flower import chain_by_hand

if TYPE_CHECKING:
    from tests.integrations.conftest import Scenarios

pytestmark = pytest.mark.slow

APP = import_module("tests.integrations.hostile_app")
REPLIES = import_module("benchmarks.hostile_replies")
HONEST = [f"client-{number}" for number in range(APP.NUM_HONEST)]
HOSTILE = [f"client-{n}" for n in range(APP.NUM_HONEST, APP.NUM_CLIENTS)]


def participants(ledger: LedgerReader) -> list[set[str]]:
    indices = range(ledger.num_rounds)
    return [{update.client for update in ledger.updates_in(i)} for i in indices]


def test_the_generator_makes_more_than_two_hundred_different_replies() -> None:
    train, evaluate = REPLIES.train_replies(), REPLIES.evaluate_replies()
    names = {one.name for one in (*train, *evaluate)}
    assert len(names) == len(train) + len(evaluate)
    assert len(names) > 200
    assert max(len(train), len(evaluate)) <= APP.NUM_ROUNDS * APP.NUM_HOSTILE


def test_the_ledger_is_that_of_the_honest_clients_alone(
    hostile_scenarios: Scenarios, tmp_path: Path
) -> None:
    chain = chain_by_hand(
        tmp_path / "ledger",
        APP.NUM_ROUNDS,
        APP.initial_arrays(),
        APP.honestly_trained,
        APP.SIZES,
    )
    with LedgerReader(hostile_scenarios.ledger("hostile")) as ledger:
        assert ledger.chain == chain
        assert participants(ledger) == [set(HONEST)] * APP.NUM_ROUNDS
        assert not verify_ledger(ledger).problems


def test_every_hostile_reply_is_left_out_with_one_line(
    hostile_scenarios: Scenarios,
) -> None:
    failures = hostile_scenarios.failures("hostile")
    found = {(f["round"], f["task"], f["client"]) for f in failures}
    expected = {
        (number, task, client)
        for number in range(1, APP.NUM_ROUNDS + 1)
        for task in ("train", "evaluate")
        for client in HOSTILE
    }
    assert found == expected
    for failure in failures:
        assert failure["outcome"] == "left out"
        assert failure["reason"].isprintable()
        assert 0 < len(failure["reason"]) <= 200


def test_metrics_are_those_of_the_honest_clients(hostile_scenarios: Scenarios) -> None:
    sizes = np.array(APP.SIZES)
    score = float((sizes * np.arange(APP.NUM_HONEST) / 10).sum() / sizes.sum())
    found = hostile_scenarios.found["hostile"]
    for task in ("trained", "evaluated"):
        assert found[task] == pytest.approx([score] * APP.NUM_ROUNDS)


def test_a_node_that_lies_about_itself_is_not_admitted(
    hostile_scenarios: Scenarios,
) -> None:
    log = (hostile_scenarios.folder / "log.txt").read_text("utf-8")
    assert "it has no partition-id in its node config" in log
    assert "is called 'client-19' too" in log
    with LedgerReader(hostile_scenarios.ledger("greedy")) as ledger:
        assert set(ledger.clients()) == {*HONEST, *HOSTILE}


def test_a_hostile_majority_ends_the_run_after_three_rounds_and_it_says_why(
    hostile_scenarios: Scenarios,
) -> None:
    error = hostile_scenarios.found["majority"]["error"]
    assert error.startswith(
        "RoundDiscardedError: round 1 is discarded: the replies of 11 of 20 clients "
        "cannot be used, more than half; 'client-10': "
    )
    assert error.endswith("because this was discarded round 3 in a row")
    with LedgerReader(hostile_scenarios.ledger("majority")) as ledger:
        assert ledger.num_rounds == 0
    assert len(hostile_scenarios.failures("majority")) == 3 * 11


def test_a_discarded_round_is_drawn_again(hostile_scenarios: Scenarios) -> None:
    assert len(hostile_scenarios.found["once"]["trained"]) == 2
    with LedgerReader(hostile_scenarios.ledger("once")) as ledger:
        assert participants(ledger) == [{*HONEST, *HOSTILE}] * 2
    failures = hostile_scenarios.failures("once")
    assert [f["round"] for f in failures] == [1] * 11
    assert "drawing it again" in (hostile_scenarios.folder / "log.txt").read_text()


def test_a_giant_number_of_examples_is_capped_and_noted(
    hostile_scenarios: Scenarios,
) -> None:
    sizes = [*APP.SIZES, *APP.SIZES[:-1]]
    cap = 100 * sorted([*sizes, APP.GREEDY])[9]
    with LedgerReader(hostile_scenarios.ledger("greedy")) as ledger:
        shares = {u.client: u.share for u in ledger.updates_in(0)}
    assert shares["client-19"] == pytest.approx(cap / (cap + sum(sizes)))
    capped = hostile_scenarios.failures("greedy")
    assert [(f["client"], f["task"], f["outcome"]) for f in capped] == [
        ("client-19", "train", "capped"),
        ("client-19", "evaluate", "capped"),
    ]
    assert capped[0]["reason"] == f"its weight 1e+10 counts as {cap:g}"
