"""An S3 server on this machine, and buckets of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from botocore.config import Config

KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass
class S3Server:
    """A real server process on loopback; what it stores is gone when it stops."""

    process: subprocess.Popen[bytes]
    port: int
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {**KEYS, "AWS_ENDPOINT_URL": self.url}

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            config=Config(retries={"max_attempts": 1}),
        )

    def bucket(self, *, versions: bool = False, locks: bool = False) -> str:
        """Return the name of a new bucket."""
        name = f"bucket-{next(self.numbers)}"
        client = self.client()
        client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=locks)
        if versions:
            client.put_bucket_versioning(
                Bucket=name, VersioningConfiguration={"Status": "Enabled"}
            )
        return name

    def objects(self, bucket: str) -> dict[str, bytes]:
        """Return every object of a bucket that can be read, by key."""
        client = self.client()
        listed = client.list_objects_v2(Bucket=bucket).get("Contents", ())
        return {
            entry["Key"]: client.get_object(Bucket=bucket, Key=entry["Key"])[
                "Body"
            ].read()
            for entry in listed
        }

    def versions(self, bucket: str) -> list[dict[str, Any]]:
        """Return every version and deletion marker of a bucket."""
        found = self.client().list_object_versions(Bucket=bucket)
        return [*found.get("Versions", ()), *found.get("DeleteMarkers", ())]

    def all_bytes(self, bucket: str) -> bytes:
        """Return the bytes of all versions of all objects."""
        client = self.client()
        listed = client.list_object_versions(Bucket=bucket).get("Versions", ())
        return b"".join(
            client.get_object(Bucket=bucket, Key=v["Key"], VersionId=v["VersionId"])[
                "Body"
            ].read()
            for v in listed
        )


@contextlib.contextmanager
def running_server() -> Iterator[S3Server]:
    """Start a server on a free port, and stop it when the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **KEYS},
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "the S3 server has stopped"
                assert time.monotonic() < deadline, "the S3 server does not answer"
                time.sleep(0.05)
        yield S3Server(process, port)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A server for all tests of a module."""
    with running_server() as found:
        yield found


@pytest.fixture(autouse=True)
def reached(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials and endpoint, as a user sets them."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
