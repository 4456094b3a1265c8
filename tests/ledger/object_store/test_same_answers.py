"""A ledger on an object store gives the same answers as one in a folder, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import DiskLedger, FastFedUL, LedgerReader, forget, verify
from fastfedul.ledger.store import transaction
from fastfedul.params import Layout
from tests.support.disk_ledgers import (
    LAYOUT,
    answer,
    details_of,
    initial_model,
    round_of,
    round_with_buffers,
    with_buffers,
)
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.slow

LARGE = Layout.of({"weight": np.zeros((300, 230)), "bias": np.zeros(230)})
"""Above one block of 65,536 values."""


def both(
    tmp_path: Path,
    server: S3Server,
    num_rounds: int,
    layout: Layout = LAYOUT,
    **options: Any,
) -> tuple[Path, Path, str]:
    """Return a ledger in a folder, the same one on a store, and its bucket."""
    bucket = server.bucket()
    places = {"local": None, "remote": f"s3://{bucket}/some/ledger"}
    for name, address in places.items():
        with DiskLedger.create(
            tmp_path / name, initial_model(layout), arrays=address, **options
        ) as ledger:
            for index in range(num_rounds):
                ledger.append(round_of(index, layout=layout))
    return tmp_path / "local", tmp_path / "remote", bucket


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("apart", [False, True])
def test_rounds_models_and_forgetting_are_the_same_to_the_bit(
    tmp_path: Path,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    apart: bool,
) -> None:
    if apart:
        monkeypatch.setattr(transaction, "SHARED_BYTES", 4096)
    layout = LARGE if apart else LAYOUT
    local, remote, bucket = both(tmp_path, server, 4, layout, update_dtype=dtype)
    with LedgerReader(local) as one, LedgerReader(remote) as other:
        assert one.chain == other.chain
        assert one.final.params.flat.tobytes() == other.final.params.flat.tobytes()
        assert answer(one, "b") == answer(other, "b")
        assert details_of(one, FastFedUL(), "b") == details_of(other, FastFedUL(), "b")
        assert verify(other).problems == ()
    arrays = {
        key.rpartition("/")[2]: data
        for key, data in server.objects(bucket).items()
        if "/arrays/" in key
    }
    assert arrays == {p.name: p.read_bytes() for p in (local / "arrays").iterdir()}


@pytest.mark.parametrize("history", ["rounds", "sums"])
def test_forgetting_for_good_is_the_same(
    tmp_path: Path, server: S3Server, history: str
) -> None:
    local, remote, bucket = both(tmp_path, server, 5, history=history)
    ends = []
    for path in (local, remote):
        with DiskLedger(path) as ledger:
            done = forget(ledger, ["c"])
            ledger.append(round_of(5, clients=("a", "b", "d")))
            ends.append((done.model.params.flat.tobytes(), ledger.chain))
            assert verify(ledger).problems == ()
    assert ends[0] == ends[1]
    names = {key.rpartition("/")[2] for key in server.objects(bucket)}
    files = {path.name for path in (local / "arrays").iterdir()}
    assert {name for name in names if name.endswith(".safetensors")} == files


def test_only_the_model_and_the_open_file_stay_in_the_folder(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "SHARED_BYTES", 16_384)
    _, remote, bucket = both(tmp_path, server, 12)
    with LedgerReader(remote) as ledger:
        wanted = {ledger.head.file, ledger.head.open_file}
    here = {int(path.stem) for path in (remote / "arrays").iterdir()}
    assert here == wanted
    # Twelve rounds share three files; beside them lie two models and the index.
    assert len(server.objects(bucket)) == 3 + 2 + 1


def test_a_folder_without_local_arrays_still_reads(
    tmp_path: Path, server: S3Server
) -> None:
    local, remote, _ = both(tmp_path, server, 3)
    for path in (remote / "arrays").iterdir():
        path.unlink()
    with LedgerReader(local) as one, LedgerReader(remote) as other:
        assert answer(one, "a") == answer(other, "a")
    with DiskLedger(remote) as ledger:
        ledger.append(round_of(3))
        assert verify(ledger).problems == ()


def test_buffers_of_clients_are_on_the_store_and_beside_the_model(
    tmp_path: Path, server: S3Server
) -> None:
    bucket, path = server.bucket(), tmp_path / "ledger"
    address = f"s3://{bucket}/some/ledger"
    with DiskLedger.create(path, with_buffers(), arrays=address) as ledger:
        for index in range(3):
            ledger.append(round_with_buffers(index))
        forget(ledger, ["b"])
        number = ledger.head.buffers_file
        sent = ledger.last_buffers()
    assert sorted(sent) == ["a", "c", "d"]
    name = f"{number:08d}.safetensors"
    assert (path / "arrays" / name).exists()
    assert f"some/ledger/arrays/{name}" in server.objects(bucket)
    # A reader without the local file, as after a restoration, takes the object.
    (path / "arrays" / name).unlink()
    with LedgerReader(path) as reader:
        for client, own in reader.last_buffers().items():
            np.testing.assert_array_equal(own["norm.mean"], sent[client]["norm.mean"])
        assert verify(reader).problems == ()
