"""Flower's choosing rules and differential privacy under `Recorded`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Bulyan, FedAvg, MultiKrum
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    PrivacySpent,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

from fastfedul import DiskLedger, LedgerReader, forget, verify
from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import resolve, rows_reader
from fastfedul.forgetting.privacy import privacy_facts
from fastfedul.integrations.flower import Recorded, StrategyRefusedError
from fastfedul.integrations.flower.privacy import PrivateAggregation
from fastfedul.ledger.protocol import vector
from fastfedul.params import Layout, Params
from fastfedul.records import CentralPrivacy, ClientUpdate, Model, Round, VectorRef
from tests.integrations.conftest import scenarios_of
from tests.support.flower import Nodes, node

if TYPE_CHECKING:
    from tests.integrations.conftest import Scenarios, Simulations

APP = Path(__file__).with_name("rules_app.py")
CHOOSING = ["krum", "multi-krum", "bulyan"]
PRIVATE = ["server-fixed", "client-fixed", "server-adaptive", "client-adaptive"]
ALL = [*CHOOSING, *PRIVATE, "private-median"]
RULES = ["krum:1", "krum:0", "multi-krum:2:3", "multi-krum:0:5", "bulyan:1", "bulyan:0"]


def rows_of(count: int, seed: int, size: int = 40) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_a_step_is_flowers_own(name: str, seed: int) -> None:
    """Flower aggregates local models; its own code runs here on the same arrays."""
    rows, start = rows_of(8, seed), rows_of(1, 99)[0]
    weights = [10 * (i + 1) for i in range(8)]
    kind, *given = name.split(":")
    numbers = [int(text) for text in given]
    strategy = (
        Bulyan(num_malicious_nodes=numbers[0])
        if kind == "bulyan"
        else MultiKrum(
            num_malicious_nodes=numbers[0],
            num_nodes_to_select=numbers[1] if kind == "multi-krum" else 1,
        )
    )
    replies = []
    for row, weight in zip(rows, weights, strict=True):
        local = (start + row).reshape(5, 8)
        content = RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(local)}),
                "metrics": MetricRecord({"num-examples": weight}),
            }
        )
        replies.append(Message(content, dst_node_id=1, message_type="train"))
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    shares = np.array(weights) / sum(weights)
    own = resolve(name, {}).step(rows_reader(rows), 40, shares)
    np.testing.assert_allclose(
        start + own, arrays["w"].numpy().ravel(), rtol=1e-5, atol=1e-5
    )


@pytest.fixture(scope="module")
def rules(simulations: Simulations) -> Scenarios:
    return scenarios_of(simulations, APP)


def flat(model: dict[str, list[float]]) -> Any:
    return np.array([*model["w"], *model["b"]], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_recorded_model_is_flowers(rules: Scenarios, name: str) -> None:
    found = rules.found[name]
    np.testing.assert_allclose(
        flat(found["recorded"]), flat(found["flower"]), atol=1e-6, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_client_is_forgotten_and_training_goes_on(
    rules: Scenarios, name: str
) -> None:
    found = rules.found[name]
    assert np.abs(flat(found["cleaned"]) - flat(found["recorded"])).max() > 1e-4
    with LedgerReader(rules.ledger(name)) as ledger:
        assert not verify(ledger).problems
        assert ledger.num_rounds == 4
        assert ledger.clients()["client-2"].state == "erased"
        assert len(ledger.updates_in(3)) == 7
        steps = [vector(ledger, VectorRef(index)) for index in range(4)]
        added = sum(steps, ledger.initial.params.flat)
        for change in ledger.adjustments().values():
            added = added + change
        np.testing.assert_allclose(added, ledger.final.params.flat, atol=1e-5)
        later = np.sort(flat(found["later"]))
        np.testing.assert_array_equal(later, np.sort(ledger.final.params.flat))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOOSING)
def test_no_rule_chooses_the_client_that_shouts(rules: Scenarios, name: str) -> None:
    with LedgerReader(rules.ledger(name)) as ledger:
        for round_ in ledger.rounds():
            own = {u.client: u.norm for u in ledger.updates_in(round_.index)}
            assert round_.step_norm < own["client-5"] / 5


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
def test_the_ledger_has_clipped_updates_and_the_size_of_the_noise(
    rules: Scenarios, name: str
) -> None:
    with LedgerReader(rules.ledger(name)) as ledger:
        rounds = ledger.rounds()
        for round_ in rounds:
            assert round_.privacy is not None
            own = {u.client: u.norm for u in ledger.updates_in(round_.index)}
            limit = round_.privacy.clipping_norm
            assert max(own.values()) <= limit * (1 + 1e-4)
            assert own["client-5"] == pytest.approx(limit, rel=1e-4)
        norms = [round_.privacy.clipping_norm for round_ in rounds if round_.privacy]
    if name.endswith("fixed"):
        assert norms == [0.4] * 4
    else:
        # The fourth round ran in a process that had to learn the norm anew.
        assert norms[0] == 0.1
        assert norms[3] == rules.found[name]["norms"][0] != 0.1


@pytest.mark.slow
def test_the_certificate_says_what_the_noise_means(rules: Scenarios) -> None:
    for name, noisy in (("server-fixed", True), ("krum", False)):
        path = rules.folder / name / "certificates" / "1.json"
        privacy = statement_in(path)["predicate"]["privacy"]
        if not noisy:
            assert privacy is None
            continue
        assert privacy["noisy_rounds"] == 3
        # Noise 0.5 * 0.4 / 8; the largest of 36 shares of 10 changes a mean by 8 / 36.
        before = 0.5 * 0.4 / 8 / (0.4 * 8 / 36)
        assert privacy["noise_multiplier_before"] == pytest.approx(before)
        assert privacy["noise_multiplier_after"] == pytest.approx(before * 33 / 36)
        assert "does not" not in privacy["means"]
        assert "without any noise" in privacy["does_not_mean"]


def statement_in(path: Path) -> Any:
    import base64

    found = json.loads(path.read_text())
    payload = found.get("payload") or found["envelope"]["payload"]
    return json.loads(base64.b64decode(payload))


def private(**options: Any) -> Any:
    return flower.DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), 1.0, 1.0, 2, **options
    )


def test_what_differential_privacy_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="counts on every update"):
        Recorded(private(), tmp_path / "ledger", keep="top:1", keep_use="aggregate")
    twice = flower.DifferentialPrivacyServerSideFixedClipping(private(), 1.0, 1.0, 2)
    with pytest.raises(StrategyRefusedError, match="wrap it once"):
        Recorded(twice, tmp_path / "ledger")
    around = flower.DifferentialPrivacyServerSideFixedClipping(
        flower.QFedAvg(client_learning_rate=0.1), 1.0, 1.0, 2
    )
    with pytest.raises(StrategyRefusedError, match="QFedAvg cannot be recorded"):
        Recorded(around, tmp_path / "ledger")
    normalised = ArrayRecord({"n.running_mean": Array(np.zeros(2, np.float32))})
    recorded, grid = Recorded(private(), tmp_path / "ledger"), Nodes(node(1, "a"))
    with pytest.raises(InvalidInputError, match=r"clips the buffer 'n\.running_mean'"):
        recorded.configure_train(1, normalised, ConfigRecord(), grid)
    assert not (tmp_path / "ledger").exists()


def test_a_rule_with_too_few_nodes_is_refused_before_anybody_trains(
    tmp_path: Path,
) -> None:
    grid = Nodes(*(node(number, f"n{number}") for number in range(1, 7)))
    few = Bulyan(min_available_nodes=6, num_malicious_nodes=1)
    with Recorded(few, tmp_path / "ledger") as recorded:
        start = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
        with pytest.raises(InvalidInputError, match="needs 7 updates, and round 1 has"):
            recorded.configure_train(1, start, ConfigRecord(), grid)


class Accountant:
    """The Renyi accountant of the Gaussian mechanism, in closed form.

    T releases of multiplier z have divergence a T / (2 z^2) of order a (Mironov 2017).
    """

    def __init__(self, population: int) -> None:
        self.config = PrivacyConfig(
            1e-5,
            population,
            NeighboringRelation.ADD_OR_REMOVE_ONE,
            SamplingMethod.NO_AMPLIFICATION,
        )
        self.events: list[GaussianPrivacyEvent] = []

    @property
    def num_releases(self) -> int:
        return len(self.events)

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        self.events += [event] * count

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        target = self.config.target_delta if delta is None else delta
        slope = sum(1 / (2 * event.noise_multiplier**2) for event in self.events)
        order = 1 + np.sqrt(np.log(1 / target) / slope) if self.events else 2.0
        epsilon = order * slope + np.log(1 / target) / (order - 1)
        return PrivacySpent(epsilon, target, self.num_releases, "rdp", order)


def noisy_ledger(path: Path, num_rounds: int, names: str) -> None:
    """Record rounds of equal clients, with a multiplier of 1.5 and a norm of 0.4."""
    layout = Layout.of({"w": np.zeros(30)})
    privacy = CentralPrivacy(
        clipping_norm=0.4, noise_stdev=1.5 * 0.4 / len(names), next_clipping_norm=0.4
    )
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(num_rounds):
            rows = rows_of(len(names) + 1, index, 30)
            updates = tuple(
                ClientUpdate(name, 1 / len(names), Params(layout, row))
                for name, row in zip(names, rows, strict=False)
            )
            noise = Params(layout, rows[-1])
            ledger.append(Round(index, updates, noise=noise, privacy=privacy))


def test_an_accountant_counts_the_recorded_rounds(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    noisy_ledger(path, 4, "abcd")
    accountant, whole = Accountant(4), Accountant(4)
    wrapper = private(accountant=accountant)
    with LedgerReader(path) as ledger:
        PrivateAggregation(wrapper).resume(ledger)
        facts = privacy_facts(ledger, ["d"])
    whole.compose(GaussianPrivacyEvent(1.5, 4, 4), 4)
    spent = wrapper.privacy_spent()
    assert spent.num_releases == 4
    assert spent.epsilon == pytest.approx(whole.get_privacy_spent().epsilon)
    # An accountant with a state of its own gets only what it does not have.
    with LedgerReader(path) as ledger:
        PrivateAggregation(private(accountant=accountant)).resume(ledger)
    assert accountant.num_releases == 4
    # The certificate's multipliers are those that an accountant counts.
    assert facts is not None
    assert facts["noise_multiplier_before"] == pytest.approx(1.5)
    assert facts["noise_multiplier_after"] == pytest.approx(1.5 * 3 / 4)
    # With a participant less in the ledger, epsilon comes out larger and not smaller.
    with DiskLedger(path) as ledger:
        forget(ledger, ["d"])
        again = Accountant(4)
        PrivateAggregation(private(accountant=again)).resume(ledger)
    assert again.get_privacy_spent().epsilon > spent.epsilon


def test_flowers_own_accountant_gives_the_same_epsilon(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs attrs below 24")
    noisy_ledger(tmp_path / "ledger", 4, "abcd")
    flowers, own = RdpAccountant(Accountant(4).config), Accountant(4)
    with LedgerReader(tmp_path / "ledger") as ledger:
        for accountant in (flowers, own):
            PrivateAggregation(private(accountant=accountant)).resume(ledger)
    # Flower tries some orders, and gains a little by a better conversion.
    spent = flowers.get_privacy_spent().epsilon
    assert 0.8 * own.get_privacy_spent().epsilon < spent
    assert spent < 1.02 * own.get_privacy_spent().epsilon
