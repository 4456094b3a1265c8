"""A prefix of an S3 bucket: bytes through obstore, versions and locks through boto3.

Credentials, region and endpoint come from the environment or the files that AWS's own
tools use. They are never part of an address.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastfedul.errors import (
    InvalidInputError,
    LedgerError,
    name_some,
    require_extra,
)
from fastfedul.files import open_private
from fastfedul.limits import require_type
from fastfedul.params import Array

_PROBE = "probe"
"""Name of an object that is written and removed to see whether that works."""

_DELETED_AT_ONCE = 1000
"""Versions that S3 deletes in one request, at most."""

_RETRIES = 5
_RETRY_TIMEOUT = timedelta(seconds=60)

_REFUSED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Forbidden")

_PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*(/|$))*")
"""Prefixes that every library spells in the same way."""

OUR_NAMES = re.compile(
    r"arrays/[0-9]{8,}\.safetensors|index/[0-9]{12}-[0-9a-f]{16}\.sqlite|probe"
)
"""Names of objects, below the prefix, that a ledger writes; it removes no other."""


class MissingObjectError(LedgerError):
    """An object is not in the store."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of an object, or the marker of its deletion.

    Attributes:
        name: Name of the object below the prefix.
        number: Name of the version in S3.
        latest: Whether a reader of the object gets this version.
        marker: Whether it says that the object was deleted.
    """

    name: str
    number: str
    latest: bool
    marker: bool


class ObjectStore:
    """The objects below one prefix of an S3 bucket.

    Attributes:
        address: The bucket and prefix, such as `s3://bucket/ledgers/one`.
    """

    def __init__(self, address: str) -> None:
        """Prepare to use a prefix; no request is sent yet.

        Raises:
            InvalidInputError: If the address is none, or a package is missing.
            LedgerError: If there are no credentials.
        """
        self._bucket, self._prefix = _parsed(address)
        self.address = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        with require_extra("store", "arrays on an object store need obstore and boto3"):
            import boto3
            import obstore
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, ClientError
            from obstore.auth.boto3 import Boto3CredentialProvider
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        self._failures: tuple[type[Exception], ...] = (
            BotoCoreError,
            ClientError,
            BaseError,
            FileNotFoundError,
            PermissionError,
        )
        self._obstore = obstore
        session = boto3.Session()
        region = session.region_name or "us-east-1"
        with self._explained():
            if session.get_credentials() is None:
                raise LedgerError(
                    f"there are no credentials for {self.address}; set "
                    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
                )
            self._client: Any = session.client(
                "s3",
                region_name=region,
                config=Config(
                    connect_timeout=5,
                    retries={"max_attempts": _RETRIES, "mode": "standard"},
                ),
            )
        endpoint = self._client.meta.endpoint_url
        self._store = S3Store(
            self._bucket,
            prefix=self._prefix or None,
            region=region,
            endpoint=endpoint,
            client_options={"allow_http": endpoint.startswith("http://")},
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": _RETRY_TIMEOUT,
            },
            credential_provider=Boto3CredentialProvider(session),
        )

    def put(self, name: str, path: Path) -> None:
        """Write an object from a file; when this returns, the store has all of it."""
        with self._explained():
            self._obstore.put(self._store, name, path)

    def read(self, name: str, count: int, offset: int) -> Any:
        """Return bytes of an object as a buffer; fewer where the object ends."""
        with self._explained():
            try:
                return self._obstore.get_range(
                    self._store, name, start=offset, length=count
                )
            except self._failures as error:
                if _code_of(error) == "InvalidRange":
                    return b""
                raise

    def size(self, name: str) -> int:
        """Return the bytes of an object."""
        with self._explained():
            return self._obstore.head(self._store, name)["size"]

    def download(self, name: str, path: Path) -> None:
        """Write an object to a new file."""
        with self._explained():
            chunks = self._obstore.get(self._store, name).stream()
            with open(path, "xb", opener=open_private) as file:
                for chunk in chunks:
                    file.write(chunk)

    def names(self, under: str) -> list[str]:
        """Return the names of the objects in a folder of the prefix, sorted."""
        with self._explained():
            batches = self._obstore.list(self._store, prefix=under)
            return sorted(entry["path"] for batch in batches for entry in batch)

    def is_empty(self) -> bool:
        """Return whether the prefix has no object and no version of one."""
        return not any(True for _ in self._versions())

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a bucket with versions keeps them until `purge`."""
        if names:
            with self._explained(), contextlib.suppress(FileNotFoundError):
                self._obstore.delete(self._store, list(names))

    def purge(self, keep: Collection[str]) -> list[Version]:
        """Delete every version of a ledger's objects that nobody may read any more.

        The latest version of an object to keep stays. Objects with names that a ledger
        does not write stay too. Uploads that were never finished go: no list of objects
        shows them, but the store has their bytes.

        Returns:
            The versions that are still there.
        """
        self._abort_uploads()
        for some in _batches(self._superfluous(keep)):
            wanted = [
                {"Key": self._key(version.name), "VersionId": version.number}
                for version in some
            ]
            with self._explained():
                self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": wanted, "Quiet": True}
                )
        return list(self._superfluous(keep))

    def check_erasable(self) -> None:
        """Raise unless the bucket lets go of every version of a deleted object.

        Raises:
            LedgerError: If versions would stay; the message says why.
        """
        refusal = f"nothing was changed: {self.address} would keep erased data: "
        with self._explained():
            found = self._client.get_bucket_versioning(Bucket=self._bucket)
        if found.get("MFADelete") == "Enabled":
            raise LedgerError(
                f"{refusal}its bucket deletes versions only with a second factor; "
                "turn MFA delete off"
            )
        lock = self._lock_configuration()
        if lock.get("Rule", {}).get("DefaultRetention"):
            raise LedgerError(
                f"{refusal}object lock retains every object of its bucket; remove the "
                "default retention, or choose another bucket"
            )
        if lock:
            for version in self._versions():
                reason = None if version.marker else self._hold_on(version)
                if reason:
                    raise LedgerError(
                        f"{refusal}{version.name} has {reason}; lift it and try again"
                    )
        self._probe(refusal)

    def _abort_uploads(self) -> None:
        """Delete the parts of uploads that a killed writer did not finish."""
        start = self._key("")
        pages = self._client.get_paginator("list_multipart_uploads")
        with self._explained():
            for page in pages.paginate(Bucket=self._bucket, Prefix=start):
                for found in page.get("Uploads", ()):
                    if OUR_NAMES.fullmatch(found["Key"].removeprefix(start)):
                        self._client.abort_multipart_upload(
                            Bucket=self._bucket,
                            Key=found["Key"],
                            UploadId=found["UploadId"],
                        )

    def _probe(self, refusal: str) -> None:
        """Write an object and delete all its versions, as an erasure will."""
        with self._explained():
            self._obstore.put(self._store, _PROBE, b"probe")
        for version in [v for v in self._versions() if v.name == _PROBE]:
            try:
                self._client.delete_object(
                    Bucket=self._bucket,
                    Key=self._key(_PROBE),
                    VersionId=version.number,
                )
            except self._failures as error:
                raise LedgerError(
                    f"{refusal}a version cannot be deleted ({_reason(error)}); allow "
                    "s3:DeleteObject and s3:DeleteObjectVersion"
                ) from None

    def _hold_on(self, version: Version) -> str | None:
        """Return the hold or retention on a version; None if there is none."""
        with self._explained():
            found = self._client.head_object(
                Bucket=self._bucket,
                Key=self._key(version.name),
                VersionId=version.number,
            )
        if found.get("ObjectLockLegalHoldStatus") == "ON":
            return "a legal hold"
        until = found.get("ObjectLockRetainUntilDate")
        if until is not None and until > datetime.now(UTC):
            return f"a retention until {until:%Y-%m-%d}"
        return None

    def _lock_configuration(self) -> dict[str, Any]:
        """Return how the bucket locks objects; nothing if it does not."""
        try:
            found = self._client.get_object_lock_configuration(Bucket=self._bucket)
        except self._failures as error:
            # Stores without object locks say so in either way.
            if _code_of(error) in (
                "ObjectLockConfigurationNotFoundError",
                "NotImplemented",
            ):
                return {}
            raise LedgerError(self._message(error)) from None
        return dict(found.get("ObjectLockConfiguration", {}))

    def _superfluous(self, keep: Collection[str]) -> Iterator[Version]:
        for version in self._versions():
            stays = version.name in keep and version.latest and not version.marker
            if not stays and OUR_NAMES.fullmatch(version.name):
                yield version

    def _versions(self) -> Iterator[Version]:
        """Yield every version and deletion marker below the prefix."""
        start = self._key("")
        pages = self._client.get_paginator("list_object_versions")
        with self._explained():
            for page in pages.paginate(Bucket=self._bucket, Prefix=start):
                for kind in ("Versions", "DeleteMarkers"):
                    for found in page.get(kind, ()):
                        yield Version(
                            found["Key"].removeprefix(start),
                            found["VersionId"],
                            found["IsLatest"],
                            kind == "DeleteMarkers",
                        )

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors of the store into errors of a ledger, of one line each."""
        try:
            yield
        except self._failures as error:
            if _code_of(error) in ("NoSuchKey", "404"):
                raise MissingObjectError(self._message(error)) from None
            raise LedgerError(self._message(error)) from None

    def _message(self, error: Exception) -> str:
        return f"{self.address}: {_reason(error)}"


def describe(versions: Sequence[Version]) -> str:
    """Return how many versions there are, and the first of them by name."""
    names = name_some(f"{version.name} ({version.number})" for version in versions)
    return f"{len(versions)} versions of objects: {names}"


def read_into(data: Any, out: Array) -> int:
    """Copy a buffer into an array from its beginning; return how many bytes it has."""
    view = memoryview(data)
    if view.nbytes == out.nbytes:
        out.data.cast("B")[:] = view.cast("B")
    return view.nbytes


def _parsed(address: str) -> tuple[str, str]:
    """Return bucket and prefix of an address."""
    require_type("the address of arrays", address, str, "text")
    try:
        parts = urlsplit(address)
        strange = bool(parts.query or parts.fragment or parts.port)
        if "@" in parts.netloc:
            raise InvalidInputError(
                "an address of arrays holds no credentials; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY"
            )
    except ValueError:
        strange, parts = True, urlsplit("")
    prefix = parts.path.strip("/")
    if strange or parts.scheme != "s3" or not parts.netloc:
        raise InvalidInputError(
            f"arrays lie at an address such as s3://bucket/prefix, not {address!r:.120}"
        )
    if not _PREFIX.fullmatch(prefix):
        raise InvalidInputError(
            f"the prefix {prefix!r:.120} has a character that stores disagree on; use "
            "letters, digits, -, _, . and / only"
        )
    return parts.netloc, prefix


def _code_of(error: Exception) -> str:
    """Return the code that the server gave for an error; empty without one."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    found = re.search(r"<Code>(\w+)</Code>", str(error))
    if found:
        return found.group(1)
    # An answer to a HEAD request has no body.
    return "404" if isinstance(error, FileNotFoundError) else ""


def _reason(error: Exception) -> str:
    """Return why a request failed, in a line."""
    code = _code_of(error)
    if code == "NoSuchBucket":
        return "there is no such bucket; create it first"
    if code in ("NoSuchKey", "404"):
        return "an object is missing"
    if code in _REFUSED or type(error).__name__ in (
        "PermissionDeniedError",
        "PermissionError",
        "UnauthenticatedError",
    ):
        return (
            f"the store refuses these credentials ({code or 'no code'}); check "
            "them and the bucket's policy"
        )
    if code:
        return f"the store says {code}"
    if "Connection" in type(error).__name__ or "error sending request" in str(error):
        return "the server does not answer; check AWS_ENDPOINT_URL and the network"
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _batches(versions: Iterable[Version]) -> Iterator[list[Version]]:
    some = list(versions)
    for first in range(0, len(some), _DELETED_AT_ONCE):
        yield some[first : first + _DELETED_AT_ONCE]
