"""KD: subtraction and loss by hand, a student that approaches its teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.trainer import (
    TrainingError,
)
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.views import KeptView
from fastfedul.methods.kd import KD, soft_labels, subtracted
from fastfedul.methods.protocol import Needs, UnlearnRequest, measured
from fastfedul.params import Params, dot, norm
from fastfedul.records import ClientUpdate, Model, Round
from fastfedul.rng import stream
from fastfedul.runs.config import RunConfig
from tests.support.by_hand import Slope, WithoutGradient, params
from tests.support.small_run import TARGET, SmallRun, trained_in_memory

PLAIN = KD(epochs=0)
"""Subtraction without distillation."""


def update(name: str, share: float, *values: float, **rest: Any) -> ClientUpdate:
    return ClientUpdate(name, share, params(*values), **rest)


def ledger_of(*rounds: tuple[ClientUpdate, ...], use: Any = "store") -> MemoryLedger:
    ledger = MemoryLedger.create(Model(params(0, 0)))
    for index, updates in enumerate(rounds):
        ledger.append(Round(index, updates, use=use))
    return ledger


def without(ledger: MemoryLedger, *clients: str) -> list[float]:
    updates = [u for name in clients for u in ledger.updates_of(name)]
    found: list[float] = subtracted(ledger, updates).params.flat.tolist()
    return found


TWO_ROUNDS = (
    (update("a", 0.5, 2, 4), update("b", 0.25, 4, 0), update("c", 0.25, 0, 8)),
    (update("a", 0.25, 8, 0), update("b", 0.75, 0, 4)),
)
"""Steps (2, 4) and (2, 3), so that the model is (4, 7)."""


def test_the_student_starts_without_the_shares_of_the_target() -> None:
    ledger = ledger_of(*TWO_ROUNDS)
    # a put in 0.5 (2, 4) + 0.25 (8, 0) = (3, 2); c put in 0.25 (0, 8) = (0, 2).
    assert without(ledger, "a") == [1, 5]
    assert without(ledger, "a", "c") == [1, 3]
    assert without(ledger) == [4, 7]


def test_what_was_kept_by_chance_stands_for_what_was_not() -> None:
    ledger = ledger_of(
        (update("a", 0.5, 2, 4, keep_probability=0.5), update("b", 0.5, 0, 0)),
        (
            update("a", 0.5, 8, 0, keep_probability=0.5, kept=False),
            update("b", 0.5, 0, 0),
        ),
    )
    # The model is (5, 2); the kept update counts with 0.5 / 0.5 = 1.
    assert without(ledger, "a") == [3, -2]


def test_an_update_that_never_entered_is_not_subtracted() -> None:
    ledger = ledger_of(
        (
            update("a", 0.5, 2, 4, keep_probability=0.5),
            update("b", 0.5, 6, 6, keep_probability=0.5, kept=False),
        ),
        use="aggregate",
    )
    assert ledger.final.params.flat.tolist() == [2, 4]
    assert without(ledger, "a") == [0, 0]
    assert without(ledger, "b") == [2, 4]


@pytest.mark.parametrize("erase", [False, True])
def test_weights_grow_when_others_have_left(erase: bool) -> None:
    ledger = ledger_of(*TWO_ROUNDS)
    # Without c round 0 is (2 (2, 4) + 1 (4, 0)) / 3 = (8, 8) / 3, not (2, 4).
    moved = np.array([8 / 3 - 2, 8 / 3 - 4], np.float32)
    ledger.commit_forgetting(["c"], moved, {}, erase=erase)
    # b put in (4, 0) / 3 + 0.75 (0, 4), and what is left is a's part.
    left = [2 * 2 / 3 + 2, 2 * 4 / 3]
    assert without(ledger, "b") == pytest.approx(left, rel=1e-6)


def test_soft_labels_by_hand() -> None:
    logits = np.array([[0, 2 * np.log(3)], [5000, 5000]], np.float32)
    np.testing.assert_allclose(
        soft_labels(logits, 2.0), [[0.25, 0.75], [0.5, 0.5]], rtol=1e-6
    )
    np.testing.assert_allclose(soft_labels(logits[:1], 1.0), [[0.1, 0.9]], rtol=1e-6)


def test_steps_of_the_distillation_by_hand() -> None:
    method = KD(temperature=3, lr=0.1, momentum=0.5, epochs=1, batch_size=2)
    inputs, answers = np.zeros((4, 1, 1, 1), np.float32), np.full((4, 2), 0.5)
    start = Model(params(1, 1))
    trainer = Slope((1, -2))
    steps = method.distil(trainer, start, inputs, answers, stream(0, "test"))
    # T^2 is 9: velocities (1, -2), (1.5, -3) times 0.9 are taken off.
    seen = [step.params.flat for step in steps]
    np.testing.assert_allclose(seen, [[0.1, 2.8], [-1.25, 5.5]], rtol=1e-5)
    assert trainer.temperatures == [3, 3]


def test_a_distillation_that_runs_away_is_an_error() -> None:
    method = KD(temperature=3)
    given = np.zeros((4, 1, 1, 1), np.float32), np.full((4, 2), 0.5)
    trainer = Slope((np.nan, 0))
    steps = method.distil(trainer, Model(params(1, 1)), *given, stream(0, "test"))
    with pytest.raises(TrainingError, match="ran away"):
        next(steps)
    assert trainer.temperatures == [3]


def divergence(run: SmallRun, model: Model, temperature: float = 2.0) -> float:
    """Return the mean KL from the teacher's to the model's answers to the server."""
    trainer, images = run.federation.trainer, run.federation.server
    teacher = soft_labels(trainer.predict(run.ledger.final, images), temperature)
    student = soft_labels(trainer.predict(model, images), temperature)
    tiny = 1e-300
    terms = teacher * (np.log(teacher + tiny) - np.log(student + tiny))
    return float(terms.sum(axis=1).mean())


def test_a_step_goes_down_the_divergence_times_the_squared_temperature(
    small_run: SmallRun,
) -> None:
    trainer: Any = small_run.federation.trainer
    images = small_run.federation.server
    start = PLAIN(small_run.request()).model(small_run.ledger.final)
    method = KD(temperature=4, lr=0.01, epochs=1, batch_size=len(images))
    teacher = soft_labels(trainer.predict(small_run.ledger.final, images), 4)
    (after,) = method.distil(trainer, start, images, teacher, stream(0, "test"))
    gradient = (start.params.flat - after.params.flat) / np.float32(0.01)
    direction = gradient / np.float32(norm(gradient))
    small = np.float32(0.01)
    losses = [
        16 * divergence(small_run, Model(Params(start.params.layout, flat)), 4)
        for flat in (
            start.params.flat + small * direction,
            start.params.flat - small * direction,
        )
    ]
    slope = (losses[0] - losses[1]) / 0.02
    assert slope == pytest.approx(dot(gradient, direction), rel=0.02)


def test_the_student_approaches_its_teacher_but_not_its_backdoor(
    small_run: SmallRun,
) -> None:
    final = small_run.ledger.final
    start = PLAIN(small_run.request()).model(final)
    result = measured(KD(), small_run.request())
    end = result.model(final)
    assert divergence(small_run, end) < 0.05 * divergence(small_run, start)
    assert small_run.main(end) > small_run.main(start) + 0.1
    assert small_run.main(end) > small_run.main(final) - 0.02
    assert small_run.backdoor(final) > 0.7
    assert small_run.backdoor(start) < 0.05
    assert small_run.backdoor(end) < 0.05
    assert result.client_calls == 0
    assert result.clients == (TARGET,)
    assert result.warnings == ()


def test_no_epoch_is_plain_subtraction(small_run: SmallRun) -> None:
    ledger = small_run.ledger
    updates = ledger.updates_of(TARGET)
    np.testing.assert_array_equal(
        PLAIN(small_run.request()).params.flat, subtracted(ledger, updates).params.flat
    )


def test_several_targets_are_subtracted_together(small_run: SmallRun) -> None:
    final = small_run.ledger.final
    request = small_run.request(TARGET, "client-1")
    start = PLAIN(request).model(final)
    result = KD()(request)
    parts = [PLAIN(small_run.request(name)).params.flat for name in request.forget]
    both = sum(part - final.params.flat for part in parts) + final.params.flat
    np.testing.assert_allclose(start.params.flat, both, atol=1e-5)
    assert result.clients == (TARGET, "client-1")
    assert small_run.main(result.model(final)) > small_run.main(start) + 0.1
    assert small_run.backdoor(result.model(final)) < 0.05


def test_the_same_request_gives_the_same_bytes(small_run: SmallRun) -> None:
    first = KD(epochs=2)(small_run.request()).params.flat.tobytes()
    assert KD(epochs=2)(small_run.request()).params.flat.tobytes() == first


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 4.0},
        {"lr": 0.01},
        {"momentum": 0.5},
        {"batch_size": 64},
        {"epochs": 2},
    ],
)
def test_every_setting_matters(small_run: SmallRun, other: dict[str, Any]) -> None:
    usual = KD(epochs=1)
    changed = replace(usual, **other)(small_run.request()).params.flat
    assert not np.array_equal(changed, usual(small_run.request()).params.flat)


def test_a_client_of_no_round_changes_next_to_nothing(small_run: SmallRun) -> None:
    request = small_run.request()
    assert request.federation is not None
    data = dict(request.federation.clients.data)
    data["newcomer"] = data[TARGET]
    request.federation.clients.data = data
    result = KD()(replace(request, forget=frozenset({"newcomer"})))
    final = small_run.ledger.final.params.flat
    assert norm(result.params.flat - final) < 1e-3 * norm(final)


def test_a_sample_of_the_updates_is_warned_of(small_run: SmallRun) -> None:
    view = KeptView(small_run.ledger, Keep.parse("uniform:4", seed=1))
    request = replace(small_run.request(), ledger=view)
    kept = [u.kept for u in view.updates_of(TARGET)]
    assert 0.2 < np.mean(kept) < 1
    result = KD()(request)
    assert f"only {np.mean(kept):.0%}" in result.warnings[0]
    assert small_run.main(result.model(small_run.ledger.final)) > 0.8


def test_too_small_a_sample_is_refused(small_run: SmallRun) -> None:
    view = KeptView(small_run.ledger, Keep.parse("uniform:4", seed=1))
    request = replace(small_run.request(), ledger=view)
    with pytest.raises(UnlearnRefusedError, match=r"only \d+% .* less than the 100%"):
        KD(minimum_coverage=1)(request)


def test_without_images_of_the_server_it_is_refused(small_run: SmallRun) -> None:
    request = small_run.request()
    assert request.federation is not None
    federation = replace(request.federation, server=request.federation.server[:0])
    with pytest.raises(UnlearnRefusedError, match="kd needs clean images"):
        KD()(replace(request, federation=federation))


def test_without_a_federation_it_is_refused(small_run: SmallRun) -> None:
    with pytest.raises(UnlearnRefusedError, match="kd needs the help of the server"):
        KD()(UnlearnRequest(small_run.ledger, frozenset({TARGET})))


def test_a_trainer_without_gradients_is_refused(small_run: SmallRun) -> None:
    request = small_run.request()
    assert request.federation is not None
    federation = replace(request.federation, trainer=WithoutGradient())
    with pytest.raises(UnlearnRefusedError, match="WithoutGradient gives none"):
        KD()(replace(request, federation=federation))


def test_another_aggregation_than_the_mean_is_refused(small_run: SmallRun) -> None:
    ledger = MemoryLedger.create(small_run.ledger.initial, aggregation="median")
    with pytest.raises(UnlearnRefusedError, match="'median'"):
        KD()(replace(small_run.request(), ledger=ledger))


def test_who_has_left_cannot_leave_again(small_run: SmallRun) -> None:
    ledger = MemoryLedger.create(small_run.ledger.initial)
    delta = Params.zeros(small_run.ledger.settings.layout)
    ledger.append(Round(0, (ClientUpdate(TARGET, 1.0, delta),)))
    ledger.commit_forgetting([TARGET], delta.flat, {})
    with pytest.raises(InvalidInputError, match="forgotten already"):
        KD()(replace(small_run.request(), ledger=ledger))


def test_batch_normalisation_is_carried_through(
    normalised: str,
) -> None:
    # Batches of 32 would leave one of the 65 images alone, without statistics.
    config = RunConfig.from_options(
        clients=3,
        rounds=2,
        train_size=365,
        server_images=65,
        model=normalised,
        workers=1,
    )
    run = trained_in_memory(config)
    result = measured(KD(), run.request())
    assert result.buffers is not None
    assert not any("buffers" in warning for warning in result.warnings)
    assert run.main(result.model(run.ledger.final)) > 0.5


def test_it_needs_the_history_and_images() -> None:
    assert KD().needs == Needs(history=True, server_data=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"lr": -1}, "learning rate"),
        ({"momentum": 1}, "momentum"),
        ({"batch_size": 0}, "batch size"),
        ({"epochs": -1}, "epochs"),
        ({"epochs": 0.5}, "epochs"),
        ({"minimum_coverage": 1.5}, "coverage"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        KD(**settings)
