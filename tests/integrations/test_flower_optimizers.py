"""Flower's server optimizers, recorded: the same model, and forgetting from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedYogi
from safetensors.numpy import load_file

from fastfedul import DiskLedger, InvalidInputError
from fastfedul.integrations.flower import Recorded, StrategyRefusedError
from fastfedul.integrations.flower.server_optimizers import optimizer_of
from fastfedul.ledger.verify import verify
from tests.integrations.conftest import Scenarios
from tests.integrations.optimizer_scenarios import KINDS, ROUNDS


def learned(scenarios: Scenarios, name: str) -> np.ndarray:
    """Return the parameters of a scenario's result; buffers are averaged otherwise."""
    arrays = load_file(scenarios.folder / name / f"result-{ROUNDS}.safetensors")
    return np.concatenate([arrays[key].ravel() for key in ("w", "b")])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_recorded_model_is_flowers_own(scenarios: Scenarios, name: str) -> None:
    assert "error" not in scenarios.found["optimizers"][f"{name}-recorded"]
    plain, recorded = (learned(scenarios, f"{name}-{k}") for k in ("plain", "recorded"))
    np.testing.assert_allclose(recorded, plain, rtol=1e-4, atol=1e-6)
    with DiskLedger(scenarios.ledger(f"{name}-recorded")) as ledger:
        assert ledger.settings.optimizer is not None
        assert ledger.settings.optimizer.name == name
        assert verify(ledger).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_forgetting_and_training_on_is_training_without_the_client(
    scenarios: Scenarios, name: str
) -> None:
    assert "error" not in scenarios.found["optimizers"][f"{name}-forgetting"]
    wanted = learned(scenarios, f"{name}-without")
    found = learned(scenarios, f"{name}-forgetting")
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    plain = learned(scenarios, f"{name}-plain")
    assert np.abs(found - plain).max() > 1e-3


@pytest.mark.slow
def test_a_ledger_goes_on_with_its_own_optimizer_only(scenarios: Scenarios) -> None:
    error = scenarios.found["optimizers"]["other"]["error"]
    assert "uses adam:lr=0.05" in error
    assert "the strategy's server adds the mean" in error


def test_settings_are_the_strategys() -> None:
    adam = optimizer_of(FedAdam(eta=0.3, beta_1=0.8, beta_2=0.7, tau=0.01))
    assert str(adam) == "adam:lr=0.3,beta1=0.8,beta2=0.7,tau=0.01"
    yogi = optimizer_of(FedYogi())
    assert str(yogi) == "yogi:lr=0.01,beta1=0.9,beta2=0.99,tau=0.001"
    assert str(optimizer_of(FedAvgM())) == "momentum:lr=1.0,momentum=0.0"
    assert optimizer_of(FedAvg()) is None


def test_an_optimizer_of_ones_own_is_refused(tmp_path: Path) -> None:
    class Own(FedAdam):
        def aggregate_train(self, *arguments: object) -> object:  # type: ignore[override]
            raise NotImplementedError

    for named in (None, "mean"):
        with pytest.raises(StrategyRefusedError, match="optimizer of its own"):
            Recorded(Own(), tmp_path / "ledger", aggregation=named)


def test_sums_and_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match='use keep="all"'):
        Recorded(FedAdam(), tmp_path / "ledger", keep="sums")
    with pytest.raises(InvalidInputError, match="server lr"):
        Recorded(FedAdam(eta=-1.0), tmp_path / "ledger")
    assert not list(tmp_path.iterdir())
