"""Flower's strategies: the aggregation of each, or why it cannot be recorded.

The function that aggregates decides: a subclass that only samples differently,
or only changes metrics, is as good as its parent.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import (
    Bulyan,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    MultiKrum,
    Strategy,
)
from flwr.serverapp.strategy.multikrum import select_multikrum

from fastfedul.federation.aggregation import MEAN, check_supported, resolve
from fastfedul.integrations.flower.errors import StrategyRefusedError
from fastfedul.integrations.flower.server_optimizers import (
    WITH_OPTIMIZER,
    optimizer_of,
)

_OWN_OPTIMIZER = (
    "has a server optimizer of its own, which the ledger cannot run again; use "
    "FedAvgM, FedAdam, FedYogi or FedAdagrad as they are"
)
_TREES = "aggregates trees, which are no arrays of parameters"
_LOSS = "weighs updates by the clients' losses, which the ledger does not have"

REFUSED: Mapping[str, str] = {
    "QFedAvg": _LOSS,
    "FedXgbBagging": _TREES,
    "FedXgbCyclic": _TREES,
}
"""Strategies that cannot be recorded, and why."""


def aggregation_of(strategy: object, named: str | None = None) -> str:
    """Return the ledger's name of a strategy's aggregation.

    Args:
        strategy: Flower's, or one derived from Flower's.
        named: The caller's name of it; needed only if it aggregates in a way of its
            own, and believed only as far as every round bears it out.

    Raises:
        StrategyRefusedError: If no client could be taken out of its model.
    """
    kind = type(strategy).__name__
    if not isinstance(strategy, Strategy):
        raise StrategyRefusedError(
            f"{kind} is no strategy of flwr.serverapp.strategy; strategies of "
            "flwr.server.strategy and secure aggregation, which hides single updates, "
            "cannot be recorded; use FedAvg"
        )
    for name, reason in REFUSED.items():
        if isinstance(strategy, getattr(flower, name)):
            raise StrategyRefusedError(
                f"{kind} cannot be recorded: it {reason}; use FedAvg or FedProx"
            )
    if isinstance(strategy, WITH_OPTIMIZER) and optimizer_of(strategy) is None:
        raise StrategyRefusedError(f"{kind} cannot be recorded: it {_OWN_OPTIMIZER}")
    if type(strategy).start is not Strategy.start:
        raise StrategyRefusedError(
            f"{kind} has a start() of its own, so its rounds cannot be recorded; "
            "derive from FedAvg and leave start() as it is"
        )
    known = _known(strategy)
    if named is None:
        if known is None:
            raise StrategyRefusedError(
                f"{kind} has an aggregate_train of its own, or chooses updates in a "
                "way of its own; if it is a weighted mean of the updates, say so with "
                'aggregation="mean"'
            )
        return known
    if known is not None and named != known:
        raise StrategyRefusedError(f"{kind} aggregates by {known}, not by {named}")
    check_supported(named)
    if named != MEAN:
        resolve(named, {})
    return named


def is_known(strategy: Strategy) -> bool:
    """Return whether the strategy aggregates updates by a function of Flower's own."""
    return _known(strategy) is not None


def _known(strategy: Strategy) -> str | None:
    if "aggregate_train" in vars(strategy):
        return None
    function = type(strategy).aggregate_train
    if function is FedAvg.aggregate_train or optimizer_of(strategy) is not None:
        return MEAN
    if function is FedMedian.aggregate_train:
        return "median"
    if function is FedTrimmedAvg.aggregate_train:
        assert isinstance(strategy, FedTrimmedAvg)
        return f"trimmed-mean:{strategy.beta!r}"
    if function is MultiKrum.aggregate_train:
        assert isinstance(strategy, MultiKrum)
        attackers, chosen = strategy.num_malicious_nodes, strategy.num_nodes_to_select
        return (
            f"krum:{attackers}" if chosen == 1 else f"multi-krum:{attackers}:{chosen}"
        )
    if function is Bulyan.aggregate_train:
        assert isinstance(strategy, Bulyan)
        if strategy.selection_rule is select_multikrum:
            return f"bulyan:{strategy.num_malicious_nodes}"
    return None
