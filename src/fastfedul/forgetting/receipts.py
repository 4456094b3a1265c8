"""Receipts: a client sees in which rounds the ledger has it, and nobody else's name.

Every round has a Merkle tree over the tags of its participants. A tag is made from the
round and a secret that only the server and the client know, so the neighbours that a
proof shows tell nothing about other clients.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from fastfedul import strict_json
from fastfedul.errors import InvalidInputError
from fastfedul.forgetting.envelopes import Envelope, parse_envelope
from fastfedul.forgetting.json_objects import JsonObject
from fastfedul.forgetting.merkle_tree import (
    Place,
    Proof,
    is_included,
    prove,
    root_of,
)
from fastfedul.forgetting.signing import SigningKey
from fastfedul.forgetting.statements import (
    STATEMENT_TYPE,
    Hex,
    LedgerIdentity,
    Unsigned,
)
from fastfedul.ledger.checks import check_name
from fastfedul.ledger.protocol import now
from fastfedul.ledger.reader import LedgerReader
from fastfedul.records import ClientId

PREDICATE_TYPE = "urn:fastfedul:participation:v1"


class PlaceFacts(JsonObject):
    """A tag with the proof that it is in the tree."""

    tag: Hex
    index: Unsigned
    path: list[Hex]


class RoundFacts(JsonObject):
    """A round: the root over its participants, and the proof for this client."""

    round: Unsigned
    included: bool
    root: Hex
    size: Unsigned
    places: Annotated[list[PlaceFacts], Field(max_length=2)]


class Participation(JsonObject):
    """What a receipt says."""

    ledger: LedgerIdentity
    made: str
    client: str
    secret: Hex
    chain: Hex
    rounds: list[RoundFacts]


class RootDigest(JsonObject):
    """Digest of a subject."""

    sha256: Hex


class RootSubject(JsonObject):
    """The root of a round."""

    name: str
    digest: RootDigest


class ReceiptStatement(JsonObject):
    """An in-toto Statement about the roots of all rounds."""

    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    subject: list[RootSubject]
    predicate_type: Annotated[
        Literal["urn:fastfedul:participation:v1"], Field(alias="predicateType")
    ]
    predicate: Participation


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt in its envelope.

    Attributes:
        envelope: Payload and signatures.
        said: What the receipt says.
    """

    envelope: Envelope
    said: Participation

    @property
    def included(self) -> tuple[int, ...]:
        """Rounds that have the client."""
        return tuple(one.round for one in self.said.rounds if one.included)


def client_secret(ledger: LedgerReader, client: ClientId) -> bytes:
    """Return the secret of a client's receipts, the same in all of them."""
    return hmac.digest(ledger.receipt_secret, client.encode(), "sha256")


def tag_of(secret: bytes, ledger_id: str, round_: int) -> bytes:
    """Return the tag that stands for a client in a round's tree."""
    text = f"fastfedul participation {ledger_id} {round_}"
    return hmac.digest(secret, text.encode(), "sha256")


def make_receipt(
    ledger: LedgerReader, client: ClientId, key: SigningKey | None
) -> Receipt:
    """Return the receipt of a client over every round as the ledger is now.

    Args:
        ledger: The ledger.
        client: Name of the client; the ledger need not know it.
        key: Signs the receipt; None for a receipt without a signature.
    """
    check_name(client)
    with ledger.snapshot():
        own = client_secret(ledger, client)
        made = [_round_facts(ledger, own, index) for index in range(ledger.num_rounds)]
        identity = {"id": ledger.ledger_id, "federation": ledger.settings.federation}
        chain = ledger.chain.hex()
    payload = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": f"round-{one['round']}", "digest": {"sha256": one["root"]}}
            for one in made
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "ledger": identity,
            "made": now(),
            "client": client,
            "secret": own.hex(),
            "chain": chain,
            "rounds": made,
        },
    }
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    envelope = Envelope(text.encode())
    return _read(envelope.signed_by(key) if key else envelope)


def parse_receipt(text: str) -> Receipt:
    """Return the receipt of a text from anybody; nothing is checked yet.

    Raises:
        InvalidInputError: If it is no receipt.
    """
    return _read(parse_envelope(text))


def wrong_rounds(receipt: Receipt) -> tuple[int, ...]:
    """Return the rounds whose proof does not prove what the receipt says."""
    said = receipt.said
    secret = bytes.fromhex(said.secret)
    wrong = []
    for number, one in enumerate(said.rounds):
        places = tuple(
            Place(
                bytes.fromhex(place.tag),
                place.index,
                tuple(bytes.fromhex(sibling) for sibling in place.path),
            )
            for place in one.places
        )
        tag = tag_of(secret, said.ledger.id, one.round)
        found = is_included(tag, Proof(one.size, places), bytes.fromhex(one.root))
        if one.round != number or found is not one.included:
            wrong.append(number)
    return tuple(wrong)


def _round_facts(ledger: LedgerReader, own: bytes, index: int) -> dict[str, Any]:
    tags = sorted(
        tag_of(client_secret(ledger, update.client), ledger.ledger_id, index)
        for update in ledger.updates_in(index)
    )
    tag = tag_of(own, ledger.ledger_id, index)
    proof = prove(tags, tag)
    return {
        "round": index,
        "included": tag in tags,
        "root": root_of(tags).hex(),
        "size": proof.size,
        "places": [
            {
                "tag": place.tag.hex(),
                "index": place.index,
                "path": [sibling.hex() for sibling in place.path],
            }
            for place in proof.places
        ],
    }


def _read(envelope: Envelope) -> Receipt:
    try:
        found = strict_json.parse(envelope.payload.decode())
        statement = ReceiptStatement.model_validate(found)
    except (UnicodeDecodeError, ValidationError):
        raise InvalidInputError(
            f"it is no receipt: its payload is no statement {PREDICATE_TYPE}"
        ) from None
    said = statement.predicate
    roots = [(f"round-{one.round}", one.root) for one in said.rounds]
    if roots != [(one.name, one.digest.sha256) for one in statement.subject]:
        raise InvalidInputError("it is no receipt: its subjects are not its roots")
    return Receipt(envelope, said)
