"""DSSE envelopes: a payload and signatures of it, as JSON."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from fastfedul import strict_json
from fastfedul.errors import InvalidInputError
from fastfedul.forgetting.json_objects import JsonObject
from fastfedul.forgetting.signing import PublicKey, SigningKey, sign_extra

PAYLOAD_TYPE = "application/vnd.in-toto+json"
"""Type of the payload: an in-toto Statement."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature of an envelope.

    Attributes:
        keyid: Fingerprint of the public key; a hint, which the signature does not
            cover.
        value: The signature.
    """

    keyid: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload with its signatures; none if it is not signed.

    Attributes:
        payload: The bytes that are signed together with the payload type.
        signatures: Signatures by different keys.
    """

    payload: bytes
    signatures: tuple[Signature, ...] = ()

    def signed_bytes(self) -> bytes:
        """Return the signed bytes: DSSE's pre-authentication encoding."""
        with sign_extra():
            from securesystemslib import dsse
        return dsse.Envelope(self.payload, PAYLOAD_TYPE, {}).pae()

    def signed_by(self, key: SigningKey) -> Envelope:
        """Return the envelope with one more signature."""
        value = key.sign(self.signed_bytes())
        added = Signature(key.public.fingerprint, value)
        return replace(self, signatures=(*self.signatures, added))

    def signature_of(self, key: PublicKey) -> Signature | None:
        """Return the signature that claims to be by a key; it is not checked yet."""
        claimed = [one for one in self.signatures if one.keyid == key.fingerprint]
        return claimed[0] if claimed else None

    def to_text(self) -> str:
        """Return the envelope as the text of a file."""
        found = {
            "payload": base64.b64encode(self.payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [
                {"keyid": one.keyid, "sig": base64.b64encode(one.value).decode()}
                for one in self.signatures
            ],
        }
        return json.dumps(found, indent=2) + "\n"


class _SignatureMembers(JsonObject):
    keyid: str
    sig: str


class _EnvelopeMembers(JsonObject):
    payload: str
    payloadType: str  # noqa: N815
    signatures: list[_SignatureMembers]


def parse_envelope(text: str) -> Envelope:
    """Return the envelope of a text from anybody; no signature is checked yet.

    Raises:
        InvalidInputError: If it is no envelope of an in-toto Statement.
    """
    found = strict_json.parse(text)
    try:
        members = _EnvelopeMembers.model_validate(found)
    except ValidationError:
        raise InvalidInputError(
            "it is no DSSE envelope with payload, payloadType and signatures"
        ) from None
    if members.payloadType != PAYLOAD_TYPE:
        raise InvalidInputError(
            f"its payload type is {members.payloadType!r:.60}, not {PAYLOAD_TYPE}"
        )
    signatures = tuple(
        Signature(one.keyid, _decode(one.sig)) for one in members.signatures
    )
    if len({one.keyid for one in signatures}) != len(signatures):
        raise InvalidInputError("one key signed it twice")
    return Envelope(_decode(members.payload), signatures)


def _decode(text: str) -> bytes:
    """Return the bytes of base64, in either alphabet, that has its one form."""
    plain = text.translate(_STANDARD) if "+" not in text and "/" not in text else text
    try:
        data = base64.b64decode(plain, validate=True)
    except (binascii.Error, ValueError):
        data = None
    if data is None or base64.b64encode(data).decode() != plain:
        raise InvalidInputError("it holds text that is not base64")
    return data


_STANDARD: dict[int, Any] = str.maketrans("-_", "+/")
