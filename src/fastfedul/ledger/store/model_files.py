"""Models as files of the user's: safetensors or npz in, safetensors out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from fastfedul.errors import InvalidInputError, LedgerError
from fastfedul.files import open_regular, placed
from fastfedul.ledger.store.array_files import why
from fastfedul.ledger.store.arrays import header_entry, padded_header
from fastfedul.ledger.store.model_arrays import DTYPE_NAMES
from fastfedul.params import FLOAT_DTYPES, Array, Layout, Params
from fastfedul.records import Model

SUFFIXES = (".safetensors", ".npz")


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the named arrays of a safetensors or npz file; nothing is unpickled."""
    try:
        arrays = _read_npz(path) if path.suffix == ".npz" else dict(load_file(path))
    except FileNotFoundError:
        raise InvalidInputError(f"there is no file {path}") from None
    except Exception as error:
        # On a damaged file zipfile, zlib and NumPy raise what they like.
        raise InvalidInputError(
            f"cannot read arrays from {path}: {why(error)}"
        ) from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise InvalidInputError(
                f"{path} holds {name!r:.80}, which is no array; save it without"
            )
    return arrays


def _read_npz(path: Path) -> dict[str, Array]:
    # NumPy forgets to close the file of a damaged archive if it opens it itself.
    with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def split_arrays(
    arrays: dict[str, Array], buffers: frozenset[str]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return parameters and buffers; an array of no float dtype is a buffer too."""
    parameters: dict[str, Array] = {}
    others: dict[str, Array] = {}
    for name, array in arrays.items():
        is_buffer = name in buffers or array.dtype.name not in FLOAT_DTYPES
        (others if is_buffer else parameters)[name] = array
    return parameters, others


def read_model(
    path: Path, *, layout: Layout | None = None, buffers: frozenset[str] = frozenset()
) -> Model:
    """Return the model of a file, checked against a layout if one is given."""
    parameters, others = split_arrays(read_arrays(path), buffers)
    try:
        return Model(Params.of(parameters, layout), others)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def write_model(
    path: Path, model: Model, notes: Mapping[str, str] | None = None
) -> None:
    """Write a model to a file, whole or not at all; it survives power loss.

    Args:
        path: Where the file goes, over one that is there.
        model: The model.
        notes: Text that the file's header holds, by name.
    """
    with model_written(path, model, notes):
        pass


def read_note(path: Path, name: str) -> str | None:
    """Return a note of a model file's header; None if the file has none."""
    try:
        with safe_open(path, framework="numpy") as file:
            found = (file.metadata() or {}).get(name)
    except (OSError, SafetensorError):
        return None
    return None if found is None else str(found)


def holds_model(path: Path, model: Model) -> bool:
    """Return whether a file holds a model, value by value, as it would be written."""
    wanted = {**_exported(path, model.params), **model.buffers}
    try:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys()) == set(wanted) and all(
                np.array_equal(file.get_tensor(name), array)
                for name, array in wanted.items()
            )
    except (OSError, SafetensorError):
        return False


@contextlib.contextmanager
def model_written(
    path: Path, model: Model, notes: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Write a model beside its place, and put it there when the block succeeds.

    So a full disk is found out before anything else is done, and the file is never
    half written.

    Raises:
        InvalidInputError: If the place is none for a file, or a value is none for the
            dtype it is written in.
    """
    _check_place(path)
    arrays = {**_exported(path, model.params), **model.buffers}
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(placed(path, _pieces(arrays, notes or {})))
        except OSError as error:
            raise LedgerError(f"cannot write {path}: {why(error)}") from None
        yield
        try:
            stack.close()
        except OSError as error:
            raise LedgerError(
                f"the model was not put at {path}: {why(error)}; what was done before "
                "is done"
            ) from None


def _pieces(
    arrays: Mapping[str, Array], notes: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file, without a second copy of the arrays.

    The library's own writer makes a file of a random name, which a killed process
    would leave behind for good.
    """
    header: dict[str, object] = {"__metadata__": dict(notes)} if notes else {}
    start = 0
    for name, array in arrays.items():
        dtype = DTYPE_NAMES[array.dtype.name]
        header[name] = header_entry(dtype, array.shape, start, array.nbytes)
        start += array.nbytes
    yield padded_header(header)
    for array in arrays.values():
        # Not ascontiguousarray, which would give a single number a shape.
        yield np.asarray(array, order="C").reshape(-1).view(np.uint8).data


def _check_place(path: Path) -> None:
    """Raise unless a file can be written at this place, or over one that is there."""
    try:
        taken = path.exists() and not path.is_file()
        homeless = not path.parent.is_dir()
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {why(error)}") from None
    if taken:
        raise InvalidInputError(
            f"cannot write {path}: it is there and no file; name a new .safetensors "
            "file"
        )
    if homeless:
        raise InvalidInputError(
            f"cannot write {path}: there is no folder {path.parent}; make it first"
        )


def _exported(path: Path, params: Params) -> dict[str, Array]:
    """Return the arrays as they are written, none of them infinite by the writing."""
    with np.errstate(over="ignore"):
        arrays = params.exported()
    for name, array in arrays.items():
        lost = np.isfinite(params[name]) & ~np.isfinite(array)
        if lost.any():
            value = params[name][lost].flat[0]
            raise InvalidInputError(
                f"cannot write {path}: {name!r:.80} is {array.dtype}, which cannot "
                f"hold {value:.6g}; leave the file out, the ledger keeps float32"
            )
    return arrays
