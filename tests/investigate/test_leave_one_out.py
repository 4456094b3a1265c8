"""Models without clients: held in memory, on shared bases, and exact."""

from __future__ import annotations

import numpy as np
import pytest

from fastfedul.errors import InvalidInputError
from fastfedul.investigate.contribution import contributions_to
from fastfedul.investigate.culprits import Step, culprits, wanted_excess
from fastfedul.investigate.held_ledger import HeldLedger
from fastfedul.investigate.inputs import evidence_of
from fastfedul.investigate.leave_one_out import LeaveOut
from fastfedul.investigate.odds import Evidence, Odds, log_odds, p_values
from fastfedul.investigate.trace import trace_answers
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.shared_basis import SharedBasis
from fastfedul.methods.protocol import UnlearnRequest
from fastfedul.runs.given import Given
from fastfedul.testing import small_federation


def test_a_basis_without_the_client_gives_the_answer_of_forgetting() -> None:
    ledger, _ = small_federation()
    gone = frozenset({"ann"})
    wanted = FastFedUL()(UnlearnRequest(ledger, gone)).delta
    assert wanted is not None
    found = SharedBasis.of(ledger, gone).difference(gone)
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


def _path(*excesses: float) -> list[Step]:
    none = Odds(np.zeros(0), np.zeros(0))
    return [Step(f"c{i}", none, e, 0.001) for i, e in enumerate(excesses)]


def test_culprits_are_one_a_group_or_nobody() -> None:
    one = _evidence(1, 60)
    assert culprits(_path(wanted_excess(1) - 0.1), one) == ()
    assert culprits(_path(15.0, 17.0), one) == ("c0",)
    assert culprits(_path(2.4, 3.9, 7.1, 19.1), one) == ("c0", "c1", "c2", "c3")
    ten = _path(4.5, 8.7, 13.3, 61.0, 64.9)
    assert culprits(ten, _evidence(10, 60)) == ("c0", "c1", "c2", "c3")
    likely = [Step("c0", Odds(np.zeros(0), np.zeros(0)), 15.0, 0.4)]
    assert culprits(likely, one) == ()


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
    worth = contributions_to(ledger, given, shapley=3)
    assert {own.client for own in worth.clients} == names
    without = FastFedUL()(UnlearnRequest(ledger, frozenset({"bob"})))
    assert worth.num_coalitions > 2
    [bob] = [own for own in worth.clients if own.client == "bob"]
    inputs = data.images.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    predict = federation.trainer.predict
    right = [
        np.mean(predict(model, inputs).argmax(axis=1) == data.labels)
        for model in (ledger.final, without.model(ledger.final))
    ]
    assert bob.accuracy == pytest.approx(right[0] - right[1])


def _unlabelled(given: Given) -> tuple:  # type: ignore[type-arg]
    return given.examples, None, given.trainer, given.source
