"""The hash chain over the rounds: their contents in their order, without times.

Two ledgers of the same training have the same chain, on whatever machine and however
often the training was interrupted. Norms and inner products are not part of it: they
follow from the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastfedul.ledger.store.schema import Value, digest_of


def genesis(
    layout: str,
    update_dtype: str,
    step_dtype: str,
    aggregation: str,
    initial: bytes,
    optimizer: str | None = None,
) -> bytes:
    """Return the chain before the first round."""
    rule = (aggregation,) if optimizer is None else (aggregation, optimizer)
    return digest_of("genesis", layout, update_dtype, step_dtype, *rule, initial)


def content_of(
    index: int,
    use: str,
    step: bytes | None,
    local: tuple[Value, ...],
    updates: Sequence[tuple[str, float, float, bytes | None]],
) -> bytes:
    """Return the digest of the contents of a round.

    Args:
        index: Number of the round.
        use: `store` or `aggregate`.
        step: Digest of the step's file; None if steps are not kept.
        local: Learning rate, momentum, batch size and epochs; None each if unknown.
        updates: Name, share, keep probability and digest of the file (None if not
            kept) of each participant, sorted by name.
    """
    flat: list[Value] = [part for update in updates for part in update]
    return digest_of("round", index, use, step, *local, *flat)


def link(previous: bytes, content: bytes) -> bytes:
    """Return the chain after a round."""
    return digest_of("link", previous, content)
