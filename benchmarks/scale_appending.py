"""Appending rounds of large models and of many clients, also through Flower."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measuring import client_name, seconds_of, write_plainly
from benchmarks.scale_setting import (
    Figures,
    Sizes,
    layout_of,
    made_up,
    random_bases,
)
from fastfedul import ClientUpdate, DiskLedger, Model, Params, Round
from fastfedul.params import Layout, Slot


def append_at(name: str, folder: Path, sizes: Sizes) -> Figures:
    """Return what an append costs over writing and syncing the same bytes."""
    path = folder / f"append-{name}"
    shutil.rmtree(path, ignore_errors=True)
    layout = layout_of(name)
    bases = random_bases(layout)
    num_bytes = 12 * 4 * layout.size
    payload = memoryview(np.concatenate(bases).tobytes())
    ratios = []
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(2 if layout.size > 5e7 else sizes.repetitions + 1):
            round_ = made_up(layout, 10, index, bases)
            plain = folder / "plain"
            write = seconds_of(partial(write_plainly, plain, payload, num_bytes))
            plain.unlink()
            append = seconds_of(partial(ledger.append, round_))
            ratios.append(append / write)
            del round_
    shutil.rmtree(path)
    return {f"append_over_write_{name}": median(ratios[1:])}


def wide_round(folder: Path, sizes: Sizes) -> Figures:
    """Return what appending a round of very many clients costs."""
    path = folder / "wide"
    shutil.rmtree(path, ignore_errors=True)
    layout = Layout((Slot("w", (sizes.wide_values,), "float32"),))
    base = random_bases(layout)[0]
    count = sizes.wide_clients
    payload = memoryview(np.tile(base, 64).tobytes())
    num_bytes = (count + 2) * 4 * layout.size
    updates = tuple(
        ClientUpdate(client_name(c), 1 / count, Params(layout, np.roll(base, c)))
        for c in range(count)
    )
    ratios = []
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(2):
            plain = folder / "plain"
            write = seconds_of(partial(write_plainly, plain, payload, num_bytes))
            plain.unlink()
            append = seconds_of(partial(ledger.append, Round(index, updates)))
            ratios.append(append / write)
    shutil.rmtree(path)
    return {"append_wide_over_write": min(ratios)}


def recorded_at(name: str, folder: Path, sizes: Sizes) -> Figures:
    """Return the time that `Recorded` adds to rounds, over a plain write of its bytes.

    The strategy, the messages and their arrays are Flower's own. The replies are made
    up, so that no client has to train.
    """
    from benchmarks.flower_made_up import added_seconds

    path = folder / f"recorded-{name}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    layout = layout_of(name)
    payload = memoryview(np.concatenate(random_bases(layout)).tobytes())
    ratios = []
    for added in added_seconds(path / "ledger", layout, 10, sizes.repetitions + 1):
        plain = path / "plain"
        num_bytes = 12 * 4 * layout.size
        write = seconds_of(partial(write_plainly, plain, payload, num_bytes))
        plain.unlink()
        ratios.append(added / write)
    shutil.rmtree(path)
    return {f"recorded_over_write_{name}": median(ratios[1:])}
