"""An erasure leaves no version of anything behind, or is refused before it begins."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fastfedul import DiskLedger, LedgerError, LedgerReader, forget, verify
from fastfedul.ledger.protocol import vector as stored
from fastfedul.records import History, VectorRef
from tests.support.disk_ledgers import (
    assert_one_line,
    initial_model,
    round_of,
    snapshot_of,
)
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.slow


def recorded(path: Path, bucket: str, num_rounds: int = 3) -> None:
    address = f"s3://{bucket}/ledger"
    with DiskLedger.create(path, initial_model(), arrays=address) as ledger:
        for index in range(num_rounds):
            ledger.append(round_of(index))


def secrets_of(path: Path) -> list[bytes]:
    """Return bytes that an erasure of `b` must take away."""
    with LedgerReader(path) as ledger:
        return [
            ledger.final.params.flat.tobytes(),
            *(stored(ledger, VectorRef(i, "b")).tobytes() for i in range(3)),
            *(stored(ledger, VectorRef(i)).tobytes() for i in range(3)),
        ]


@pytest.mark.parametrize("versions", [False, True])
def test_no_version_of_an_erased_vector_is_left(
    tmp_path: Path, server: S3Server, versions: bool
) -> None:
    bucket = server.bucket(versions=versions)
    recorded(tmp_path / "ledger", bucket)
    secrets = secrets_of(tmp_path / "ledger")
    before = server.all_bytes(bucket)
    assert all(secret in before for secret in secrets)
    with DiskLedger(tmp_path / "ledger") as ledger:
        forget(ledger, ["b"])
        after = server.all_bytes(bucket)
        assert not any(secret in after for secret in secrets)
        found = server.versions(bucket)
        assert len(found) == len(server.objects(bucket))
        assert verify(ledger).problems == ()


@pytest.mark.parametrize("history", ["rounds", "sums"])
def test_a_ledger_goes_on_after_an_erasure(
    tmp_path: Path, server: S3Server, history: History
) -> None:
    """The file of small rounds that an erasure rewrote lies in the store alone."""
    path, address = tmp_path / "ledger", f"s3://{server.bucket()}/ledger"
    stays = ("a", "c", "d")
    with DiskLedger.create(
        path, initial_model(), history=history, arrays=address
    ) as ledger:
        for index in range(3):
            ledger.append(round_of(index))
        forget(ledger, ["b"])
    for index in (3, 4):
        with DiskLedger(path) as ledger:
            ledger.append(round_of(index, clients=stays))
    with DiskLedger(path) as ledger:
        forget(ledger, ["c"])
        assert verify(ledger).problems == ()
    with DiskLedger(path) as ledger:
        assert ledger.num_rounds == 5
        assert verify(ledger).problems == ()


def test_old_copies_of_the_index_go_with_the_client(
    tmp_path: Path, server: S3Server
) -> None:
    bucket = server.bucket(versions=True)
    recorded(tmp_path / "ledger", bucket)
    copies = [v for v in server.versions(bucket) if "/index/" in v["Key"]]
    assert len(copies) > 1
    with DiskLedger(tmp_path / "ledger") as ledger:
        forget(ledger, ["b"])
        copies = [v for v in server.versions(bucket) if "/index/" in v["Key"]]
        assert len(copies) == 1


def test_objects_of_others_below_the_prefix_stay(
    tmp_path: Path, server: S3Server
) -> None:
    bucket = server.bucket(versions=True)
    recorded(tmp_path / "ledger", bucket)
    client = server.client()
    for key in ("ledger/notes.txt", "ledger/arrays/notes.txt", "ledger2/arrays/x"):
        client.put_object(Bucket=bucket, Key=key, Body=b"mine")
    with DiskLedger(tmp_path / "ledger") as ledger:
        forget(ledger, ["b"])
        assert verify(ledger).foreign == ("arrays/notes.txt",)
    assert list(server.objects(bucket).values()).count(b"mine") == 3


def test_uploads_that_were_never_finished_go_too(
    tmp_path: Path, server: S3Server
) -> None:
    bucket, client = server.bucket(), server.client()
    recorded(tmp_path / "ledger", bucket)
    with DiskLedger(tmp_path / "ledger") as ledger:
        for name in ("arrays/00000999.safetensors", "notes.txt"):
            upload = client.create_multipart_upload(Bucket=bucket, Key=f"ledger/{name}")
            client.upload_part(
                Bucket=bucket,
                Key=f"ledger/{name}",
                UploadId=upload["UploadId"],
                PartNumber=1,
                Body=b"an update",
            )
        forget(ledger, ["b"])
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == ["ledger/notes.txt"]


def refused(path: Path, *words: str) -> None:
    """Forgetting with erasure says why it cannot be, and changes nothing."""
    with DiskLedger(path) as ledger:
        before = snapshot_of(path)
        with pytest.raises(LedgerError) as caught:
            forget(ledger, ["b"])
        assert_one_line(caught, "nothing was changed", *words)
        assert snapshot_of(path) == before


@pytest.mark.parametrize("hold", ["legal hold", "retention"])
def test_a_held_object_refuses_the_erasure(
    tmp_path: Path, server: S3Server, hold: str
) -> None:
    bucket = server.bucket(locks=True)
    path = tmp_path / "ledger"
    recorded(path, bucket)
    client = server.client()
    key = next(key for key in server.objects(bucket) if "/arrays/" in key)
    if hold == "legal hold":
        client.put_object_legal_hold(Bucket=bucket, Key=key, LegalHold={"Status": "ON"})
    else:
        until = datetime.now(UTC) + timedelta(days=3)
        client.put_object_retention(
            Bucket=bucket,
            Key=key,
            Retention={"Mode": "GOVERNANCE", "RetainUntilDate": until},
        )
    refused(path, hold, key.removeprefix("ledger/"))
    with DiskLedger(path) as ledger:
        # What does not remove anything for good goes on.
        ledger.append(round_of(3))
        forget(ledger, ["b"], erase=False)


def test_a_bucket_that_retains_everything_takes_no_ledger(
    tmp_path: Path, server: S3Server
) -> None:
    bucket = server.bucket(locks=True)
    server.client().put_object_lock_configuration(
        Bucket=bucket,
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}},
        },
    )
    with pytest.raises(LedgerError) as caught:
        DiskLedger.create(
            tmp_path / "other", initial_model(), arrays=f"s3://{bucket}/other"
        )
    assert_one_line(caught, "default retention")
    assert not (tmp_path / "other").exists()


def test_an_erasure_in_a_bucket_with_locks_but_no_hold_is_whole(
    tmp_path: Path, server: S3Server
) -> None:
    bucket = server.bucket(locks=True)
    recorded(tmp_path / "ledger", bucket)
    secrets = secrets_of(tmp_path / "ledger")
    with DiskLedger(tmp_path / "ledger") as ledger:
        forget(ledger, ["b"])
    assert not any(secret in server.all_bytes(bucket) for secret in secrets)
