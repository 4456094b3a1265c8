"""Models in array files: parameters in float32 under their own names, then buffers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from blake3 import blake3
from xxhash import xxh3_64_digest

from fastfedul.errors import LedgerDamagedError
from fastfedul.ledger.store.array_files import ArrayFile, ArrayFiles
from fastfedul.ledger.store.arrays import (
    BLOCK_VALUES,
    CHECKSUM_BYTES,
    Source,
    Stored,
    block_checksums,
    buffer_of,
    header_entry,
    padded_header,
    read_blocks,
)
from fastfedul.params import Array, Flat, Layout

_BLOCKS_AT_ONCE = 16  # the kernel reads at most 2 GiB in one call

DTYPE_NAMES = {
    "bool": "BOOL",
    **{f"{kind}int{bits}": f"{kind.upper() or 'I'}{bits}"
       for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}  # fmt: skip
"""Names of dtypes in safetensors."""

NO_PARAMETERS = Layout(())
"""The layout of a file that holds buffers alone."""

_BUFFER_DTYPES = {short: name for name, short in DTYPE_NAMES.items()}


def write_model(
    files: ArrayFiles,
    number: int,
    layout: Layout,
    flat: Flat,
    buffers: Mapping[str, Array],
) -> Iterator[tuple[int, Stored]]:
    """Write a model under its own array names: parameters in float32, then buffers.

    Yields the bytes of the file, and the place of the model in it. The file survives a
    loss of power when the iteration has ended.
    """
    entries: dict[str, object] = {}
    start = 0
    for slot in layout.slots:
        entries[slot.name] = header_entry("F32", slot.shape, start, 4 * slot.size)
        start += 4 * slot.size
    tail = []
    for name, buffer in buffers.items():
        array = np.asarray(buffer)
        data = array.tobytes()
        short = DTYPE_NAMES[array.dtype.name]
        entries[name] = header_entry(short, array.shape, start, len(data))
        start += len(data)
        tail.append(data)
    header, end = padded_header(entries), b"".join(tail)
    pieces = [memoryview(header), buffer_of(flat), memoryview(end)]
    descriptor = files.create(number)
    try:
        for piece in pieces:
            view = piece
            while view:
                view = view[os.write(descriptor, view) :]
        hasher = blake3()
        for piece in pieces:
            hasher.update(piece)
        checksums = xxh3_64_digest(header) + block_checksums(
            np.empty(0, np.float32), flat
        )
        checksums += xxh3_64_digest(end) if end else b""
        yield sum(map(len, pieces)), Stored(0, hasher.digest(), checksums)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    files.put(number, stays=True)


def supported_buffer(array: Array) -> bool:
    """Return whether a buffer's dtype can be stored."""
    return array.dtype.name in DTYPE_NAMES


def read_model(
    files: ArrayFiles, number: int, stored: Stored, layout: Layout, place: str
) -> tuple[Flat, dict[str, Array]]:
    """Return parameters and buffers of a model file, every byte checked."""
    with files.opened(number, place) as file:
        header = _header_of(file, stored, place)
        values = Stored(len(header), stored.digest, stored.checksums[CHECKSUM_BYTES:])
        source = Source(number, values, "float32", layout.size, place)
        flat = np.empty(layout.size, np.float32)
        for first in range(0, source.num_blocks, _BLOCKS_AT_ONCE):
            start, stop = (i * BLOCK_VALUES for i in (first, first + _BLOCKS_AT_ONCE))
            read_blocks(file, source, first, flat[start:stop])
        tail_start = len(header) + flat.nbytes
        tail = file.read(file.num_bytes() - tail_start, tail_start, place)
        if (xxh3_64_digest(tail) if tail else b"") != values.checksum(
            source.num_blocks
        ):
            raise LedgerDamagedError(f"{place}: the buffers are damaged")
    buffers = {}
    for name, entry in _buffers_in(header, layout).items():
        begin, end = (offset - flat.nbytes for offset in entry["data_offsets"])
        dtype = np.dtype(_BUFFER_DTYPES[entry["dtype"]])
        data = np.frombuffer(tail[begin:end], dtype)
        buffers[name] = data.reshape(entry["shape"])
    return flat, buffers


def read_buffer_names(
    files: ArrayFiles, number: int, stored: Stored, layout: Layout, place: str
) -> tuple[str, ...]:
    """Return the sorted names of a model file's buffers; only its header is read."""
    with files.opened(number, place) as file:
        header = _header_of(file, stored, place)
    return tuple(sorted(_buffers_in(header, layout)))


def _header_of(file: ArrayFile, stored: Stored, place: str) -> bytes:
    """Return the checked header of a model file, with its length field."""
    length = int.from_bytes(file.read(8, 0, place), "little")
    if 0 < length <= file.num_bytes():
        header = file.read(8 + length, 0, place)
        if xxh3_64_digest(header) == stored.checksum(0):
            return header
    raise LedgerDamagedError(f"{place}: the file's header is damaged")


def _buffers_in(header: bytes, layout: Layout) -> dict[str, Any]:
    """Return the entries of the buffers in a model file's header."""
    known = {slot.name for slot in layout.slots}
    return {n: e for n, e in json.loads(header[8:]).items() if n not in known}
