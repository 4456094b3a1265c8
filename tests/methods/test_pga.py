"""PGA by hand: the reference model, the ball, the steps, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.trainer import TrainingError
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.methods.pga import PGA, Ball, ball_radius, clip, reference_model
from fastfedul.methods.protocol import Needs, measured
from fastfedul.params import Array, Params
from fastfedul.records import ClientUpdate, Model, Round
from fastfedul.rng import stream
from tests.support.by_hand import LAYOUT, Slope, WithoutGradient, flat, model_at
from tests.support.pga import Same, one_round, tiny_request

EQUAL = (("a", 0.25, (6.0, 0.0)), ("b", 0.25, (2.0, 4.0)))
REST = (("c", 0.25, (1.0, 8.0)), ("d", 0.25, (3.0, 0.0)))
FOUR = {"a": 1, "b": 1, "c": 1, "d": 1}
STILL = PGA(post_rounds=0, distance_threshold=None, radius=1000.0)
"""On a level loss the ascent goes nowhere, so that the answer is the reference."""


def test_the_reference_model_is_the_mean_of_the_others() -> None:
    # The mean of 6, 2, 1 and 3 is 3; without 6 it is 2, without 6 and 2 as well.
    assert reference_model(flat(3), [flat(6)], [0.25]) == pytest.approx(2)
    assert reference_model(flat(3), [flat(6), flat(2)], [0.25] * 2) == pytest.approx(2)


def test_the_squared_radius_is_a_third_of_the_mean_squared_distance() -> None:
    # Squared distances 9 and 15 have the mean 12, a third of which is 4.
    models = [flat(4, 1), flat(1, 1 + 15**0.5)]
    assert ball_radius(flat(1, 1), models) == pytest.approx(2)


def test_projection_leaves_the_inside_alone_and_brings_the_outside_to_the_edge() -> (
    None
):
    ball = Ball(flat(1, 0), 5)
    np.testing.assert_array_equal(ball.project(flat(4, 4)), flat(4, 4))
    np.testing.assert_allclose(ball.project(flat(7, 8)), [4, 4])


def test_clipping_shortens_only_what_is_too_long() -> None:
    np.testing.assert_array_equal(clip(flat(3, 4), 5), flat(3, 4))
    np.testing.assert_allclose(clip(flat(6, 8), 5), [3, 4])


def test_steps_of_the_ascent_by_hand() -> None:
    method = PGA(lr=0.1, momentum=0.5, clip_norm=2.5, epochs=1, batch_size=1)
    rng = stream(0, "test")
    given = np.zeros((3, 1, 1, 1), np.float32), np.zeros(3, np.int64)
    # The gradient (3, 4) is clipped to (1.5, 2). Velocities: (1.5, 2), (2.25, 3),
    # (2.625, 3.5); a tenth of them is added each time, and 0.5 is the edge.
    steps = method.ascend(
        Slope((3, 4)), model_at(0, 0), Ball(flat(0, 0), 0.5), *given, rng
    )
    seen = [step.params.flat for step in steps]
    np.testing.assert_allclose(seen, [[0.15, 0.2], [0.3, 0.4], [0.3, 0.4]], rtol=1e-6)


def test_the_usual_ball_reaches_a_part_of_the_way_to_random_models() -> None:
    method = PGA(post_rounds=0, distance_threshold=None, lr=1000)
    request = tiny_request(one_round(*EQUAL, *REST), FOUR, "a", trainer=Slope((0, 1)))
    # From (2, 4) every random model, (100, 0), is 98^2 + 4^2 = 9620 away, squared.
    edge = [2, 4 + (9620 / 3) ** 0.5]
    np.testing.assert_allclose(method(request).params.flat, edge, rtol=1e-6)


def test_the_others_train_in_rounds_that_were_not_there_before() -> None:
    workers = Same((1, 0))
    ledger = one_round(*EQUAL, *REST)
    replace(STILL, post_rounds=2)(tiny_request(ledger, FOUR, "a", workers=workers))
    assert workers.asked == [(1, ("b", "c", "d")), (2, ("b", "c", "d"))]


def test_a_level_loss_gives_the_reference_model() -> None:
    ledger = one_round(*EQUAL, *REST)
    for forget in (["a"], ["a", "b"]):
        result = STILL(tiny_request(ledger, FOUR, *forget))
        rest = [d for name, _, d in EQUAL + REST if name not in forget]
        np.testing.assert_allclose(result.params.flat, np.mean(rest, axis=0), rtol=1e-6)
        assert result.clients == tuple(forget)


def test_shares_follow_the_weighting_of_the_federation() -> None:
    ledger = one_round(("a", 0.6, (6, 0)), ("b", 0.2, (2, 4)), ("c", 0.2, (1, 8)))
    sizes = {"a": 3, "b": 1, "c": 1}
    result = STILL(tiny_request(ledger, sizes, "a", weighting="size"))
    np.testing.assert_allclose(result.params.flat, [1.5, 6], rtol=1e-5)


def test_the_last_local_model_is_that_of_the_last_round_of_the_client() -> None:
    ledger = one_round(*EQUAL, *REST)
    after = Params(LAYOUT, flat(1, 1))
    ledger.append(Round(1, (ClientUpdate("a", 1.0, after),)))
    ledger.append(Round(2, (ClientUpdate("b", 1.0, after),)))
    # Before round 1 the model is (3, 3), so that a's last one is (4, 4); now it is
    # (5, 5), and (4 (5, 5) - (4, 4)) / 3 = (16, 16) / 3.
    result = STILL(tiny_request(ledger, FOUR, "a"))
    np.testing.assert_allclose(result.params.flat, [16 / 3, 16 / 3], rtol=1e-6)


def test_who_left_before_has_no_share() -> None:
    ledger = one_round(*EQUAL, *REST)
    ledger.commit_forgetting(["d"], flat(0, 1), {})
    # Now three are there and the model is (3, 4): (3 (3, 4) - (6, 0)) / 2.
    result = STILL(tiny_request(ledger, FOUR, "a"))
    np.testing.assert_allclose(result.params.flat, [1.5, 6], rtol=1e-6)


def test_a_client_whose_update_was_not_kept_trains_once_more() -> None:
    ledger = one_round(*EQUAL, *REST, kept=False)
    request = tiny_request(ledger, FOUR, "a", scales={"a": 3.0})
    result = measured(STILL, request)
    # It sends (1, 0) times 3 from (3, 3): (4 (3, 3) - (6, 3)) / 3 = (2, 3).
    np.testing.assert_allclose(result.params.flat, [2, 3], rtol=1e-6)
    assert result.client_calls == 2
    assert "trained once more" in result.warnings[0]


def test_an_update_that_never_entered_does_not_count_as_the_last() -> None:
    ledger = one_round(*EQUAL, *REST)
    dropped = ClientUpdate("a", 0.5, Params(LAYOUT, flat(9, 9)), 0.5, kept=False)
    other = ClientUpdate("b", 0.5, Params(LAYOUT, flat(0, 0)), 0.5)
    ledger.append(Round(1, (dropped, other), use="aggregate"))
    result = measured(STILL, tiny_request(ledger, FOUR, "a"))
    np.testing.assert_allclose(result.params.flat, [2, 4], rtol=1e-6)
    assert result.client_calls == 1


def test_post_training_averages_the_buffers_of_the_others() -> None:
    def buffers(value: float) -> dict[str, Array]:
        return {"mean": np.array([value], np.float32)}

    ledger = MemoryLedger.create(Model(Params(LAYOUT, flat(0, 0)), buffers(1)))
    updates = tuple(ClientUpdate(n, s, Params(LAYOUT, flat(*d))) for n, s, d in EQUAL)
    updates = tuple(replace(update, share=0.5) for update in updates)
    ledger.append(Round(0, updates, None, buffers(2)))
    request = tiny_request(
        ledger, {"a": 1, "b": 1}, "a", workers=Same((1, 0), buffers(5))
    )
    trained = replace(STILL, post_rounds=2)(request)
    assert trained.buffers == buffers(5)
    np.testing.assert_allclose(trained.params.flat, [4, 4])  # (2, 4) and two updates.
    # The round does not say whose buffers were averaged.
    assert measured(STILL, request).buffers is None


def test_an_ascent_that_runs_away_is_an_error() -> None:
    request = tiny_request(
        one_round(*EQUAL, *REST), FOUR, "a", trainer=Slope((np.nan, 0))
    )
    with pytest.raises(TrainingError, match="ran away"):
        STILL(request)


def test_it_needs_the_target_and_whoever_trains_afterwards() -> None:
    assert PGA().needs == Needs(target=True, others=True)
    assert PGA(post_rounds=0).needs == Needs(target=True)


def test_a_trainer_without_gradients_is_refused() -> None:
    request = tiny_request(
        one_round(*EQUAL, *REST), FOUR, "a", trainer=WithoutGradient()
    )
    with pytest.raises(UnlearnRefusedError, match="WithoutGradient gives none"):
        PGA()(request)


def test_another_aggregation_than_the_mean_is_refused() -> None:
    ledger = MemoryLedger.create(model_at(0, 0), aggregation="median")
    with pytest.raises(UnlearnRefusedError, match="'median'"):
        STILL(tiny_request(ledger, FOUR, "a"))


@pytest.mark.parametrize("post_rounds", [0, 1])
def test_somebody_has_to_stay(post_rounds: int) -> None:
    request = tiny_request(one_round(*EQUAL, *REST), FOUR, *FOUR)
    with pytest.raises(UnlearnRefusedError, match="nobody stays"):
        PGA(post_rounds=post_rounds)(request)


def test_who_is_not_in_the_model_cannot_be_taken_out() -> None:
    ledger = one_round(*EQUAL, *REST)
    request = tiny_request(ledger, {**FOUR, "e": 1}, "a", "e")
    with pytest.raises(UnlearnRefusedError, match="nothing of client 'e'"):
        STILL(request)
    assert request.federation is not None
    assert request.federation.clients.calls == 0
    ledger.commit_forgetting(["a"], flat(0, 0), {})
    with pytest.raises(InvalidInputError, match="forgotten already"):
        STILL(tiny_request(ledger, FOUR, "a"))
    with pytest.raises(InvalidInputError, match="not in this federation"):
        STILL(tiny_request(ledger, FOUR, "stranger"))


def test_a_floor_needs_an_example_to_hold_back_and_one_to_climb_on() -> None:
    ledger = one_round(*EQUAL, *REST)
    method = replace(STILL, accuracy_floor=0.5)
    with pytest.raises(UnlearnRefusedError, match="too few examples"):
        method(tiny_request(ledger, FOUR, "a"))
    method(tiny_request(ledger, {**FOUR, "a": 2}, "a"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 0}, "learning rate"),
        ({"momentum": 1}, "momentum"),
        ({"batch_size": 0}, "batch size"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 1.5}, "epochs"),
        ({"clip_norm": 0}, "clip_norm"),
        ({"radius": float("nan")}, "radius"),
        ({"distance_threshold": -1}, "distance_threshold"),
        ({"accuracy_floor": 1.1}, "accuracy_floor"),
        ({"post_rounds": -1}, "post_rounds"),
        ({"post_epochs": 0}, "epochs"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        PGA(**settings)
    assert "choose" in str(caught.value)
