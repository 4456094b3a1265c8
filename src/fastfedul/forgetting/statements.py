"""The statement that a certificate signs: an in-toto Statement about two models.

A statement is made from one entry of the ledger's log and nothing else. So a crash can
delay a certificate but not lose it, and a check makes the statement again and compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import (
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
)

from fastfedul import strict_json
from fastfedul.errors import InvalidInputError
from fastfedul.forgetting.json_objects import JsonObject
from fastfedul.forgetting.privacy import PRIVACY_DOES_NOT_MEAN, PRIVACY_MEANS
from fastfedul.ledger.changes.log import TAKES_OUT
from fastfedul.records import LogEntry

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:fastfedul:forgetting:v1"
"""Kind and version of the predicate; the texts below belong to it."""

BEFORE, AFTER = "model-before", "model-after"
"""Names of the two subjects."""

BOUND_MEANS = (
    "If every client's update were a Lipschitz function of the model with this "
    "constant, the model would be within this distance of one retrained without the "
    "clients."
)
BOUND_DOES_NOT_MEAN = (
    "The constant is an estimate from below. The bound is loose, says nothing about "
    "what the model still reveals, and is no guarantee of forgetting."
)
MAY_CONCLUDE = (
    "If a key that you trust signed: its holder states that the ledger with this id "
    "recorded this change of its model at this time, by this method with these "
    "settings.",
    "The digests fix one model before, one model after and one ledger: another model "
    "or another ledger does not match them.",
    "The coverage says which part of the clients' share in the model the method could "
    "work with.",
    "From then on the ledger refuses updates under these clients' names.",
)
MAY_CONCLUDE_ERASED = (
    "The ledger was rewritten without these clients, and their updates were "
    "removed from its files.",
)
MAY_NOT_CONCLUDE = (
    "Anything from this file alone, if no key that you trust signed it.",
    "That the model has forgotten the clients: the method is an estimate. Measure the "
    "model.",
    "That nothing of the clients is left in backups, in file systems or devices, in "
    "copies of earlier models, or at other parties.",
    "That the ledger was true when it was recorded, or that it is the only one.",
    "That a client does not take part again under another name.",
)
MAY_NOT_CONCLUDE_KEPT = (
    "That the clients' updates are gone from the ledger: this forgetting left them "
    "there. A later entry of the log may have erased them, with its own certificate.",
)

Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Unsigned = Annotated[int, Field(ge=0)]


class Digests(JsonObject):
    """Digests of a model file."""

    blake3: Hex
    sha256: Hex


class Subject(JsonObject):
    """A model that the statement is about."""

    name: Literal["model-before", "model-after"]
    digest: Digests


class LedgerIdentity(JsonObject):
    """The ledger that forgot: its random id, and its federation if that has a name."""

    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    federation: str | None


class RequestFacts(JsonObject):
    """A request that the forgetting answered."""

    request: int
    asked: str
    reason: str | None


class MethodFacts(JsonObject):
    """The method with all its settings."""

    name: str
    settings: dict[str, JsonValue] | None


class RoundCounts(JsonObject):
    """Rounds of the ledger then, and rounds with one of the clients."""

    recorded: Unsigned
    taken_part: Unsigned | None


class Coverage(JsonObject):
    """Part of the clients' share in the model whose updates were kept, 0 to 1."""

    all: float | None
    by_client: list[float] | None


class Movement(JsonObject):
    """How far the model moved; the standard error is for a sample of the updates."""

    moved_by: float | None
    standard_error: float | None


class Chain(JsonObject):
    """Ends of the ledger's hash chain before and after."""

    before: Hex
    after: Hex


class LogPlace(JsonObject):
    """Number and digest of the entry of the log; the digest covers all before it."""

    entry: Annotated[int, Field(ge=1)]
    digest: Hex


class Bound(JsonObject):
    """Bound of Theorem 1, with its meaning."""

    distance: float | None
    lipschitz: float | None
    source: str | None
    means: str
    does_not_mean: str


class Privacy(JsonObject):
    """Central differential privacy of the rounds, with its meaning."""

    noisy_rounds: Unsigned
    noise_multiplier_before: float | None
    noise_multiplier_after: float | None
    means: str
    does_not_mean: str


class Predicate(JsonObject):
    """The ledger's statement about the forgetting."""

    ledger: LedgerIdentity
    clients: Annotated[list[str], Field(min_length=1)]
    requests: list[RequestFacts]
    applied: str
    action: Literal["forget", "erase", "forget and erase"]
    history: Literal["erased", "kept"]
    sums_given_up: Unsigned | None
    method: MethodFacts | None
    rounds: RoundCounts
    coverage: Coverage
    model: Movement
    chain: Chain
    log: LogPlace
    bound: Bound | None
    privacy: Privacy | None
    audit: Digests | None
    software: dict[str, str | None]
    may_conclude: list[str]
    may_not_conclude: list[str]


class Statement(JsonObject):
    """An in-toto Statement: the subjects and the predicate."""

    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    subject: Annotated[list[Subject], Field(min_length=2, max_length=2)]
    predicate_type: Annotated[
        Literal["urn:fastfedul:forgetting:v1"], Field(alias="predicateType")
    ]
    predicate: Predicate

    @property
    def before(self) -> Digests:
        """Digests of the model before."""
        return self.subject[0].digest

    @property
    def after(self) -> Digests:
        """Digests of the model after."""
        return self.subject[1].digest

    def to_json(self) -> dict[str, Any]:
        """Return the statement as JSON values."""
        return self.model_dump(mode="json", by_alias=True)

    def payload(self) -> bytes:
        """Return the bytes that are signed."""
        text = json.dumps(
            self.to_json(), ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
        return text.encode()


def is_certified(entry: LogEntry) -> bool:
    """Return whether an entry of the log took clients out of model or ledger.

    The log also has what was dropped for a budget and that the ledger was compacted.
    """
    return entry.event.kind in TAKES_OUT


def make_statement(entry: LogEntry) -> Statement:
    """Return the statement about an entry of the log.

    Raises:
        InvalidInputError: If nobody was forgotten or erased.
    """
    if not is_certified(entry):
        raise InvalidInputError(
            f"entry {entry.number} of the log is {entry.event.kind!r}: nobody was "
            "forgotten, so there is nothing to certify"
        )
    event, details = entry.event, cast(Mapping[str, Any], entry.event.details)
    erased = "erase" in event.kind
    may, may_not = conclusions(erased=erased)
    method = None
    if "method" in details:
        method = {"name": details["method"], "settings": details.get("settings")}
    software = details.get("software")
    predicate = {
        "ledger": {
            "id": details["ledger_id"],
            "federation": details["federation"],
        },
        "clients": list(event.clients),
        "requests": requests_of(entry),
        "applied": event.time,
        "action": event.kind,
        "history": "erased" if erased else "kept",
        "sums_given_up": details.get("sums_given_up"),
        "method": method,
        "rounds": {
            "recorded": details["recorded_rounds"],
            "taken_part": details.get("rounds"),
        },
        "coverage": {
            "all": details.get("coverage"),
            "by_client": details.get("coverages"),
        },
        "model": {
            "moved_by": details.get("delta_norm"),
            "standard_error": details.get("standard_error"),
        },
        "chain": {"before": details["chain_before"], "after": details["chain_after"]},
        "log": {"entry": entry.number, "digest": entry.digest},
        "bound": _bound(details) if "bound" in details else None,
        "privacy": _privacy(details.get("privacy")),
        "audit": details.get("audit"),
        "software": software if isinstance(software, dict) else {"fastfedul": software},
        "may_conclude": list(may),
        "may_not_conclude": list(may_not),
    }
    subject = [
        {
            "name": f"model-{when}",
            "digest": {
                "blake3": details[f"model_{when}"],
                "sha256": details[f"sha256_{when}"],
            },
        }
        for when in ("before", "after")
    ]
    return _validated(
        {
            "_type": STATEMENT_TYPE,
            "subject": subject,
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate,
        }
    )


def parse_statement(payload: bytes) -> Statement:
    """Return the statement of a payload from anybody.

    Raises:
        InvalidInputError: If it is no statement about a forgetting.
    """
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise InvalidInputError("its payload is not text") from None
    found = strict_json.parse(text)
    if not isinstance(found, dict) or found.get("_type") != STATEMENT_TYPE:
        raise InvalidInputError("its payload is no in-toto Statement v1")
    if found.get("predicateType") != PREDICATE_TYPE:
        raise InvalidInputError(
            f"its predicate is {found.get('predicateType')!r:.60}; this version reads "
            f"{PREDICATE_TYPE}"
        )
    return _validated(found)


def conclusions(*, erased: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the conclusions that a certificate allows, and forbidden conclusions."""
    if erased:
        return (*MAY_CONCLUDE, *MAY_CONCLUDE_ERASED), MAY_NOT_CONCLUDE
    return MAY_CONCLUDE, (*MAY_NOT_CONCLUDE, *MAY_NOT_CONCLUDE_KEPT)


def requests_of(entry: LogEntry) -> list[dict[str, Any]]:
    """Return the requests that an entry of the log answered."""
    return list(cast(Any, entry.event.details.get("requests", ())))


def _validated(found: Mapping[str, Any]) -> Statement:
    try:
        statement = Statement.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError(f"{place:.120}: {first['msg']:.120}") from None
    if [subject.name for subject in statement.subject] != [BEFORE, AFTER]:
        raise InvalidInputError(f"its subjects are not {BEFORE} and {AFTER}")
    return statement


def _privacy(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if facts is None:
        return None
    return {
        **facts,
        "means": PRIVACY_MEANS,
        "does_not_mean": PRIVACY_DOES_NOT_MEAN,
    }


def _bound(details: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "distance": details.get("bound"),
        "lipschitz": details.get("lipschitz"),
        "source": details.get("bound_source"),
        "means": BOUND_MEANS,
        "does_not_mean": BOUND_DOES_NOT_MEAN,
    }
