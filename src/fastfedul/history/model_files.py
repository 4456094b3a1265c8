"""Models as files of the user's: safetensors or npz in, safetensors out."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from fastfedul.errors import InvalidInputError, LedgerError
from fastfedul.params import FLOAT_DTYPES, Array, Layout, Params
from fastfedul.records import Model

SUFFIXES = (".safetensors", ".npz")


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the named arrays of a safetensors or npz file; nothing is unpickled."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        return dict(load_file(path))
    except FileNotFoundError:
        raise InvalidInputError(f"there is no file {path}") from None
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        EOFError,
        SafetensorError,
        zipfile.BadZipFile,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInputError(f"cannot read arrays from {path}: {reason}") from None


def split_arrays(
    arrays: dict[str, Array], buffers: frozenset[str]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return parameters and buffers: what is not of a float dtype is a buffer too."""
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


@contextlib.contextmanager
def model_written(path: Path, model: Model) -> Iterator[None]:
    """Write a model beside its place, and put it there when the block succeeds.

    So a full disk is found out before anything else is done, and the file is never
    half written.

    Raises:
        InvalidInputError: If the place is none for a file.
    """
    if path.exists() and not path.is_file():
        raise InvalidInputError(
            f"cannot write {path}: it is there and no file; name a new .safetensors "
            "file"
        )
    if not path.parent.is_dir():
        raise InvalidInputError(
            f"cannot write {path}: there is no folder {path.parent}; make it first"
        )
    temporary = path.with_name(f".{path.name}.new-{os.getpid()}")
    arrays = {
        name: np.ascontiguousarray(array)
        for name, array in {**model.params.exported(), **model.buffers}.items()
    }
    try:
        try:
            save_file(
                {k: np.ascontiguousarray(v) for k, v in arrays.items()}, temporary
            )
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        except (OSError, SafetensorError) as error:
            raise LedgerError(f"cannot write {path}: {error}") from None
        yield
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
