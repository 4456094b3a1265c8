"""What is read is what was written."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from fastfedul import DiskLedger, FastFedULError, LedgerReader, Model, Params
from fastfedul.ledger.protocol import models
from fastfedul.ledger.protocol import vector as stored_vector
from fastfedul.ledger.store import codec
from fastfedul.params import Array, Flat, Layout
from fastfedul.records import StorageDtype, VectorRef
from tests.support.damage import images_of, live_vectors
from tests.support.disk_ledgers import CLIENTS, LAYOUT, initial_model, round_of, vector
from tests.support.stored_vectors import through


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
@pytest.mark.parametrize(
    "size", [1, 1023, 1025, 65_535, 65_536, 65_537, 70_000, 131_073, 17 * 65_536 + 1]
)
def test_vectors_come_back_as_their_storage_dtype_has_them(
    dtype: StorageDtype, size: int, tmp_path: Path
) -> None:
    layout = Layout.of({"w": np.zeros(size)})
    with DiskLedger.create(
        tmp_path / "ledger",
        initial_model(layout),
        update_dtype=dtype,
        step_dtype=dtype,
    ) as ledger:
        ledger.append(round_of(0, layout=layout, clients=("a", "b")))
        final = ledger.final.params.flat
    rows = [vector(1, 0, i, size=size) for i in range(2)]
    step: Flat = rows[0] * np.float32(0.5) + rows[1] * np.float32(0.5)
    with LedgerReader(tmp_path / "ledger") as reader:
        np.testing.assert_array_equal(reader.final.params.flat, final)
        np.testing.assert_array_equal(final, vector(0, size=size) + step)
        round_ = reader.updates_in(0)
        assert [u.client for u in round_] == ["a", "b"]
        np.testing.assert_array_equal(
            list(models(reader))[-1].flat, reader.final.params.flat
        )
        for expected, client in ((step, None), (rows[0], "a"), (rows[1], "b")):
            found = stored(reader, 0, client)
            np.testing.assert_array_equal(found, through(expected, dtype))


def stored(reader: LedgerReader, index: int, client: str | None) -> Array:
    return stored_vector(reader, VectorRef(index, client))


@pytest.mark.parametrize(
    "buffer",
    [
        np.array(7),
        np.array([True, False]),
        np.arange(6, dtype=np.uint8).reshape(2, 3).T,
        np.array([1, -2], np.int16),
        np.array([1.5, math.nan], np.float64),
        np.zeros((0, 3), np.float32),
        np.array([1, 2], ">i4"),
        np.array([1.5, -2], ">f8"),
    ],
    ids=lambda buffer: f"{buffer.dtype.str}{buffer.shape}",
)
def test_buffers_come_back_with_their_values(buffer: Array, tmp_path: Path) -> None:
    initial = Model(Params.zeros(LAYOUT), {"state": buffer, "more": np.array([1.0])})
    DiskLedger.create(tmp_path / "ledger", initial).close()
    with LedgerReader(tmp_path / "ledger") as reader:
        np.testing.assert_array_equal(reader.final.buffers["state"], buffer)
        assert reader.final.buffers["state"].dtype.name == buffer.dtype.name
        np.testing.assert_array_equal(reader.final.buffers["more"], [1.0])


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
def test_the_safetensors_library_reads_the_same_values(
    dtype: StorageDtype, tmp_path: Path
) -> None:
    with DiskLedger.create(
        tmp_path / "ledger", initial_model(), update_dtype=dtype, step_dtype=dtype
    ) as ledger:
        ledger.append(round_of(0))
        model = load_file(ledger.model_path)
        final = ledger.final
    assert set(model) == {"weight", "bias", "seen"}
    np.testing.assert_array_equal(model["weight"], final.params["weight"])
    np.testing.assert_array_equal(model["bias"], final.params["bias"])
    np.testing.assert_array_equal(model["seen"], np.arange(3))
    index = sqlite3.connect(tmp_path / "ledger" / "index.sqlite")
    found = index.execute(
        "SELECT clients.name, clients.id, updates.file FROM updates "
        "JOIN clients ON clients.id = updates.client"
    ).fetchall()
    index.close()
    assert len(found) == len(CLIENTS)
    for name, number, in_file in found:
        file = tmp_path / "ledger" / "arrays" / f"{in_file:08d}.safetensors"
        tensors = deserialized(file.read_bytes())
        encoded = codec.encode(vector(1, 0, CLIENTS.index(name)), dtype)
        values = tensors[f"0.update.{number}"]
        assert values["shape"] == [LAYOUT.size]
        assert values["dtype"] == codec.SAFETENSORS_NAMES[dtype]
        assert bytes(values["data"]) == encoded.values.tobytes()
        if encoded.scales is not None:
            scales = tensors[f"0.update.{number}.scales"]
            assert bytes(scales["data"]) == encoded.scales.tobytes()
        if dtype == "float32":
            loaded = load_file(file)
            own = [f"0.update.{other}" for _, other, _ in found]
            assert set(loaded) == {"0.step", *own}
            np.testing.assert_array_equal(
                loaded[f"0.update.{number}"], vector(1, 0, CLIENTS.index(name))
            )


def test_each_round_of_a_shared_file_is_an_image_for_the_safetensors_library(
    path: Path,
) -> None:
    [shared] = live_vectors(path)
    content = shared.read_bytes()
    images = list(images_of(content))
    assert [image.start for image in images] == [0, 4096, 8192]
    for index, image in enumerate(images):
        tensors = deserialized(content[image.start : image.stop])
        own = [f"{index}.update.{number}" for number in range(1, 5)]
        assert set(tensors) == {f"{index}.step", *own}
        for number, name in enumerate(own):
            sent = vector(1, index, number)
            assert bytes(tensors[name]["data"]) == sent.tobytes()


def deserialized(content: bytes) -> dict[str, Any]:
    deserialize: Callable[[bytes], Any] = safetensors.deserialize
    return dict(deserialize(content))


@pytest.mark.parametrize(
    "name",
    ["a/b", "..", "é😀", 'quo"te', "two\nlines", "", " ", "__metadata__", "\ud800"],
)
def test_a_model_with_odd_parameter_names_is_readable_or_refused(
    name: str, tmp_path: Path
) -> None:
    refused = False
    try:
        initial = Model(Params.of({name: np.arange(4.0), "plain": np.ones(2)}))
        DiskLedger.create(tmp_path / "ledger", initial).close()
    except FastFedULError as error:
        refused = "\n" not in str(error)
    if refused:
        assert not (tmp_path / "ledger").exists()
        return
    with LedgerReader(tmp_path / "ledger") as reader:
        np.testing.assert_array_equal(reader.final.params[name], np.arange(4.0))
        loaded = load_file(reader.model_path)
    np.testing.assert_array_equal(loaded[name], np.arange(4.0))
