"""Array files: safetensors images, one behind the other, checked on reading.

A file holds one model, or images with vectors. The step and updates of a small round
are one image, and small rounds share a file; an image begins at a multiple of a page,
so that adding one never touches a page that was synced before. Of a large round the
step has a file of its own and so have a few updates each, so that erasing a client
rewrites little.

A vector is cut into blocks of 65,536 values. The index keeps where a vector lies, its
BLAKE3 digest, and an XXH3 checksum of each block (its scales, then its values), so that
a slice can be checked without reading the rest.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from xxhash import xxh3_64, xxh3_64_digest

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.files import open_regular
from fastfedul.ledger.store import codec
from fastfedul.ledger.store.array_files import ArrayFile, ArrayFiles, file_name
from fastfedul.ledger.store.schema import FileRow
from fastfedul.params import Array, Flat
from fastfedul.records import StorageDtype, VectorRef

BLOCK_VALUES = 65_536
PAGE = 4096
"""Images begin at multiples of this."""

_COPY_BYTES = 1 << 23
_SMALL_BYTES = 1 << 18
"""An image below this is gathered in memory and written with its neighbours."""

CHECKSUM_BYTES = 8
_SCALES_PER_BLOCK = BLOCK_VALUES // codec.SCALE_BLOCK
_ALIGNMENT = 64
_STORED = struct.Struct("<q32s")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a vector or model lies in its file, and how it is checked.

    Attributes:
        offset: Where its bytes begin.
        digest: BLAKE3 digest of its bytes.
        checksums: XXH3 checksums. A vector has one for each block. A model has one for
            the header, one for each block, and one for the buffers if it has any.
    """

    offset: int
    digest: bytes
    checksums: bytes

    def packed(self) -> bytes:
        """Return it as a column of the index has it."""
        return _STORED.pack(self.offset, self.digest) + self.checksums

    @classmethod
    def unpacked(cls, column: bytes) -> Stored:
        """Return the place and checksums that a column of the index holds."""
        offset, digest = _STORED.unpack_from(column)
        return cls(offset, digest, column[_STORED.size :])

    def checksum(self, position: int) -> bytes:
        """Return one of the checksums."""
        start = position * CHECKSUM_BYTES
        return self.checksums[start : start + CHECKSUM_BYTES]


def digest_in(column: bytes | None) -> bytes | None:
    """Return the digest of a stored vector, given its column of the index."""
    return None if column is None else column[_STORED.size - 32 : _STORED.size]


@dataclass(frozen=True, slots=True)
class Source:
    """One stored vector, ready to be read.

    Attributes:
        file: Number of its file.
        stored: Where in the file, and its checksums.
        dtype: How the values are stored.
        size: Number of values.
        place: Name of the vector in an error, for instance `round 3, client 'a'`.
    """

    file: int
    stored: Stored
    dtype: StorageDtype
    size: int
    place: str | VectorRef

    @property
    def num_blocks(self) -> int:
        """Number of checksummed blocks."""
        return -(-self.size // BLOCK_VALUES)

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored vector."""
        return codec.encoded_bytes(self.dtype, self.size)


@dataclass(frozen=True, slots=True)
class Part:
    """A vector to be written as part of an image.

    Attributes:
        name: Name of the tensor.
        dtype: How the values are stored.
        size: Number of values.
        load: Returns the vector, when its turn comes; None for a copy.
        copy_of: Array files and stored vector to copy as it is; None for a new vector.
        data: Stored bytes of the vector to copy, where they are at hand.
    """

    name: str
    dtype: StorageDtype
    size: int
    load: Callable[[], Flat] | None = None
    copy_of: tuple[ArrayFiles, Source] | None = None
    data: memoryview | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that the vector takes."""
        return codec.encoded_bytes(self.dtype, self.size)


def new_part(name: str, vector: Flat, dtype: StorageDtype) -> Part:
    """Return a vector at hand as a part of an image."""
    return Part(name, dtype, vector.size, lambda: vector)


def copied_part(
    name: str, files: ArrayFiles, source: Source, data: memoryview | None = None
) -> Part:
    """Return a stored vector, to be copied, as a part of another image."""
    return Part(name, source.dtype, source.size, None, (files, source), data)


def image_header(parts: Sequence[tuple[str, StorageDtype, int]]) -> bytes:
    """Return the header of an image of vectors: name, dtype and size of each."""
    entries: dict[str, object] = {}
    start = 0
    for name, dtype, size in parts:
        scales = codec.num_scales(dtype, size)
        if scales:
            entries[f"{name}.scales"] = header_entry(
                "F32", (scales,), start, 4 * scales
            )
            start += 4 * scales
        num_bytes = size * codec.VALUE_BYTES[dtype]
        kind = codec.SAFETENSORS_NAMES[dtype]
        entries[name] = header_entry(kind, (size,), start, num_bytes)
        start += num_bytes
    return padded_header(entries)


def image_bytes(parts: Sequence[tuple[str, StorageDtype, int]]) -> int:
    """Return the bytes of an image of vectors, given name, dtype and size of each."""
    data = sum(codec.encoded_bytes(dtype, size) for _, dtype, size in parts)
    return len(image_header(parts)) + data


def with_header(before: bytes, header: bytes) -> bytes:
    """Return the checksum over some headers and another one behind them."""
    return bytes(xxh3_64_digest(before + header))


_AROUND = "a header, or a gap between images, was changed"


def header_damage(file: ArrayFile, row: FileRow) -> str | None:
    """Return the damage around the vectors of a file; None if there is none.

    These are the headers of its images, and the gaps between the images.
    """
    checksum, end = b"", 0
    try:
        while end < row.num_bytes:
            start = page_end(end)
            if any(file.read(start - end, end, "a gap")):
                return _AROUND
            length = int.from_bytes(file.read(8, start, "a header"), "little")
            if not 0 < length <= row.num_bytes:
                return _AROUND
            header = file.read(8 + length, start, "a header")
            checksum = with_header(checksum, header)
            entries = json.loads(header[8:]).values()
            end = start + len(header) + max(e["data_offsets"][1] for e in entries)
    except (LedgerError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return _AROUND
    return None if checksum == row.headers else _AROUND


def page_end(offset: int) -> int:
    """Return the next offset at which an image may begin.

    >>> page_end(0), page_end(1), page_end(4096)
    (0, 4096, 4096)
    """
    return -(-offset // PAGE) * PAGE


class ArrayWriter:
    """Writes images to one array file; they survive power loss once it is synced.

    Attributes:
        number: Number of the file.
        end: Bytes of the file so far.
        live_bytes: Bytes of the vectors written by this writer.
        headers: Checksum over the headers of all images so far.
    """

    def __init__(
        self, files: ArrayFiles, number: int, end: int = 0, headers: bytes = b""
    ) -> None:
        """Open a new file, or one to which images are added.

        Args:
            files: The array files of the ledger.
            number: Number of the file.
            end: Where the bytes end that count; 0 for a new file.
            headers: Checksum over the headers that are there already.
        """
        self.number = number
        self.end = end
        self.headers = headers
        self.live_bytes = 0
        self._pending: list[bytes | memoryview] = []
        self._pending_at = end
        self._pending_end = end
        self._descriptor = files.resume(number) if end else files.create(number)

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def add(self, parts: Sequence[Part]) -> tuple[int, list[Stored]]:
        """Write an image; return where it begins, and the places of its vectors."""
        header = image_header([(p.name, p.dtype, p.size) for p in parts])
        self.headers = with_header(self.headers, header)
        start = page_end(self.end)
        offsets = []
        at = start + len(header)
        for part in parts:
            offsets.append(at)
            at += part.num_bytes
        if at - start <= _SMALL_BYTES:
            found = self._add_small(start, header, parts, offsets)
        else:
            self.flush()
            self._write([header], start)
            found = [
                self._add_one(part, offset)
                for part, offset in zip(parts, offsets, strict=True)
            ]
        self.end = at
        self.live_bytes += sum(part.num_bytes for part in parts)
        return start, found

    def row(self) -> FileRow:
        """Return the row of a file that this writer alone has written."""
        return FileRow(self.number, self.end, self.live_bytes, self.headers)

    def sync(self) -> None:
        """Write the bytes still in memory and make the file survive power loss."""
        self.flush()
        os.fdatasync(self._descriptor)

    def _add_small(
        self, start: int, header: bytes, parts: Sequence[Part], offsets: list[int]
    ) -> list[Stored]:
        if self._pending_end - self._pending_at > _COPY_BYTES:
            self.flush()
        if not self._pending:
            self._pending_at = start
        else:
            self._pending.append(bytes(start - self._pending_end))
        self._pending.append(header)
        self._pending_end = start + len(header) + sum(p.num_bytes for p in parts)
        found = []
        for part, offset in zip(parts, offsets, strict=True):
            if part.copy_of is not None:
                files, source = part.copy_of
                data = part.data or read_raw(files, source)
                check_raw(data, source)
                self._pending.append(data)
                found.append(
                    Stored(offset, source.stored.digest, source.stored.checksums)
                )
            else:
                pieces, stored = _hashed(part, offset)
                self._pending += [bytes(piece) for piece in pieces]
                found.append(stored)
        return found

    def _add_one(self, part: Part, offset: int) -> Stored:
        if part.copy_of is not None:
            files, source = part.copy_of
            copy_raw(files, source, self._descriptor, offset)
            return Stored(offset, source.stored.digest, source.stored.checksums)
        pieces, stored = _hashed(part, offset, self._write)
        del pieces
        return stored

    def flush(self) -> None:
        """Hand all bytes to the system, so that they can be read."""
        if self._pending:
            self._write([b"".join(self._pending)], self._pending_at)
            self._pending = []

    def _write(self, pieces: Sequence[bytes | memoryview], offset: int) -> None:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                count = os.pwrite(self._descriptor, view, offset)
                view, offset = view[count:], offset + count


def write_image(
    files: ArrayFiles, number: int, parts: Sequence[Part]
) -> Iterator[tuple[FileRow, list[Stored]]]:
    """Write a file of one image, and yield its row and its vectors' places.

    The change itself may read the vectors from then on. The file survives a loss of
    power when the iteration has ended.
    """
    with ArrayWriter(files, number) as writer:
        _, stored = writer.add(parts)
        writer.flush()
        yield writer.row(), stored
        writer.sync()
    files.put(number)


def read_blocks(file: ArrayFile, source: Source, first: int, out: Flat) -> int:
    """Read, check and decode blocks until `out` is full; return the bytes read."""
    starts = range(0, out.size, BLOCK_VALUES)
    if source.dtype == "float32":
        offset = source.stored.offset + 4 * first * BLOCK_VALUES
        file.read_into(out, offset, source.place)
        parts = [out[start : start + BLOCK_VALUES].data for start in starts]
        # Other threads wait while this one holds the interpreter: one comparison.
        found = b"".join(map(xxh3_64_digest, parts))
        begin = CHECKSUM_BYTES * first
        if found != source.stored.checksums[begin : begin + len(found)]:
            for block, part in enumerate(parts, first):
                _require(xxh3_64_digest(part), source, block)
        return out.nbytes
    return sum(
        _decode_block(file, source, block, out[start : start + BLOCK_VALUES])
        for block, start in enumerate(starts, first)
    )


def decode_whole(data: memoryview, source: Source, out: Flat) -> None:
    """Check and decode a vector of one block, given its stored bytes."""
    _require(xxh3_64_digest(data), source, 0)
    if source.dtype == "float32":
        out[:] = np.frombuffer(data, np.float32)
        return
    scale_bytes = 4 * codec.num_scales(source.dtype, source.size)
    scales = np.frombuffer(data[:scale_bytes], np.float32) if scale_bytes else None
    storage = np.int8 if source.dtype == "int8" else np.uint16
    values = np.frombuffer(data[scale_bytes:], storage)
    codec.decode_into(values, scales, source.dtype, out)


def read_raw(files: ArrayFiles, source: Source) -> bytes:
    """Return the stored bytes of a small vector, not checked yet."""
    with files.opened(source.file, source.place) as file:
        return file.read(source.num_bytes, source.stored.offset, source.place)


def copy_raw(files: ArrayFiles, source: Source, to: int, offset: int) -> None:
    """Copy the stored bytes of a vector to another file, checked on the way."""
    with files.opened(source.file, source.place) as file:
        hasher = blake3()
        done = 0
        while done < source.num_bytes:
            count = min(_COPY_BYTES, source.num_bytes - done)
            at = source.stored.offset + done
            data = file.read(count, at, source.place)
            hasher.update(data)
            view = memoryview(data)
            while view:
                written = os.pwrite(to, view, offset + done)
                view, done = view[written:], done + written
    if hasher.digest() != source.stored.digest:
        raise LedgerDamagedError(f"{source.place}: values are damaged")


def damage_of(file: ArrayFile, source: Source) -> str | None:
    """Return the damage of a stored vector; None if there is none."""
    hasher = blake3()
    try:
        for at in range(0, source.num_bytes, _COPY_BYTES):
            count = min(_COPY_BYTES, source.num_bytes - at)
            begin = source.stored.offset + at
            hasher.update(file.read(count, begin, source.place))
    except LedgerError as error:
        return str(error)
    if hasher.digest() != source.stored.digest:
        return f"{source.place}: the file {file_name(source.file)} was changed"
    return None


def whole_digest(file: ArrayFile, place: object) -> bytes:
    """Return the BLAKE3 digest of all bytes of a file."""
    hasher = blake3()
    num_bytes = file.num_bytes()
    for at in range(0, num_bytes, _COPY_BYTES):
        hasher.update(file.read(min(_COPY_BYTES, num_bytes - at), at, place))
    return hasher.digest()


def file_digest(path: Path) -> bytes:
    """Return the BLAKE3 digest of a file."""
    hasher = blake3()
    with open_regular(path) as file:
        while chunk := file.read(1 << 22):
            hasher.update(chunk)
    return hasher.digest()


def _hashed(
    part: Part,
    offset: int,
    write: Callable[[Sequence[memoryview], int], None] | None = None,
) -> tuple[list[memoryview], Stored]:
    """Return a new vector's bytes and its place; write the bytes if asked to."""
    assert part.load is not None
    encoded = codec.encode(part.load(), part.dtype)
    scales = encoded.scales if encoded.scales is not None else np.empty(0, np.float32)
    pieces = [buffer_of(scales), buffer_of(encoded.values)]
    if write is not None:
        write(pieces, offset)
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    stored = Stored(offset, hasher.digest(), block_checksums(scales, encoded.values))
    return pieces, stored


def _decode_block(file: ArrayFile, source: Source, block: int, out: Flat) -> int:
    """Read, check and decode one block of fewer bits; return the bytes read."""
    width = codec.VALUE_BYTES[source.dtype]
    scale_bytes = 4 * codec.num_scales(source.dtype, source.size)
    values = np.empty(out.size * width, np.uint8)
    begin = source.stored.offset
    values_at = begin + scale_bytes + block * BLOCK_VALUES * width
    file.read_into(values, values_at, source.place)
    hasher = xxh3_64()
    scales = None
    if scale_bytes:
        scales = np.empty(codec.num_scales(source.dtype, out.size), np.float32)
        scales_at = begin + 4 * block * _SCALES_PER_BLOCK
        file.read_into(scales, scales_at, source.place)
        hasher.update(scales.data)
    hasher.update(values.data)
    _require(hasher.digest(), source, block)
    storage = np.int8 if source.dtype == "int8" else np.uint16
    codec.decode_into(values.view(storage), scales, source.dtype, out)
    return values.nbytes + (scales.nbytes if scales is not None else 0)


def check_raw(data: bytes | memoryview, source: Source) -> None:
    """Raise unless these are the bytes of a stored vector."""
    if blake3(data).digest() != source.stored.digest:
        raise LedgerDamagedError(f"{source.place}: values are damaged")


def _require(checksum: bytes, source: Source, block: int) -> None:
    if checksum != source.stored.checksum(block):
        raise LedgerDamagedError(
            f"{source.place}: values {block * BLOCK_VALUES} and following are damaged"
        )


def header_entry(
    dtype: str, shape: Sequence[int], start: int, num_bytes: int
) -> dict[str, object]:
    """Return the entry of one tensor in the header of an image."""
    return {
        "dtype": dtype,
        "shape": list(shape),
        "data_offsets": [start, start + num_bytes],
    }


def padded_header(entries: Mapping[str, object]) -> bytes:
    """Return a header with its length, padded so that the data begin aligned."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def buffer_of(array: Array) -> memoryview:
    """Return the bytes of an array, without a copy."""
    # An empty or zero-dimensional array has no castable buffer.
    return array.data.cast("B") if array.size else memoryview(b"")


def block_checksums(scales: Flat, values: Array) -> bytes:
    """Return the checksum of each block: of its scales and then of its values."""
    sums = []
    for block in range(-(-values.size // BLOCK_VALUES)):
        hasher = xxh3_64()
        if scales.size:
            first = block * _SCALES_PER_BLOCK
            hasher.update(buffer_of(scales[first : first + _SCALES_PER_BLOCK]))
        first = block * BLOCK_VALUES
        hasher.update(buffer_of(values[first : first + BLOCK_VALUES]))
        sums.append(hasher.digest())
    return b"".join(sums)
