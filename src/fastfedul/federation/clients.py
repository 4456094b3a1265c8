"""Clients as a method of unlearning meets them: it asks, and every call is counted."""

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
    """The clients of a federation, and the one count of the calls to them.

    Attributes:
        workers: Where they train.
        data: Everybody's examples, in the order in which clients are drawn.
        calls: How many times a client had to compute something.
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
        """Let clients train from a model; return their results, in order.

        Args:
            model: Where they start from.
            index: Number of the round; it decides the order of their examples.
            names: Names of the clients.
            local: How they train; None for the way of the federation.
        """
        self.calls += len(names)
        return self.workers.train(model, index, names, local)

    def at(self, name: ClientId) -> ClientData:
        """Return a client's examples for work that is done at that client: one call.

        Results computed from them may leave the client, the examples may not.
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
        local: How a client trains in a round.
        scales: Factors by which clients multiply their updates before sending.
        select: Marks which updates of a round are kept, and says whether the others
            count; None if all are.
        server: Clean images of the server's own, without labels, as a model sees
            them. Nothing is scored on them.
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
