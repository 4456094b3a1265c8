"""Names of clients that a reader may take for another client's name.

The check is small: names that are the same but for case, width, invisible characters
or compatibility forms, and names that mix alphabets whose letters look alike. It has
no table of letters, so `сосо` in Cyrillic alone is not taken for `coco` in Latin.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable

from fastfedul.records import ClientId

_ALPHABETS = frozenset({"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "COPTIC", "CHEROKEE"})
"""Alphabets that share letter forms; Unicode's names of letters begin with these."""


def skeleton(name: ClientId) -> str:
    """Return a name without case, width and invisible characters.

    >>> skeleton("Ｃlient\u200b-３") == skeleton("client-3")
    True
    """
    folded = unicodedata.normalize("NFKC", name).casefold()
    seen = (c for c in folded if unicodedata.category(c) not in ("Cf", "Cc"))
    return unicodedata.normalize("NFKC", "".join(seen)).strip()


def alphabets_of(name: ClientId) -> tuple[str, ...]:
    """Return the alphabets that a name mixes and that look alike, sorted."""
    first = {unicodedata.name(c, "").partition(" ")[0] for c in name if c.isalpha()}
    return tuple(sorted(first & _ALPHABETS))


def lookalike_warnings(
    names: Iterable[ClientId], known: Collection[ClientId]
) -> tuple[str, ...]:
    """Return a sentence for each name that a reader may take for another client's.

    Args:
        names: Names in question.
        known: Names of all clients.
    """
    by_skeleton: dict[str, list[ClientId]] = {}
    for other in known:
        by_skeleton.setdefault(skeleton(other), []).append(other)
    found = []
    for name in names:
        for other in by_skeleton.get(skeleton(name), ()):
            if other != name:
                found.append(
                    f"client {name!a:.80} looks like client {other!a:.80}, "
                    "and they are two clients; make sure that you name the right one"
                )
        mixed = alphabets_of(name)
        if len(mixed) > 1:
            found.append(
                f"client {name!a:.80} mixes the alphabets "
                f"{' and '.join(a.title() for a in mixed)}, whose letters look alike"
            )
    return tuple(found)
