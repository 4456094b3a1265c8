"""Rounds of clients with equal shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastfedul.params import Layout, Params
from fastfedul.records import ClientUpdate, Round


def random_round(
    index: int, clients: Sequence[str], layout: Layout, rng: np.random.Generator
) -> Round:
    """Return a round in which every client sent normal numbers."""
    updates = (
        ClientUpdate(
            name,
            1 / len(clients),
            Params(layout, rng.normal(size=layout.size).astype(np.float32)),
        )
        for name in clients
    )
    return Round(index, tuple(updates))
