"""Measured skew: exact where the server reacts as the clients do, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from fastfedul import DiskLedger
from fastfedul.data.dataset import ClientData
from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Clients, Federation
from fastfedul.federation.rounds import Schedule
from fastfedul.federation.trainer import (
    Inputs,
    Labels,
    LocalTraining,
    Logits,
    Trainer,
    TrainingError,
)
from fastfedul.federation.workers.pool import Workers
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.views import KeptView
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.skews import NoSkew
from fastfedul.methods.protocol import Needs, UnlearnRequest, measured
from fastfedul.params import Array, Flat, Layout, Params, Slot
from fastfedul.records import ClientUpdate, Model, Round
from fastfedul.rng import stream
from fastfedul.runs.config import RunConfig
from paper.board.measured import Measured, ServerTraining
from tests.support.small_run import SmallRun, trained_in_memory

TARGET = "client-0"
SIZE = 4
LAYOUT = Layout((Slot("w", (SIZE,), "float32"),))
LOCAL = LocalTraining(batch_size=2, lr=0.1, momentum=0.5, weight_decay=0.02)

Matrix = npt.NDArray[np.float64]


@dataclass
class Bowl:
    """A trainer whose loss is (w - c)^T H (w - c) / 2, plus a slope of each batch.

    Attributes:
        curvature: H; zero for a loss that falls the same way everywhere.
        centre: c.
        seen: First pixel of every image of each gradient.
    """

    curvature: Matrix
    centre: Matrix
    seen: list[list[float]] = field(default_factory=list)

    def initial(self, seed: int) -> Model:
        return Model(Params(LAYOUT, np.ones(SIZE, np.float32)))

    def train(
        self,
        model: Model,
        inputs: Inputs,
        labels: Labels,
        rng: np.random.Generator,
        local: LocalTraining | None = None,
    ) -> Model:
        raise AssertionError("nobody is asked")

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        return np.zeros((len(inputs), 2), np.float32)

    def gradient(
        self, model: Model, inputs: Inputs, targets: Array, temperature: float = 1.0
    ) -> tuple[float, Flat]:
        pixels = inputs[:, 0, 0, 0]
        self.seen.append(pixels.tolist())
        away = model.params.flat - self.centre
        slope = self.curvature @ away + float(pixels.mean())
        return 0.0, slope.astype(np.float32)


class Plain:
    """A trainer without gradients."""

    initial = Bowl.initial
    train = Bowl.train
    predict = Bowl.predict


def curvature() -> Matrix:
    rows = stream(3, "curvature").normal(size=(SIZE, SIZE))
    product = rows @ rows.T
    matrix: Matrix = product / np.linalg.eigvalsh(product)[-1]
    return matrix


def centre(client: str) -> Matrix:
    found: Matrix = stream(4, "centre", ord(client)).normal(size=SIZE)
    return found + (3 if client == "a" else 0)


def trained(start: Matrix, client: str, steps: int) -> Matrix:
    """Return a client's model after its own steps, apart from the code under test."""
    here, velocity = start, np.zeros(SIZE)
    for _ in range(steps):
        slope = curvature() @ (here - centre(client)) + LOCAL.weight_decay * here
        velocity = LOCAL.momentum * velocity + slope
        here = here - LOCAL.lr * velocity
    return here


SHARES = {"a": 2, "b": 3, "c": 1, "d": 2}


def run_of(
    rounds: Sequence[str], *, without: str = "", steps: int = 2
) -> tuple[MemoryLedger, Matrix]:
    """Return the history of clients alike in curvature, and the model in float64."""
    flat: Matrix = np.ones(SIZE)
    ledger = MemoryLedger.create(Bowl(np.eye(SIZE), np.zeros(SIZE)).initial(0))
    for index, drawn in enumerate(rounds):
        names = [name for name in drawn if name not in without]
        if not names:
            continue
        total = sum(SHARES[name] for name in names)
        deltas = {name: trained(flat, name, steps) - flat for name in names}
        flat = flat + sum(SHARES[n] / total * deltas[n] for n in names)
        if not without:
            updates = tuple(
                ClientUpdate(
                    name,
                    SHARES[name] / total,
                    Params(LAYOUT, delta.astype(np.float32)),
                )
                for name, delta in deltas.items()
            )
            ledger.append(Round(index, updates))
    return ledger, flat


def request_of(
    ledger: Ledger,
    trainer: Trainer,
    *forget: str,
    images: int = 5,
    sizes: Sequence[int] = (4, 4, 4, 4),
) -> UnlearnRequest:
    data = {
        name: ClientData(
            name, np.zeros((size, 1, 1, 1), np.uint8), np.zeros(size, np.int64)
        )
        for name, size in zip("abcd", sizes, strict=True)
    }
    federation = Federation(
        clients=Clients(cast(Workers, None), data),
        trainer=trainer,
        schedule=Schedule(seed=0),
        local=LOCAL,
        scales={},
        server=np.arange(images, dtype=np.float32).reshape(-1, 1, 1, 1),
        seed=0,
    )
    return UnlearnRequest(ledger, frozenset(forget or {"a"}), federation)


ROUNDS = ("bcd", "abcd", "bc", "acd", "abd", "cd", "ab", "abcd")
SERVER = Bowl(curvature(), np.full(SIZE, -2.0))
"""The server's images pull elsewhere than any client's, with the same curvature."""
FLAT = Bowl(np.zeros((SIZE, SIZE)), np.zeros(SIZE))


@pytest.mark.parametrize("forget", ["a", "ad", "c"])
def test_it_is_retraining_where_curvature_is_alike(forget: str) -> None:
    ledger, _ = run_of(ROUNDS)
    _, retrained = run_of(ROUNDS, without=forget)
    assert np.abs(ledger.final.params.flat - retrained).max() > 0.05
    # Clients with 4 images in batches of 2 take 2 steps; the server has 5 images.
    result = Measured()(request_of(ledger, SERVER, *forget))
    np.testing.assert_allclose(result.params.flat, retrained, atol=2e-6)
    assert result.clients == tuple(forget)
    assert result.warnings == ()


def test_a_round_of_leavers_alone_would_not_have_happened() -> None:
    rounds = ("abcd", "a", "bcd", "ad", "a", "bc")
    ledger, _ = run_of(rounds)
    for forget in ("a", "ad"):
        _, retrained = run_of(rounds, without=forget)
        result = Measured()(request_of(ledger, SERVER, *forget))
        np.testing.assert_allclose(result.params.flat, retrained, atol=2e-6)


def test_forgetting_everybody_gives_the_first_model() -> None:
    ledger, _ = run_of(ROUNDS)
    result = Measured()(request_of(ledger, SERVER, *"abcd"))
    np.testing.assert_allclose(result.params.flat, np.ones(SIZE), atol=2e-6)


@pytest.mark.parametrize("erase", [False, True])
def test_clients_can_leave_one_after_the_other(erase: bool) -> None:
    ledger, _ = run_of(ROUNDS)
    before = ledger.final.params.flat
    first = Measured()(request_of(ledger, SERVER, "d"))
    ledger.commit_forgetting(["d"], first.params.flat - before, {}, erase=erase)
    second = Measured()(request_of(ledger, SERVER, "a"))
    _, retrained = run_of(ROUNDS, without="ad")
    np.testing.assert_allclose(second.params.flat, retrained, atol=5e-6)


@pytest.mark.parametrize("forget", ["a", "bd"])
def test_without_a_reaction_it_is_the_undamped_recursion(forget: str) -> None:
    ledger, _ = run_of(ROUNDS)
    request = request_of(ledger, FLAT, *forget)
    assert request.federation is not None
    # Weight decay is a reaction too.
    local = replace(LOCAL, weight_decay=0)
    request = replace(request, federation=replace(request.federation, local=local))
    undamped = FastFedUL(skew=NoSkew())(request)
    assert np.abs(undamped.params.flat - ledger.final.params.flat).max() > 0.05
    np.testing.assert_allclose(
        Measured(steps=7)(request).params.flat, undamped.params.flat, atol=2e-6
    )


def test_another_number_of_steps_is_another_reaction() -> None:
    ledger, _ = run_of(ROUNDS, steps=3)
    _, retrained = run_of(ROUNDS, without="a", steps=3)
    request = request_of(ledger, SERVER)
    right, wrong = (
        np.abs(method(request).params.flat - retrained).max()
        for method in (Measured(steps=3), Measured())
    )
    assert right < 2e-6
    assert wrong > 1e-2


def test_both_updates_of_a_round_see_the_same_batches() -> None:
    ledger, _ = run_of(ROUNDS)
    trainer = replace(SERVER, seen=[])
    Measured(steps=4)(request_of(ledger, trainer, images=5))
    # The first leaver is in round 1, so there are differences in rounds 2 to 7.
    assert len(trainer.seen) == 6 * 2 * 4
    rounds = [trainer.seen[i : i + 8] for i in range(0, 48, 8)]
    for seen in rounds:
        assert seen[:4] == seen[4:]
        # Three batches are a pass over the five images; the fourth begins another.
        assert sorted(len(batch) for batch in seen[:3]) == [1, 2, 2]
        assert sorted(np.concatenate(seen[:3])) == [0, 1, 2, 3, 4]
    assert len({str(seen) for seen in rounds}) == 6


def test_steps_of_a_local_update_by_hand() -> None:
    zeros = np.zeros((4, 1, 1, 1), np.float32)
    server = ServerTraining(
        trainer=Bowl(np.diag([0.0, 1.0, 0.0, 0.0]), np.zeros(SIZE)),
        inputs=zeros,
        answers=np.full((4, 2), 0.5),
        temperature=3,
        local=LocalTraining(batch_size=2, lr=0.1, momentum=0.5, weight_decay=0.2),
        steps=2,
        seed=0,
    )
    start = Model(Params(LAYOUT, np.array([1, 1, 0, 0], np.float32)))
    # T^2 is 9, and the weight decay stays a client's: 1 - 0.1 * 0.2 = 0.98, then a
    # velocity of 0.5 * 0.2 + 0.2 * 0.98. The second adds 9 times its own value.
    moved = server.update(start, 0)
    first = 0.1 * (9 + 0.2)
    second = 0.5 * first + first * (1 - first)
    by_hand = [-0.02 - 0.0296, -first - second, 0, 0]
    np.testing.assert_allclose(moved, by_hand, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ((90, 4, 4, 4), 2),
        ((90, 4, 4, 20), 5),
        # Three images are a single batch: the one left over joins it.
        ((90, 3, 3, 3), 1),
    ],
)
def test_the_server_takes_as_many_steps_as_an_average_client(
    sizes: Sequence[int], steps: int
) -> None:
    ledger, _ = run_of(("abcd", "abcd"))
    trainer = replace(SERVER, seen=[])
    Measured()(request_of(ledger, trainer, sizes=sizes))
    assert len(trainer.seen) == 2 * steps


def test_a_client_that_never_took_part_changes_nothing() -> None:
    ledger, _ = run_of(("bcd", "bd"))
    trainer = replace(SERVER, seen=[])
    result = Measured()(request_of(ledger, trainer, "a"))
    np.testing.assert_array_equal(result.params.flat, ledger.final.params.flat)
    assert not trainer.seen


def test_a_difference_that_runs_away_is_an_error() -> None:
    ledger, _ = run_of(ROUNDS)
    steep = Bowl(1e30 * np.eye(SIZE), np.zeros(SIZE))
    with (
        np.errstate(all="ignore"),
        pytest.raises(TrainingError, match="ran away in round 2"),
    ):
        Measured(steps=5)(request_of(ledger, steep))


def test_the_attack_goes_and_the_model_stays(small_run: SmallRun) -> None:
    final = small_run.ledger.final
    result = measured(Measured(), small_run.request())
    after = result.model(final)
    undamped = FastFedUL(skew=NoSkew())(small_run.request()).model(final)
    assert small_run.backdoor(final) > 0.7
    assert small_run.backdoor(after) < 0.1
    assert small_run.main(after) > small_run.main(small_run.retrained) - 0.05
    assert small_run.main(after) > small_run.main(undamped)
    assert result.client_calls == 0
    assert result.clients == (TARGET,)
    assert result.warnings == ()


def test_the_same_request_gives_the_same_bytes(small_run: SmallRun) -> None:
    method = Measured(steps=2)
    first, second = (method(small_run.request()) for _ in range(2))
    assert first.params.flat.tobytes() == second.params.flat.tobytes()


@pytest.mark.parametrize("other", [{"temperature": 2.0}, {"steps": 3}])
def test_every_setting_matters(small_run: SmallRun, other: dict[str, Any]) -> None:
    usual = Measured(steps=2)
    changed = replace(usual, **other)(small_run.request()).params.flat
    assert not np.array_equal(changed, usual(small_run.request()).params.flat)


def test_too_small_a_sample_is_refused_and_a_small_one_warned_of(
    small_run: SmallRun,
) -> None:
    view = KeptView(small_run.ledger, Keep.parse("uniform:3", seed=1))
    request = replace(small_run.request(), ledger=view)
    assert 0.2 < np.mean([u.kept for u in view.updates_of(TARGET)]) < 0.8
    assert "the rest is estimated" in Measured(steps=1)(request).warnings[0]
    with pytest.raises(UnlearnRefusedError, match=r"only \d+% .* less than the 100%"):
        Measured(minimum_coverage=1)(request)


def test_batch_normalisation_is_carried_through(
    normalised: str,
) -> None:
    config = RunConfig.from_options(
        clients=3,
        rounds=3,
        train_size=365,
        server_images=65,
        model=normalised,
        workers=1,
    )
    run = trained_in_memory(config)
    result = measured(Measured(), run.request())
    assert result.warnings == ()
    assert run.main(result.model(run.ledger.final)) > 0.5


def test_it_needs_the_history_and_images() -> None:
    assert Measured().needs == Needs(history=True, server_data=True)


def test_without_a_federation_it_is_refused() -> None:
    ledger, _ = run_of(ROUNDS)
    with pytest.raises(UnlearnRefusedError, match="measured needs the help of the ser"):
        Measured()(UnlearnRequest(ledger, frozenset({"a"})))


def test_without_images_of_the_server_it_is_refused() -> None:
    ledger, _ = run_of(ROUNDS)
    with pytest.raises(UnlearnRefusedError, match="measured needs clean images"):
        Measured()(request_of(ledger, SERVER, images=0))


def test_a_trainer_without_gradients_is_refused() -> None:
    ledger, _ = run_of(ROUNDS)
    with pytest.raises(UnlearnRefusedError, match="Plain gives none; use a trainer"):
        Measured()(request_of(ledger, cast(Trainer, Plain())))


def test_another_aggregation_than_the_mean_is_refused() -> None:
    ledger = MemoryLedger.create(SERVER.initial(0), aggregation="median")
    with pytest.raises(UnlearnRefusedError, match="'median'; retrain without"):
        Measured()(request_of(ledger, SERVER))


def test_a_ledger_of_sums_is_refused(tmp_path: Path) -> None:
    model = SERVER.initial(0)
    with DiskLedger.create(tmp_path / "sums", model, history="sums") as ledger:
        delta = Params.zeros(LAYOUT)
        ledger.append(Round(0, tuple(ClientUpdate(n, 0.5, delta) for n in "ab")))
        with pytest.raises(UnlearnRefusedError, match="keeps sums per client"):
            Measured()(request_of(ledger, SERVER))


def test_clients_of_unknown_size_are_refused_unless_steps_are_set() -> None:
    ledger, _ = run_of(ROUNDS)
    request = request_of(ledger, SERVER)
    assert request.federation is not None
    clients = request.federation.clients
    clients.data = {"a": clients.data["a"]}
    with pytest.raises(UnlearnRefusedError, match="set the number of steps"):
        Measured()(request)
    assert np.isfinite(Measured(steps=2)(request).params.flat).all()


def test_who_has_left_cannot_leave_again() -> None:
    ledger, _ = run_of(ROUNDS)
    ledger.commit_forgetting(["a"], np.zeros(SIZE, np.float32), {})
    with pytest.raises(InvalidInputError, match="forgotten already"):
        Measured()(request_of(ledger, SERVER))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0}, "temperature is 0; choose"),
        ({"temperature": float("inf")}, "temperature is inf; choose"),
        ({"steps": 0}, "takes 0 steps in a round; choose"),
        ({"steps": 1.5}, "takes 1.5 steps in a round; choose"),
        ({"minimum_coverage": 1.5}, "minimum coverage is from 0 to 1, not 1.5"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Measured(**settings)
