"""Receipts: a client sees in which rounds the ledger has it, and nobody else's name.

Every round has a Merkle tree over the tags of its participants. A tag is made from the
round and a secret that only the server and the client know, so the neighbours that a
proof shows tell nothing about other clients.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from fastfedul import strict_json
from fastfedul.errors import InvalidInputError, LedgerDamagedError
from fastfedul.forgetting.envelopes import Envelope, parse_envelope
from fastfedul.forgetting.folder import require_newest
from fastfedul.forgetting.json_objects import JsonObject
from fastfedul.forgetting.signing import SigningKey
from fastfedul.forgetting.statements import (
    STATEMENT_TYPE,
    Hex,
    LedgerIdentity,
    Unsigned,
)
from fastfedul.ledger.checks import check_name
from fastfedul.ledger.merkle_tree import Place, Proof, is_included, prove, root_of
from fastfedul.ledger.protocol import now
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.roots import Roots, tag_of
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
    """The statement of a receipt."""

    ledger: LedgerIdentity
    made: str
    client: str
    secret: Hex
    chain: Hex
    root_chain: Hex
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


def make_receipt(
    ledger: LedgerReader, client: ClientId, key: SigningKey | None
) -> Receipt:
    """Return the receipt of a client over every round as the ledger is now.

    Args:
        ledger: The ledger.
        client: Name of the client; the ledger need not know it.
        key: Signs the receipt; None for a receipt without a signature.

    Raises:
        LedgerDamagedError: If a round's root is not the root over its participants, or
            the ledger is an older copy.
    """
    check_name(client)
    require_newest(ledger)
    roots = ledger.roots
    with ledger.snapshot():
        made = [
            _round_facts(ledger, roots, client, index)
            for index in range(ledger.num_rounds)
        ]
        identity = {"id": ledger.ledger_id, "federation": ledger.settings.federation}
        chain, root_chain = ledger.chain.hex(), ledger.root_chain.hex()
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
            "secret": roots.secret_of(client).hex(),
            "chain": chain,
            "root_chain": root_chain,
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
    """Return the rounds whose proof does not prove the receipt's statement."""
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


def erased_since(receipt: Receipt, ledger: LedgerReader) -> str | None:
    """Return when the ledger first erased a client after a receipt was made, if so."""
    return next(
        (
            event.time
            for event in ledger.events()
            if "erase" in event.kind and event.time >= receipt.said.made
        ),
        None,
    )


def other_rounds(receipt: Receipt, ledger: LedgerReader) -> tuple[int, ...]:
    """Return the rounds for which the ledger has another root than the receipt.

    An erasure gives the rounds of the erased client new roots.

    Raises:
        InvalidInputError: If the receipt is of another ledger, or of more rounds than
            the ledger has.
    """
    said = receipt.said
    with ledger.snapshot():
        if said.ledger.id != ledger.ledger_id:
            raise InvalidInputError(
                f"the receipt is of ledger {said.ledger.id}, and {ledger.path} has the "
                f"id {ledger.ledger_id}"
            )
        if len(said.rounds) > ledger.num_rounds:
            raise InvalidInputError(
                f"the receipt has {len(said.rounds)} rounds, and {ledger.path} has "
                f"{ledger.num_rounds}: it is an older copy, so restore the newest"
            )
        return tuple(
            one.round
            for one in said.rounds
            if bytes.fromhex(one.root) != ledger.root_of(one.round)
        )


def _round_facts(
    ledger: LedgerReader, roots: Roots, client: ClientId, index: int
) -> dict[str, Any]:
    tags = roots.tags(index, [update.client for update in ledger.updates_in(index)])
    root = root_of(tags)
    if root != ledger.root_of(index):
        raise LedgerDamagedError(
            f"round {index}: the root over its participants is another; run "
            "`fastfedul ledger verify`, and restore the ledger from a backup"
        )
    tag = tag_of(roots.secret_of(client), ledger.ledger_id, index)
    proof = prove(tags, tag)
    return {
        "round": index,
        "included": tag in tags,
        "root": root.hex(),
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
