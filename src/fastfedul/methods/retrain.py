"""Retraining: the run again, from its first model, without the clients to forget.

The reference of every paper on federated unlearning, among them Gaoyang Liu, Xiaoqiang
Ma, Yang Yang, Chen Wang, Jiangchuan Liu: "FedEraser: Enabling Efficient Client-Level
Data Removal from Federated Learning Models", IWQoS 2021.

Split, draws, order of examples and first model are the run's own; the slots of the
forgotten clients stay empty. A round for which no other client was drawn is drawn
again, as training does when everybody drops out. So the result is the model of a run in
which these clients never answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.clients import Federation
from fastfedul.federation.rounds import run_rounds
from fastfedul.methods.protocol import (
    Needs,
    UnlearnRequest,
    UnlearnResult,
    federation_of,
    first_model,
    rule_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrain:
    """Trains again from the first model without the clients; exact, and the dearest.

    Attributes:
        progress: Called with the number of each round that is done.
    """

    progress: Callable[[int], None] | None = field(
        default=None, compare=False, repr=False
    )
    name: ClassVar[str] = "retrain"
    needs: ClassVar[Needs] = Needs(others=True)
    is_retraining: ClassVar[bool] = True

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model of the same run without the clients."""
        federation = federation_of(request, self)
        _check(request, federation)
        model = first_model(request, self.name)
        rounds = run_rounds(
            federation.clients.train,
            federation.clients.sizes,
            federation.schedule,
            model=model,
            stop=request.ledger.num_rounds,
            absent=request.gone,
            scales=federation.scales,
            select=federation.select,
            rule=rule_of(request.ledger),
            optimizer=request.ledger.settings.optimizer,
        )
        for trained in rounds:
            model = trained.model
            if self.progress is not None:
                self.progress(trained.round.index)
        return UnlearnResult(
            params=model.params,
            clients=tuple(sorted(request.forget)),
            buffers=model.buffers,
            server=model.server,
        )


def _check(request: UnlearnRequest, federation: Federation) -> None:
    """Raise if retraining would give the model of another run."""
    sampled = any(round_.use == "aggregate" for round_ in request.ledger.rounds())
    if sampled and federation.select is None:
        raise UnlearnRefusedError(
            f"{Retrain.name} cannot repeat a run that aggregated only a sample of the "
            "updates, because this federation does not say how the sample was drawn; "
            "train again with the same options and without the client"
        )
    missing = sorted(set(request.stayers) - set(federation.clients.data))
    if missing:
        raise UnlearnRefusedError(
            f"{Retrain.name} needs every client that stays, and {missing[0]!r:.80} is "
            "not in this federation; forget it too, or bring it back"
        )
