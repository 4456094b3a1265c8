"""The trajectory score: whose updates pushed the model towards an answer, and when.

The score of a client is the sum over rounds of minus the inner product of the gradient
of the unwanted answers' loss, at the model before the round, with the client's weighted
update. It follows FLForensics (NeurIPS 2025). It needs the models of the rounds, and a
trainer that gives gradients.
"""

from __future__ import annotations

import numpy as np

from fastfedul.federation.trainer import GradientTrainer, Inputs, Labels
from fastfedul.ledger.protocol import Ledger, models
from fastfedul.methods.fast_fedul.columns import spans
from fastfedul.params import Array
from fastfedul.records import ClientId, Model, VectorRef

MOST_ROUNDS = 20
"""Rounds that are looked at; of more rounds, as many at equal distances."""


def trajectory_scores(
    ledger: Ledger, trainer: GradientTrainer, inputs: Inputs, answers: Labels
) -> dict[ClientId, float]:
    """Return by client how far its updates lowered the loss of some answers.

    Args:
        ledger: A ledger of rounds.
        trainer: Gives gradients.
        inputs: Inputs with an unwanted answer.
        answers: The answers.
    """
    found = dict.fromkeys(
        (name for name, entry in ledger.clients().items() if entry.state == "active"),
        0.0,
    )
    every = max(1, -(-ledger.num_rounds // MOST_ROUNDS))
    buffers = ledger.final.buffers
    for index, params in enumerate(models(ledger)):
        if index == ledger.num_rounds or (ledger.num_rounds - 1 - index) % every:
            continue
        kept = [u for u in ledger.updates_in(index) if u.kept and u.client in found]
        if not kept:
            continue
        _, gradient = trainer.gradient(Model(params, buffers), inputs, answers)
        stack = ledger.stack([VectorRef(index, update.client) for update in kept])
        products: Array = np.zeros(len(kept))
        for low, high in spans(0, params.layout.size, len(kept)):
            products += stack.read(low, high) @ gradient[low:high]
        for update, product in zip(kept, products.tolist(), strict=True):
            found[update.client] -= every * update.weight * product
    return found
