"""Trains a run of the board, with attackers who hide, into a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastfedul.data.dataset import ClientData
from fastfedul.errors import NothingToPoisonError
from fastfedul.federation.local import LocalResult
from fastfedul.federation.rounds import run_rounds
from fastfedul.federation.trainer import LocalTraining
from fastfedul.federation.workers.pool import InProcess
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.keeping import Keep
from fastfedul.params import norm, scale
from fastfedul.records import ClientId, Model
from fastfedul.runs.preparation import Prepared, prepare
from paper.tracing.runs import BOUNDED, HONEST, RARE, SOMETIMES, Run, config_of

EVERY = 3
RARE_OWNER: ClientId = "client-0"
RARE_CLASS = 3


@dataclass(slots=True)
class Hiding:
    """Clients of which the attackers hide as the run says.

    Attributes:
        run: The run.
        poisoned: The clients with their poison.
        clean: The same clients without it.
        attackers: Names of the attackers.
    """

    run: Run
    poisoned: InProcess
    clean: InProcess
    attackers: frozenset[ClientId]

    def train(
        self,
        model: Model,
        index: int,
        names: Sequence[ClientId],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        """Return the results of clients that train from a model, in their order."""
        honest = self.run.behaviour == SOMETIMES and index % EVERY
        workers = self.clean if honest else self.poisoned
        found = list(workers.train(model, index, names, local))
        if self.run.behaviour != BOUNDED:
            return found
        usual = np.median(
            [
                norm(own.delta.flat)
                for name, own in zip(names, found, strict=True)
                if name not in self.attackers
            ]
        )
        return [
            replace(own, delta=scale(own.delta, _factor(own, float(usual))))
            if name in self.attackers
            else own
            for name, own in zip(names, found, strict=True)
        ]


def _factor(own: LocalResult, usual: float) -> float:
    length = norm(own.delta.flat)
    return min(1.0, usual / length) if length > 0 else 1.0


def train(run: Run, folder: Path) -> tuple[Prepared, Path]:
    """Train a run with the first of its seeds that lets every attacker attack.

    Returns:
        The data of the run, and its ledger.
    """
    for seed in run.seeds:
        try:
            prepared = prepare(config_of(run, seed))
            break
        except NothingToPoisonError:
            continue
    else:
        raise NothingToPoisonError(f"no seed of {run.key} lets everybody attack")
    if run.attack == RARE:
        prepared = replace(prepared, clients=_with_rare_class(prepared.clients))
    config = prepared.config
    poisoned = _workers(prepared)
    clean = poisoned
    if run.behaviour == SOMETIMES:
        honest = replace(run, attack=HONEST, attackers=0)
        clean = _workers(prepare(config_of(honest, config.seed)))
    clients = Hiding(run, poisoned, clean, frozenset(prepared.attack.attackers))
    keep = Keep.parse(run.keep, seed=config.seed)
    model = poisoned.initial(config.seed)
    # A bounded attacker sends no more than the bound, so no factor comes on top.
    scales = {} if run.behaviour == BOUNDED else prepared.scales
    with DiskLedger.create(folder / "ledger", model, history=keep.history) as ledger:
        rounds = run_rounds(
            clients.train,
            prepared.sizes,
            config.round_schedule,
            model=model,
            start=0,
            stop=config.rounds,
            scales=scales,
            select=keep,
            local=config.local.training.sgd,
            record=lambda _, round_: ledger.append(round_),
        )
        for _ in rounds:
            pass
    return prepared, folder / "ledger"


def _workers(prepared: Prepared) -> InProcess:
    return InProcess(prepared.trainer, prepared.clients, seed=prepared.config.seed)


def _with_rare_class(clients: Sequence[ClientData]) -> tuple[ClientData, ...]:
    """Return the clients after one of them got every example of one class."""
    images = [own.images[own.labels == RARE_CLASS] for own in clients]
    labels = [own.labels[own.labels == RARE_CLASS] for own in clients]
    found = []
    for own in clients:
        rest = own.labels != RARE_CLASS
        kept, names = own.images[rest], own.labels[rest]
        if own.client == RARE_OWNER:
            kept = np.concatenate([kept, *images])
            names = np.concatenate([names, *labels])
        found.append(ClientData(own.client, kept, names))
    return tuple(found)
