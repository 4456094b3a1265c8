"""PGA on digits: an ascent that stays in its ball, and post-training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fastfedul.data.dataset import to_model_input
from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.trainer import Inputs, Labels, Logits
from fastfedul.ledger.protocol import params_at, vector
from fastfedul.ledger.views import LedgerView
from fastfedul.methods.pga import PGA, Ball
from fastfedul.methods.protocol import UnlearnRequest, measured
from fastfedul.params import Array, Flat, norm
from fastfedul.records import Model, UpdateEntry, VectorRef
from fastfedul.rng import stream
from fastfedul.runs.config import RunConfig
from tests.support.small_run import TARGET, SmallRun, trained_in_memory


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
    normalised: str,
) -> None:
    # Batches of 128 would leave one of the 129 images alone, without statistics.
    config = RunConfig.from_options(
        clients=3,
        rounds=2,
        epochs=1,
        train_size=387,
        batch_size=50,
        model=normalised,
        workers=1,
    )
    run = trained_in_memory(config)
    assert run.federation.clients.sizes[TARGET] == 129
    result = PGA(post_rounds=2)(run.request())
    assert result.buffers is not None
    before = run.ledger.final.buffers
    assert set(result.buffers) == set(before)
    assert any(not np.array_equal(result.buffers[n], before[n]) for n in before)
    assert run.main(result.model(run.ledger.final)) > 0.5


def test_without_a_federation_it_is_refused(small_run: SmallRun) -> None:
    with pytest.raises(UnlearnRefusedError, match="pga needs the help of the client"):
        PGA()(UnlearnRequest(small_run.ledger, frozenset({TARGET})))


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
