"""A Merkle tree over sorted tags, as in RFC 9162, with proofs for and against a tag."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A tag of the tree with the proof that it is there.

    Attributes:
        tag: The tag.
        index: Its place among the sorted tags, from 0.
        path: Hashes of the siblings, from the leaf to the root.
    """

    tag: bytes
    index: int
    path: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof that a tag is in the tree or not.

    Attributes:
        size: Number of tags in the tree.
        places: The tag itself if it is there. Otherwise its neighbours: the next
            smaller and the next larger tag, as far as there are any.
    """

    size: int
    places: tuple[Place, ...]


def root_of(tags: Sequence[bytes]) -> bytes:
    """Return the root over sorted tags, which also stands for their number."""
    return _sealed(len(tags), _hash(tags) if tags else b"")


def prove(tags: Sequence[bytes], tag: bytes) -> Proof:
    """Return the proof that a tag is among sorted tags, or that it is not."""
    at = bisect_left(tags, tag)
    if at < len(tags) and tags[at] == tag:
        indices = [at]
    else:
        indices = [i for i in (at - 1, at) if 0 <= i < len(tags)]
    places = tuple(Place(tags[i], i, _path(tags, i)) for i in indices)
    return Proof(len(tags), places)


def is_included(tag: bytes, proof: Proof, root: bytes) -> bool | None:
    """Return whether a tag is in the tree of a root; None if the proof proves nothing.

    A tag that is not there has neighbours that stand beside each other, one below it
    and one above it, or stands before the first or after the last tag.
    """
    if any(_root_from(place, proof.size) != root for place in proof.places):
        return None
    if len(proof.places) == 1 and proof.places[0].tag == tag:
        return True
    below = [place.index for place in proof.places if place.tag < tag]
    above = [place.index for place in proof.places if place.tag > tag]
    if len(below) + len(above) != len(proof.places):
        return None
    if not proof.places:
        return False if proof.size == 0 and root == root_of([]) else None
    left = below[0] if below else -1
    right = above[0] if above else proof.size
    alone = len(below) <= 1 and len(above) <= 1
    return False if alone and right == left + 1 else None


def _hash(tags: Sequence[bytes]) -> bytes:
    if len(tags) == 1:
        return hashlib.sha256(b"\0" + tags[0]).digest()
    split = _split(len(tags))
    return _node(_hash(tags[:split]), _hash(tags[split:]))


def _path(tags: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    if len(tags) == 1:
        return ()
    split = _split(len(tags))
    if index < split:
        return (*_path(tags[:split], index), _hash(tags[split:]))
    return (*_path(tags[split:], index - split), _hash(tags[:split]))


def _root_from(place: Place, size: int) -> bytes | None:
    """Return the root that a place and its path lead to; None if they do not fit."""
    if not 0 <= place.index < size:
        return None
    # From the root down: whether the tag is in the left or the right half.
    turns = []
    first, length = 0, size
    while length > 1:
        split = _split(length)
        right = place.index - first >= split
        turns.append(right)
        first, length = (first + split, length - split) if right else (first, split)
    if len(turns) != len(place.path):
        return None
    found = hashlib.sha256(b"\0" + place.tag).digest()
    for right, sibling in zip(reversed(turns), place.path, strict=True):
        found = _node(sibling, found) if right else _node(found, sibling)
    return _sealed(size, found)


def _split(size: int) -> int:
    """Return the largest power of two below a size."""
    return 1 << (size - 1).bit_length() - 1


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _sealed(size: int, top: bytes) -> bytes:
    return hashlib.sha256(b"\2" + size.to_bytes(8, "big") + top).digest()
