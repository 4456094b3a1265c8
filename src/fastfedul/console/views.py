"""What the pages show, read from a ledger; nothing here changes anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfedul.console.heat_map import PAGE_CLIENTS, HeatMap, heat_map
from fastfedul.errors import InvalidInputError, UnknownClientError
from fastfedul.files import read_regular_text
from fastfedul.forgetting.certificates import (
    Certificate,
    certificate_path,
    certificates_folder,
    read_certificate,
)
from fastfedul.forgetting.statements import is_certified
from fastfedul.ledger.failures import FailureEntry, read_failures
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.store.folder import INDEX
from fastfedul.methods.protocol import coverage_of
from fastfedul.records import ClientEntry, ClientId, LogEntry
from fastfedul.report.lineage_chart import Stage, stages_of
from fastfedul.runs import metrics_file
from fastfedul.runs.evaluation_source import run_at
from fastfedul.runs.seeds import seed_runs_with

_POINTS = 200
"""Points of a line; of more rounds, each point is the mean of some."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line chart: points of an SVG of 1000 by 100, upside down as SVG is.

    Attributes:
        points: Value of the attribute `points`.
        last: The last value.
        low: Value at the bottom.
        high: Value at the top.
        first_round: Number of the first round, from 1.
        last_round: Number of the last round.
    """

    points: str
    last: float
    low: float
    high: float
    first_round: int
    last_round: int


def line_of(
    values: Sequence[tuple[int, float]], ends: tuple[float, float] | None = None
) -> Line | None:
    """Return a line through values by round; None without two of them.

    Args:
        values: Number of a round from 0, and its value.
        ends: Values at the bottom and the top; None for the smallest and the largest.
    """
    finite = [(place, value) for place, value in values if math.isfinite(value)]
    if len(finite) < 2:
        return None
    size = math.ceil(len(finite) / _POINTS)
    groups = [finite[i : i + size] for i in range(0, len(finite), size)]
    means = [
        (sum(p for p, _ in own) / len(own), sum(v for _, v in own) / len(own))
        for own in groups
    ]
    low, high = ends or (min(v for _, v in means), max(v for _, v in means))
    first, last = finite[0][0], finite[-1][0]
    span, height = max(last - first, 1), (high - low) or 1.0
    points = " ".join(
        f"{1000 * (place - first) / span:.1f},{100 - 100 * (value - low) / height:.1f}"
        for place, value in means
    )
    return Line(points, finite[-1][1], low, high, first + 1, last + 1)


@dataclass(frozen=True, slots=True)
class ClientPage:
    """A page of clients with their map.

    Attributes:
        clients: The clients of the page.
        found: Clients that the search finds.
        page: Number of the page, from 1.
        pages: Number of pages.
        heat: Who of them took part when.
    """

    clients: tuple[ClientEntry, ...]
    found: int
    page: int
    pages: int
    heat: HeatMap


def matching(
    ledger: LedgerReader, find: str, states: Sequence[str] = ()
) -> list[ClientEntry]:
    """Return the clients whose names have a text, those that pulled most first."""
    wanted = find.casefold()
    entries = [
        entry
        for entry in ledger.clients().values()
        if wanted in entry.client.casefold() and (not states or entry.state in states)
    ]
    return sorted(entries, key=lambda entry: (-_pull(entry), entry.client))


def client_page(ledger: LedgerReader, find: str, page: int) -> ClientPage:
    """Return a page of the clients that a search finds."""
    entries = matching(ledger, find)
    pages = max(1, math.ceil(len(entries) / PAGE_CLIENTS))
    page = min(max(1, page), pages)
    shown = tuple(entries[(page - 1) * PAGE_CLIENTS : page * PAGE_CLIENTS])
    return ClientPage(shown, len(entries), page, pages, heat_map(ledger, shown))


def _pull(entry: ClientEntry) -> float:
    return (entry.mean_share or 0.0) * (entry.mean_norm or 0.0) * entry.num_updates


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """One client.

    Attributes:
        entry: The ledger's facts.
        coverage: Kept part of the client's share in the model; None once erased.
        first: First round with the client, from 1; None without a round.
        last: Last round with the client, from 1.
        heat: When it took part.
        norms: Lengths of its updates.
        key: Fingerprint of its node's key, where a server noted one.
        failures: Rounds that left it out or capped it, the newest first.
        certificates: Files of certificates that name it.
    """

    entry: ClientEntry
    coverage: float | None
    first: int | None
    last: int | None
    heat: HeatMap
    norms: Line | None
    key: str | None
    failures: tuple[FailureEntry, ...]
    certificates: tuple[str, ...]


def client_facts(ledger: LedgerReader, name: ClientId) -> ClientFacts:
    """Return everything about one client.

    Raises:
        UnknownClientError: If the ledger never saw it.
    """
    entry = ledger.client(name)
    if entry is None:
        raise UnknownClientError(f"no client is called {name!r:.80} in this ledger")
    updates = ledger.updates_of(name)
    failures = [one for one in read_failures(ledger.path) if one.client == name]
    return ClientFacts(
        entry,
        coverage_of(updates) if updates else None,
        updates[0].round + 1 if updates else None,
        updates[-1].round + 1 if updates else None,
        heat_map(ledger, [entry]),
        line_of([(update.round, update.norm) for update in updates]),
        _key_of(ledger.path, name),
        tuple(reversed(failures[-20:])),
        tuple(
            own.file.name
            for own in certificates_of(ledger)
            if name in own.entry.event.clients
        ),
    )


def _key_of(ledger: Path, name: ClientId) -> str | None:
    """Return the fingerprint that a Flower server noted for a client."""
    own = ledger.absolute()
    file = own.with_name(f"{own.name}.nodes.json")
    try:
        found = json.loads(read_regular_text(file))["clients"].get(name)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return found if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class CertificateFile:
    """A certificate that the log calls for.

    Attributes:
        entry: The entry of the log.
        file: Its file.
        certificate: The certificate; None if it is missing or cannot be read.
    """

    entry: LogEntry
    file: Path
    certificate: Certificate | None


def certificates_of(ledger: LedgerReader) -> tuple[CertificateFile, ...]:
    """Return the certificates that the log calls for, the newest first."""
    folder = certificates_folder(ledger.path)
    found = []
    for entry in filter(is_certified, ledger.log()):
        path = certificate_path(folder, entry)
        try:
            own = read_certificate(path)
        except InvalidInputError:
            own = None
        found.append(CertificateFile(entry, path, own))
    return tuple(reversed(found))


def find_certificate(ledger: LedgerReader, name: str) -> CertificateFile:
    """Return a certificate by the name of its file.

    Raises:
        InvalidInputError: If the log calls for none of this name, or it is not there.
    """
    for own in certificates_of(ledger):
        if own.file.name == name and own.certificate is not None:
            return own
    raise InvalidInputError(f"there is no certificate {name!r:.80}")


def lineage_of(ledger: LedgerReader) -> tuple[Stage, ...]:
    """Return the stages of the model, the newest first."""
    return tuple(reversed(stages_of(ledger.lineage())))


@dataclass(frozen=True, slots=True)
class Holding:
    """Something that still has a client that was forgotten.

    Attributes:
        what: What it is.
        has: What it has of the client.
        level: `gone`, `name` or `data`.
    """

    what: str
    has: str
    level: str


@dataclass(frozen=True, slots=True)
class Storage:
    """Where the bytes are.

    Attributes:
        kinds: Bytes by kind.
        clients: The clients with the most bytes.
        more: Number of the other clients.
        erased: Clients out of the ledger.
        total: Bytes of arrays and index.
    """

    kinds: Mapping[str, int]
    clients: tuple[tuple[ClientEntry, int], ...]
    more: int
    erased: tuple[ClientEntry, ...]
    total: int


def storage_of(ledger: LedgerReader, most: int = 50) -> Storage:
    """Return where the bytes of a ledger are; rows of the index tell."""
    settings = ledger.settings
    update = encoded_bytes(settings.update_dtype, settings.layout.size)
    entries = ledger.clients().values()
    own = {
        entry.client: update * entry.num_kept
        if settings.history == "rounds"
        else encoded_bytes("float32", settings.layout.size) * bool(entry.num_summed)
        for entry in entries
    }
    arrays = ledger.num_array_bytes()
    index = (ledger.path / INDEX).stat().st_size
    clients = min(sum(own.values()), arrays)
    held = sorted(
        (entry for entry in entries if own[entry.client]),
        key=lambda entry: (-own[entry.client], entry.client),
    )
    return Storage(
        {
            "updates of clients": clients,
            "steps, models and sums over clients": arrays - clients,
            "index": index,
        },
        tuple((entry, own[entry.client]) for entry in held[:most]),
        max(0, len(held) - most),
        tuple(entry for entry in entries if entry.state != "active"),
        arrays + index,
    )


def holdings_of(ledger: LedgerReader, path: Path, name: ClientId) -> list[Holding]:
    """Return what still has a client that was forgotten, and what does not."""
    updates = ledger.updates_of(name)
    found = [
        Holding("ledger", f"{len(updates)} updates", "data")
        if updates
        else Holding("ledger", "no update; name and log of the forgetting", "name")
    ]
    named = sum(name in own.entry.event.clients for own in certificates_of(ledger))
    if named:
        found.append(Holding("certificates", f"its name, in {named}", "name"))
    if _key_of(ledger.path, name) is not None:
        text = "its name and the fingerprint of its key"
        found.append(Holding(f"{ledger.path.name}.nodes.json", text, "name"))
    failed = sum(one.client == name for one in read_failures(ledger.path))
    if failed:
        file = f"{ledger.path.name}.failures.jsonl"
        found.append(Holding(file, f"its name, in {failed} lines", "name"))
    run = run_at(path)
    if run is not None:
        for place in seed_runs_with(run, [name]):
            text = "its updates: forget it there, too"
            found.append(Holding(f"run {place.name}", text, "data"))
    text = "whatever it had when it was made: look yourself"
    found.append(Holding("backups, snapshots, copies", text, "data"))
    return found


def accuracy_of(path: Path) -> tuple[Line | None, Line | None]:
    """Return the lines of accuracy and attack success, as far as they were measured."""
    points = list(metrics_file.read(metrics_file.metrics_of(path)).values())
    main = [(p.round, p.main) for p in points if p.main is not None]
    attack = [(p.round, p.backdoor) for p in points if p.backdoor is not None]
    return line_of(main, (0.0, 1.0)), line_of(attack, (0.0, 1.0))


def usable_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a kept comparison that can be shown."""
    rows = []
    for row in found["rows"]:
        try:
            rows.append(
                {
                    "method": str(row["method"]),
                    "seed": row["seed"],
                    "seconds": _number(row["seconds"]),
                    "distance": _number(row["distance"]),
                    **{
                        name: None
                        if row[name] is None
                        else (
                            float(row[name]),
                            *map(float, row[f"{name}_interval"]),
                            *map(int, row[f"{name}_count"]),
                        )
                        for name in ("main", "backdoor")
                    },
                }
            )
        except (LookupError, TypeError, ValueError):
            continue
    return rows


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
