"""FedEraser and FedAccum: by hand on two numbers, then on a poisoned federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import pytest

from fastfedul.data.dataset import ClientData
from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Clients, Federation
from fastfedul.federation.local import LocalResult
from fastfedul.federation.rounds import Schedule
from fastfedul.federation.trainer import LocalTraining, Logits
from fastfedul.integrations.torch import TorchTrainer
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.protocol import read_round
from fastfedul.ledger.views import KeptView
from fastfedul.methods.federaser import (
    FedAccum,
    FedEraser,
    calibrated,
    calibrated_by_layer,
)
from fastfedul.methods.protocol import (
    Method,
    Needs,
    UnlearnRequest,
    UnlearnResult,
    measured,
)
from fastfedul.params import Array, Flat, Params, norm
from fastfedul.records import ClientId, ClientUpdate, Model, Round
from fastfedul.runs.config import RunConfig
from tests.support.by_hand import Updates, ledger_from
from tests.support.small_run import SmallRun, trained_in_memory

LAYOUT = Params.of({"w": np.zeros(2), "b": np.zeros(2)}).layout
Vector = tuple[float, float, float, float]


def params(*values: float) -> Params:
    return Params(LAYOUT, np.array(values, np.float32))


class Answers:
    """Workers that give the answers they were told to, and remember the questions."""

    def __init__(
        self,
        answers: Mapping[ClientId, Vector],
        buffers: Mapping[ClientId, Mapping[str, Array]] | None = None,
    ) -> None:
        self.answers = answers
        self.buffers = buffers or {}
        self.asked: list[tuple[list[float], int, tuple[ClientId, ...], float]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def initial(self, seed: int) -> Model:
        raise AssertionError("the first model is in the ledger")

    def predict(self, model: Model, name: str) -> Logits:
        raise AssertionError("nothing is scored")

    def train(
        self,
        model: Model,
        index: int,
        clients: Sequence[ClientId],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        assert local is not None
        question = (model.params.flat.tolist(), index, tuple(clients), local.epochs)
        self.asked.append(question)
        return [
            LocalResult(params(*self.answers[name]), self.buffers.get(name, {}))
            for name in clients
        ]


def ledger_of(*rounds: Updates, aggregation: str = "mean") -> MemoryLedger:
    return ledger_from(params(1, 1, 1, 1), *rounds, aggregation=aggregation)


def request_of(
    ledger: MemoryLedger,
    workers: Answers,
    *forget: ClientId,
    scales: Mapping[ClientId, float] | None = None,
) -> UnlearnRequest:
    image = np.zeros((1, 1, 1, 1), np.uint8)
    names = ("a", "b", "t")
    data = {name: ClientData(name, image, np.zeros(1, np.int64)) for name in names}
    federation = Federation(
        clients=Clients(workers, data),
        trainer=TorchTrainer(shape=(8, 8, 1), num_classes=10),
        schedule=Schedule(seed=0),
        local=LocalTraining(epochs=4),
        scales=scales or {},
        server=np.zeros((0, 1, 1, 1), np.float32),
        seed=0,
    )
    return UnlearnRequest(ledger, frozenset(forget), federation)


FIRST: Updates = {
    "a": (0.25, (4, 0, 0, 0)),
    "b": (0.25, (0, 2, 0, 0)),
    "t": (0.5, (9, 9, 9, 9)),
}
SECOND: Updates = {
    "a": (0.1, (0, 3, 4, 0)),
    "b": (0.3, (0, 0, 0, 10)),
    "t": (0.6, (9, 9, 9, 9)),
}
FRESH: dict[ClientId, Vector] = {"a": (6, 8, 0, 0), "b": (0, 0, 0.6, 0.8)}


# The formulas by hand.


def test_the_first_round_is_the_stored_one_without_the_client() -> None:
    workers = Answers(FRESH)
    result = FedEraser()(request_of(ledger_of(FIRST), workers, "t"))
    # (1, 1, 1, 1) + 0.5 (4, 0, 0, 0) + 0.5 (0, 2, 0, 0); nobody trains.
    np.testing.assert_allclose(result.params.flat, [3, 2, 1, 1])
    assert workers.asked == []


def test_a_later_round_has_fresh_directions_and_stored_lengths() -> None:
    workers = Answers(FRESH)
    request = request_of(ledger_of(FIRST, SECOND), workers, "t")
    result = FedEraser(interval=1)(request)
    # a: 5 (0.6, 0.8, 0, 0) = (3, 4, 0, 0); b: 10 (0, 0, 0.6, 0.8) = (0, 0, 6, 8);
    # (3, 2, 1, 1) + 0.25 (3, 4, 0, 0) + 0.75 (0, 0, 6, 8).
    np.testing.assert_allclose(result.params.flat, [3.75, 3, 5.5, 7], rtol=1e-6)
    # They start from the rebuilt model, in the stored round, for half the epochs.
    assert workers.asked == [([3, 2, 1, 1], 1, ("a", "b"), 2.0)]


def test_a_later_round_by_layer_keeps_the_length_of_each_array() -> None:
    workers = Answers({"a": (6, 8, 0, -2), "b": (5, 0, 0.6, 0.8)})
    request = request_of(ledger_of(FIRST, SECOND), workers, "t")
    result = FedEraser(interval=1, calibration="layer")(request)
    # a: w 3 (0.6, 0.8), b 4 (0, -1); b: w 0, b 10 (0.6, 0.8);
    # (3, 2, 1, 1) + 0.25 (1.8, 2.4, 0, -4) + 0.75 (0, 0, 6, 8).
    np.testing.assert_allclose(result.params.flat, [3.45, 2.6, 5.5, 6], rtol=1e-6)


def test_accumulating_adds_the_stored_rounds() -> None:
    ledger = ledger_of(FIRST, SECOND)
    request = UnlearnRequest(ledger, frozenset({"t"}))
    result = FedAccum(interval=1)(request)
    # (3, 2, 1, 1) + 0.25 (0, 3, 4, 0) + 0.75 (0, 0, 0, 10).
    np.testing.assert_allclose(result.params.flat, [3, 2.75, 2, 8.5])
    # Every second round is the first one alone.
    np.testing.assert_allclose(FedAccum()(request).params.flat, [3, 2, 1, 1])


def test_a_vector_without_a_direction_or_a_length_stays_zero() -> None:
    zeros, some = np.zeros(3, np.float32), np.array([1, 2, 3], np.float32)
    assert calibrated(zeros, 5.0).tolist() == [0, 0, 0]
    assert calibrated(some, 0.0).tolist() == [0, 0, 0]
    mixed = calibrated_by_layer(params(0, 0, 3, 4), params(1, 1, 0, 10))
    np.testing.assert_allclose(mixed.flat, [0, 0, 6, 8])


def test_a_tiny_vector_is_calibrated_to_a_huge_length() -> None:
    # The quotient of the two lengths is beyond float32.
    tiny = np.array([3e-22, 4e-22], np.float32)
    found = calibrated(tiny, 1e18)
    np.testing.assert_allclose(found, [0.6e18, 0.8e18], rtol=0.01)


def test_a_client_that_learns_nothing_adds_nothing() -> None:
    workers = Answers({**FRESH, "b": (0, 0, 0, 0)})
    request = request_of(ledger_of(FIRST, SECOND), workers, "t")
    result = FedEraser(interval=1)(request)
    np.testing.assert_allclose(result.params.flat, [3.75, 3, 1, 1], rtol=1e-6)


def test_a_round_of_the_client_alone_is_skipped() -> None:
    alone: Updates = {"t": (1.0, (9, 9, 9, 9))}
    workers = Answers(FRESH)
    ledger = ledger_of(FIRST, alone, SECOND)
    result = FedEraser(interval=1)(request_of(ledger, workers, "t"))
    np.testing.assert_allclose(result.params.flat, [3.75, 3, 5.5, 7], rtol=1e-6)
    assert [index for _, index, _, _ in workers.asked] == [2]


def test_a_later_round_is_calibrated_even_if_it_is_the_first_that_is_left() -> None:
    alone: Updates = {"t": (1.0, (9, 9, 9, 9))}
    workers = Answers(FRESH)
    request = request_of(ledger_of(alone, SECOND), workers, "t")
    result = FedEraser(interval=1)(request)
    # Its updates are stored from a model that t had made.
    np.testing.assert_allclose(result.params.flat, [1.75, 2, 5.5, 7], rtol=1e-6)


def test_who_was_forgotten_before_is_left_out_too() -> None:
    ledger = ledger_of(FIRST, SECOND)
    ledger.commit_forgetting(["b"], np.ones(4, np.float32), {})
    workers = Answers(FRESH)
    result = FedEraser(interval=1)(request_of(ledger, workers, "t"))
    # Only a stays: (1, 1, 1, 1) + (4, 0, 0, 0) + (3, 4, 0, 0).
    np.testing.assert_allclose(result.params.flat, [8, 5, 1, 1], rtol=1e-6)
    accumulated = FedAccum(interval=1)(UnlearnRequest(ledger, frozenset({"t"})))
    np.testing.assert_allclose(accumulated.params.flat, [5, 4, 5, 1])


def test_of_an_attackers_factor_only_the_sign_counts() -> None:
    ledger = ledger_of(FIRST, SECOND)
    found = [
        FedEraser(interval=1)(
            request_of(ledger, Answers(FRESH), "t", scales={"a": factor})
        ).params.flat
        for factor in (1.0, 4.0, -4.0)
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    np.testing.assert_allclose(found[2], [2.25, 1, 5.5, 7], rtol=1e-6)


def test_buffers_are_the_mean_of_what_came_back() -> None:
    buffers = {"mean": np.zeros(1, np.float32), "count": np.array(0)}
    ledger = MemoryLedger.create(Model(params(1, 1, 1, 1), buffers))
    for index, updates in enumerate((FIRST, SECOND)):
        pairs = [ClientUpdate(n, s, params(*v)) for n, (s, v) in updates.items()]
        ledger.append(Round(index, tuple(pairs)))
    own: dict[ClientId, dict[str, Array]] = {
        "a": {"mean": np.array([4], np.float32), "count": np.array(3)},
        "b": {"mean": np.array([8], np.float32), "count": np.array(5)},
    }
    request = request_of(ledger, Answers(FRESH, own), "t")
    result = FedEraser(interval=1)(request)
    assert result.buffers is not None
    assert result.buffers["mean"].tolist() == [7]  # 0.25 of 4 and 0.75 of 8
    assert result.buffers["count"] == 5
    assert result.warnings == ()
    # Where nobody trains, there are only the buffers of the current model.
    for method in (FedEraser(interval=2), FedAccum(interval=1)):
        untrained: UnlearnResult = method(request)
        assert untrained.buffers is None


# On a poisoned federation.


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_every_client_has_its_stored_length_in_every_round(
    small_run: SmallRun, interval: int
) -> None:
    rebuilt = FedEraser(interval=interval).rounds(small_run.request())
    rounds = [one.round for one in rebuilt]
    assert [round_.index for round_ in rounds] == list(range(0, 8, interval))
    for round_ in rounds:
        entries = small_run.ledger.updates_in(round_.index)
        stored = {entry.client: entry.norm for entry in entries}
        del stored["client-0"]
        found = {u.client: norm(flat_of(u)) for u in round_.updates}
        assert found == pytest.approx(stored, rel=1e-5)
        assert sum(u.share for u in round_.updates) == pytest.approx(1)


def test_every_layer_has_its_stored_length_in_every_round(small_run: SmallRun) -> None:
    method = FedEraser(calibration="layer")
    for round_ in (one.round for one in method.rounds(small_run.request())):
        for update in round_.updates:
            stored = stored_update(small_run, round_.index, update.client)
            assert update.delta is not None
            for name in stored:
                length = float(np.linalg.norm(stored[name]))
                found = float(np.linalg.norm(update.delta[name]))
                assert found == pytest.approx(length, rel=1e-4), name


def test_the_directions_are_those_of_the_clients_short_training(
    small_run: SmallRun,
) -> None:
    rebuilt = FedEraser(interval=4).rounds(small_run.request())
    first, second = (one.round for one in rebuilt)
    start = small_run.ledger.initial
    flat = start.params.flat + sum(u.share * flat_of(u) for u in first.updates)
    model = Model(Params(start.params.layout, flat.astype(np.float32)))
    names = [update.client for update in second.updates]
    local = replace(small_run.federation.local, epochs=1)  # half of 2
    answers = small_run.federation.clients.workers.train(model, 4, names, local)
    for update, answer in zip(second.updates, answers, strict=True):
        ours, theirs = flat_of(update), answer.delta.flat
        cosine = ours @ theirs / (norm(ours) * norm(theirs))
        assert cosine == pytest.approx(1, abs=1e-3)


def test_the_backdoor_goes_and_the_accuracy_stays(small_run: SmallRun) -> None:
    final = small_run.ledger.final
    result = FedEraser(interval=1)(small_run.request())
    model = result.model(final)
    assert small_run.backdoor(final) > 0.5
    assert small_run.backdoor(model) < 0.1
    assert small_run.main(model) > small_run.main(small_run.retrained) - 0.08


def test_calibration_is_worth_its_price(small_run: SmallRun) -> None:
    final = small_run.ledger.final
    eraser = FedEraser()(small_run.request()).model(final)
    accumulated = FedAccum()(small_run.request()).model(final)
    assert small_run.backdoor(accumulated) < 0.1
    assert small_run.main(eraser) > small_run.main(accumulated) + 0.1


def test_with_everything_as_it_was_the_run_comes_out_again(
    small_run: SmallRun,
) -> None:
    # A client of the federation that never took part; full epochs, every round.
    request = small_run.request()
    assert request.federation is not None
    clients = request.federation.clients
    stranger = replace(clients.data["client-0"], client="stranger")
    data = {**clients.data, "stranger": stranger}
    federation = replace(request.federation, clients=Clients(clients.workers, data))
    request = UnlearnRequest(small_run.ledger, frozenset({"stranger"}), federation)
    final = small_run.ledger.final.params.flat
    first = small_run.ledger.initial.params.flat
    accumulated = FedAccum(interval=1)(request).params.flat
    assert norm(accumulated - final) < 1e-4 * norm(final - first)
    rebuilt = FedEraser(interval=1, ratio=1.0)(request).params.flat
    assert norm(rebuilt - final) < 1e-2 * norm(final - first)


def test_clients_are_called_only_in_later_rounds_that_count(
    small_run: SmallRun,
) -> None:
    calls = {
        interval: measured(FedEraser(interval=interval), small_run.request())
        for interval in (1, 2, 8)
    }
    counted = {interval: found.client_calls for interval, found in calls.items()}
    assert counted == {1: 7 * 5, 2: 3 * 5, 8: 0}
    # The lengths need no array: only the first round is read.
    size = small_run.ledger.final.params.flat.nbytes
    assert calls[2].bytes_read == 5 * size
    accumulated = measured(FedAccum(), small_run.request())
    assert accumulated.client_calls == 0
    assert accumulated.bytes_read == 4 * 5 * size


def test_settings_matter(small_run: SmallRun) -> None:
    methods: list[Method] = [
        FedEraser(),
        FedEraser(interval=4),
        FedEraser(ratio=1.0),
        FedEraser(calibration="layer"),
        FedAccum(),
        FedAccum(interval=4),
    ]
    found = {m(small_run.request()).params.flat.tobytes() for m in methods}
    assert len(found) == len(methods)


def test_several_clients_are_left_out_together(small_run: SmallRun) -> None:
    request = small_run.request("client-3", "client-0")
    result = measured(FedEraser(interval=4), request)
    assert result.clients == ("client-0", "client-3")
    assert result.client_calls == 4
    for round_ in (one.round for one in FedEraser(interval=4).rounds(request)):
        names = [update.client for update in round_.updates]
        assert names == ["client-1", "client-2", "client-4", "client-5"]
        assert sum(update.share for update in round_.updates) == pytest.approx(1)
    assert FedAccum()(request).clients == ("client-0", "client-3")


def test_the_same_request_gives_the_same_bytes(small_run: SmallRun) -> None:
    for method in (FedEraser(interval=4), FedEraser(interval=4, calibration="layer")):
        first, second = (method(small_run.request()) for _ in range(2))
        assert first.params.flat.tobytes() == second.params.flat.tobytes()


def test_batch_statistics_come_from_the_others_training(normalised: str) -> None:
    config = RunConfig.from_options(
        clients=4, rounds=5, train_size=300, model=normalised, per_round=3, workers=1
    )
    run = trained_in_memory(config)
    ledger = run.ledger
    model = FedEraser()(run.request("client-1")).model(ledger.final)
    spread = "1.running_var"
    assert not np.array_equal(model.buffers[spread], ledger.initial.buffers[spread])
    assert not np.array_equal(model.buffers[spread], ledger.final.buffers[spread])
    # Two trained rounds, of 2 epochs' half each.
    batches = -(-max(run.prepared.sizes.values()) // config.local.batch_size)
    assert model.buffers["1.num_batches_tracked"] == 2 * batches


# What it cannot do, and what makes no sense.


def test_dropped_updates_are_refused_only_where_they_are_needed(
    small_run: SmallRun,
) -> None:
    class FirstRoundKept(KeptView):
        def updates_in(self, index):  # type: ignore[no-untyped-def]
            if index == 0:
                return self.ledger.updates_in(0)
            return KeptView.updates_in(self, index)

    few = Keep.parse("uniform:2")
    request = small_run.request()
    with pytest.raises(UnlearnRefusedError, match="round 0, which was not kept"):
        FedEraser()(replace(request, ledger=KeptView(small_run.ledger, few)))
    sampled = replace(request, ledger=FirstRoundKept(small_run.ledger, few))
    whole = FedEraser(interval=4)(request).params.flat
    found = FedEraser(interval=4)(sampled).params.flat
    assert found.tobytes() == whole.tobytes()
    for method in (FedEraser(interval=4, calibration="layer"), FedAccum(interval=4)):
        with pytest.raises(UnlearnRefusedError, match="round 4, which was not kept"):
            method(sampled)


def test_an_update_the_server_never_had_is_refused() -> None:
    ledger = ledger_of(FIRST)
    unseen = (
        ClientUpdate("a", 0.5, None, keep_probability=0.5, kept=False),
        ClientUpdate("t", 0.5, params(1, 1, 1, 1)),
    )
    ledger.append(Round(1, unseen, step=params(1, 1, 1, 1)))
    workers = Answers(FRESH)
    with pytest.raises(UnlearnRefusedError, match="never had"):
        FedEraser(interval=1)(request_of(ledger, workers, "t"))
    assert workers.asked == []


@pytest.mark.parametrize("method", [FedEraser(), FedAccum()])
def test_another_aggregation_is_refused(method: FedEraser | FedAccum) -> None:
    ledger = ledger_of(FIRST, aggregation="median")
    with pytest.raises(UnlearnRefusedError, match="'median'"):
        method(request_of(ledger, Answers(FRESH), "t"))


@pytest.mark.parametrize("method", [FedEraser(), FedAccum()])
def test_forgetting_everybody_is_refused(method: FedEraser | FedAccum) -> None:
    request = request_of(ledger_of(FIRST), Answers(FRESH), "a", "b", "t")
    with pytest.raises(UnlearnRefusedError, match="nobody"):
        method(request)


def test_an_interval_that_misses_all_who_stay_is_refused() -> None:
    alone: Updates = {"t": (1.0, (9, 9, 9, 9))}
    request = request_of(ledger_of(alone, SECOND), Answers(FRESH), "t")
    for method in (FedEraser(interval=2), FedAccum(interval=2)):
        with pytest.raises(UnlearnRefusedError, match="interval of 1"):
            method(request)


def test_fed_eraser_needs_a_federation_and_fed_accum_does_not() -> None:
    request = UnlearnRequest(ledger_of(FIRST), frozenset({"t"}))
    with pytest.raises(UnlearnRefusedError, match="federaser needs the help"):
        FedEraser()(request)
    assert FedAccum()(request).clients == ("t",)
    assert FedEraser().needs == Needs(history=True, others=True)
    assert FedAccum().needs == Needs(history=True)


def test_it_is_refused_when_somebody_who_is_needed_cannot_be_asked() -> None:
    workers = Answers(FRESH)
    request = request_of(ledger_of(FIRST, SECOND), workers, "t")
    assert request.federation is not None
    data = dict(request.federation.clients.data)
    del data["b"]
    federation = replace(request.federation, clients=Clients(workers, data))
    lonely = replace(request, federation=federation)
    with pytest.raises(UnlearnRefusedError, match="needs 'b'"):
        FedEraser(interval=1)(lonely)
    assert workers.asked == []
    # The first round needs nobody.
    np.testing.assert_allclose(FedEraser()(lonely).params.flat, [3, 2, 1, 1])


@pytest.mark.parametrize("interval", [0, -1, 1.5, True])
def test_an_interval_is_a_whole_number_of_rounds(interval: int) -> None:
    for method in (FedEraser, FedAccum):
        with pytest.raises(InvalidInputError, match="; choose a whole number of 1"):
            method(interval=interval)


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.5, float("nan")])
def test_a_ratio_is_above_zero_and_up_to_one(ratio: float) -> None:
    with pytest.raises(InvalidInputError, match="above 0 and up to 1"):
        FedEraser(ratio=ratio)


def test_calibration_is_by_client_or_by_layer() -> None:
    with pytest.raises(InvalidInputError, match="client or layer"):
        FedEraser(calibration="round")  # type: ignore[arg-type]


def flat_of(update: ClientUpdate) -> Flat:
    assert update.delta is not None
    return update.delta.flat


def stored_update(small_run: SmallRun, index: int, client: ClientId) -> Params:
    updates = read_round(small_run.ledger, index).updates
    (found,) = [u.delta for u in updates if u.client == client]
    assert found is not None
    return found
