"""Time stamps by RFC 3161: somebody else says when a certificate existed.

The stamp covers the bytes of the certificate's file and lies beside it.
"""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.files import read_regular
from fastfedul.forgetting.signing import create_file, sign_extra

if TYPE_CHECKING:
    from cryptography.x509 import Certificate as Root
    from rfc3161_client import TimeStampResponse

LARGEST_ANSWER = 2**20
_PATIENCE = 60.0
"""Seconds that a time stamping authority may take."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file, its time stamp if there is one, and the trusted authority.

    Attributes:
        file: Bytes of the file.
        answer: The authority's answer, in DER; None if there is none.
        roots: Root certificates of authorities that are trusted.
    """

    file: bytes
    answer: bytes | None
    roots: Sequence[Root] = ()

    @classmethod
    def beside(cls, path: Path, roots: Path | None) -> Stamp:
        """Return the time stamp that lies beside a file.

        Args:
            path: The file.
            roots: PEM file of the root certificates; None if nobody is trusted.
        """
        place = stamp_path(path)
        answer = _read(place) if place.exists() else None
        return cls(_read(path), answer, _read_roots(roots) if roots else ())

    def time(self) -> datetime:
        """Return when the file existed, by an authority that is trusted.

        Raises:
            InvalidInputError: If there is no stamp, or it does not fit.
        """
        if self.answer is None:
            raise InvalidInputError("there is no time stamp beside the certificate")
        with sign_extra():
            from rfc3161_client import VerificationError, VerifierBuilder
        found = _decoded(self.answer)
        try:
            VerifierBuilder(roots=list(self.roots)).build().verify_message(
                found, self.file
            )
        except (VerificationError, ValueError) as error:
            raise InvalidInputError(f"the time stamp does not fit: {error}") from None
        return found.tst_info.gen_time


def stamp_path(certificate: Path) -> Path:
    """Return where the time stamp of a certificate is put."""
    return certificate.with_name(f"{certificate.name}.tsr")


def request_stamp(certificate: Path, url: str) -> tuple[Path, datetime]:
    """Have a certificate stamped; return the file of the stamp, and its time.

    Args:
        certificate: File of the certificate.
        url: Address of a time stamping authority.

    Raises:
        InvalidInputError: If the address or the file is wrong, or a stamp is there.
        FastFedULError: If the authority does not answer with a stamp of this file.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidInputError(f"{url!r:.80} is no address; give http:// or https://")
    place = stamp_path(certificate)
    if place.exists():
        raise InvalidInputError(f"{place} exists already and is not overwritten")
    data = _read(certificate)
    with sign_extra():
        from rfc3161_client import TimestampRequestBuilder
    asked = TimestampRequestBuilder().data(data).build()
    query = urllib.request.Request(
        url,
        asked.as_bytes(),
        {"Content-Type": "application/timestamp-query"},
    )
    try:
        with urllib.request.urlopen(query, timeout=_PATIENCE) as reply:
            answer = reply.read(LARGEST_ANSWER)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise FastFedULError(f"{url:.80} does not answer: {reason}") from None
    found = _decoded(answer)
    if found.status != 0:
        said = "; ".join(found.status_string) or f"status {found.status}"
        raise FastFedULError(f"{url:.80} refuses: {said:.200}")
    imprint = found.tst_info.message_imprint
    if (
        imprint.message != asked.message_imprint.message
        or found.tst_info.nonce != asked.nonce
    ):
        raise FastFedULError(f"{url:.80} stamped something else")
    try:
        create_file(place, answer, 0o644)
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {place}: {error.strerror or error}"
        ) from None
    return place, found.tst_info.gen_time


def _decoded(answer: bytes) -> TimeStampResponse:
    with sign_extra():
        from rfc3161_client import decode_timestamp_response
    try:
        return decode_timestamp_response(answer)
    except ValueError:
        raise InvalidInputError("the answer is no time stamp by RFC 3161") from None


def _read_roots(path: Path) -> tuple[Root, ...]:
    with sign_extra():
        from cryptography.x509 import load_pem_x509_certificates
    try:
        return tuple(load_pem_x509_certificates(_read(path)))
    except ValueError:
        raise InvalidInputError(
            f"{path} holds no certificate in PEM; give the root certificate of the "
            "time stamping authority"
        ) from None


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise InvalidInputError(
            f"cannot read {path}: {error.strerror or error}"
        ) from None
