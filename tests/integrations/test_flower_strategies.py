"""Which strategies are wrapped and which are refused, before anything is sent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("CI") != "true":
    pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Strategy

from fastfedul.errors import InvalidInputError
from fastfedul.integrations.flower import Recorded, StrategyRefusedError
from fastfedul.integrations.flower.strategies import REFUSED, aggregation_of


def made(name: str) -> Strategy:
    """Return one of Flower's strategies."""
    kind: Callable[..., Strategy] = getattr(flower, name)
    if name == "QFedAvg":
        return kind(client_learning_rate=0.1)
    return kind()


class Sampling(FedAvg):
    """Only draws clients in its own way."""

    def configure_train(self, *arguments: Any) -> Any:
        return super().configure_train(*arguments)


class Aggregating(FedAvg):
    """Aggregates in its own way."""

    def aggregate_train(self, *arguments: Any) -> Any:
        return super().aggregate_train(*arguments)


class Looping(FedAvg):
    """Runs its rounds in its own way."""

    def start(self, *arguments: Any, **options: Any) -> Any:
        return super().start(*arguments, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_undone_is_refused_by_name(name: str, tmp_path: Path) -> None:
    for named in (None, "mean"):
        with pytest.raises(StrategyRefusedError, match=f"^{name} cannot be recorded"):
            Recorded(made(name), tmp_path / "ledger", aggregation=named)
    assert not list(tmp_path.iterdir())


def strategies_in_the_table() -> dict[str, str]:
    """Return whether docs/flower.md says that a strategy is recorded, by its name."""
    page = Path(__file__).parents[2] / "docs" / "flower.md"
    section = page.read_text("utf-8").split("## Which strategies can be recorded?")[1]
    rows = [line.split("|") for line in section.split("\n## ")[0].splitlines()]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows if len(row) > 3]
    return {cell[0].strip("`"): cell[1] for cell in cells if cell[0].startswith("`")}


def test_the_page_has_every_strategy_of_flower_and_no_other() -> None:
    table = strategies_in_the_table()
    assert set(table) == set(flower.__all__) - {"Result", "Strategy"}
    for name, outcome in table.items():
        assert outcome in ("yes", "refused"), name
        if outcome == "refused":
            assert name in REFUSED


def test_each_one_has_its_aggregation() -> None:
    assert aggregation_of(FedAvg()) == "mean"
    assert aggregation_of(flower.FedProx(proximal_mu=0.1)) == "mean"
    assert aggregation_of(FedMedian()) == "median"
    assert aggregation_of(FedTrimmedAvg(beta=0.1)) == "trimmed-mean:0.1"
    assert aggregation_of(Sampling()) == "mean"
    assert aggregation_of(flower.Krum(num_malicious_nodes=2)) == "krum:2"
    several = flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3)
    assert aggregation_of(several) == "multi-krum:1:3"
    assert aggregation_of(flower.Bulyan(num_malicious_nodes=1)) == "bulyan:1"


def test_a_selection_of_ones_own_in_bulyan_is_refused() -> None:
    own = flower.Bulyan(selection_rule=lambda replies, attackers, count: replies)
    with pytest.raises(StrategyRefusedError, match="aggregate_train of its own"):
        aggregation_of(own)


def test_an_aggregation_of_ones_own_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(StrategyRefusedError, match="aggregate_train of its own"):
        Recorded(Aggregating(), tmp_path / "ledger")
    assert aggregation_of(Aggregating(), "mean") == "mean"
    with pytest.raises(InvalidInputError, match="server optimizer and no aggregation"):
        aggregation_of(Aggregating(), "fedadam")
    with pytest.raises(InvalidInputError, match="is unknown; choose"):
        aggregation_of(Aggregating(), "largest")
    with pytest.raises(StrategyRefusedError, match="by median, not by mean"):
        aggregation_of(FedMedian(), "mean")


def test_a_replaced_method_counts_as_ones_own() -> None:
    strategy = FedAvg()
    strategy.aggregate_train = lambda *arguments: (None, None)  # type: ignore[method-assign]
    with pytest.raises(StrategyRefusedError, match="of its own"):
        aggregation_of(strategy)


def test_a_loop_of_its_own_is_refused() -> None:
    with pytest.raises(StrategyRefusedError, match=r"start\(\) of its own"):
        aggregation_of(Looping())


def test_the_old_interface_and_secure_aggregation_are_refused() -> None:
    from flwr.server import strategy as old
    from flwr.server.workflow import SecAggPlusWorkflow

    for other in (old.FedAvg(), SecAggPlusWorkflow(3, 2), object()):
        with pytest.raises(StrategyRefusedError, match="hides single updates"):
            Recorded(other, "ledger")  # type: ignore[arg-type]


def test_what_is_recorded_already_is_refused(tmp_path: Path) -> None:
    recorded = Recorded(FedAvg(), tmp_path / "ledger")
    with pytest.raises(StrategyRefusedError, match="recorded already"):
        Recorded(recorded, tmp_path / "other")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": "most"}, "cannot read the policy"),
        ({"keep_use": "lose"}, "use is store or aggregate"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"min_clients": 0}, "min_clients is 0"),
        ({"max_discards": 0}, "max_discards is 0"),
        ({"max_weight_ratio": 0.5}, "max_weight_ratio is 0.5"),
        ({"max_weight_ratio": float("nan")}, "max_weight_ratio is nan"),
        ({"max_norm_ratio": 1.0}, "max_norm_ratio is 1"),
        ({"identify": "guess"}, "identify is 'guess'"),
    ],
)
def test_an_option_of_no_use_is_refused(
    options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=match):
        Recorded(FedAvg(), tmp_path / "ledger", **options)


@pytest.mark.parametrize("kind", [FedMedian, flower.Krum, flower.Bulyan])
def test_a_replayed_aggregation_needs_every_update(
    kind: Callable[[], Strategy], tmp_path: Path
) -> None:
    for options in ({"keep": "top:2"}, {"keep_use": "aggregate"}):
        with pytest.raises(InvalidInputError, match="only be replayed with every"):
            Recorded(kind(), tmp_path / "ledger", **options)  # type: ignore[arg-type]


def test_without_flower_the_error_names_the_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules['flwr'] = None\n"
        "try:\n"
        "    from fastfedul.integrations.flower import Recorded\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == "this needs Flower; run pip install 'fastfedul[flower]'\n"


def test_a_client_imports_no_framework_but_flower() -> None:
    code = "import sys, fastfedul.integrations.flower.client; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in found.stdout.split()}
    assert not loaded & {"torch", "ray", "sklearn", "matplotlib"}


def test_noise_after_a_server_optimizer_is_refused(tmp_path: Path) -> None:
    noisy = flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAdam(), noise_multiplier=0.1, clipping_norm=1.0, num_sampled_clients=2
    )
    with pytest.raises(StrategyRefusedError, match="after the server optimizer adam"):
        Recorded(noisy, tmp_path / "ledger")
