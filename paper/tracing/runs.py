"""The list of runs, drawn once with a fixed seed before any of them was scored.

Of every choice each level comes equally often within a data set, up to one; which
levels meet is left to the draw. Other experiments, development and earlier searches
have other seeds: the thresholds of a verdict were chosen on seeds 100 to 199.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fastfedul.rng import stream
from fastfedul.runs.config import RunConfig
from paper.drawn_runs import SEEDS_EACH, DrawnRun
from paper.settings import setting_of

DIGITS, MNIST, CIFAR10 = "digits", "mnist", "cifar10"
COUNTS = {DIGITS: 96, MNIST: 12, CIFAR10: 6}
FIRST_SEED = 31_000
HONEST, RARE = "none", "rare class"

PLAIN, BOUNDED, SCALED, SOMETIMES, SPREAD = (
    "plain",
    "norm-bounded",
    "scaled down",
    "every third round",
    "spread over four",
)
BEHAVIOURS = (PLAIN, PLAIN, PLAIN, PLAIN, BOUNDED, SCALED, SOMETIMES, SPREAD)
"""Half of the attackers do not know that they are traced; the others do."""

_DRAW = 20_261_118
_ATTACKS = ("pixel", "edge-case", "label-flip", "pixel", "edge-case", HONEST, RARE)
_CROWDS = ((10, 1), (10, 4), (20, 1), (20, 4), (50, 1), (50, 4))
_SPLITS = ("iid", "dirichlet:0.2")
_KEEPS = ("all", "optimal:5", "sums")
_TRAIN_SIZES = {MNIST: 8_000, CIFAR10: 8_000}
_BOOST = {10: 1.0, 20: 3.0, 50: 6.0}
"""Factor of a single attacker's updates, so that its attack works among so many."""

_EPOCHS = {10: 2, 20: 3, 50: 5}
"""Epochs of a round on digits: among more clients each has fewer examples.

With two epochs, 50 clients learned nothing on development runs.
"""

_FLIP_BOOST = 3.0
"""Further factor of label flips, which did not work on development runs without it."""

_Level = TypeVar("_Level")


@dataclass(frozen=True, slots=True)
class Run(DrawnRun):
    """One run of the list.

    Attributes:
        number: Its place in the list, from 0.
        data: Data set.
        attack: Attack; `none`, or `rare class` for an honest client that alone has one
            class.
        clients: Number of clients.
        attackers: Number of attackers, the first clients; 0 without an attack.
        split: How the data are split among the clients.
        keep: Updates that the ledger keeps.
        behaviour: How attackers hide.
        seed: The first of its `SEEDS_EACH` seeds.
    """

    number: int
    data: str
    attack: str
    clients: int
    attackers: int
    split: str
    keep: str
    behaviour: str
    seed: int


def all_runs() -> tuple[Run, ...]:
    """Return the list, in the order of the draw."""
    found: list[Run] = []
    for data, count in COUNTS.items():
        rng = stream(_DRAW, f"tracing {data}")
        columns = zip(
            _balanced(_ATTACKS, count, rng),
            _balanced(_CROWDS, count, rng),
            _balanced(_SPLITS, count, rng),
            _balanced(_KEEPS, count, rng),
            _balanced(BEHAVIOURS, count, rng),
            strict=True,
        )
        for attack, (clients, attackers), split, keep, behaviour in columns:
            honest = attack in (HONEST, RARE)
            if behaviour == SPREAD:
                attackers = 4
            found.append(
                Run(
                    number=len(found),
                    data=data,
                    attack=attack,
                    clients=clients,
                    attackers=0 if honest else attackers,
                    split="iid" if attack == RARE else split,
                    keep=keep,
                    behaviour=PLAIN if honest else behaviour,
                    seed=FIRST_SEED + SEEDS_EACH * len(found),
                )
            )
    return tuple(found)


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Return runs in the order of the work: data sets; numbers of clients in turn."""
    seen: Counter[tuple[str, int]] = Counter()
    places: dict[int, tuple[int, int, int]] = {}
    for run in sorted(runs, key=lambda run: run.number):
        own = (run.data, run.clients)
        places[run.number] = (list(COUNTS).index(run.data), seen[own], run.clients)
        seen[own] += 1
    return sorted(runs, key=lambda run: places[run.number])


def config_of(run: Run, seed: int) -> RunConfig:
    """Return the options of a run; a rare class is dealt out later."""
    options: dict[str, Any]
    if run.data == DIGITS:
        options = {"rounds": 20, "epochs": _EPOCHS[run.clients]}
    else:
        options = dict(setting_of("standard", run.data).run)
        options |= {"train_size": _TRAIN_SIZES[run.data], "rounds": 20}
        options.pop("server_images", None)
    options["clients"] = run.clients
    if run.attackers:
        options |= {"attack": run.attack, "attackers": str(run.attackers)}
        options["attack_scale"] = attack_scale(run)
        if run.attack == "pixel":
            options["poison_ratio"] = 0.5
    return RunConfig.from_options(
        data=run.data, partition=run.split, seed=seed, workers=1, **options
    )


def attack_scale(run: Run) -> float:
    """Return the factor of the attackers' updates."""
    scale = _BOOST[run.clients] if run.attackers == 1 else _BOOST[run.clients] / 2
    scale = max(1.0, scale)
    if run.attack == "label-flip":
        scale *= _FLIP_BOOST
    return scale / 2 if run.behaviour == SCALED else scale


def _balanced(
    levels: Sequence[_Level], count: int, rng: np.random.Generator
) -> list[_Level]:
    """Return levels in random order, each equally often up to one."""
    dealt = [levels[place % len(levels)] for place in range(count)]
    return [dealt[place] for place in rng.permutation(count)]
