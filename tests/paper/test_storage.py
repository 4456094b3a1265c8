"""Bytes of history, counted alike for every method."""

from __future__ import annotations

from typing import Any

import pytest

from fastfedul.runs.config import RunConfig
from paper.cells import Cell
from paper.experiments import lines_of
from paper.settings import Scale, data_sets, setting_of
from paper.storage import Storage, storage_of

VECTOR = 400
"""Bytes of a model of 100 values."""


def stored(method: str, per_round: int | None = None, **settings: Any) -> Storage:
    options = {"clients": 10, "rounds": 20, "per_round": per_round}
    cell = Cell(RunConfig.from_options(**options), method, settings)
    found = storage_of(cell, 100)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("method", "settings", "published", "least"),
    [
        ("cdp", {}, 0, 0),
        ("pga", {}, 0, 0),
        ("kd", {}, 200, 10),
        ("fedaccum", {"interval": 3}, 70, 10),
        ("fedrecover", {}, 220, 200),
        ("fast-fedul-paper", {}, 200, 11),
        ("fast-fedul-paper", {"keep": "optimal:5"}, 100, 11),
        ("fast-fedul-2", {"keep": "optimal:1"}, 20, 11),
        ("fast-fedul", {}, 220, 74),
    ],
)
def test_vectors_are_counted_alike(
    method: str, settings: dict[str, Any], published: int, least: int
) -> None:
    assert stored(method, **settings) == Storage(published * VECTOR, least * VECTOR)


def test_federaser_needs_lengths_alone_after_its_first_kept_round() -> None:
    found = stored("federaser", interval=2)
    assert found.published == 10 * 10 * VECTOR
    assert found.least == 10 * VECTOR + 10 * 9 * 4
    half = stored("federaser", per_round=5, interval=2)
    assert half.published == 5 * 10 * VECTOR


def test_every_line_of_the_cost_table_is_counted() -> None:
    for line in lines_of("cost", "standard", 1):
        assert line.size > 0
        assert storage_of(line.cells[0], line.size) is not None, line.label


@pytest.mark.parametrize("scale", ["smoke", "standard"])
def test_the_sizes_of_the_models_are_as_written(scale: Scale) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    from fastfedul.integrations.torch.trainer import TorchTrainer

    shapes = {"digits": (8, 8, 1), "mnist": (28, 28, 1), "cifar10": (32, 32, 3)}
    for name in data_sets(scale):
        shape = shapes.get(name, (28, 28, 1))
        num_classes = 4 if name == "oct" else 10
        trainer = TorchTrainer(shape=shape, num_classes=num_classes)
        assert setting_of(scale, name).size == trainer.layout.size, name
