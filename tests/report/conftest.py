"""One full report, as a run on small pictures would give it."""

from __future__ import annotations

import numpy as np
import pytest

from fastfedul.report.content import (
    Contributions,
    ExampleImages,
    Report,
    RoundPoint,
    Row,
)
from fastfedul.rng import stream


@pytest.fixture(scope="session")
def rows() -> tuple[Row, ...]:
    return (
        Row("before", 0.975, (351, 360), (0.953, 0.987), 0.929, (302, 325),
            (0.896, 0.953), 0.641, 3.871, 38.2),
        Row("retrained", 0.981, (353, 360), (0.96, 0.991), 0.0, (0, 325),
            (0.0, 0.012), 0.503, 0.0, 0.0, 9.42, 180),
        Row("fast-fedul", 0.919, (331, 360), (0.887, 0.943), 0.022, (7, 325),
            (0.01, 0.044), 0.517, 1.204, 9.6, 0.0123, 0, 7_340_032),
        Row("no-skew", 0.744, (268, 360), (0.697, 0.787), 0.0, (0, 325),
            (0.0, 0.012), 0.511, 2.902, 25.1, 0.0117, 0, 7_340_032),
    )  # fmt: skip


@pytest.fixture(scope="session")
def report(rows: tuple[Row, ...]) -> Report:
    random = stream(1, "sample report")
    numbers = np.arange(1, 21)
    main = 0.98 - 0.8 * np.exp(-numbers / 4)
    attack = 0.94 / (1 + np.exp(5 - numbers)) + random.normal(0, 0.015, 20)
    points = [
        RoundPoint(int(n), float(m), float(min(max(a, 0), 1)))
        for n, m, a in zip(numbers, main, attack, strict=True)
    ]
    values = random.gamma(4, 0.1, (10, 20)) * np.exp(-np.arange(20) / 15)
    values[random.random((10, 20)) < 0.15] = np.nan
    values[3] *= 2.5
    images = random.integers(0, 120, (8, 8, 8, 1)).astype(np.uint8)
    images[:, 5:8:2, 5:8:2] = 255
    return Report(
        title="Forgetting client-3 in a federation of 10",
        summary=(
            "client-3 taught the model a hidden trick: a small pattern in the corner "
            "of a picture made it answer “7”.",
            "After forgetting client-3 the trick works on 7 of 325 pictures instead "
            "of 302, and the model is right on 331 of 360 test pictures.",
        ),
        rows=rows,
        rounds=(*points, RoundPoint(20, 0.919, 0.022)),
        forgotten=((20, "client-3"),),
        unit_angles={
            "fast-fedul": random.gamma(9, 1.05, 10),
            "no-skew": random.gamma(16, 1.6, 10),
        },
        removed_by_layer=(
            ("conv.weight", 0.34), ("conv.bias", 1.02), ("unused", None),
            ("dense.weight", 0.07), ("dense.bias", -0.01),
        ),
        contributions=Contributions(tuple(f"client-{i}" for i in range(10)), values),
        examples=ExampleImages(images, tuple(f"a {i}, labelled 7" for i in range(8))),
        settings={"data": "digits", "clients": 10, "rounds": 20, "lr": 0.05,
                  "partition": "dirichlet:0.5", "attack": "pixel", "seed": 1},
        commands=("fastfedul train run --seed 1", "fastfedul report run"),
        notes=("The poisoned pictures are not among those trained on.",),
    )  # fmt: skip
