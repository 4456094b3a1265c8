"""Models without clients, and the search for culprits on them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fastfedul.errors import InvalidInputError
from fastfedul.investigate.contribution import contributions_to
from fastfedul.investigate.culprits import Search, Step, look, search, wanted_scores
from fastfedul.investigate.held_ledger import HeldLedger
from fastfedul.investigate.inputs import evidence_of
from fastfedul.investigate.leave_one_out import LeaveOut
from fastfedul.investigate.odds import Evidence, Odds, log_odds, p_values
from fastfedul.investigate.trace import trace_answers
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.skews import NoSkew
from fastfedul.methods.protocol import UnlearnRequest
from fastfedul.params import Params
from fastfedul.records import ClientUpdate, Model, Round
from fastfedul.runs.given import Given
from fastfedul.testing import small_federation
from tests.support.linear_trainer import Linear


def test_what_a_client_added_is_what_forgetting_takes_if_nobody_reacts() -> None:
    ledger, _ = small_federation()
    ann = frozenset({"ann"})
    wanted = FastFedUL(skew=NoSkew())(UnlearnRequest(ledger, ann)).delta
    assert wanted is not None
    found = LeaveOut.of(HeldLedger(ledger)).added("ann")
    np.testing.assert_allclose(found, wanted.flat, rtol=1e-4, atol=1e-6)


def test_a_held_ledger_gives_the_same_model_and_notices_changes() -> None:
    ledger, _ = small_federation()
    held = HeldLedger(ledger)
    leave = LeaveOut.of(held)
    wanted = FastFedUL()(UnlearnRequest(ledger, frozenset({"bob"}))).params.flat
    found = leave.exact(["bob"]).params.flat
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert not held.changed
    ledger.commit_forgetting(["cyd"], np.zeros_like(wanted), {})
    assert held.changed


def test_one_client_cannot_be_compared() -> None:
    ledger, _ = small_federation()
    size = ledger.settings.layout.size
    ledger.commit_forgetting(["ann", "bob", "cyd"], np.zeros(size, np.float32), {})
    with pytest.raises(InvalidInputError, match="two are needed"):
        LeaveOut.of(HeldLedger(ledger))


def test_log_odds_tell_sure_answers_apart() -> None:
    found = log_odds(np.array([[20.0, 0.0], [30.0, 0.0]]), np.array([0, 0]))
    np.testing.assert_allclose(found, [20, 30])


def _evidence(num_bad: int, num_clean: int) -> Evidence:
    none = np.zeros((0, 1), np.float32)
    return Evidence(
        none,
        np.zeros(num_bad, np.int64),
        none,
        np.zeros(num_clean, np.int64),
        lambda model, inputs: np.zeros((len(inputs), 2), np.float32),
    )


def test_p_value_is_small_for_an_excess_and_large_for_none() -> None:
    rng = np.random.default_rng(0)
    clean = rng.normal(size=60)
    drops = {
        "guilty": Odds(rng.normal(8, 1, 5), clean),
        "honest": Odds(rng.normal(size=5), clean),
    }
    found = p_values(_evidence(5, 60), drops, rng)
    assert found["guilty"] == pytest.approx(0.001)
    assert found["honest"] is not None
    assert found["honest"] > 0.05
    assert p_values(_evidence(5, 0), drops, rng) == {"guilty": None, "honest": None}


def _poisoned(attackers: int) -> tuple[MemoryLedger, Evidence]:
    """Return a linear federation of ten, and backdoor inputs with right answers.

    Values 0 to 2 of a row tell its class. Attackers teach that value 3 means class 0.
    """
    rng = np.random.default_rng(4)
    ledger = MemoryLedger.create(Model(Params.of({"w": np.zeros((4, 3))})))
    for index in range(8):
        updates = []
        for number in range(10):
            own = rng.normal(size=(4, 3))
            own[:3] += np.eye(3) - 1 / 3
            if number < attackers:
                own[3] += np.array([2, -1, -1]) * 24 / (1 + attackers)
            flat = {"w": own / 2}
            updates.append(ClientUpdate(f"c{number}", 0.1, Params.of(flat)))
        ledger.append(Round(index, tuple(updates)))
    clean = np.repeat(np.eye(4)[:3], 20, axis=0) + rng.normal(size=(60, 4)) / 20
    bad = np.repeat([[0, 1, 0, 2], [0, 0, 1, 2]], 10, axis=0)
    bad = bad + rng.normal(size=(20, 4)) / 20
    predict = Linear(4, 3).predict
    return ledger, Evidence(
        bad, np.zeros(20, np.int64), clean[:20], np.zeros(20, np.int64), predict
    )


def _suspects(
    ledger: MemoryLedger, evidence: Evidence, chance: float | None = 0.01
) -> list[str]:
    leave = LeaveOut.of(HeldLedger(ledger))
    drops = look(leave, evidence, (), lambda *_: None)
    chances = dict.fromkeys(drops, chance)
    rng = np.random.default_rng(0)
    found = search(leave, evidence, drops, chances, rng, lambda *_: None)
    names = [step.client for step in found.steps]
    assert (found.fall is None) == (not names)
    return sorted(names)


@pytest.mark.parametrize("attackers", [0, 1, 4])
def test_attackers_are_suspects_and_nobody_else(attackers: int) -> None:
    ledger, evidence = _poisoned(attackers)
    assert _suspects(ledger, evidence) == [f"c{i}" for i in range(attackers)]
    assert _suspects(ledger, evidence, 0.06) == []
    right = replace(evidence, bad=evidence.clean[:20])
    assert _suspects(ledger, right) == []


def test_suspects_are_accused_if_forgetting_them_undoes_the_answers() -> None:
    steps = (Step("a", 1, 9.0), Step("b", 2, 2.0))
    assert Search(steps, 4.0, 3.3, {}).culprits == ("a", "b")
    assert Search(steps, 3.2, 3.3, {}).culprits == ()
    assert Search(steps, None, 3.3, {}).culprits == ()


def test_one_client_alone_is_accused_if_it_does_more_than_the_suspects() -> None:
    steps = (Step("a", 1, 9.0), Step("b", 2, 2.0))
    assert Search((), None, 3.3, {"a": 3.5}).culprits == ("a",)
    assert Search(steps, 3.2, 3.3, {"c": 3.5, "a": 3.4}).culprits == ("c", "a")
    assert Search(steps, 6.0, 3.3, {"a": 6.2}).culprits == ("a",)
    assert Search(steps, 6.0, 3.3, {"a": 5.9}).culprits == ("a", "b")


def test_an_attacker_that_is_no_suspect_is_found_by_forgetting_it() -> None:
    ledger, evidence = _poisoned(1)
    leave = LeaveOut.of(HeldLedger(ledger))
    drops = look(leave, evidence, (), lambda *_: None)
    told: list[tuple[str, int, int]] = []

    def say(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    def found(evidence: Evidence) -> Search:
        chances = dict.fromkeys(drops, 0.06)
        rng = np.random.default_rng(0)
        return search(leave, evidence, drops, chances, rng, say)

    by_forgetting = found(evidence)
    assert by_forgetting.steps == ()
    assert by_forgetting.culprits == ("c0",)
    assert by_forgetting.alone["c0"] >= by_forgetting.wanted
    assert told[-1] == ("forgetting the first one by one", 5, 5)
    # Without right answers nobody knows how far honest clients reach.
    unknown = replace(
        evidence, clean=evidence.clean[:0], clean_answers=evidence.clean_answers[:0]
    )
    assert found(unknown).alone == {}


def test_without_right_answers_one_client_is_accused_at_most() -> None:
    ledger, evidence = _poisoned(4)
    alone = replace(
        evidence, clean=evidence.clean[:0], clean_answers=evidence.clean_answers[:0]
    )
    assert _suspects(ledger, alone, None) in (["c0"], ["c1"], ["c2"], ["c3"])


def test_a_client_that_works_against_a_class_gains_no_excess() -> None:
    evidence = _evidence(2, 4)
    bad = np.array([1.0, 3.0])
    assert evidence.excess(Odds(bad, np.full(4, -5.0))).tolist() == [1, 3]
    assert evidence.excess(Odds(bad, np.full(4, 2.0))).tolist() == [-1, 1]
    assert evidence.error(Odds(bad, np.array([1.0, 1, 3, 3]))) == pytest.approx(
        0.5**0.5
    )
    assert wanted_scores(1, 20) > wanted_scores(10, 20) > wanted_scores(10, 50)


def test_unwanted_answers_must_be_answers_that_the_model_gives() -> None:
    ledger, federation = small_federation()
    data = federation.clients.data["ann"]
    says = federation.trainer.predict(
        ledger.final, data.images.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    ).argmax(axis=1)
    wrong = Given(data.images, (says + 1) % 3, federation.trainer, "bad.npz")
    with pytest.raises(InvalidInputError, match="`unwanted` out"):
        evidence_of(ledger, wrong, None)


def test_trace_and_contribution_rank_every_client() -> None:
    ledger, federation = small_federation()
    data = federation.clients.data["ann"]
    given = Given(data.images, data.labels, federation.trainer, "ann's examples")
    found = trace_answers(ledger, Given(*_unlabelled(given)), given)
    names = {"ann", "bob", "cyd", "dee"}
    assert {own.client for own in found.clients} == names
    scores = [own.score for own in found.clients]
    assert scores == sorted(scores, reverse=True)
    assert all(own.trajectory is not None for own in found.clients)
    assert not any("trajectory" in note for note in found.notes)
    plain = SimpleNamespace(predict=federation.trainer.predict)
    bad = Given(data.images, None, plain, "ann's examples")
    without = trace_answers(ledger, bad, given)
    assert all(own.trajectory is None for own in without.clients)
    assert any("gives no gradients" in note for note in without.notes)
    worth = contributions_to(ledger, given, shapley=3)
    for shown in (found._repr_html_(), worth._repr_html_()):
        assert all(f"<td>{name}</td>" in shown for name in names)
        assert shown.count("<tr>") == 5
    assert {own.client for own in worth.clients} == names
    bobless = FastFedUL()(UnlearnRequest(ledger, frozenset({"bob"})))
    assert worth.num_coalitions > 2
    [bob] = [own for own in worth.clients if own.client == "bob"]
    inputs = data.images.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    predict = federation.trainer.predict
    right = [
        np.mean(predict(model, inputs).argmax(axis=1) == data.labels)
        for model in (ledger.final, bobless.model(ledger.final))
    ]
    assert bob.accuracy == pytest.approx(right[0] - right[1])


def _unlabelled(given: Given) -> tuple:  # type: ignore[type-arg]
    return given.examples, None, given.trainer, given.source
