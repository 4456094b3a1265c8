"""The model file of a run: it follows the ledger when somebody is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastfedul.ledger.store.model_files import model_written
from fastfedul.records import Model
from fastfedul.runs.config import CONFIG

FINAL = "model.safetensors"


@contextmanager
def run_model_written(ledger: Path, model: Model) -> Iterator[None]:
    """Replace the model file of a ledger's run when the block succeeds.

    That file is what people deploy. A ledger that is in no run, or whose run has no
    model yet, has none to replace.

    Args:
        ledger: Where the ledger is.
        model: The ledger's model from now on.
    """
    place = ledger.parent / FINAL
    if (ledger.parent / CONFIG).is_file() and place.is_file():
        with model_written(place, model):
            yield
    else:
        yield
