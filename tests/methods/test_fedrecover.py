"""FedRecover: exact where losses are quadratic, frugal with the clients, and stable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import pytest

from fastfedul.data.dataset import ClientData
from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Clients, Federation
from fastfedul.federation.local import LocalResult
from fastfedul.federation.rounds import Schedule, model_after, run_rounds
from fastfedul.federation.trainer import LocalTraining, Logits, Trainer
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.protocol import vector
from fastfedul.ledger.views import KeptView
from fastfedul.methods.fedrecover import FedRecover
from fastfedul.methods.protocol import Needs, UnlearnRequest, measured
from fastfedul.params import Flat, Layout, Params, Slot
from fastfedul.records import ClientUpdate, Model, Round, VectorRef
from fastfedul.rng import stream
from fastfedul.runs.config import RunConfig
from tests.support.small_run import SmallRun, trained_in_memory

SIZE = 5
LAYOUT = Layout((Slot("w", (SIZE,), "float32"),))


@dataclass
class Quadratic:
    """Clients that take one gradient step on (w - c)^T H (w - c) / 2.

    Attributes:
        curvatures: H of each client, learning rate included.
        centres: c of each client.
        asked: Which clients were trained in which round.
    """

    curvatures: Mapping[str, npt.NDArray[np.float64]]
    centres: Mapping[str, npt.NDArray[np.float64]]
    asked: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def initial(self, seed: int) -> Model:
        flat = stream(seed, "initial").normal(size=SIZE).astype(np.float32)
        return Model(Params(LAYOUT, flat))

    def train(
        self,
        model: Model,
        index: int,
        clients: Sequence[str],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        self.asked[index] = (*self.asked.get(index, ()), *clients)
        return [LocalResult(self._step(model, name), {}) for name in clients]

    def predict(self, model: Model, name: str) -> Logits:
        raise AssertionError("nothing is scored")

    def _step(self, model: Model, name: str) -> Params:
        away = model.params.flat.astype(np.float64) - self.centres[name]
        step = -self.curvatures[name] @ away
        return Params(LAYOUT, step.astype(np.float32))


@dataclass
class QuadraticRun:
    """A run of quadratic clients; `a` is far off and is to be forgotten."""

    workers: Quadratic
    schedule: Schedule
    scales: Mapping[str, float]
    ledger: MemoryLedger
    rounds: int

    def request(self, *forget: str) -> UnlearnRequest:
        self.workers.asked.clear()
        return UnlearnRequest(
            self.ledger, frozenset(forget or {"a"}), self._federation()
        )

    def retrained(self, *without: str) -> Flat:
        model = self.workers.initial(0)
        rounds = self._rounds(model, frozenset(without or {"a"}))
        return model_after(rounds, model).params.flat

    def distance(self, params: Params, *without: str) -> float:
        return float(np.linalg.norm(params.flat - self.retrained(*without)))

    def record(self) -> Self:
        for trained in self._rounds(self.workers.initial(0), frozenset()):
            self.ledger.append(trained.round)
        return self

    def _rounds(self, model: Model, absent: frozenset[str]) -> Any:
        return run_rounds(
            self.workers.train,
            self._federation().clients.sizes,
            self.schedule,
            model=model,
            stop=self.rounds,
            absent=absent,
            scales=self.scales,
        )

    def _federation(self) -> Federation:
        data = {
            name: ClientData(
                name, np.zeros((size, 1, 1, 1), np.uint8), np.zeros(size, np.int64)
            )
            for size, name in enumerate(self.workers.centres, start=1)
        }
        return Federation(
            clients=Clients(self.workers, data),
            trainer=cast(Trainer, None),
            schedule=self.schedule,
            local=LocalTraining(),
            scales=self.scales,
            server=np.zeros((0, 1, 1, 1), np.float32),
            seed=0,
        )


def quadratic_run(
    *,
    rounds: int = 20,
    round_losses: bool = False,
    schedule: Schedule | None = None,
    scales: Mapping[str, float] | None = None,
    aggregation: str = "mean",
) -> QuadraticRun:
    rng = stream(1, "problem")
    curvatures, centres = {}, {}
    for name in "abcde":
        rows = rng.normal(size=(SIZE, SIZE))
        matrix = rows @ rows.T
        matrix *= 0.3 / np.linalg.eigvalsh(matrix)[-1]
        curvatures[name] = 0.05 * (1 + ord(name) % 5) * np.eye(SIZE)
        if not round_losses:
            curvatures[name] = matrix
        centres[name] = rng.normal(size=SIZE) + (5 if name == "a" else 0)
    workers = Quadratic(curvatures, centres)
    ledger = MemoryLedger.create(workers.initial(0), aggregation=aggregation)
    schedule = schedule or Schedule(seed=0)
    return QuadraticRun(workers, schedule, scales or {}, ledger, rounds).record()


def test_it_is_retraining_where_one_number_is_the_curvature() -> None:
    run = quadratic_run(round_losses=True)
    result = FedRecover()(run.request())
    assert run.distance(run.ledger.final.params) > 0.1
    np.testing.assert_allclose(result.params.flat, run.retrained(), atol=1e-5)
    assert not result.warnings


def test_it_comes_close_where_curvature_differs_by_direction() -> None:
    run = quadratic_run()
    result = FedRecover()(run.request())
    before = run.distance(run.ledger.final.params)
    assert run.distance(result.params) < 0.02 * before


def test_asking_more_often_brings_it_closer() -> None:
    run = quadratic_run()
    distances = [
        run.distance(FedRecover(max_exact_share=share, warmup=20)(run.request()).params)
        for share in (0.1, 0.3, 0.6, 1)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-5 < distances[0]


def test_a_longer_memory_brings_it_closer() -> None:
    run = quadratic_run(rounds=40)
    one, three = (
        run.distance(FedRecover(memory=size, warmup=4)(run.request()).params)
        for size in (1, 3)
    )
    assert three < one


def test_curvature_is_what_helps() -> None:
    run = quadratic_run()
    close = FedRecover()(run.request())
    # So small a limit is as good as no curvature at all.
    blind = FedRecover(max_curvature=1e-9)(run.request())
    assert run.distance(close.params) < 0.5 * run.distance(blind.params)


def test_a_round_by_hand() -> None:
    run = quadratic_run(rounds=2)
    result = FedRecover(max_exact_share=0.5)(run.request())
    start = run.workers.initial(0)
    # The first round needs nobody: b to e trained from the very same model.
    assert run.workers.asked == {1: ("b", "c", "d", "e")}
    weights = dict(zip("bcde", (2 / 14, 3 / 14, 4 / 14, 5 / 14), strict=True))
    flat = start.params.flat.astype(np.float64)
    for _ in range(2):
        flat = flat - sum(
            weights[n] * run.workers.curvatures[n] @ (flat - run.workers.centres[n])
            for n in "bcde"
        )
    np.testing.assert_allclose(result.params.flat, flat, atol=1e-5)


def test_rounds_to_ask_in() -> None:
    assert FedRecover().exact_rounds(0, 20) == (1, 19, 2, 12)
    assert FedRecover().exact_rounds(0, 8) == (1, 7, 2)
    assert FedRecover(correction=5).exact_rounds(0, 20) == (1, 19, 2, 7, 12, 17)
    assert FedRecover(correction=None).exact_rounds(4, 20) == (5, 19, 6)
    assert FedRecover(warmup=1, final=3).exact_rounds(0, 10) == (1, 9, 8, 7)
    assert FedRecover(warmup=9, final=0).exact_rounds(6, 10) == (7, 8, 9)


def test_at_most_the_share_of_rounds_is_asked_in() -> None:
    run = quadratic_run()
    # A rate of one half makes half of all values odd.
    result = measured(FedRecover(tolerance_rate=0.5), run.request())
    assert len(run.workers.asked) == 6
    # In the first round nothing is estimated, so nothing can be odd.
    assert 0 not in run.workers.asked
    assert result.client_calls == sum(
        len(names) for names in run.workers.asked.values()
    )
    assert "were odd when no round to ask in was left" in result.warnings[0]


def test_only_clients_with_odd_estimates_are_asked() -> None:
    run = quadratic_run()
    FedRecover(tolerance_rate=0.02)(run.request())
    planned = {1, 2, 12, 19}
    extra = {i: names for i, names in run.workers.asked.items() if i not in planned}
    assert extra
    assert min(len(names) for names in extra.values()) < 4
    assert all("a" not in names for names in run.workers.asked.values())


def test_answers_to_odd_estimates_teach_as_much_as_others() -> None:
    run = quadratic_run(round_losses=True)
    method = FedRecover(
        tolerance_rate=0.02, max_exact_share=1, warmup=1, final=0, correction=None
    )
    result = method(run.request())
    assert run.workers.asked == {1: ("b", "c", "d", "e"), 2: ("c",), 3: ("c",)}
    np.testing.assert_allclose(result.params.flat, run.retrained(), atol=1e-5)


def test_the_threshold_leaves_its_rate_of_stored_values_above() -> None:
    run = quadratic_run()
    stored = [
        np.abs(vector(run.ledger, VectorRef(index, name)))
        for index in range(20)
        for name in "bcde"
    ]
    # 20 rounds, 4 clients, 5 values: 200 of 400 are above the 201st.
    threshold = np.sort(np.concatenate(stored))[-201]
    result = FedRecover(tolerance_rate=0.5)(run.request())
    assert result.warnings[0].endswith(f"at most {threshold:.3g}")


def test_odd_estimates_are_cut_when_nobody_can_be_asked() -> None:
    run = quadratic_run()
    method = FedRecover(tolerance_rate=0.99, max_exact_share=0.05)
    result = method(run.request())
    assert sorted(run.workers.asked) == [1]
    threshold = float(result.warnings[0].split()[-1])
    # Rounds 0 and 1 are exact; each of the others can go this far.
    way = np.abs(result.params.flat - quadratic_run(rounds=2).retrained())
    assert way.max() <= 18 * threshold * 1.01


def test_settings_that_ask_for_too_much_are_cut_and_it_says_so() -> None:
    run = quadratic_run()
    result = FedRecover(warmup=20)(run.request())
    assert sorted(run.workers.asked) == [1, 2, 3, 4, 5, 19]
    assert result.warnings == (
        "the server asked in 6 rounds instead of 19, to stay within 0.3 of all",
    )


def test_nobody_is_asked_before_the_client_came() -> None:
    run = quadratic_run(schedule=Schedule(seed=1, per_round=2), rounds=30)
    first = run.ledger.updates_of("a")[0].round
    assert first == 5
    FedRecover()(run.request())
    assert min(run.workers.asked) > first


def test_a_client_that_came_late_is_retrained_away_exactly() -> None:
    run = quadratic_run(schedule=Schedule(seed=11, per_round=2), rounds=30)
    late = max("abcde", key=lambda name: run.ledger.updates_of(name)[0].round)
    first = run.ledger.updates_of(late)[0].round
    share = (29 - first) / 30
    result = FedRecover(warmup=30, max_exact_share=share)(run.request(late))
    np.testing.assert_allclose(result.params.flat, run.retrained(late), atol=1e-5)


def test_a_client_that_never_took_part_changes_nothing() -> None:
    run = quadratic_run(schedule=Schedule(seed=11, per_round=1), rounds=3)
    [stranger, *_] = [n for n in "abcde" if not run.ledger.updates_of(n)]
    result = FedRecover()(run.request(stranger))
    np.testing.assert_array_equal(result.params.flat, run.ledger.final.params.flat)


def test_clients_may_miss_rounds() -> None:
    schedule = Schedule(seed=2, per_round=3, dropout=0.2)
    run = quadratic_run(schedule=schedule, rounds=40)
    result = FedRecover()(run.request())
    assert len(run.workers.asked) <= 12
    before = run.distance(run.ledger.final.params)
    assert run.distance(result.params) < 0.3 * before


def test_attackers_that_stay_keep_scaling_their_updates() -> None:
    run = quadratic_run(round_losses=True, scales={"b": 2.0, "a": 3.0})
    result = FedRecover()(run.request())
    np.testing.assert_allclose(result.params.flat, run.retrained(), atol=1e-5)


def test_several_clients_leave_at_once() -> None:
    run = quadratic_run(round_losses=True)
    result = FedRecover()(run.request("a", "d"))
    np.testing.assert_allclose(result.params.flat, run.retrained("a", "d"), atol=1e-5)
    assert result.clients == ("a", "d")
    assert set(run.workers.asked[1]) == {"b", "c", "e"}


def test_who_left_before_stays_away() -> None:
    run = quadratic_run(round_losses=True)
    nothing = np.zeros(SIZE, np.float32)
    run.ledger.commit_forgetting(["d"], nothing, {})
    result = FedRecover()(run.request("a"))
    np.testing.assert_allclose(result.params.flat, run.retrained("a", "d"), atol=1e-5)
    run.ledger.commit_erasure(["d"], {})
    assert "erased before" in FedRecover()(run.request("a")).warnings[-1]


def test_who_was_erased_counts_from_the_first_round_they_are_missing_in() -> None:
    run = quadratic_run(schedule=Schedule(seed=1, per_round=2), rounds=30)
    [early, *_] = [update.client for update in run.ledger.updates_in(0)]
    nothing = np.zeros(SIZE, np.float32)
    run.ledger.commit_forgetting([early], nothing, {}, erase=True)
    FedRecover()(run.request("a"))
    assert min(run.workers.asked) == 1


def test_it_stays_finite_where_the_papers_own_runs_away(small_run: SmallRun) -> None:
    far, near = (
        FedRecover(max_curvature=limit)(small_run.request()) for limit in (None, 2.0)
    )
    retrained = small_run.retrained.params.flat
    assert np.linalg.norm(near.params.flat - retrained) < 2
    assert np.linalg.norm(far.params.flat - retrained) > 4


def test_the_attack_goes_and_the_model_stays(small_run: SmallRun) -> None:
    final, retrained = small_run.ledger.final, small_run.retrained.params.flat
    result = measured(FedRecover(), small_run.request())
    after = result.model(final)
    assert small_run.backdoor(final) > 0.7
    assert small_run.backdoor(after) < 0.1
    assert small_run.main(after) > small_run.main(final) - 0.03
    assert np.linalg.norm(result.params.flat - retrained) < np.linalg.norm(
        final.params.flat - retrained
    )
    # Two of eight rounds, five clients each.
    assert result.client_calls == 10
    assert result.bytes_read > 0


def test_asking_in_half_of_the_rounds_is_closer(small_run: SmallRun) -> None:
    retrained = small_run.retrained.params.flat
    third, half = (
        np.linalg.norm(
            FedRecover(max_exact_share=share)(small_run.request()).params.flat
            - retrained
        )
        for share in (0.3, 0.5)
    )
    assert half < 0.8 * third


def test_asking_always_is_retraining(small_run: SmallRun) -> None:
    result = FedRecover(max_exact_share=1, warmup=8)(small_run.request())
    np.testing.assert_allclose(
        result.params.flat, small_run.retrained.params.flat, atol=1e-4
    )


def test_the_same_request_gives_the_same_bytes(small_run: SmallRun) -> None:
    first, second = (FedRecover()(small_run.request()) for _ in range(2))
    assert first.params.flat.tobytes() == second.params.flat.tobytes()


def test_buffers_come_from_the_rounds_that_were_asked_in(
    normalised: str,
) -> None:
    config = RunConfig.from_options(
        clients=4,
        rounds=7,
        epochs=1,
        train_size=240,
        model=normalised,
        workers=1,
    )
    run = trained_in_memory(config)
    ledger = run.ledger
    result = FedRecover()(run.request())
    assert result.buffers is not None
    # Each of the two rounds counts the batches of its clients.
    batches = int(result.buffers["1.num_batches_tracked"])
    assert batches == 2 * int(ledger.final.buffers["1.num_batches_tracked"]) // 7
    assert not np.array_equal(
        result.buffers["1.running_mean"], ledger.final.buffers["1.running_mean"]
    )


def test_it_gives_no_buffers_where_no_round_was_asked_in() -> None:
    start = Params(LAYOUT, np.zeros(SIZE, np.float32))
    ledger = MemoryLedger.create(Model(start, {"mean": np.zeros(2, np.float32)}))
    delta = Params(LAYOUT, np.ones(SIZE, np.float32))
    for index, names in enumerate(["bc", "bc", "bc", "abc"]):
        updates = tuple(ClientUpdate(name, 1 / len(names), delta) for name in names)
        buffers = {"mean": np.full(2, index + 1, np.float32)}
        ledger.append(Round(index, updates, buffers=buffers))
    run = quadratic_run(rounds=1)
    result = FedRecover()(replace(run.request(), ledger=ledger))
    assert not run.workers.asked
    assert result.buffers is None
    assert result.model(ledger.final).buffers["mean"].tolist() == [4, 4]
    assert result.warnings == ()


def test_it_says_what_it_needs() -> None:
    assert FedRecover().needs == Needs(history=True, others=True)


def test_it_refuses_without_a_federation() -> None:
    run = quadratic_run(rounds=4)
    with pytest.raises(UnlearnRefusedError, match="fedrecover needs the help of"):
        FedRecover()(UnlearnRequest(run.ledger, frozenset({"a"})))


def test_it_refuses_updates_that_were_not_kept() -> None:
    run = quadratic_run(rounds=4)
    sampled = KeptView(run.ledger, Keep.parse("uniform:2"))
    with pytest.raises(UnlearnRefusedError, match="was not kept; train with"):
        FedRecover()(replace(run.request(), ledger=sampled))


def test_it_refuses_other_aggregations() -> None:
    run = quadratic_run(rounds=1, aggregation="median")
    with pytest.raises(UnlearnRefusedError, match="aggregated by 'median'"):
        FedRecover()(run.request())


def test_it_refuses_when_nobody_stays() -> None:
    run = quadratic_run(rounds=4)
    with pytest.raises(UnlearnRefusedError, match="nobody stays"):
        FedRecover()(run.request(*"abcde"))


def test_it_refuses_when_a_client_cannot_be_asked() -> None:
    run = quadratic_run(rounds=4)
    request = run.request()
    assert request.federation is not None
    old = request.federation.clients
    data = {name: own for name, own in old.data.items() if name != "c"}
    federation = replace(request.federation, clients=Clients(old.workers, data))
    with pytest.raises(UnlearnRefusedError, match="must ask 'c', who is not in"):
        FedRecover()(replace(request, federation=federation))


def test_it_refuses_when_it_may_never_ask() -> None:
    run = quadratic_run(rounds=3)
    with pytest.raises(UnlearnRefusedError, match="raise max_exact_share, or retrain"):
        FedRecover()(run.request())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 0}, "warmup is 0"),
        ({"correction": 0}, "correction is 0"),
        ({"final": -1}, "final is -1"),
        ({"memory": 0}, "memory is 0"),
        ({"max_curvature": 0}, "max_curvature is 0"),
        ({"tolerance_rate": 1}, "tolerance_rate is 1"),
        ({"tolerance_rate": float("nan")}, "tolerance_rate is nan"),
        ({"max_exact_share": 1.1}, "max_exact_share is 1.1"),
        ({"max_exact_share": -0.1}, "max_exact_share is -0.1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{message}; choose"):
        FedRecover(**settings)
