"""Altered certificates: bytes, JSON values, signatures, key ids and payload types."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastfedul.forgetting.envelopes import Envelope
from fastfedul.forgetting.signing import SigningKey

Place = tuple[Any, ...]
"""Names and numbers that lead to a value inside a JSON value."""


def places_of(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield every place of a JSON value that holds no other value."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from places_of(inner, (*place, name))
    else:
        yield place


def value_at(value: Any, place: Place) -> Any:
    """Return the value at a place of a JSON value."""
    for name in place:
        value = value[name]
    return value


def change(value: Any, place: Place, new: Any) -> Any:
    """Return a copy of a JSON value with another value in one place."""
    value = copy.deepcopy(value)
    value_at(value, place[:-1])[place[-1]] = new
    return value


def _without_padding(text: str) -> str:
    """Return base64 that decodes to the same bytes in a lax reader."""
    return text.rstrip("=") if text.endswith("=") else text + "="


def _other_last_bits(text: str) -> str:
    """Return base64 whose last character has bits that no byte takes up."""
    body, padding = text.rstrip("="), text[len(text.rstrip("=")) :]
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return body[:-1] + letters[letters.index(body[-1]) ^ 1] + padding


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "one member more": lambda e: e.update(more=1),
    "no payload": lambda e: e.pop("payload"),
    "no type": lambda e: e.pop("payloadType"),
    "another type": lambda e: e.update(payloadType="application/json"),
    "an empty payload": lambda e: e.update(payload=""),
    "no signatures": lambda e: e.update(signatures=[]),
    "signatures of another kind": lambda e: e.update(signatures={}),
    "one signature twice": lambda e: e["signatures"].append(dict(e["signatures"][0])),
    "no keyid": lambda e: e["signatures"][0].pop("keyid"),
    "an empty keyid": lambda e: e["signatures"][0].update(keyid=""),
    "a keyid in capitals": lambda e: e["signatures"][0].update(
        keyid=e["signatures"][0]["keyid"].upper()
    ),
    "a signature with more": lambda e: e["signatures"][0].update(cert="x"),
    "a signature of zeros": lambda e: e["signatures"][0].update(sig="A" * 86 + "=="),
    "an empty signature": lambda e: e["signatures"][0].update(sig=""),
    "loose base64": lambda e: e["signatures"][0].update(
        sig=_without_padding(e["signatures"][0]["sig"])
    ),
    "other last bits": lambda e: e["signatures"][0].update(
        sig=_other_last_bits(e["signatures"][0]["sig"])
    ),
}
"""Changes of an envelope that no check may pass, by name."""

TYPES = (
    "",
    "application/json",
    "application/vnd.in-toto",
    "application/vnd.in-toto+JSON",
    "application/vnd.in-toto+json ",
    "application/vnd.in-toto+json; charset=utf-8",
    "application/vnd.in-toto+json\x00",
    "application/vnd.in\u2010toto+json",
    "https://in-toto.io/Statement/v1",
)
"""Payload types that are not the certificate's."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**53 + 1, 10**400, 0.5, -0.0, 1e308,
    "", "x", "0" * 64, "\u202e", "\x00", "../../key", "2001-01-01T00:00:00+00:00",
    [], {}, [[]], {"": ""},
)  # fmt: skip
"""Values that take the place of others."""


@dataclass(frozen=True, slots=True)
class Altered:
    """An altered certificate.

    Attributes:
        kind: Kind of the alteration.
        text: The alteration, for a line about a violation.
        data: Bytes of the file.
        by_signer: Whether the holder of the trusted key made it. Its signature is
            right then, and the ledger alone contradicts.
    """

    kind: str
    text: str
    data: bytes
    by_signer: bool = False


@dataclass(frozen=True, slots=True)
class Originals:
    """Certificates of one signer to alter.

    Attributes:
        files: Bytes of at least two certificates of one ledger.
        signer: The key that signed them.
        stranger: Another key.
    """

    files: tuple[bytes, ...]
    signer: SigningKey
    stranger: SigningKey


def meaning(data: bytes) -> object:
    """Return the payload, its type and the signatures; None if it is no envelope.

    White space, the order of members and the alphabet of base64 carry no meaning.
    """
    try:
        found = json.loads(data, object_pairs_hook=_single)
        signatures = [(s["keyid"], _lax(s["sig"])) for s in found["signatures"]]
        rest = (set(found), [set(one) for one in found["signatures"]])
        return _lax(found["payload"]), found["payloadType"], signatures, rest
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _single(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object; readers differ about a member that is twice."""
    if len(dict(members)) != len(members):
        raise ValueError("a member is twice")
    return dict(members)


def _lax(text: str) -> bytes:
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)


def _envelope_bytes(envelope: Any) -> bytes:
    return json.dumps(envelope, indent=2).encode() + b"\n"


def _other_value(old: Any, rng: np.random.Generator) -> Any:
    """Return a value near another one, or any value."""
    near: list[Any] = []
    if isinstance(old, str) and old:
        at = int(rng.integers(len(old)))
        letter = chr(ord(old[at]) ^ 1)
        near = [old + "x", old[:-1], old[:at] + letter + old[at + 1 :], old.upper()]
    elif isinstance(old, bool):
        near = [not old]
    elif isinstance(old, int | float):
        near = [old + 1, -old, old * 10, str(old), float(old) + 0.5]
    choices = near if near and rng.random() < 0.5 else VALUES
    return choices[rng.integers(len(choices))]


def _altered_statement(payload: bytes, rng: np.random.Generator) -> tuple[str, bytes]:
    """Return a place of a statement and the statement with another value there."""
    statement = json.loads(payload)
    places = list(places_of(statement))
    place = places[rng.integers(len(places))]
    if rng.random() < 0.2:
        changed = copy.deepcopy(statement)
        inner = value_at(changed, place[:-1])
        inner.pop(place[-1])
        text = f"{place} removed"
    else:
        new = _other_value(value_at(statement, place), rng)
        changed = change(statement, place, new)
        text = f"{place} = {new!r:.40}"
    made = json.dumps(changed, ensure_ascii=False, separators=(",", ":"))
    return text, made.encode()


def _bytes(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return a certificate with changed, lost, doubled or swapped bytes."""
    at, stop = sorted(int(n) for n in rng.integers(len(data), size=2))
    size = int(rng.integers(1, 65))
    ways = {
        f"byte {at}": data[:at] + rng.bytes(1) + data[at + 1 :],
        f"bit of byte {at}": data[:at]
        + bytes([data[at] ^ 1 << int(rng.integers(8))])
        + data[at + 1 :],
        f"{size} bytes lost at {at}": data[:at] + data[at + size :],
        f"{size} bytes more at {at}": data[:at] + rng.bytes(size) + data[at:],
        f"{size} bytes twice at {at}": data[: at + size] + data[at:],
        f"cut off at {at}": data[:at],
        f"{at} and {stop} swapped": data[:at]
        + data[stop : stop + 8]
        + data[at + 8 : stop]
        + data[at : at + 8]
        + data[stop + 8 :],
    }
    names = list(ways)
    name = names[rng.integers(len(names))]
    return Altered("bytes", name, ways[name])


def _statement(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return a certificate with another value in its statement; the signature stays."""
    envelope = json.loads(data)
    text, payload = _altered_statement(base64.b64decode(envelope["payload"]), rng)
    envelope["payload"] = base64.b64encode(payload).decode()
    return Altered("statement", text, _envelope_bytes(envelope))


def _members(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return a certificate with another value in its envelope, or a known change."""
    envelope = json.loads(data)
    if rng.random() < 0.5:
        name = list(CHANGES)[rng.integers(len(CHANGES))]
        CHANGES[name](envelope)
        return Altered("envelope", name, _envelope_bytes(envelope))
    places = [*places_of(envelope), ("signatures",), ("signatures", 0)]
    place = places[rng.integers(len(places))]
    new = _other_value(value_at(envelope, place), rng)
    changed = change(envelope, place, new)
    return Altered("envelope", f"{place} = {new!r:.40}", _envelope_bytes(changed))


def _signature(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return a certificate with another signature under the trusted key's id."""
    envelope = json.loads(data)
    [signature] = envelope["signatures"]
    value = bytearray(base64.b64decode(signature["sig"]))
    payload = Envelope(base64.b64decode(envelope["payload"]))
    way = int(rng.integers(4))
    if way == 0:
        at = int(rng.integers(len(value)))
        value[at] ^= 1 << int(rng.integers(8))
        text = f"bit of byte {at}"
    elif way == 1:
        value, text = bytearray(rng.bytes(len(value))), "random"
    elif way == 2:
        value, text = bytearray(rng.bytes(int(rng.integers(130)))), "of another length"
    else:
        value = bytearray(own.stranger.sign(payload.signed_bytes()))
        text = "by a stranger"
    signature["sig"] = base64.b64encode(bytes(value)).decode()
    return Altered("signature", text, _envelope_bytes(envelope))


def _key_id(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return a certificate whose signature names another key."""
    envelope = json.loads(data)
    [signature] = envelope["signatures"]
    old = signature["keyid"]
    ids = (own.stranger.public.fingerprint, old[:-1], f" {old}", f"{old}\x00", "*")
    new = ids[rng.integers(len(ids))]
    if rng.random() < 0.5:
        new = str(_other_value(old, rng))
    signature["keyid"] = new
    return Altered("key_id", f"{new!r:.80}", _envelope_bytes(envelope))


def _type(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return a certificate with another payload type; sometimes its signature fits."""
    envelope = json.loads(data)
    new = TYPES[rng.integers(len(TYPES))]
    envelope["payloadType"] = new
    if rng.random() < 0.5:
        payload = base64.b64decode(envelope["payload"])
        kind = new.encode()
        signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
        sig = base64.b64encode(own.signer.sign(signed)).decode()
        envelope["signatures"][0]["sig"] = sig
    return Altered("payload_type", f"{new!r}", _envelope_bytes(envelope))


def _mixed(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return the payload of one certificate with the signature of another one."""
    others = [json.loads(file) for file in own.files if file != data]
    other = others[rng.integers(len(others))]
    envelope = {**json.loads(data), "signatures": other["signatures"]}
    return Altered("mixed", "signature of another one", _envelope_bytes(envelope))


def _doubled(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return a certificate with one member twice: readers may differ about it."""
    envelope = json.loads(data)
    _, forged = _altered_statement(base64.b64decode(envelope["payload"]), rng)
    text = json.dumps(envelope)
    payload = json.dumps(base64.b64encode(forged).decode())
    member = f'"payload": {payload}, '
    if rng.random() < 0.5:
        made = "{" + member + text[1:]
    else:
        made = text[:-1] + ", " + member[:-2] + "}"
    return Altered("member_twice", "payload", made.encode())


def _forged(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return an altered statement that a stranger signed, under either key id."""
    envelope = json.loads(data)
    text, payload = _altered_statement(base64.b64decode(envelope["payload"]), rng)
    signed = json.loads(Envelope(payload).signed_by(own.stranger).to_text())
    if rng.random() < 0.5:
        signed["signatures"][0]["keyid"] = own.signer.public.fingerprint
    return Altered("stranger", text, _envelope_bytes(signed))


def _by_signer(own: Originals, data: bytes, rng: np.random.Generator) -> Altered:
    """Return an altered statement that the signer itself signed."""
    payload = base64.b64decode(json.loads(data)["payload"])
    text, changed = _altered_statement(payload, rng)
    made = Envelope(changed).signed_by(own.signer).to_text()
    return Altered("signer", text, made.encode(), by_signer=True)


ALTERATIONS: tuple[
    Callable[[Originals, bytes, np.random.Generator], Altered], ...
] = (
    _bytes, _statement, _members, _signature, _key_id, _type, _mixed, _doubled,
    _forged, _by_signer,
)  # fmt: skip
"""Kinds of alterations."""


def alter(own: Originals, number: int, rng: np.random.Generator) -> Altered:
    """Return an altered certificate that means something else.

    Args:
        own: The certificates.
        number: Number of the alteration; the kinds take turns.
        rng: Source of the draws.
    """
    make = ALTERATIONS[number % len(ALTERATIONS)]
    while True:
        data = own.files[rng.integers(len(own.files))]
        made = make(own, data, rng)
        if made.data != data and meaning(made.data) != meaning(data):
            return made
