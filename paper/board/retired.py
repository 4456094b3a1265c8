"""Skews that the software had once, computed by the commit that still has them.

A run's rounds are written to a file; a process that imports the old software reads
them, forgets with each of the old skews, and writes the differences back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from fastfedul.ledger.protocol import Ledger, read_round
from fastfedul.params import Array, Flat
from fastfedul.records import ClientId

COMMIT = "f3df8bfe0a1b8c041e740a116bc84bc82e453a8c"
"""The last commit that has `auto` (a damping per coordinate) and `direction`."""

_WORKER = Path(__file__).with_name("retired_worker.py")


@dataclass(frozen=True, slots=True)
class OldDifference:
    """The difference that an old skew adds to the model.

    Attributes:
        vector: The difference.
        seconds: Time of the computation.
        bytes_read: Bytes of history read.
    """

    vector: Flat
    seconds: float
    bytes_read: int


def check_out(folder: Path) -> Path:
    """Write the old software into a folder; return the place to import it from."""
    root = Path(__file__).parents[2]
    packed = subprocess.run(
        ["git", "-C", str(root), "archive", COMMIT, "src"],
        capture_output=True,
        check=True,
    ).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def old_difference(
    ledger: Ledger, forget: Iterable[ClientId], skew: str, software: Path, folder: Path
) -> OldDifference:
    """Return the difference that an old skew adds to a run's model.

    Args:
        ledger: The run, every update kept.
        forget: Clients that leave.
        skew: `auto` or `direction`.
        software: The folder that `check_out` returned.
        folder: Where the run's rounds are written, once for all skews.
    """
    rounds = folder / "rounds.npz"
    if not rounds.exists():
        _write_rounds(ledger, rounds)
    answer = folder / f"{skew}.npz"
    subprocess.run(
        [sys.executable, str(_WORKER), str(rounds), str(answer), skew, *sorted(forget)],
        env={**os.environ, "PYTHONPATH": str(software)},
        check=True,
    )
    with np.load(answer) as found:
        return OldDifference(
            found["vector"], float(found["seconds"]), int(found["bytes_read"])
        )


def _write_rounds(ledger: Ledger, path: Path) -> None:
    """Write the first model and every round; names and shapes go in as JSON."""
    arrays: dict[str, Array] = {"initial": ledger.initial.params.flat}
    shares = []
    for index in range(ledger.num_rounds):
        updates = read_round(ledger, index).updates
        shares.append({update.client: update.share for update in updates})
        flats = [update.delta.flat for update in updates if update.delta is not None]
        if len(flats) != len(updates):
            raise ValueError(f"round {index} has updates that were not kept")
        arrays[f"round-{index}"] = np.stack(flats)
    shapes = {slot.name: slot.shape for slot in ledger.settings.layout.slots}
    about = json.dumps({"shapes": shapes, "shares": shares})
    arrays["about"] = np.frombuffer(about.encode(), np.uint8)
    with ZipFile(path, "w") as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
