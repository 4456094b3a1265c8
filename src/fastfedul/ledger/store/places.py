"""Where the array files of a ledger lie: its own folder, or an object store."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from fastfedul.errors import InvalidInputError, LedgerError
from fastfedul.ledger.store.array_files import ArrayFiles
from fastfedul.ledger.store.object_arrays import ObjectArrays, new_owner
from fastfedul.ledger.store.object_store import ObjectStore
from fastfedul.ledger.store.schema import PlaceRow


def array_files(folder: Path, place: PlaceRow) -> ArrayFiles:
    """Return the array files of a ledger.

    Args:
        folder: The local folder of array files.
        place: The row of the index that says where they lie.
    """
    if place.address is None or place.owner is None:
        return ArrayFiles(folder)
    return ObjectArrays(folder, ObjectStore(place.address), place.owner)


def new_place(address: str | None) -> PlaceRow:
    """Return where the array files of a new ledger will lie, checked.

    Args:
        address: An address such as `s3://bucket/prefix`; None for the ledger's own
            folder.

    Raises:
        InvalidInputError: If something lies at the address already.
        LedgerError: If the store cannot be used, or would keep erased data.
    """
    if address is None:
        return PlaceRow(1, None, None)
    store = ObjectStore(address)
    if not store.is_empty():
        raise InvalidInputError(
            f"{store.address} holds objects already; choose another prefix, or bring "
            "that ledger back with fastfedul ledger restore"
        )
    store.check_erasable()
    return PlaceRow(1, store.address, new_owner())


def discard(folder: Path, address: str | None) -> None:
    """Remove the folder of an unfinished ledger, and its objects if it has any."""
    shutil.rmtree(folder, ignore_errors=True)
    if address is not None:
        with contextlib.suppress(LedgerError):
            ObjectStore(address).purge(keep=())
