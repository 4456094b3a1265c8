"""Starts a ledger from models that somebody saved while training without one.

The folder holds `global/N.EXT`, the server's model before round N, one more than there
were rounds; `clients/N/NAME.EXT`, each participant's model after its training in round
N, with NAME percent-encoded where the file system needs it; and optionally
`shares.json`: {"N": {"NAME": number of examples}}, with every round and every client
in it; without the file all clients of a round count the same. EXT is safetensors or
npz.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from fastfedul import strict_json
from fastfedul.errors import InvalidInputError, LedgerError
from fastfedul.files import read_regular_text
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.store.array_files import why
from fastfedul.ledger.store.folder import new_folder
from fastfedul.ledger.store.model_files import SUFFIXES, read_model
from fastfedul.ledger.store.places import discard
from fastfedul.params import Params, subtract
from fastfedul.records import (
    ClientId,
    ClientUpdate,
    LocalSGD,
    Model,
    Round,
    StorageDtype,
)

Progress = Callable[[int, int], None]
Sizes = Mapping[ClientId, float]


def import_ledger(
    folder: Path,
    out: Path,
    *,
    aggregation: str = "mean",
    update_dtype: StorageDtype = "float32",
    step_dtype: StorageDtype = "float32",
    buffers: frozenset[str] = frozenset(),
    local: LocalSGD | None = None,
    arrays: str | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a ledger of saved models to `out` and return its number of rounds.

    If anything is wrong no ledger is left behind.

    Args:
        folder: The saved models.
        out: Where the ledger goes.
        aggregation: How the server aggregated.
        update_dtype: How updates are stored.
        step_dtype: How steps are stored.
        buffers: Names of float arrays that are not learned, such as running means.
        local: How the clients of every round trained; None if that is not known.
        arrays: Where the array files go, such as `s3://bucket/prefix`; None for `out`.
        progress: Called with rounds done and rounds in all.
    """
    models = _numbered(folder / "global")
    if len(models) < 2:
        raise InvalidInputError(
            f"{folder / 'global'} needs the models before and after at least one "
            "round: 0.safetensors, 1.safetensors and so on"
        )
    sizes = _read_sizes(folder / "shares.json", len(models) - 1)
    # A link that leads nowhere is in the way too.
    if os.path.lexists(out):
        raise InvalidInputError(f"{out} exists already; choose another folder")
    building = new_folder(out).with_name(f".{out.name}.importing")
    model = read_model(models[0], buffers=buffers)
    # An import that was killed leaves this behind; it has never been a ledger.
    shutil.rmtree(building, ignore_errors=True)
    made = False
    try:
        with DiskLedger.create(
            building,
            model,
            aggregation=aggregation,
            update_dtype=update_dtype,
            step_dtype=step_dtype,
            arrays=arrays,
        ) as ledger:
            made = True
            for index in range(len(models) - 1):
                after = read_model(
                    models[index + 1], layout=model.params.layout, buffers=buffers
                )
                round_ = _round(folder, index, model, after, sizes[index], buffers)
                ledger.append(replace(round_, local=local))
                model = after
                if progress:
                    progress(index + 1, len(models) - 1)
        building.rename(out)
    except OSError as error:
        discard(building, arrays if made else None)
        raise LedgerError(f"cannot write a ledger to {out}: {why(error)}") from None
    except BaseException:
        discard(building, arrays if made else None)
        raise
    return len(models) - 1


def _round(
    folder: Path,
    index: int,
    before: Model,
    after: Model,
    sizes: Sizes | None,
    buffers: frozenset[str],
) -> Round:
    files = _named(folder / "clients" / str(index))
    names = sorted(set(files) | set(sizes or {}))
    if not names:
        raise InvalidInputError(
            f"{folder / 'clients' / str(index)} holds no client's model"
        )
    weights = np.array([_size(sizes, name, index) for name in names])
    shares = weights / weights.sum()
    updates = tuple(
        ClientUpdate(
            name,
            float(share),
            _delta(files[name], before, buffers) if name in files else None,
            kept=name in files,
        )
        for name, share in zip(names, shares, strict=True)
    )
    step = subtract(after.params, before.params)
    return Round(index, updates, step, buffers=after.buffers)


def _delta(path: Path, before: Model, buffers: frozenset[str]) -> Params:
    local = read_model(path, layout=before.params.layout, buffers=buffers)
    return subtract(local.params, before.params)


def _size(sizes: Sizes | None, name: ClientId, index: int) -> float:
    if sizes is None:
        return 1.0
    if name not in sizes:
        raise InvalidInputError(
            f"shares.json has no number of examples for client {name!r:.80} "
            f"in round {index}"
        )
    return float(sizes[name])


def _read_sizes(path: Path, num_rounds: int) -> list[Sizes | None]:
    """Return the numbers of examples of each round; None if there is no such file."""
    if not os.path.lexists(path):
        return [None] * num_rounds
    try:
        table = strict_json.parse(read_regular_text(path))
        sizes = {
            index: {name: float(size) for name, size in row.items()}
            for index, row in table.items()
        }
    except (ValueError, AttributeError, TypeError, OSError) as error:
        raise InvalidInputError(
            f'{path} must be JSON like {{"0": {{"client": 120}}}}: {why(error)}'
        ) from None
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None
    for index, row in sizes.items():
        _check_sizes(path, index, row)
    rounds = dict.fromkeys(map(str, range(num_rounds)))
    for index in [*rounds, *sizes]:
        if index not in sizes or index not in rounds:
            have = "lacks" if index in rounds else "names"
            raise InvalidInputError(
                f"{path} {have} round {index:.40}; it must have rounds 0 to "
                f"{num_rounds - 1}, as there are models"
            )
    return [sizes[index] for index in rounds]


def _check_sizes(path: Path, index: str, row: Sizes) -> None:
    """Raise unless every number of examples of a round gives a share."""
    if any(not 0 < size < math.inf for size in row.values()):
        raise InvalidInputError(f"{path}: numbers of examples must be above 0")
    total = sum(row.values())
    if any(not 0 < size / total < math.inf for size in row.values()):
        raise InvalidInputError(
            f"{path}: the numbers of examples of round {index:.40} are too large, or "
            "too far apart, to give shares"
        )


def _numbered(folder: Path) -> list[Path]:
    """Return model files 0, 1, 2 and so on, which must have no gap."""
    found = {int(name): path for name, path in _named(folder).items() if _whole(name)}
    missing = [number for number in range(len(found)) if number not in found]
    if missing:
        raise InvalidInputError(f"{folder} has no model {missing[0]}")
    return [found[number] for number in range(len(found))]


def _whole(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _named(folder: Path) -> dict[str, Path]:
    """Return the array files of a folder by the names they stand for."""
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidInputError(f"there is no folder {folder}") from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"cannot read the folder {folder}: {why(error)}"
        ) from None
    found: dict[str, Path] = {}
    for path in paths:
        if path.suffix in SUFFIXES:
            name = unquote(path.name.removesuffix(path.suffix))
            if name in found:
                raise InvalidInputError(
                    f"{found[name]} and {path.name} are both model {name!r:.80}"
                )
            found[name] = path
    return found
