"""Scores tracing on one run: draws of unwanted answers, of mistakes, of right answers.

Every draw asks the same models without clients, so these are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastfedul.data.dataset import to_model_input
from fastfedul.investigate.held_ledger import HeldLedger
from fastfedul.investigate.inputs import evidence_of
from fastfedul.investigate.leave_one_out import LeaveOut
from fastfedul.investigate.odds import Evidence
from fastfedul.investigate.trace import trace_with
from fastfedul.ledger.reader import LedgerReader
from fastfedul.params import Flat
from fastfedul.records import ClientId, Model
from fastfedul.rng import stream
from fastfedul.runs.given import Given, tested_by
from paper.tracing.runs import RARE, Run
from paper.tracing.training import RARE_CLASS, train

ATTACK, MISTAKES, RIGHT = "attack", "mistakes", "right answers"
DRAWS = {1: 10, 10: 5, 100: 1}
"""Draws of each number of inputs."""

RIVALS = ("forgetting each", "no skew", "trajectory", "norm", "cosine")

UNDONE = 0.1
"""Share of backdoor images below which an attack counts as undone."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Remembered(LeaveOut):
    """Models without clients, and what clients added, each computed once."""

    models: dict[frozenset[ClientId], Model] = field(default_factory=dict)
    shares: dict[ClientId, Flat] = field(default_factory=dict)

    def exact(self, clients: Sequence[ClientId]) -> Model:
        """Return the model without these clients."""
        key = frozenset(clients)
        if key not in self.models:
            self.models[key] = LeaveOut.exact(self, clients)
        return self.models[key]

    def added(self, client: ClientId) -> Flat:
        """Return the difference without a client if nobody had reacted to it."""
        if client not in self.shares:
            self.shares[client] = LeaveOut.added(self, client)
        return self.shares[client]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Inputs of a case with the answers that the model gives.

    Attributes:
        given: The inputs.
        places: Place of each among the clean examples; none if it is not one of them.
    """

    given: Given
    places: np.ndarray[Any, Any] | None

    def draw(
        self, number: int, clean: Given, rng: np.random.Generator
    ) -> tuple[Given, Given]:
        """Return some inputs, and the clean examples that are not among them.

        A right answer that is asked about must not stand on both sides.
        """
        chosen = np.sort(rng.permutation(len(self.given.examples))[:number])
        rest = np.ones(len(clean.examples), bool)
        if self.places is not None:
            rest[self.places[chosen]] = False
        assert self.given.labels is not None
        assert clean.labels is not None
        return (
            _some(self.given, chosen, self.given.labels),
            _some(clean, rest, clean.labels),
        )


def measure(run: Run, folder: Path) -> list[Row]:
    """Train a run and return its rows: one for each case and number of inputs."""
    prepared, place = train(run, folder)
    rng = stream(prepared.config.seed, "draws of tracing")
    with LedgerReader(place) as ledger:
        held = HeldLedger(ledger)
        leave = Remembered(held, LeaveOut.of(held).clients)
        clean = tested_by(prepared)
        with leave.calmly():
            backdoor = _backdoor(prepared)
            pools = _pools(run, leave, clean, backdoor)
            rows = []
            for case, pool in pools.items():
                for number, draws in DRAWS.items():
                    if len(pool.given.examples) < number:
                        continue
                    row = _row(leave, case, pool, clean, number, draws, backdoor, rng)
                    rows.append(row)
            works = _share_that_works(leave, backdoor)
            accuracy = _share_that_works(leave, clean)
    attackers = list(prepared.attack.attackers)
    facts = {**run.facts, "seed": prepared.config.seed, "names": attackers}
    if not rows:
        rows = [{"method": "nothing to ask"}]
    facts |= {"attack_works": works, "accuracy": accuracy}
    return [{**facts, **judged(row, frozenset(attackers))} for row in rows]


def _row(
    leave: Remembered,
    case: str,
    pool: Pool,
    clean: Given,
    number: int,
    draws: int,
    backdoor: Given | None,
    rng: np.random.Generator,
) -> Row:
    """Return the answers of every draw of one case."""
    said = []
    alone = {name: leave.exact([name]) for name in leave.clients}
    undone = {name: leave.moved(leave.added(name)) for name in leave.clients}
    for _ in range(draws):
        bad, reference = pool.draw(number, clean, rng)
        found = trace_with(leave, bad, reference)
        evidence, _ = evidence_of(leave.ledger, bad, reference)
        paths = {own.client: own.trajectory for own in found.clients}

        said.append(
            {
                "first": [own.client for own in found.clients[:4]],
                "accused": list(found.culprits),
                "score": found.clients[0].score,
                "left": _share_that_works(leave, backdoor, found.culprits),
                "forgetting each": _largest(_falls(evidence, alone)),
                "no skew": _largest(_falls(evidence, undone)),
                "trajectory": _largest(paths),
                "norm": _largest(_norms(leave)),
                "cosine": _largest(_outliers(leave)),
            }
        )
    return {"method": f"{case}/{number}", "case": case, "inputs": number, "said": said}


def judged(row: Row, attackers: frozenset[ClientId]) -> Row:
    """Return a row with counts of right and wrong accusations in place of names."""
    found = {name: value for name, value in row.items() if name != "said"}
    said = row.get("said", [])
    found |= {
        "draws": len(said),
        "score": [round(one["score"], 3) for one in said],
        "false": sum(bool(set(one["accused"]) - attackers) for one in said),
        "accused": sum(bool(one["accused"]) for one in said),
    }
    if row.get("case") != ATTACK:
        return found
    many = len(attackers)
    found["top1"] = sum(one["first"][0] in attackers for one in said)
    found["topk"] = sum(set(one["first"][:many]) == attackers for one in said)
    found["group"] = sum(set(one["accused"]) == attackers for one in said)
    found["undone"] = sum(bool(one["accused"]) and one["left"] < UNDONE for one in said)
    for rival in RIVALS:
        told = [one[rival] for one in said if one[rival] is not None]
        found[rival] = [sum(name in attackers for name in told), len(told)]
    return found


def _pools(
    run: Run, leave: LeaveOut, clean: Given, backdoor: Given | None
) -> dict[str, Pool]:
    """Return the inputs of each case."""
    found = {}
    if backdoor is not None:
        says = _answers(leave, backdoor)
        assert backdoor.labels is not None
        works = _some(backdoor, says == backdoor.labels, says)
        found[ATTACK] = Pool(works, None)
    says = _answers(leave, clean)
    assert clean.labels is not None
    wrong = says != clean.labels
    found[MISTAKES] = Pool(_some(clean, wrong, says), np.flatnonzero(wrong))
    right = says == clean.labels
    if run.attack == RARE:
        right &= clean.labels == RARE_CLASS
    found[RIGHT] = Pool(_some(clean, right, says), np.flatnonzero(right))
    return found


def _answers(leave: LeaveOut, given: Given) -> np.ndarray[Any, Any]:
    logits = given.trainer.predict(leave.ledger.final, to_model_input(given.examples))
    found: np.ndarray[Any, Any] = logits.argmax(axis=1)
    return found


def _some(
    given: Given, chosen: np.ndarray[Any, Any], says: np.ndarray[Any, Any]
) -> Given:
    """Return chosen examples with other labels for all of the given ones."""
    return Given(
        given.examples[chosen],
        says[chosen].astype(np.int64),
        given.trainer,
        given.source,
    )


def _backdoor(prepared: Any) -> Given | None:
    images, labels = prepared.backdoor.images, prepared.backdoor.labels
    if not len(labels):
        return None
    return Given(images, labels, prepared.trainer, "backdoor images")


def _share_that_works(
    leave: LeaveOut, given: Given | None, without: Sequence[ClientId] = ()
) -> float | None:
    """Return the share of examples that get their label, without some clients."""
    if given is None:
        return None
    inputs = to_model_input(given.examples)
    says = given.trainer.predict(leave.exact(without), inputs).argmax(axis=1)
    return round(float(np.mean(says == given.labels)), 4)


def _falls(
    evidence: Evidence, models: dict[ClientId, Model]
) -> dict[ClientId, float | None]:
    """Return how low the odds of the unwanted answers are by each model, negated."""
    return {n: -float(evidence.odds(own).bad.mean()) for n, own in models.items()}


def _norms(leave: LeaveOut) -> dict[ClientId, float | None]:
    known = leave.ledger.clients()
    return {name: known[name].mean_norm for name in leave.clients}


def _outliers(leave: LeaveOut) -> dict[ClientId, float | None]:
    """Return how far each client's updates point away from the steps, by cosine."""
    steps = {own.index: own.step_norm for own in leave.ledger.rounds()}
    found: dict[ClientId, float | None] = {}
    for name in leave.clients:
        own = [
            -update.step_product / (update.norm * steps[update.round])
            for update in leave.ledger.updates_of(name)
            if update.step_product is not None and update.norm * steps[update.round] > 0
        ]
        found[name] = math.fsum(own) / len(own) if own else None
    return found


def _largest(values: dict[ClientId, float | None]) -> ClientId | None:
    known = {n: v for n, v in values.items() if v is not None and not math.isnan(v)}
    return max(known, key=lambda name: known[name]) if known else None
