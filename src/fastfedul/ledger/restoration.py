"""Brings a ledger back from the copy of its index on an object store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fastfedul.errors import LedgerError
from fastfedul.files import sync_folder
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.store.folder import ARRAYS, INDEX, explain, new_folder
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.object_arrays import (
    ObjectArrays,
    copies_in,
    copy_name,
    new_owner,
)
from fastfedul.ledger.store.object_store import ObjectStore
from fastfedul.ledger.store.schema import HeadRow, PlaceRow


def restore_ledger(address: str, path: Path | str) -> int:
    """Bring a ledger back to a new folder, and return its number of rounds.

    From then on, only the new folder may write to the address. Rounds that were
    recorded after the last copy of the index are not in it.

    Args:
        address: Where the array files lie, such as `s3://bucket/prefix`.
        path: A folder that does not exist yet, or is empty.
    """
    store = ObjectStore(address)
    copies = copies_in(store)
    if not copies:
        raise LedgerError(f"{store.address} holds no copy of an index; check it")
    number, _ = copies[-1]
    folder = new_folder(path)
    building = folder.with_name(f".{folder.name}.restoring-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(mode=0o700, parents=True)
        (building / ARRAYS).mkdir(mode=0o700)
        store.download(copy_name(*copies[-1]), building / INDEX)
        place = PlaceRow(1, store.address, new_owner())
        _fill(building, store, place)
        building.replace(folder)
        sync_folder(folder.parent)
        # The name of the new owner in the store keeps every other folder from writing.
        files = ObjectArrays(folder / ARRAYS, store, place.owner or "")
        index = Index(folder / INDEX, write=False)
        try:
            files.claim(index)
        finally:
            index.close()
            files.close()
    except OSError as error:
        raise explain(error, folder, f"copy {number}") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    with DiskLedger(folder) as ledger:
        return ledger.num_rounds


def _fill(folder: Path, store: ObjectStore, place: PlaceRow) -> None:
    """Give a downloaded index and its local array files to a new owner."""
    files = ObjectArrays(folder / ARRAYS, store, place.owner or "")
    index = Index(folder / INDEX, write=True)
    try:
        with index.writing():
            head = index.one(HeadRow, id=1)
            index.one(PlaceRow, id=1)
            index.replace(place)
        files.fetch(head.file)
        if head.open_file is not None:
            files.fetch(head.open_file)
    finally:
        index.close()
        files.close()
