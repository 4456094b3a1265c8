"""How objects show themselves in a notebook: as small tables of facts."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping
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
