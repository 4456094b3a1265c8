"""PGA: the reference model by hand, an ascent that stays in its ball, post-training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from fastfedul.data.dataset import ClientData, to_model_input
from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Clients, Federation
from fastfedul.federation.local import LocalResult
from fastfedul.federation.rounds import Schedule, Weighting
from fastfedul.federation.trainer import (
    Inputs,
    Labels,
    LocalTraining,
    Logits,
    TrainingError,
)
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.protocol import params_at, vector
from fastfedul.ledger.views import LedgerView
from fastfedul.methods.pga import PGA, Ball, ball_radius, clip, reference_model
from fastfedul.methods.protocol import Needs, UnlearnRequest, measured
from fastfedul.params import Array, Flat, Params, norm
from fastfedul.records import ClientUpdate, Model, Round, UpdateEntry, VectorRef
from fastfedul.rng import stream
from fastfedul.runs.config import RunConfig
from fastfedul.runs.preparation import federation_for, prepare, rounds_of, start_workers

if TYPE_CHECKING:
    from tests.methods.conftest import SmallRun

TARGET = "client-0"
LAYOUT = Params.of({"w": np.zeros(2, np.float32)}).layout
NORMALISED = """
from torch import nn


def build(image_shape, num_classes):
    height, width, channels = image_shape
    size = height * width * channels
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size), nn.Linear(size, 10))
"""


def flat(*values: float) -> Flat:
    return np.array(values, np.float32)


def model_at(*values: float) -> Model:
    return Model(Params(LAYOUT, flat(*values)))


@dataclass(frozen=True)
class Slope:
    """A trainer whose loss rises the same way everywhere."""

    rise: tuple[float, float] = (0.0, 0.0)

    def initial(self, seed: int) -> Model:
        return model_at(100, 0)

    def train(
        self,
        model: Model,
        inputs: Inputs,
        labels: Labels,
        rng: np.random.Generator,
        local: LocalTraining | None = None,
    ) -> Model:
        return model

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        return np.zeros((len(inputs), 2), np.float32)

    def gradient(
        self, model: Model, inputs: Inputs, targets: Array, temperature: float = 1.0
    ) -> tuple[float, Flat]:
        return 0.0, flat(*self.rise)


@dataclass(frozen=True)
class Same:
    """Workers whose clients always send the same update and the same buffers."""

    delta: tuple[float, float]
    buffers: dict[str, Array] = field(default_factory=dict)
    asked: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def initial(self, seed: int) -> Model:
        return model_at(0, 0)

    def train(
        self,
        model: Model,
        index: int,
        clients: Sequence[str],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        self.asked.append((index, tuple(clients)))
        update = Params(LAYOUT, flat(*self.delta))
        return [LocalResult(update, self.buffers) for _ in clients]

    def predict(self, model: Model, name: str) -> Logits:
        raise AssertionError("nothing is scored")


def client(name: str, count: int) -> ClientData:
    images = np.zeros((count, 1, 1, 1), np.uint8)
    return ClientData(name, images, np.zeros(count, np.int64))


def tiny_request(
    ledger: Any,
    sizes: dict[str, int],
    *forget: str,
    weighting: Weighting = "equal",
    trainer: Any = None,
    workers: Same | None = None,
    scales: dict[str, float] | None = None,
) -> UnlearnRequest:
    data = {name: client(name, count) for name, count in sizes.items()}
    federation = Federation(
        clients=Clients(workers or Same((1, 0)), data),
        trainer=trainer or Slope(),
        schedule=Schedule(seed=0, weighting=weighting),
        local=LocalTraining(),
        scales=scales or {},
        server=np.zeros((0, 1, 1, 1), np.float32),
        seed=0,
    )
    return UnlearnRequest(ledger, frozenset(forget), federation)


def one_round(
    *updates: tuple[str, float, tuple[float, float]], kept: bool = True
) -> MemoryLedger:
    """Return a ledger whose one round starts from the origin."""
    ledger = MemoryLedger.create(model_at(0, 0))
    entries = [
        ClientUpdate(name, share, Params(LAYOUT, flat(*delta)), kept=kept)
        for name, share, delta in updates
    ]
    ledger.append(Round(0, tuple(entries)))
    return ledger


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
    at_once = STILL(request)
    assert at_once.buffers == buffers(2)
    assert "buffers" in at_once.warnings[0]


def test_an_ascent_that_runs_away_is_an_error() -> None:
    request = tiny_request(
        one_round(*EQUAL, *REST), FOUR, "a", trainer=Slope((np.nan, 0))
    )
    with pytest.raises(TrainingError, match="ran away"):
        STILL(request)


@dataclass
class Watched:
    """The trainer of a run, and what it was asked."""

    trainer: Any
    climbed: list[tuple[Model, int]] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)

    def initial(self, seed: int) -> Model:
        found: Model = self.trainer.initial(seed)
        return found

    def train(self, *given: Any) -> Model:
        raise AssertionError("clients train by their workers")

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        self.judged.append(len(inputs))
        found: Logits = self.trainer.predict(model, inputs)
        return found

    def gradient(
        self, model: Model, inputs: Inputs, targets: Array, temperature: float = 1.0
    ) -> tuple[float, Flat]:
        self.climbed.append((model, len(inputs)))
        found: tuple[float, Flat] = self.trainer.gradient(
            model, inputs, targets, temperature
        )
        return found


def watched(run: SmallRun, *forget: str) -> tuple[UnlearnRequest, Watched]:
    request = run.request(*forget)
    assert request.federation is not None
    trainer = Watched(request.federation.trainer)
    federation = replace(request.federation, trainer=trainer)
    return replace(request, federation=federation), trainer


def squared_distances(run: SmallRun, models: Sequence[Model]) -> list[float]:
    """Return squared distances to the target's last local model."""
    last = run.ledger.num_rounds - 1
    own = params_at(run.ledger, last).flat + vector(run.ledger, VectorRef(last, TARGET))
    return [norm(model.params.flat - own) ** 2 for model in models]


def target_examples(run: SmallRun) -> tuple[Inputs, Labels]:
    data = run.federation.clients.data[TARGET]
    return to_model_input(data.images), data.labels


def target_loss(run: SmallRun, model: Model) -> float:
    trainer: Any = run.federation.trainer
    return float(trainer.gradient(model, *target_examples(run))[0])


CLIMB = PGA(post_rounds=0, distance_threshold=None)


def test_the_ascent_never_leaves_its_ball_while_the_loss_rises(
    small_run: SmallRun,
) -> None:
    final = small_run.ledger.final
    ball = Ball(final.params.flat, 0.4)
    trainer: Any = small_run.federation.trainer
    rng = stream(0, "test")
    examples = target_examples(small_run)
    steps = list(CLIMB.ascend(trainer, final, ball, *examples, rng))
    distances = [norm(step.params.flat - ball.centre) for step in steps]
    assert len(steps) == 10  # Five epochs of two batches.
    assert max(distances) <= 0.4 * (1 + 1e-5)
    assert distances[-1] == pytest.approx(0.4)  # The edge was reached.
    assert target_loss(small_run, steps[-1]) > target_loss(small_run, final) + 1


def test_the_ball_of_a_call_holds_every_step(small_run: SmallRun) -> None:
    request, trainer = watched(small_run)
    result = replace(CLIMB, radius=0.3)(request)
    centre = trainer.climbed[0][0].params.flat  # The ascent begins there.
    models = [model for model, _ in trainer.climbed]
    models.append(result.model(small_run.ledger.final))
    assert max(norm(m.params.flat - centre) for m in models) <= 0.3 * (1 + 1e-5)


def test_the_usual_radius_is_wide_on_digits(small_run: SmallRun) -> None:
    narrow = replace(CLIMB, radius=0.3)(small_run.request()).params.flat
    usual = CLIMB(small_run.request()).params.flat
    wide = replace(CLIMB, radius=1e6)(small_run.request()).params.flat
    np.testing.assert_array_equal(usual, wide)
    assert not np.array_equal(usual, narrow)


def test_the_ascent_ends_with_the_first_step_beyond_the_threshold(
    small_run: SmallRun,
) -> None:
    request, trainer = watched(small_run)
    result = replace(CLIMB, distance_threshold=4.0)(request)
    starts = squared_distances(small_run, [model for model, _ in trainer.climbed])
    (end,) = squared_distances(small_run, [result.model(small_run.ledger.final)])
    assert 1 < len(starts) < 10
    assert max(starts) <= 4 < end
    assert result.warnings == ()


def test_a_threshold_that_leaves_no_room_is_warned_of(small_run: SmallRun) -> None:
    request, trainer = watched(small_run)
    result = PGA(post_rounds=0)(request)
    assert len(trainer.climbed) == 1
    assert "distance_threshold" in result.warnings[0]


def test_the_ascent_ends_below_the_accuracy_floor(small_run: SmallRun) -> None:
    request, trainer = watched(small_run)
    replace(CLIMB, accuracy_floor=0.5)(request)
    count = small_run.federation.clients.sizes[TARGET]
    held = round(count / 10)
    assert set(trainer.judged) == {held}
    assert 1 < len(trainer.climbed) < 10
    assert sum(size for _, size in trainer.climbed[:2]) == count - held
    request, trainer = watched(small_run)
    CLIMB(request)
    assert len(trainer.climbed) == 10
    assert trainer.judged == []  # Without a floor nothing is held back.
    assert sum(size for _, size in trainer.climbed[:2]) == count


def test_the_backdoor_goes_and_the_others_bring_accuracy_back(
    small_run: SmallRun,
) -> None:
    final = small_run.ledger.final
    climbed = CLIMB(small_run.request()).model(final)
    method = replace(CLIMB, post_rounds=10)
    result = measured(method, small_run.request())
    cleaned = result.model(final)
    assert small_run.backdoor(final) > 0.7
    assert target_loss(small_run, climbed) > target_loss(small_run, final) + 1
    assert small_run.backdoor(climbed) < 0.05
    assert small_run.main(climbed) < 0.6
    assert small_run.backdoor(cleaned) < 0.1
    assert small_run.main(cleaned) > 0.85
    assert result.client_calls == 1 + 10 * 5  # One target, five others.
    assert result.clients == (TARGET,)


def test_the_defaults_lower_the_backdoor_and_keep_the_accuracy(
    small_run: SmallRun,
) -> None:
    final = small_run.ledger.final
    cleaned = PGA()(small_run.request()).model(final)
    assert small_run.main(cleaned) > 0.94
    assert small_run.backdoor(cleaned) < small_run.backdoor(final) - 0.2


def test_several_targets_climb_one_after_the_other(small_run: SmallRun) -> None:
    request, trainer = watched(small_run, TARGET, "client-1")
    result = measured(replace(CLIMB, epochs=1, post_rounds=3), request)
    sizes = small_run.federation.clients.sizes
    assert len(trainer.climbed) == 4
    assert sum(n for _, n in trainer.climbed) == sizes[TARGET] + sizes["client-1"]
    assert result.client_calls == 2 + 3 * 4
    assert result.clients == (TARGET, "client-1")
    alone, first = watched(small_run, TARGET)
    replace(CLIMB, epochs=1)(alone)
    # Its reference is another one, because the second target is missing from it too.
    assert not np.array_equal(
        first.climbed[0][0].params.flat, trainer.climbed[0][0].params.flat
    )


def test_the_same_request_gives_the_same_bytes(small_run: SmallRun) -> None:
    method = PGA(post_rounds=1, distance_threshold=4.0)
    first = method(small_run.request()).params.flat.tobytes()
    assert method(small_run.request()).params.flat.tobytes() == first


@pytest.mark.parametrize(
    "other",
    [
        {"lr": 0.02},
        {"momentum": 0.5},
        {"batch_size": 64},
        {"epochs": 1},
        {"clip_norm": 1.0},
        {"post_rounds": 1},
        {"post_rounds": 1, "post_epochs": 0.5},
    ],
)
def test_every_setting_matters(small_run: SmallRun, other: dict[str, Any]) -> None:
    changed = replace(CLIMB, **other)(small_run.request()).params.flat
    base = {"post_rounds": 1} if "post_epochs" in other else {}
    usual = replace(CLIMB, **base)(small_run.request()).params.flat
    assert not np.array_equal(changed, usual)


def test_batch_normalisation_is_carried_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "normalised_for_pga.py").write_text(NORMALISED, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    # Batches of 128 would leave one of the 129 images alone, without statistics.
    config = RunConfig.from_options(
        clients=3,
        rounds=2,
        epochs=1,
        train_size=387,
        batch_size=50,
        model="normalised_for_pga:build",
        workers=1,
    )
    prepared = prepare(config)
    workers = start_workers(prepared)
    model = workers.initial(0)
    ledger = MemoryLedger.create(model)
    for round_ in rounds_of(prepared, workers, model, 0, 2, frozenset()):
        ledger.append(round_)
    federation = federation_for(prepared, workers)
    request = UnlearnRequest(ledger, frozenset({TARGET}), federation)
    assert federation.clients.sizes[TARGET] == 129
    result = PGA(post_rounds=2)(request)
    assert result.buffers is not None
    before = ledger.final.buffers
    assert set(result.buffers) == set(before)
    assert any(not np.array_equal(result.buffers[n], before[n]) for n in before)
    logits = federation.trainer.predict(
        result.model(ledger.final), to_model_input(prepared.dataset.test_images)
    )
    assert np.mean(logits.argmax(axis=1) == prepared.dataset.test_labels) > 0.5


def test_it_needs_the_target_and_whoever_trains_afterwards() -> None:
    assert PGA().needs == Needs(target=True, others=True)
    assert PGA(post_rounds=0).needs == Needs(target=True)


def test_without_a_federation_it_is_refused(small_run: SmallRun) -> None:
    with pytest.raises(UnlearnRefusedError, match="pga needs the help of the client"):
        PGA()(UnlearnRequest(small_run.ledger, frozenset({TARGET})))


def test_a_trainer_without_gradients_is_refused() -> None:
    class Plain:
        initial = Slope.initial
        train = Slope.train
        predict = Slope.predict

    request = tiny_request(one_round(*EQUAL, *REST), FOUR, "a", trainer=Plain())
    with pytest.raises(UnlearnRefusedError, match="Plain gives none"):
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
        ({"accuracy_floor": 1.1}, "accuracy floor"),
        ({"post_rounds": -1}, "post-training"),
        ({"post_epochs": 0}, "epochs"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        PGA(**settings)
    assert "choose" in str(caught.value)


@dataclass(slots=True)
class NothingKept(LedgerView):
    """A ledger that remembers who took part, and no update."""

    def updates_of(self, client: str) -> Sequence[UpdateEntry]:
        return [replace(u, kept=False) for u in self.ledger.updates_of(client)]


def test_it_works_without_stored_updates(small_run: SmallRun) -> None:
    request = small_run.request()
    view = NothingKept(small_run.ledger)
    result = measured(CLIMB, replace(request, ledger=view))
    assert result.client_calls == 2
    assert result.bytes_read == 0
    assert small_run.backdoor(result.model(small_run.ledger.final)) < 0.05
