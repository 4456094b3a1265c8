"""What an audit found, and what an auditor may conclude from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from fastfedul.evaluate.comparison import BEFORE, RETRAINED
from fastfedul.evaluate.lira import (
    ENOUGH_SHADOWS,
    LEAST_SHADOWS,
    RATES,
    Attacked,
    Measured,
)
from fastfedul.forgetting.audits import AUDIT_KIND, content_digest
from fastfedul.investigate.audit.whole import Whole
from fastfedul.records import ClientId
from fastfedul.strict_json import finite_values

MAY_NOT_CONCLUDE = (
    "That the model has forgotten the client: another attack may find what this one "
    "does not.",
    "Anything about another client, or about a federation with other data: the shadow "
    "federations are this run, with half of this client's examples.",
    "That nothing of the client is left in the ledger, in copies of the model or "
    "elsewhere.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to forget, or one of the two that stand beside every way.

    Attributes:
        name: Name of the method; `retrained`; `before` for the model as trained.
        settings: Settings of the method, as JSON values.
        refused: Why the method cannot be used here; None if it can.
        whole: What the model of the whole federation does.
        gaps: Distances of its measures from the retrained model's.
        differences: The same in words: `none` below the noise floor, else `some`.
        attack: The attack on single examples; None with too few shadows.
        klom: Quantiles of KLOM by group of examples, those of `retrained` being the
            floor; None with too few shadows.
    """

    name: str
    settings: Mapping[str, Any]
    refused: str | None = None
    whole: Whole | None = None
    gaps: Mapping[str, float | None] | None = None
    differences: Mapping[str, str | None] | None = None
    attack: Attacked | None = None
    klom: Mapping[str, Mapping[str, float]] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Audit:
    """What an audit found.

    Attributes:
        kind: Names the format of the JSON.
        client: The client.
        ledger: Id of the run's ledger.
        chain: End of the ledger's hash chain.
        gone_before: Clients that had gone before.
        rounds: Rounds of the run.
        shadows: Shadow federations that were done.
        shadows_wanted: Shadow federations that were asked for.
        examples: Number of examples by group.
        by_backdoor: Whether relearning is judged by the backdoor; else by the loss.
        rows: `before`, `retrained`, then a row for each method.
        noise: Largest distance of two of four retrainings that differ in the order of
            batches, by measure.
        may_conclude: Conclusions that the numbers allow.
        may_not_conclude: Conclusions that they do not allow.
        notes: Sentences that a reader should know.
    """

    client: ClientId
    ledger: str
    chain: str
    gone_before: tuple[ClientId, ...]
    rounds: int
    shadows: int
    shadows_wanted: int
    examples: Mapping[str, int]
    by_backdoor: bool
    rows: tuple[Row, ...]
    noise: Mapping[str, float | None]
    may_conclude: tuple[str, ...]
    may_not_conclude: tuple[str, ...]
    notes: tuple[str, ...]
    kind: str = AUDIT_KIND

    @property
    def complete(self) -> bool:
        """Whether every shadow federation that was asked for is done."""
        return self.shadows >= self.shadows_wanted

    def to_json(self) -> dict[str, Any]:
        """Return the audit as JSON values; `forget --audit` takes such a file."""
        found = TypeAdapter(Audit).dump_python(self, mode="json")
        values: dict[str, Any] = finite_values(found)
        values = {"kind": values.pop("kind"), **values}
        return {**values, "digest": content_digest(values)}

    def __repr__(self) -> str:
        title = f"Audit of {self.client!r:.80}: {self.shadows} shadow federations"
        return "\n".join([title, *self.may_conclude, *self.notes])


def difference(gap: float | None, floor: float | None) -> str | None:
    """Return a distance in words; None if there is none to judge.

    >>> difference(-0.004, 0.006), difference(0.01, 0.006)
    ('none', 'some')
    """
    if gap is None or floor is None:
        return None
    return "none" if abs(gap) <= floor else "some"


def conclusions(
    rows: tuple[Row, ...], shadows: int, *, by_backdoor: bool
) -> tuple[list[str], list[str]]:
    """Return what an auditor may conclude from the rows, and what not.

    Args:
        rows: The rows.
        shadows: Shadow federations that were done.
        by_backdoor: Whether relearning is judged by the backdoor; else by the loss.
    """
    may: list[str] = []
    may_not = list(MAY_NOT_CONCLUDE)
    retrained = next(row for row in rows if row.name == RETRAINED)
    methods = [row for row in rows if row.name not in (BEFORE, RETRAINED)]
    if shadows < LEAST_SHADOWS:
        may_not.append(
            f"Anything about single examples: {shadows} shadow federations are done, "
            f"and the attack needs {LEAST_SHADOWS}."
        )
    elif shadows < ENOUGH_SHADOWS:
        may_not.append(
            f"How sure the numbers about single examples are: {shadows} shadow "
            f"federations are done, and intervals need {ENOUGH_SHADOWS}."
        )
    elif retrained.attack is not None:
        for rate, told in retrained.attack.found.items():
            if told is None:
                may_not.append(
                    f"Anything at {rate} false positives: the attack has "
                    f"{retrained.attack.num_members} scores of non-members, too few "
                    f"for one in {RATES[rate]}."
                )
        may += [_of_attack(row, rows[0]) for row in methods if row.attack is not None]
    may += [
        _of_whole(row, retrained, by_backdoor)
        for row in methods
        if row.whole is not None
    ]
    return may, may_not


def _of_attack(row: Row, before: Row) -> str:
    attack = row.attack
    assert attack is not None
    remembered = before.attack
    said = f"After {row.name} the attack tells examples apart {_area(attack.auc)}"
    found = attack.found["1 %"]
    if found is not None:
        said += f", and finds {_share(found)} of them at 1 % false positives"
    if remembered is not None and not _differs(remembered):
        return (
            f"{said}. But it finds nothing in the model as trained either, so it "
            "cannot tell whether anything was forgotten."
        )
    if not _differs(attack):
        return f"{said}. The attack does not tell the model from a retrained one."
    more = found.more if found is not None and found.differs else attack.auc.more
    verdict = "more" if more > 0 else "less"
    return f"{said}. It finds {verdict} of the client than after retraining."


def _differs(attack: Attacked) -> bool:
    """Return whether any number differs from the retrained models'."""
    return attack.auc.differs or any(
        own is not None and own.differs for own in attack.found.values()
    )


def _area(own: Measured) -> str:
    low, high = own.more_interval
    return (
        f"with an area of {own.value:.3f} ({own.more:+.3f} against retraining, "
        f"{low:+.3f} to {high:+.3f})"
    )


def _share(own: Measured) -> str:
    low, high = (100 * end for end in own.more_interval)
    return f"{own.value:.1%} ({100 * own.more:+.1f} points, {low:+.1f} to {high:+.1f})"


def _of_whole(row: Row, retrained: Row, by_backdoor: bool) -> str:
    assert row.whole is not None
    assert retrained.whole is not None
    told = row.differences or {}
    some = [MEASURES[name] for name, verdict in told.items() if verdict == "some"]
    none = [MEASURES[name] for name, verdict in told.items() if verdict == "none"]
    parts = []
    if some:
        parts.append(f"differs from the retrained model in {_listed(some)}")
    if none:
        parts.append(f"does not differ beyond noise in {_listed(none)}")
    what = "attack success" if by_backdoor else "loss on its examples"
    own, other = (
        "not within the check" if n is None else f"after {n} round{'s' * (n != 1)}"
        for n in (row.whole.relearn.reached, retrained.whole.relearn.reached)
    )
    return (
        f"The model of {row.name} {' and '.join(parts)}. With the client back, the "
        f"{what} is where it had been {own}; in the retrained model {other}."
    )


MEASURES = {
    "main": "accuracy",
    "backdoor": "attack success",
    "auc": "area by loss",
    "kl": "KL",
}
"""Words for the measures of a whole federation, the same in every table and text."""


def _listed(words: list[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
