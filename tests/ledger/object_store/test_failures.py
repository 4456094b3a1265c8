"""Servers that stop, objects that are damaged, folders that may not write."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from fastfedul import (
    DiskLedger,
    InvalidInputError,
    LedgerDamagedError,
    LedgerError,
    LedgerLockedError,
    LedgerReader,
    forget,
    verify,
)
from fastfedul.errors import MissingPackageError
from fastfedul.ledger.restoration import restore_ledger
from fastfedul.ledger.store import object_store, transaction
from tests.support.disk_ledgers import (
    answer,
    assert_one_line,
    initial_model,
    round_of,
    snapshot_of,
)
from tests.support.s3_server import S3Server, running_server

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(server: S3Server) -> str:
    return server.bucket()


@pytest.fixture
def path(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed ledger of three rounds, each with files of its own."""
    monkeypatch.setattr(transaction, "SHARED_BYTES", 256)
    folder, address = tmp_path / "ledger", f"s3://{bucket}/ledger"
    with DiskLedger.create(folder, initial_model(), arrays=address) as ledger:
        for index in range(3):
            ledger.append(round_of(index))
    return folder


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens on this port of loopback.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(object_store, "_RETRIES", 1)


def test_a_store_out_of_reach_records_nothing_and_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    before = snapshot_of(path)
    monkeypatch.setattr(object_store, "_RETRIES", 1)
    with DiskLedger(path) as ledger:
        with monkeypatch.context() as away:
            away.setattr(ledger.files, "store", out_of_reach(bucket, away))
            with pytest.raises(LedgerError) as caught:
                ledger.append(round_of(3))
            assert_one_line(caught, "the server does not answer")
            assert snapshot_of(path) == before
        assert ledger.num_rounds == 3
        ledger.append(round_of(3))
        ledger.append(round_of(4))
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0


def out_of_reach(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> object_store.ObjectStore:
    """Return the same prefix through an address where no server listens."""
    unreachable(monkeypatch)
    return object_store.ObjectStore(f"s3://{bucket}/ledger")


def test_a_server_that_dies_between_two_rounds_loses_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_RETRIES", 1)
    path = tmp_path / "ledger"
    with running_server() as dying:
        monkeypatch.setenv("AWS_ENDPOINT_URL", dying.url)
        address = f"s3://{dying.bucket()}/ledger"
        ledger = DiskLedger.create(path, initial_model(), arrays=address)
        model = ledger.append(round_of(0))
    with pytest.raises(LedgerError) as caught:
        ledger.append(round_of(1))
    assert_one_line(caught, "the server does not answer")
    with pytest.raises(LedgerError) as caught:
        ledger.close()
    assert_one_line(caught, "the rounds are recorded", "fastfedul ledger backup")
    # The model and the first round, whose file is not full, lie in the folder.
    with LedgerReader(path) as reader:
        assert reader.num_rounds == 1
        assert reader.final.params.flat.tobytes() == model.params.flat.tobytes()
        assert answer(reader, "a")


def test_a_store_out_of_reach_refuses_writers_and_damages_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable(monkeypatch)
    with pytest.raises(LedgerError) as caught:
        DiskLedger(path)
    assert_one_line(caught, "s3://", "does not answer")
    with LedgerReader(path) as reader:
        assert reader.num_rounds == 3
        with pytest.raises(LedgerError) as caught:
            answer(reader, "a")
        assert not isinstance(caught.value, LedgerDamagedError)
        assert_one_line(caught, "does not answer")


def test_a_copy_that_fails_when_a_ledger_closes_is_told_and_made_later(
    path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = DiskLedger(path)
    ledger.set_budget(10**9)
    with monkeypatch.context() as away:
        away.setattr(ledger.files, "store", out_of_reach(bucket, away))
        with pytest.raises(LedgerError) as caught:
            ledger.close()
    assert_one_line(caught, "fastfedul ledger backup")
    with DiskLedger(path) as ledger:
        ledger.backup()
        assert ledger.settings.budget == 10**9


def test_objects_of_an_interrupted_writer_are_swept(
    path: Path, server: S3Server, bucket: str
) -> None:
    client = server.client()
    client.put_object(
        Bucket=bucket, Key="ledger/arrays/00000999.safetensors", Body=b"x"
    )
    (path / "arrays" / "00000998.safetensors").write_bytes(b"x")
    (path / "arrays" / "00000997.part").write_bytes(b"x")
    with LedgerReader(path) as reader:
        assert verify(reader).num_strays == 2
    with DiskLedger(path) as ledger:
        assert verify(ledger).num_strays == 0
    assert "ledger/arrays/00000999.safetensors" not in server.objects(bucket)
    assert not (path / "arrays" / "00000997.part").exists()


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_damaged_object_is_named(
    path: Path, server: S3Server, bucket: str, damage: str
) -> None:
    client = server.client()
    arrays = {k: v for k, v in server.objects(bucket).items() if "/arrays/" in k}
    # The last bytes of each file are the update of the last client.
    for key, data in arrays.items():
        if damage == "missing":
            client.delete_object(Bucket=bucket, Key=key)
        elif damage == "short":
            client.put_object(Bucket=bucket, Key=key, Body=data[: len(data) // 2])
        else:
            flipped = data[:-1] + bytes([data[-1] ^ 1])
            client.put_object(Bucket=bucket, Key=key, Body=flipped)
    with LedgerReader(path) as reader:
        with pytest.raises(LedgerDamagedError) as caught:
            answer(reader, "d")
        assert_one_line(caught, "round 0")
        # The model and the open file lie in the folder, and are sound.
        problems = verify(reader).problems
        assert len(problems) == len(arrays) - 2
        assert problems[0].startswith("the initial model: ")


def test_a_writer_that_was_left_behind_is_refused(
    path: Path, tmp_path: Path, server: S3Server
) -> None:
    shutil.copytree(path, tmp_path / "copy")
    with DiskLedger(path) as ledger:
        ledger.append(round_of(3))
    with pytest.raises(LedgerLockedError) as caught:
        DiskLedger(tmp_path / "copy")
    assert_one_line(caught, "another copy of this folder")
    with DiskLedger(path) as ledger:
        assert verify(ledger).problems == ()


def test_a_lost_disk_loses_nothing_that_was_copied(
    path: Path, tmp_path: Path, bucket: str
) -> None:
    with LedgerReader(path) as reader:
        truth = (reader.chain, answer(reader, "a"))
    path.rename(tmp_path / "old")
    assert restore_ledger(f"s3://{bucket}/ledger", path) == 3
    with DiskLedger(path) as ledger:
        assert (ledger.chain, answer(ledger, "a")) == truth
        ledger.append(round_of(3))
        forget(ledger, ["b"])
        assert verify(ledger).problems == ()
    with pytest.raises(LedgerLockedError) as caught:
        DiskLedger(tmp_path / "old")
    assert_one_line(caught, "restored to another folder")


def test_large_rounds_are_copied_as_they_are_recorded(
    path: Path, tmp_path: Path, bucket: str
) -> None:
    ledger = DiskLedger(path)
    ledger.files.committed(ledger.index, ledger.index.num_bytes(), erases=False)
    ledger.append(round_of(3))
    ledger.files.committed(ledger.index, ledger.index.num_bytes(), erases=False)
    # The machine is lost here: nobody closes the ledger.
    assert restore_ledger(f"s3://{bucket}/ledger", tmp_path / "new") == 4
    with pytest.raises(LedgerLockedError) as caught:
        ledger.append(round_of(4))
    assert_one_line(caught, "restored to another folder")
    ledger.close()
    with LedgerReader(tmp_path / "new") as reader:
        assert verify(reader).problems == ()
        assert verify(reader).num_strays == 0


def test_a_restored_ledger_of_rounds_not_copied_is_whole(
    path: Path, tmp_path: Path, bucket: str
) -> None:
    ledger = DiskLedger(path)
    ledger.append(round_of(3))
    ledger.append(round_of(4))
    assert restore_ledger(f"s3://{bucket}/ledger", tmp_path / "new") == 3
    with DiskLedger(tmp_path / "new") as new:
        assert verify(new).problems == ()
        assert verify(new).num_strays == 0
        new.append(round_of(3))
    with pytest.raises(LedgerLockedError):
        ledger.close()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("bucket/prefix", "s3://bucket/prefix"),
        ("gs://bucket/prefix", "s3://bucket/prefix"),
        ("s3://", "s3://bucket/prefix"),
        ("s3://bucket/a b", "letters, digits"),
        ("s3://bucket/a/../b", "letters, digits"),
        ("s3://key:secret@bucket/prefix", "no credentials"),
        ("s3://no-such-bucket/prefix", "no such bucket"),
    ],
)
def test_a_wrong_address_is_one_line_and_makes_nothing(
    tmp_path: Path, address: str, words: str
) -> None:
    for act in (
        lambda: DiskLedger.create(tmp_path / "new", initial_model(), arrays=address),
        lambda: restore_ledger(address, tmp_path / "new"),
    ):
        with pytest.raises((InvalidInputError, LedgerError)) as caught:
            act()
        assert_one_line(caught, words)
        assert "secret" not in str(caught.value).replace("AWS_SECRET", "")
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_in_use_and_an_empty_one_are_refused(
    path: Path, tmp_path: Path, bucket: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        DiskLedger.create(
            tmp_path / "new", initial_model(), arrays=f"s3://{bucket}/ledger"
        )
    assert_one_line(caught, "holds objects already")
    with pytest.raises(LedgerError, match="no copy of an index"):
        restore_ledger(f"s3://{bucket}/nothing", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_missing_credentials_are_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(LedgerError) as caught:
        LedgerReader(path)
    assert_one_line(caught, "no credentials", "AWS_ACCESS_KEY_ID")


def test_a_missing_extra_is_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingPackageError) as caught:
        LedgerReader(path)
    assert_one_line(caught, "fastfedul[store]")
