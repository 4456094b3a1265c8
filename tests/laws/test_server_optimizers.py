"""Laws of forgetting with a server optimizer, whatever the history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    Kronecker,
    MemoryLedger,
    Model,
    NoSkew,
    Params,
    Round,
    Scalar,
    ServerOptimizer,
    UnlearnRequest,
    forget,
)
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.protocol import WritableLedger, models
from fastfedul.ledger.server_replay import server_steps
from fastfedul.ledger.verify import verify
from fastfedul.methods.fast_fedul.removal import Removal
from fastfedul.methods.fast_fedul.skews import Skew
from fastfedul.params import Array
from fastfedul.records import VectorRef

LAYOUT = Params.of(
    {"w": np.zeros((4, 3), np.float32), "b": np.zeros(5, np.float32)}
).layout
OPTIMIZERS = [
    ServerOptimizer.make("momentum", lr=0.8, momentum=0.7),
    ServerOptimizer.make("nesterov"),
    ServerOptimizer.make("adam", lr=0.05),
    ServerOptimizer.make("yogi", lr=0.05),
    ServerOptimizer.make("adagrad", lr=0.05),
]
IDENTITY = ServerOptimizer.make("momentum", lr=1.0, momentum=0.0)
NAMES = ("ann", "bob", "cyd", "dan")
START = Model(Params(LAYOUT, np.linspace(-1, 1, LAYOUT.size).astype(np.float32)))


by_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)


def history(
    num_rounds: int = 6, alone: Sequence[int] = (), names: Sequence[str] = NAMES
) -> list[Round]:
    """Return rounds of unequal shares; in some of them `ann` is alone."""
    rng = np.random.default_rng(7)
    rounds = []
    for index in range(num_rounds):
        here = ["ann"] if index in alone else [n for n in names if rng.random() < 0.8]
        here = here or ["bob"]
        weights = rng.uniform(0.5, 1.5, len(here))
        updates = tuple(
            ClientUpdate(name, float(share), Params(LAYOUT, values))
            for name, share, values in zip(
                here,
                weights / weights.sum(),
                rng.standard_normal((len(here), LAYOUT.size)).astype(np.float32),
                strict=True,
            )
        )
        rounds.append(Round(index, updates))
    return rounds


def without(rounds: Sequence[Round], *gone: str) -> list[Round]:
    """Return the rounds as the server would have had them without some clients."""
    found: list[Round] = []
    for round_ in rounds:
        left = [u for u in round_.updates if u.client not in gone]
        total = math.fsum(u.share for u in left)
        if left:
            updates = tuple(replace(u, share=u.share / total) for u in left)
            found.append(Round(len(found), updates))
    return found


def mean_of(round_: Round) -> Array:
    """Return the weighted mean of a round's updates, in doubles."""
    rows = [(u.share, u.delta.flat) for u in round_.updates if u.delta is not None]
    parts = [share * flat.astype(np.float64) for share, flat in rows]
    return np.asarray(np.sum(parts, axis=0))


def recorded(
    rounds: Sequence[Round],
    optimizer: ServerOptimizer | None,
    folder: Path | None = None,
) -> WritableLedger:
    ledger: WritableLedger
    if folder is None:
        ledger = MemoryLedger.create(START, optimizer=optimizer)
    else:
        ledger = DiskLedger.create(folder, START, optimizer=optimizer)
    for round_ in rounds:
        ledger.append(round_)
    return ledger


def removal(ledger: WritableLedger, skew: Skew, *clients: str) -> Removal:
    return FastFedUL(skew=skew)(UnlearnRequest(ledger, frozenset(clients)))


def assert_same_server(found: Model, wanted: Model) -> None:
    np.testing.assert_allclose(found.params.flat, wanted.params.flat, atol=2e-5)
    if wanted.server is None:
        assert found.server is None or found.server.steps == 0
        return
    assert found.server is not None
    assert found.server.steps == wanted.server.steps
    np.testing.assert_allclose(found.server.vectors, wanted.server.vectors, atol=2e-5)


def assert_models_lead_to_final(ledger: WritableLedger) -> None:
    """Check that steps and adjustments add up to the model now."""
    *_, last, final = models(ledger)
    *_, step = server_steps(ledger)
    moved = ledger.adjustments().get(ledger.num_rounds, 0)
    np.testing.assert_allclose(last.flat + step + moved, final.flat, atol=3e-5)


@pytest.mark.parametrize("skew", [NoSkew(), Scalar(0.3), Kronecker("all")])
def test_the_identity_gives_the_result_of_a_server_that_adds_the_mean(
    skew: Skew,
) -> None:
    rounds = history(8)
    plain = removal(recorded(rounds, None), skew, "ann")
    served = removal(recorded(rounds, IDENTITY), skew, "ann")
    np.testing.assert_allclose(served.delta.flat, plain.delta.flat, atol=1e-5)
    if not isinstance(skew, Scalar):
        np.testing.assert_allclose(served.gamma_norms, plain.gamma_norms, atol=1e-5)
    assert np.abs(plain.delta.flat).max() > 0.1


@by_optimizer
def test_without_skew_forgetting_is_training_without_the_client(
    optimizer: ServerOptimizer,
) -> None:
    rounds = history(8, alone=[0, 3, 7])
    ledger = recorded(rounds, optimizer)
    found = removal(ledger, NoSkew(), "ann")
    wanted = recorded(without(rounds, "ann"), optimizer).final
    assert_same_server(found.model(ledger.final), wanted)
    assert np.abs(found.delta.flat).max() > 1e-2


@by_optimizer
def test_a_client_alone_in_every_round_leaves_the_first_model(
    optimizer: ServerOptimizer,
) -> None:
    ledger = recorded(history(3, alone=[0, 1, 2]), optimizer)
    found = removal(ledger, NoSkew(), "ann")
    np.testing.assert_allclose(found.params.flat, START.params.flat, atol=1e-6)
    assert found.server is not None
    assert found.server.steps == 0
    assert not found.server.vectors.any()


def test_momentum_has_a_closed_form() -> None:
    optimizer = OPTIMIZERS[0]
    rounds = history(7)
    beta, lr = optimizer.settings["momentum"], optimizer.settings["lr"]
    wanted = np.zeros(LAYOUT.size)
    for index, round_ in enumerate(rounds):
        [left_round] = without([round_], "ann")
        gamma = mean_of(left_round) - mean_of(round_)
        left = len(rounds) - index
        wanted += lr * (1 - beta**left) / (1 - beta) * gamma
    found = removal(recorded(rounds, optimizer), NoSkew(), "ann").delta.flat
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_adam_with_damping_is_the_recurrence_written_plainly() -> None:
    damping, lr, tau, b1, b2 = 0.2, 0.05, 1e-3, 0.9, 0.99
    rounds = history(7)

    def adam(state: list[Array], mean: Array, number: int) -> tuple[list[Array], Array]:
        m = b1 * state[0] + (1 - b1) * mean
        v = b2 * state[1] + (1 - b2) * mean**2
        rate = lr * math.sqrt(1 - b2 ** (number + 1)) / (1 - b1 ** (number + 1))
        return [m, v], rate * m / (np.sqrt(v) + tau)

    first = [np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)]
    second = [np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)]
    ahead = np.zeros(LAYOUT.size)
    for number, round_ in enumerate(rounds, start=1):
        [left] = without([round_], "ann")
        means = [mean_of(round_), mean_of(left)]
        first, step = adam(first, means[0], number)
        second, other = adam(second, means[1] - damping * ahead, number)
        ahead = ahead + other - step
    found = removal(recorded(rounds, OPTIMIZERS[2]), Scalar(damping), "ann")
    np.testing.assert_allclose(found.delta.flat, ahead, atol=2e-5)
    assert found.server is not None
    np.testing.assert_allclose(found.server.vectors, second, atol=2e-5)


@by_optimizer
@pytest.mark.parametrize("skew", [NoSkew(), Scalar(0.1), Kronecker("all")])
def test_memory_and_disk_agree(
    optimizer: ServerOptimizer, skew: Skew, tmp_path: Path
) -> None:
    rounds = history()
    memory, disk = recorded(rounds, optimizer), recorded(rounds, optimizer, tmp_path)
    for erase, client in ((True, "ann"), (False, "bob")):
        for ledger in (memory, disk):
            done = forget(ledger, [client], FastFedUL(skew=skew), erase=erase)
            found, now = done.model.server, ledger.final.server
            assert found is not None
            assert now is not None
            assert found.steps == now.steps
            np.testing.assert_array_equal(found.vectors, now.vectors)
        np.testing.assert_allclose(
            memory.final.params.flat, disk.final.params.flat, atol=1e-6
        )
        assert_same_server(memory.final, disk.final)


@by_optimizer
def test_training_goes_on_from_the_cleaned_model_and_state(
    optimizer: ServerOptimizer, tmp_path: Path
) -> None:
    rounds = history(9)
    wanted = recorded(without(rounds, "ann"), optimizer).final
    ledger = recorded(rounds[:5], optimizer, tmp_path)
    forget(ledger, ["ann"], FastFedUL(skew=NoSkew()))
    for round_ in without(rounds[5:], "ann"):
        ledger.append(replace(round_, index=ledger.num_rounds))
    assert_same_server(ledger.final, wanted)
    assert_models_lead_to_final(ledger)
    assert isinstance(ledger, DiskLedger)
    assert verify(ledger).problems == ()
    ledger.close()
    with DiskLedger(tmp_path) as again:
        assert_same_server(again.final, wanted)
        assert again.settings.optimizer == optimizer


@by_optimizer
@pytest.mark.parametrize("erase", [True, False])
def test_one_by_one_is_both_at_once(
    optimizer: ServerOptimizer, erase: bool, tmp_path: Path
) -> None:
    rounds = history(9)
    wanted = recorded(without(rounds, "ann", "bob"), optimizer).final
    ledger = recorded(rounds[:4], optimizer, tmp_path)
    method = FastFedUL(skew=NoSkew())
    forget(ledger, ["ann"], method, erase=erase)
    for round_ in without(rounds[4:], "ann"):
        ledger.append(replace(round_, index=ledger.num_rounds))
    forget(ledger, ["bob"], method, erase=erase)
    assert_same_server(ledger.final, wanted)
    assert_models_lead_to_final(ledger)
    if not erase:
        forget(ledger, ["bob"], erase=True)
        forget(ledger, ["ann"], erase=True)
        assert_same_server(ledger.final, wanted)
        assert_models_lead_to_final(ledger)


@by_optimizer
def test_an_erasure_takes_the_client_out_of_states_of_earlier_forgettings(
    optimizer: ServerOptimizer, tmp_path: Path
) -> None:
    rounds = history(8)
    ledger = recorded(rounds[:4], optimizer, tmp_path)
    forget(ledger, ["ann"], FastFedUL(skew=NoSkew()))
    for round_ in without(rounds[4:], "ann"):
        ledger.append(replace(round_, index=ledger.num_rounds))
    with_bob = ledger.server_states()[4]
    forget(ledger, ["bob"], FastFedUL(skew=NoSkew()))
    wanted = recorded(without(rounds[:4], "ann", "bob"), optimizer).final.server
    found = ledger.server_states()[4]
    assert wanted is not None
    np.testing.assert_allclose(found.vectors, wanted.vectors, atol=2e-5)
    assert np.abs(found.vectors - with_bob.vectors).max() > 1e-3


@by_optimizer
def test_a_damped_forgetting_leaves_models_that_lead_to_the_final_one(
    optimizer: ServerOptimizer,
) -> None:
    rounds = history(9)
    ledger = recorded(rounds[:5], optimizer)
    forget(ledger, ["ann"], FastFedUL(skew=Scalar(0.2)))
    for round_ in without(rounds[5:], "ann"):
        ledger.append(replace(round_, index=ledger.num_rounds))
    forget(ledger, ["bob"], FastFedUL(skew=Kronecker("all")))
    assert_models_lead_to_final(ledger)


@by_optimizer
@pytest.mark.parametrize("keep", ["uniform:2", "optimal:2", "top:2"])
def test_an_erasure_of_sampled_updates_leaves_steps_that_lead_to_the_final_model(
    optimizer: ServerOptimizer, keep: str
) -> None:
    select = Keep.parse(keep, seed=1)
    ledger = recorded([select(round_) for round_ in history()], optimizer)
    forget(ledger, ["ann"], FastFedUL(skew=NoSkew(), minimum_coverage=0.0))
    steps = np.sum(list(server_steps(ledger)), axis=0)
    found = ledger.initial.params.flat + steps
    np.testing.assert_allclose(found, ledger.final.params.flat, atol=3e-5)


@by_optimizer
@pytest.mark.parametrize("at_once", [True, False])
def test_after_an_erasure_every_state_follows_from_the_rounds_that_stay(
    optimizer: ServerOptimizer, at_once: bool, tmp_path: Path
) -> None:
    rounds = history(8)
    ledger = recorded(rounds[:4], optimizer, tmp_path)
    forget(ledger, ["ann"], FastFedUL(skew=Scalar(0.2)), erase=at_once)
    for round_ in without(rounds[4:], "ann"):
        ledger.append(replace(round_, index=ledger.num_rounds))
    if not at_once:
        forget(ledger, ["ann"], erase=True)
    state = optimizer.start(ledger.settings.layout.size)
    for index in range(8):
        if index == 4:
            given = ledger.server_states()[4]
            np.testing.assert_allclose(given.vectors, state.vectors, atol=2e-5)
        mean = ledger.combine([VectorRef(index)], [[1.0]]).sums[0]
        vectors, _ = optimizer.move(state.vectors, mean, state.steps)
        state = replace(state, steps=state.steps + 1, vectors=vectors)
    assert ledger.final.server is not None
    np.testing.assert_allclose(ledger.final.server.vectors, state.vectors, atol=2e-5)
    assert_models_lead_to_final(ledger)
    assert isinstance(ledger, DiskLedger)
    assert verify(ledger).problems == ()
