"""The search for culprits: remove the first suspect, look again, and know when to stop.

Attackers who hold the same backdoor cover for each other: without one of them, the
answer stays. So the search removes the first suspect and looks again. It accuses a
group only if the unwanted answers lose far more than clean answers of the same class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.investigate.leave_one_out import LeaveOut
from fastfedul.investigate.odds import Evidence, Odds, p_values
from fastfedul.records import ClientId
from fastfedul.rng import stream

SHORT_LIST = 5
"""First suspects whose models are computed exactly, as `fastfedul forget` does."""

LARGEST_GROUP = 6
"""Clients that the search removes at most."""

LEAST_EXCESS = 2.5
ONE_INPUT = 2.5
"""Nats of excess that accuse one client: the first, and more for few inputs.

With one input they sum to 5. On 17 development runs (digits, seeds 100 and above) no
honest client that came first reached 5, with 226 mistakes and 5,894 right answers. The
second part shrinks with the root of the number of inputs.
"""

PER_CLIENT = 0.6
"""Part of that excess which each further client of a group must add."""

SAME_KIND = 0.1
"""Part of the group's excess that a further client must add to belong to the group."""

SIGNIFICANT = 0.05
"""Chance by permutation above which nobody is accused."""

_HOPELESS = 0.2
"""Part of the wanted excess below which the search gives up on a group."""

Tell = Callable[[str, int, int], None]
"""Called with the name of a stage, the work done, and the work in all."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One client removed on top of the clients before.

    Attributes:
        client: The removed client.
        drop: How far the odds have fallen from the current model's.
        excess: Mean excess of the unwanted answers over clean ones.
        p_value: Chance of such an excess by permutation; None without clean inputs.
    """

    client: ClientId
    drop: Odds
    excess: float
    p_value: float | None


def wanted_excess(num_inputs: int, num_clients: int = 1) -> float:
    """Return the excess that accuses a group of so many clients.

    >>> wanted_excess(1), round(wanted_excess(100, 2), 2)
    (5.0, 4.4)
    """
    one = LEAST_EXCESS + ONE_INPUT / math.sqrt(num_inputs)
    return one * (1 + PER_CLIENT * (num_clients - 1))


def first_look(
    leave: LeaveOut, evidence: Evidence, gone: Sequence[ClientId], tell: Tell
) -> tuple[dict[ClientId, Odds], tuple[ClientId, ...]]:
    """Return how far the odds fall without each client, and who was computed exactly.

    All clients are ranked on shared bases; the first of them are computed again, each
    on its own.

    Args:
        leave: Models without clients.
        evidence: The unwanted answers.
        gone: Clients that every model lacks.
        tell: Told how far it is.
    """
    now = evidence.odds(leave.ledger.final)
    total = len(leave.clients) - len(gone)
    few = total <= SHORT_LIST
    drops: dict[ClientId, Odds] = {}
    for name, model in leave.each(gone, exact=few):
        drops[name] = now.fell_to(evidence.odds(model))
        tell(f"without {len(gone) + 1} clients", len(drops), total)
    if few or not leave.shares_basis:
        return drops, tuple(drops)
    exact = ranked(drops)[:SHORT_LIST]
    for name in exact:
        model = leave.exact((*gone, name))
        drops[name] = now.fell_to(evidence.odds(model))
    return drops, exact


def ranked(drops: dict[ClientId, Odds]) -> tuple[ClientId, ...]:
    """Return clients from the most to the least suspected."""
    return tuple(sorted(drops, key=lambda name: (-drops[name].bad.mean(), name)))


def search(
    leave: LeaveOut, evidence: Evidence, first: dict[ClientId, Odds], tell: Tell
) -> tuple[Step, ...]:
    """Return the clients that the search removed, in order.

    Args:
        leave: Models without clients.
        evidence: The unwanted answers.
        first: How far the odds fall without each client.
        tell: Told how far it is.
    """
    # Without clean inputs, a model that falls apart looks like one that forgets.
    most = min(LARGEST_GROUP, (len(leave.clients) - 1) // 2)
    most = max(1, most) if evidence.compares else 1
    steps: list[Step] = []
    drops = first
    while True:
        steps.append(_step(leave, evidence, drops))
        found = len(culprits(steps, evidence))
        wanted = wanted_excess(len(evidence.answers), len(steps))
        if len(steps) >= most or 0 < found < len(steps):
            return tuple(steps)
        if not found and steps[-1].excess < _HOPELESS * wanted:
            return tuple(steps)
        gone = [step.client for step in steps]
        drops, _ = first_look(leave, evidence, gone, tell)


def culprits(steps: Sequence[Step], evidence: Evidence) -> tuple[ClientId, ...]:
    """Return the accused of a search; nobody if nobody stands out.

    The shortest beginning of the search that has the wanted excess is accused, and then
    everybody whose removal adds as much as a single culprit must.
    """
    num_inputs = len(evidence.answers)
    one = wanted_excess(num_inputs)
    accused = 0
    for count, step in enumerate(steps, 1):
        if not accused:
            unlikely = step.p_value is None or step.p_value <= SIGNIFICANT
            enough = step.excess >= wanted_excess(num_inputs, count)
            # A client that made it no worse has no part in it.
            added = step.excess - (steps[count - 2].excess if count > 1 else 0.0)
            if enough and unlikely and added >= SAME_KIND * step.excess:
                accused = count
            continue
        before = steps[count - 2].excess
        if step.excess - before < max(one, SAME_KIND * before):
            break
        accused = count
    return tuple(step.client for step in steps[:accused])


def _step(leave: LeaveOut, evidence: Evidence, drops: dict[ClientId, Odds]) -> Step:
    name = ranked(drops)[0]
    rng = stream(int.from_bytes(leave.ledger.chain), "permutations of a group")
    chance = p_values(evidence, {name: drops[name]}, rng)[name]
    excess = float(np.mean(evidence.excess(drops[name])))
    return Step(name, drops[name], excess, chance)
