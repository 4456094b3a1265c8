"""Clients as a method asks them for help; every call is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastfedul.data.dataset import ClientData
from fastfedul.errors import InvalidInputError, name_some
from fastfedul.federation.local import LocalResult
from fastfedul.federation.rounds import Schedule
from fastfedul.federation.trainer import Inputs, LocalTraining, Trainer
from fastfedul.federation.workers.pool import Workers
from fastfedul.records import ClientId, Model, Round


@dataclass(slots=True)
class Clients:
    """The clients of a federation, with one count of the calls to them.

    Attributes:
        workers: Processes in which the clients train.
        data: Examples of every client, in the order of the draw.
        calls: Number of computations that a method asked of a client.
    """

    workers: Workers
    data: Mapping[ClientId, ClientData]
    calls: int = field(default=0, init=False)

    @property
    def sizes(self) -> dict[ClientId, int]:
        """Number of examples of every client."""
        return {name: data.num_examples for name, data in self.data.items()}

    def train(
        self,
        model: Model,
        index: int,
        names: Sequence[ClientId],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        """Return the results of clients that train from a model, in their order.

        Args:
            model: Model to start from.
            index: Number of the round; it decides the order of the examples.
            names: Names of the clients.
            local: Settings of the training; None for the federation's own.
        """
        self.calls += len(names)
        return self.workers.train(model, index, names, local)

    def at(self, name: ClientId) -> ClientData:
        """Return a client's examples, for a computation at this client: one call.

        Results of the computation may leave the client, the examples may not.
        """
        if name not in self.data:
            raise InvalidInputError(
                f"no client is called {name!r:.80} in this federation; clients are "
                f"{name_some(self.data)}"
            )
        self.calls += 1
        return self.data[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Federation:
    """The living federation behind a ledger, for methods that need its help.

    Attributes:
        clients: The clients.
        trainer: Applies a model, and trains it on the server.
        schedule: Participants of the rounds, and their shares.
        local: Settings of a client's training in a round.
        scales: Factors by which clients multiply their updates before sending.
        select: Marks the updates of a round that the ledger keeps; None if it keeps
            all of them.
        server: Clean images of the server's own, without labels, as a model sees
            them. No score is measured on them.
        seed: Seed of the run.
    """

    clients: Clients
    trainer: Trainer
    schedule: Schedule
    local: LocalTraining
    scales: Mapping[ClientId, float]
    select: Callable[[Round], Round] | None = None
    server: Inputs
    seed: int
