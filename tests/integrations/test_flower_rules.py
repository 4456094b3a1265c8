"""Flower's choosing rules and differential privacy under `Recorded`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Bulyan, MultiKrum

from fastfedul.federation.aggregation import resolve, rows_reader

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
