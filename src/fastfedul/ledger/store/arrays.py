"""Immutable array files: safetensors, named by their BLAKE3 digest, checked on reading.

A vector is cut into blocks of 65,536 values. The index keeps an XXH3 checksum of the
header, of each block (its scales, then its values) and of the buffers at the end of a
model file, so that a slice can be checked without reading the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from blake3 import blake3
from xxhash import xxh3_64, xxh3_64_digest

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.ledger.store import codec
from fastfedul.params import Array, Flat, Layout
from fastfedul.records import StorageDtype

BLOCK_VALUES = 65_536
_BLOCKS_AT_ONCE = 16  # of a model; the kernel reads at most 2 GiB in one call
_CHECKSUM_BYTES = 8
_SCALES_PER_BLOCK = BLOCK_VALUES // codec.SCALE_BLOCK
_ALIGNMENT = 64
_TEMPORARY = ".new-"

_BUFFER_NAMES = {
    "bool": "BOOL",
    **{f"{kind}int{bits}": f"{kind.upper() or 'I'}{bits}"
       for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}  # fmt: skip
_BUFFER_DTYPES = {short: name for name, short in _BUFFER_NAMES.items()}


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """What the index knows of an array file."""

    digest: bytes
    num_bytes: int
    checksums: bytes

    def checksum(self, position: int) -> bytes:
        """Return a checksum: the header's first, then the blocks', then the tail's."""
        start = position * _CHECKSUM_BYTES
        return self.checksums[start : start + _CHECKSUM_BYTES]


@dataclass(frozen=True, slots=True)
class Source:
    """One stored vector, ready to be read: its file, its form, and its place in words.

    Attributes:
        info: Digest, size and checksums of the file.
        dtype: How the values are stored.
        size: Number of values.
        header_bytes: Where the data begin.
        place: What to call it in an error, such as `round 3, client 'a'`.
    """

    info: ArrayInfo
    dtype: StorageDtype
    size: int
    header_bytes: int
    place: str

    @property
    def num_blocks(self) -> int:
        """Number of checksummed blocks."""
        return -(-self.size // BLOCK_VALUES)


def file_name(digest: bytes) -> str:
    """Return the name of the file with this content."""
    return digest.hex() + ".safetensors"


@cache
def vector_header(dtype: StorageDtype, size: int) -> bytes:
    """Return the header of a vector's file, which is a function of dtype and size."""
    scales = codec.num_scales(dtype, size)
    values = size * codec.VALUE_BYTES[dtype]
    entries: dict[str, object] = {}
    if scales:
        entries["scales"] = _entry("F32", (scales,), 0, 4 * scales)
    entries["values"] = _entry(
        codec.SAFETENSORS_NAMES[dtype], (size,), 4 * scales, 4 * scales + values
    )
    return _padded(entries)


def vector_bytes(dtype: StorageDtype, size: int) -> int:
    """Return the size of a vector's file."""
    data = 4 * codec.num_scales(dtype, size) + size * codec.VALUE_BYTES[dtype]
    return len(vector_header(dtype, size)) + data


def write_vector(folder: Path, vector: Flat, dtype: StorageDtype) -> ArrayInfo:
    """Write a vector so that it survives power loss once its folder is synced too."""
    encoded = codec.encode(vector, dtype)
    scales = encoded.scales if encoded.scales is not None else np.empty(0, np.float32)
    header = vector_header(dtype, vector.size)
    return _write(folder, header, scales, encoded.values, b"")


def write_model(
    folder: Path, layout: Layout, flat: Flat, buffers: Mapping[str, Array]
) -> ArrayInfo:
    """Write a model under its own array names: parameters in float32, then buffers."""
    entries: dict[str, object] = {}
    start = 0
    for slot in layout.slots:
        entries[slot.name] = _entry("F32", slot.shape, start, start + 4 * slot.size)
        start += 4 * slot.size
    tail = []
    for name, buffer in buffers.items():
        array = np.asarray(buffer)
        data = array.tobytes()
        short = _BUFFER_NAMES[array.dtype.name]
        entries[name] = _entry(short, array.shape, start, start + len(data))
        start += len(data)
        tail.append(data)
    return _write(
        folder, _padded(entries), np.empty(0, np.float32), flat, b"".join(tail)
    )


def supported_buffer(array: Array) -> bool:
    """Return whether a buffer's dtype can be stored."""
    return array.dtype.name in _BUFFER_NAMES


def read_model(
    folder: Path, info: ArrayInfo, layout: Layout, place: str
) -> tuple[Flat, dict[str, Array]]:
    """Return parameters and buffers of a model file, every byte checked."""
    with opened(folder, info, place) as descriptor:
        length = int.from_bytes(_read(descriptor, 8, 0, place), "little")
        if not 0 < length <= info.num_bytes:
            raise LedgerDamagedError(f"{place}: the file's header is damaged")
        header = _read(descriptor, 8 + length, 0, place)
        if xxh3_64_digest(header) != info.checksum(0):
            raise LedgerDamagedError(f"{place}: the file's header is damaged")
        source = Source(info, "float32", layout.size, len(header), place)
        flat = np.empty(layout.size, np.float32)
        for first in range(0, source.num_blocks, _BLOCKS_AT_ONCE):
            start, stop = (i * BLOCK_VALUES for i in (first, first + _BLOCKS_AT_ONCE))
            read_blocks(descriptor, source, first, flat[start:stop])
        tail_start = len(header) + flat.nbytes
        tail = _read(descriptor, info.num_bytes - tail_start, tail_start, place)
        if tail and xxh3_64_digest(tail) != info.checksum(1 + source.num_blocks):
            raise LedgerDamagedError(f"{place}: the buffers are damaged")
    known = {slot.name for slot in layout.slots}
    buffers = {}
    for name, entry in json.loads(header[8:]).items():
        if name not in known:
            begin, end = (offset - flat.nbytes for offset in entry["data_offsets"])
            dtype = np.dtype(_BUFFER_DTYPES[entry["dtype"]])
            data = np.frombuffer(tail[begin:end], dtype)
            buffers[name] = data.reshape(entry["shape"])
    return flat, buffers


def vector_source(
    info: ArrayInfo, dtype: StorageDtype, size: int, place: str
) -> Source:
    """Return a stored vector as something that can be read block by block."""
    return Source(info, dtype, size, len(vector_header(dtype, size)), place)


@contextlib.contextmanager
def opened(folder: Path, info: ArrayInfo, place: str) -> Iterator[int]:
    """Open an array file for the time of a `with` block."""
    descriptor = open_array(folder, info, place)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_array(folder: Path, info: ArrayInfo, place: str) -> int:
    """Return a file descriptor, after a look at the file's size."""
    path = folder / file_name(info.digest)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LedgerDamagedError(f"{place}: the file {path.name} is missing") from None
    except OSError as error:
        raise LedgerError(f"{place}: cannot read {path.name}: {error}") from None
    if os.fstat(descriptor).st_size != info.num_bytes:
        os.close(descriptor)
        raise LedgerDamagedError(f"{place}: the file {path.name} has the wrong size")
    return descriptor


def check_header(descriptor: int, source: Source) -> None:
    """Raise unless the header is the one written."""
    header = _read(descriptor, source.header_bytes, 0, source.place)
    if xxh3_64_digest(header) != source.info.checksum(0):
        raise LedgerDamagedError(f"{source.place}: the file's header is damaged")


def read_blocks(descriptor: int, source: Source, first: int, out: Flat) -> int:
    """Read, check and decode blocks until `out` is full; return the bytes read."""
    starts = range(0, out.size, BLOCK_VALUES)
    if source.dtype == "float32":
        offset = source.header_bytes + 4 * first * BLOCK_VALUES
        _read_into(descriptor, out, offset, source.place)
        for block, start in enumerate(starts, first):
            part = out[start : start + BLOCK_VALUES]
            _require(xxh3_64_digest(part.data), source, block)
        return out.nbytes
    return sum(
        _decode_block(descriptor, source, block, out[start : start + BLOCK_VALUES])
        for block, start in enumerate(starts, first)
    )


def file_digest(path: Path) -> bytes:
    """Return the BLAKE3 digest of a file."""
    hasher = blake3(max_threads=blake3.AUTO)
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 22):
            hasher.update(chunk)
    return hasher.digest()


def sync_folder(folder: Path) -> None:
    """Make new and renamed files of a folder survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _decode_block(descriptor: int, source: Source, block: int, out: Flat) -> int:
    """Read, check and decode one block of fewer bits; return the bytes read."""
    width = codec.VALUE_BYTES[source.dtype]
    scale_bytes = 4 * codec.num_scales(source.dtype, source.size)
    values = np.empty(out.size * width, np.uint8)
    values_at = source.header_bytes + scale_bytes + block * BLOCK_VALUES * width
    _read_into(descriptor, values, values_at, source.place)
    hasher = xxh3_64()
    scales = None
    if scale_bytes:
        scales = np.empty(codec.num_scales(source.dtype, out.size), np.float32)
        scales_at = source.header_bytes + 4 * block * _SCALES_PER_BLOCK
        _read_into(descriptor, scales, scales_at, source.place)
        hasher.update(scales.data)
    hasher.update(values.data)
    _require(hasher.digest(), source, block)
    storage = np.int8 if source.dtype == "int8" else np.uint16
    codec.decode_into(values.view(storage), scales, source.dtype, out)
    return values.nbytes + (scales.nbytes if scales is not None else 0)


def _require(checksum: bytes, source: Source, block: int) -> None:
    if checksum != source.info.checksum(1 + block):
        raise LedgerDamagedError(
            f"{source.place}: values {block * BLOCK_VALUES} and following are damaged"
        )


def _entry(
    dtype: str, shape: Sequence[int], start: int, stop: int
) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _padded(entries: Mapping[str, object]) -> bytes:
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(
    folder: Path, header: bytes, scales: Flat, values: Array, tail: bytes
) -> ArrayInfo:
    parts = [memoryview(header), _bytes(scales), _bytes(values), memoryview(tail)]
    temporary = folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
        )
        try:
            for part in parts:
                view = part
                while view:
                    view = view[os.write(descriptor, view) :]
            hasher = blake3()
            for part in parts:
                hasher.update(part)
            checksums = _checksums(header, scales, values, tail)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        digest = hasher.digest()
        temporary.rename(folder / file_name(digest))
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return ArrayInfo(digest, sum(len(part) for part in parts), checksums)


def _bytes(array: Array) -> memoryview:
    # An empty or zero-dimensional array has no castable buffer.
    return array.data.cast("B") if array.size else memoryview(b"")


def _checksums(header: bytes, scales: Flat, values: Array, tail: bytes) -> bytes:
    sums = [xxh3_64_digest(header)]
    for block in range(-(-values.size // BLOCK_VALUES)):
        hasher = xxh3_64()
        if scales.size:
            first = block * _SCALES_PER_BLOCK
            hasher.update(_bytes(scales[first : first + _SCALES_PER_BLOCK]))
        first = block * BLOCK_VALUES
        hasher.update(_bytes(values[first : first + BLOCK_VALUES]))
        sums.append(hasher.digest())
    if tail:
        sums.append(xxh3_64_digest(tail))
    return b"".join(sums)


def _read_into(descriptor: int, out: Array, offset: int, place: str) -> None:
    # A read of a regular file is short only at its end.
    try:
        count = os.preadv(descriptor, [out.data], offset)
    except OSError as error:
        raise LedgerError(f"{place}: cannot read: {error}") from None
    if count != out.nbytes:
        raise LedgerDamagedError(f"{place}: the file is cut short")


def _read(descriptor: int, count: int, offset: int, place: str) -> bytes:
    out = np.empty(count, np.uint8)
    if count:
        _read_into(descriptor, out, offset, place)
    return out.tobytes()
