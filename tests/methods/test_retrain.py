"""Retraining: bit for bit the run in which the clients never answered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Clients
from fastfedul.federation.rounds import participants
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.methods.protocol import Needs, UnlearnRequest, measured
from fastfedul.methods.retrain import Retrain
from fastfedul.params import Params
from fastfedul.records import Model
from fastfedul.runs.config import RunConfig
from fastfedul.runs.preparation import retrain, rounds_of
from tests.support.small_run import SmallRun, TrainedRun, trained_in_memory


def trained(**options: object) -> TrainedRun:
    config = RunConfig.from_options(
        **{"clients": 5, "rounds": 3, "epochs": 1, "train_size": 300, "workers": 1}
        | options
    )
    return trained_in_memory(config)


def assert_same(found: Model, expected: Model) -> None:
    assert found.params.flat.tobytes() == expected.params.flat.tobytes()
    assert set(found.buffers) == set(expected.buffers)
    for name, buffer in expected.buffers.items():
        assert np.asarray(found.buffers[name]).tobytes() == buffer.tobytes(), name


def test_it_is_the_run_in_which_the_client_never_answered(small_run: SmallRun) -> None:
    request = small_run.request()
    result = Retrain()(request)
    model = result.model(small_run.ledger.final)
    assert_same(model, small_run.retrained)
    assert result.clients == ("client-0",)
    assert not np.array_equal(model.params.flat, small_run.ledger.final.params.flat)


def test_it_removes_the_backdoor_and_keeps_the_accuracy(small_run: SmallRun) -> None:
    model = Retrain()(small_run.request()).model(small_run.ledger.final)
    final = small_run.ledger.final
    assert small_run.backdoor(model) < small_run.backdoor(final) / 2
    assert small_run.main(model) > small_run.main(final) - 0.05


def test_everybody_else_is_asked_in_every_round(small_run: SmallRun) -> None:
    result = measured(Retrain(), small_run.request())
    assert result.client_calls == 5 * 8
    assert result.bytes_read == 0


@pytest.mark.parametrize(
    "options",
    [
        {"per_round": 3},
        {"dropout": 0.4},
        {"per_round": 2, "dropout": 0.3, "weighting": "equal"},
    ],
)
def test_draws_and_dropouts_are_those_of_the_run(options: dict[str, object]) -> None:
    run = trained(rounds=4, **options)
    # Whoever is forgotten must have been there, or nothing is tested.
    target = run.ledger.updates_in(0)[0].client
    result = measured(Retrain(), run.request(target))
    expected = retrain(run.prepared, run.workers, {target})
    assert_same(result.model(run.ledger.final), expected)
    names = tuple(run.prepared.sizes)
    schedule = run.prepared.config.round_schedule
    assert result.client_calls == sum(
        len(participants(names, schedule, index, {target})) for index in range(4)
    )


def test_a_round_of_forgotten_clients_alone_is_drawn_anew() -> None:
    run = trained(per_round=1)
    [target] = [update.client for update in run.ledger.updates_in(0)]
    result = measured(Retrain(), run.request(target))
    expected = retrain(run.prepared, run.workers, {target})
    assert_same(result.model(run.ledger.final), expected)
    # Somebody else trains in every round, also in those that were the client's.
    assert result.client_calls == 3


def test_a_run_of_which_only_a_sample_was_stored_can_be_retrained() -> None:
    run = trained(keep="uniform:2")
    expected = retrain(run.prepared, run.workers, {"client-0"})
    assert_same(Retrain()(run.request("client-0")).model(run.ledger.final), expected)


def test_it_is_plain_averaging_of_the_others_worked_out_step_by_step() -> None:
    run = trained()
    sizes = {n: s for n, s in run.prepared.sizes.items() if n != "client-0"}
    model = run.ledger.initial
    for index in range(3):
        answers = run.workers.train(model, index, tuple(sizes))
        total = sum(
            size * answer.delta.flat.astype(np.float64)
            for size, answer in zip(sizes.values(), answers, strict=True)
        )
        flat = model.params.flat + total / sum(sizes.values())
        model = Model(Params(model.params.layout, flat.astype(np.float32)))
    found = Retrain()(run.request("client-0")).params.flat
    np.testing.assert_allclose(found, model.params.flat, atol=1e-4)


def test_several_clients_are_left_out_together(small_run: SmallRun) -> None:
    request = small_run.request("client-3", "client-0")
    result = measured(Retrain(), request)
    workers = small_run.federation.clients.workers
    expected = retrain(small_run.prepared, workers, {"client-0", "client-3"})
    assert_same(result.model(small_run.ledger.final), expected)
    assert result.clients == ("client-0", "client-3")
    assert result.client_calls == 4 * 8


def test_who_was_forgotten_before_stays_out() -> None:
    run = trained()
    nothing = np.zeros_like(run.ledger.final.params.flat)
    run.ledger.commit_forgetting(["client-1"], nothing, {})
    result = Retrain()(run.request("client-0"))
    expected = retrain(run.prepared, run.workers, {"client-0", "client-1"})
    assert_same(result.model(run.ledger.final), expected)


def test_attackers_that_stay_go_on_scaling_their_updates() -> None:
    run = trained(attack="pixel", attackers="client-0", attack_scale=3.0)
    expected = retrain(run.prepared, run.workers, {"client-2"})
    result = Retrain()(run.request("client-2"))
    assert_same(result.model(run.ledger.final), expected)
    request = run.request("client-2")
    assert request.federation is not None
    honest = replace(request.federation, scales={})
    other = Retrain()(replace(request, federation=honest))
    assert not np.array_equal(other.params.flat, result.params.flat)


def test_buffers_are_trained_too(normalised: str) -> None:
    run = trained(model=normalised)
    result = Retrain()(run.request("client-0"))
    assert result.buffers
    expected = retrain(run.prepared, run.workers, {"client-0"})
    assert_same(result.model(run.ledger.final), expected)


def test_the_same_request_gives_the_same_bytes() -> None:
    run = trained()
    first, second = (Retrain()(run.request("client-0")) for _ in range(2))
    assert first.params.flat.tobytes() == second.params.flat.tobytes()


def test_progress_is_told_of_every_round() -> None:
    run = trained()
    told: list[int] = []
    Retrain(progress=told.append)(run.request("client-0"))
    assert told == [0, 1, 2]
    assert Retrain(progress=told.append) == Retrain()


def test_it_needs_the_others_and_nothing_else() -> None:
    assert Retrain().needs == Needs(others=True)


def test_a_ledger_alone_is_refused(small_run: SmallRun) -> None:
    request = UnlearnRequest(small_run.ledger, frozenset({"client-0"}))
    with pytest.raises(UnlearnRefusedError, match="the other clients"):
        Retrain()(request)


def test_a_run_of_aggregated_samples_needs_to_know_how_they_were_drawn() -> None:
    run = trained(keep="uniform:2", keep_use="aggregate")
    request = run.request("client-0")
    expected = retrain(run.prepared, run.workers, {"client-0"})
    found = Retrain()(request).params.flat
    assert found.tobytes() == expected.params.flat.tobytes()
    assert request.federation is not None
    unknown = replace(request.federation, select=None)
    with pytest.raises(UnlearnRefusedError, match="only a sample"):
        Retrain()(replace(request, federation=unknown))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["median", "krum:1", "bulyan:0"])
def test_the_server_retrains_under_its_own_aggregation(
    small_run: SmallRun, name: str
) -> None:
    config = small_run.prepared.config.with_options(aggregation=name, rounds=2)
    prepared = replace(small_run.prepared, config=config)
    workers, model = small_run.workers, small_run.ledger.initial
    ledger = MemoryLedger.create(model, aggregation=name)
    for one in rounds_of(
        prepared, workers, model, 0, 2, frozenset(), lambda _, r: ledger.append(r)
    ):
        model = one.model
    unrecorded = rounds_of(prepared, workers, ledger.initial, 0, 2, frozenset())
    assert [one.model for one in unrecorded][-1].params.flat.tobytes() == (
        model.params.flat.tobytes()
    )
    found = Retrain()(replace(small_run.request("client-1"), ledger=ledger))
    expected = retrain(prepared, workers, {"client-1"})
    assert found.params.flat.tobytes() == expected.params.flat.tobytes()
    mean = retrain(small_run.prepared, workers, {"client-1"})
    assert found.params.flat.tobytes() != mean.params.flat.tobytes()


def test_forgetting_everybody_is_refused(small_run: SmallRun) -> None:
    with pytest.raises(UnlearnRefusedError, match="nobody stays"):
        Retrain()(small_run.request(*small_run.prepared.sizes))


def test_a_stranger_is_refused(small_run: SmallRun) -> None:
    with pytest.raises(InvalidInputError, match="not in this federation"):
        Retrain()(small_run.request("nobody"))


def test_it_is_refused_when_somebody_who_stays_cannot_be_asked(
    small_run: SmallRun,
) -> None:
    request = small_run.request()
    assert request.federation is not None
    clients = request.federation.clients
    fewer = {name: own for name, own in clients.data.items() if name != "client-4"}
    federation = replace(request.federation, clients=Clients(clients.workers, fewer))
    with pytest.raises(UnlearnRefusedError, match="'client-4'"):
        Retrain()(replace(request, federation=federation))
    assert federation.clients.calls == 0
