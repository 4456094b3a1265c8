"""Bytes that a server stores for each method, counted alike for all of them.

`published` counts what the method's paper lets the server store. `least` counts what
the same answer needs at the least, for one client that leaves. Both count updates of
all clients, because nobody knows beforehand who will leave. The models before and after
training count for no method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.pairs import RESERVOIR
from fastfedul.methods.protocol import method_settings
from fastfedul.methods.registry import find_method
from fastfedul.runs.config import NUM_CLIENTS
from paper.cells import BEFORE, RETRAINED, Cell

_NUMBER = 4
"""Bytes of a number in float32."""

ABOUT = (
    "The column `history stored` counts the bytes that this software keeps to be able "
    "to forget anybody.",
    "The column `as published` counts the vectors that the method's paper stores.",
    "The column `at the least` counts what the same answer needs for one leaver.",
    "FedEraser, calibrated per client, needs whole updates of its first kept round and "
    "only their lengths afterwards.",
    "Distillation and FedAccum need one running sum per client.",
    "So does the paper's Fast-FedUL if its damping is fixed beforehand: one faded sum "
    "per client, and one of the steps.",
    f"The default method needs a sum per client and {RESERVOIR} differences of two "
    "clients (`--keep sums`).",
    "PGA's leaver keeps its own last update.",
)
"""What the columns of bytes mean, sentence by sentence."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of history on the server.

    Attributes:
        published: As the method's paper stores it.
        least: At the least.
    """

    published: int
    least: int


def storage_of(cell: Cell, size: int) -> Storage | None:
    """Return the bytes for a cell's method; None for a method that is not known here.

    Args:
        cell: The method with its settings, and the run.
        size: Number of the model's parameters.
    """
    if cell.method in (BEFORE, RETRAINED, "cdp", "pga"):
        return Storage(0, 0)
    clients = cell.run.data.clients or NUM_CLIENTS
    in_round = cell.run.schedule.per_round or clients
    rounds = cell.run.rounds
    vector = _NUMBER * size
    everything = in_round * rounds * vector
    if cell.method in ("federaser", "fedaccum"):
        settings = method_settings(find_method(cell.method, cell.settings))
        counted = math.ceil(rounds / int(str(settings["interval"])))
        published = in_round * counted * vector
        if cell.method == "fedaccum":
            return Storage(published, clients * vector)
        lengths = in_round * (counted - 1) * _NUMBER
        return Storage(published, in_round * vector + lengths)
    if cell.method == "kd":
        return Storage(everything, clients * vector)
    if cell.method == "fedrecover":
        return Storage(everything + rounds * vector, everything)
    if cell.method == "fast-fedul":
        least = (clients + RESERVOIR) * vector
        whole = everything + rounds * vector
        return Storage(whole, min(least, whole))
    if cell.method.startswith("fast-fedul-"):
        kept = Keep.parse(str(cell.settings.get("keep", cell.run.recording.keep))).count
        published = min(kept or in_round, in_round) * rounds * vector
        return Storage(published, min((clients + 1) * vector, published))
    return None
