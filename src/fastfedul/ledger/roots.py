"""A Merkle root for each round: a commitment to its participants without their names.

The server makes a client's tag in a round from a secret that only the server and the
client know. The tags of a round, sorted, are the leaves of the round's tree.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from fastfedul.ledger.merkle_tree import root_of
from fastfedul.ledger.store.schema import LedgerRow, digest_of
from fastfedul.records import ClientId


def tag_of(secret: bytes, ledger_id: str, index: int) -> bytes:
    """Return the tag that stands for a client in a round's tree."""
    text = f"fastfedul participation {ledger_id} {index}"
    return hmac.digest(secret, text.encode(), "sha256")


class Roots:
    """Tags and roots of one ledger; the secret of a client is computed once."""

    def __init__(self, row: LedgerRow) -> None:
        self._ledger_id = row.ledger_id
        self._key = row.receipt_secret
        self._secrets: dict[ClientId, bytes] = {}

    def secret_of(self, client: ClientId) -> bytes:
        """Return the secret of a client's receipts, the same in all of them."""
        found = self._secrets.get(client)
        if found is None:
            found = hmac.digest(self._key, client.encode(), "sha256")
            self._secrets[client] = found
        return found

    def tags(self, index: int, clients: Iterable[ClientId]) -> list[bytes]:
        """Return the sorted tags of a round's participants."""
        own = (tag_of(self.secret_of(name), self._ledger_id, index) for name in clients)
        return sorted(own)

    def root(self, index: int, clients: Iterable[ClientId]) -> bytes:
        """Return the root over a round's participants."""
        return root_of(self.tags(index, clients))


def first_root_link(ledger_id: str) -> bytes:
    """Return the chain of roots before the first round."""
    return digest_of("roots", ledger_id)


def root_link(previous: bytes, chain: bytes, root: bytes) -> bytes:
    """Return the chain of roots after a round.

    It covers the round's link of the ledger's chain and the round's root. The ledger's
    own chain has no roots, so that two ledgers of one training have the same chain.
    """
    return digest_of("root", previous, chain, root)
