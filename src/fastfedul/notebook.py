"""How objects show themselves in a notebook: as small tables of facts."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastfedul.errors import FastFedULError


class _Ledger(Protocol):
    """The parts of a ledger that a notebook shows."""

    @property
    def settings(self) -> Any: ...

    @property
    def num_rounds(self) -> int: ...

    @property
    def chain(self) -> bytes: ...

    def clients(self) -> Mapping[str, Any]: ...


def facts_to_html(caption: str, facts: Mapping[str, object]) -> str:
    """Return a table of names and values, every text escaped.

    >>> facts_to_html("Ledger", {"clients": "<b>"})
    '<table><caption>Ledger</caption><tr><th>clients</th><td>&lt;b&gt;</td></tr></table>'
    """
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table><caption>{html.escape(caption)}</caption>{rows}</table>"


def rows_to_html(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
) -> str:
    """Return a table with headings, and sentences below it, every text escaped.

    >>> rows_to_html("Worth", ["client"], [["<b>"]], ["few"])[:64]
    '<table><caption>Worth</caption><thead><tr><th>client</th></tr></'
    """
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    below = "".join(f"<p>{html.escape(text)}</p>" for text in notes)
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
    )


def ledger_to_text(ledger: _Ledger) -> str:
    """Return the text of a ledger object, also of a closed one: place and size."""
    path = getattr(ledger, "path", None)
    start = type(ledger).__name__ + ("" if path is None else f" {path}")
    try:
        count = f"{ledger.num_rounds} rounds, {len(ledger.clients())} clients"
    except FastFedULError as error:
        count = str(error)
    return f"<{start}: {count}>"


def ledger_to_html(ledger: _Ledger) -> str:
    """Return the table that a notebook shows for a ledger, also for a closed one.

    The table has the rounds, the clients by state, the kept updates and the chain
    digest, by which two people see that they look at the same ledger. No array is
    read, so a ledger of any size shows itself at once.
    """
    path = getattr(ledger, "path", None)
    caption = "Ledger in memory" if path is None else f"Ledger {path}"
    try:
        facts = _facts(ledger)
    except FastFedULError as error:
        # A notebook shows a traceback for an object that cannot show itself.
        facts = {"state": error}
    return facts_to_html(caption, facts)


def _facts(ledger: _Ledger) -> dict[str, object]:
    settings = ledger.settings
    states = Counter(entry.state for entry in ledger.clients().values())
    people = [f"{count} {state}" for state, count in sorted(states.items())]
    sums_only = settings.history == "sums"
    what = "a sum for each client" if sums_only else "updates of rounds"
    facts: dict[str, object] = {
        "rounds": ledger.num_rounds,
        "clients": ", ".join(people) or "none yet",
        "parameters": f"{settings.layout.size:,}",
        "aggregation": settings.aggregation,
        "keeps": f"{what}, as {settings.update_dtype}",
    }
    num_bytes = getattr(ledger, "num_array_bytes", None)
    if callable(num_bytes):
        of = "" if settings.budget is None else f" of {settings.budget:,}"
        facts["size"] = f"{num_bytes():,}{of} bytes"
    return {**facts, "chain": ledger.chain.hex()}
