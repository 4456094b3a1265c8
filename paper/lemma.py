"""Lemma 3 of the Fast-FedUL paper, measured: is a poisoned update kept more often?

The lemma compares a malicious client with a benign one for a classifier softmax(W F),
with F the features before the last layer. It holds if for a clean example x, its
poisoned form x + d and every feature i

    d . grad F_i(x) > (2 / xi) F_i(x),

where xi is the number of poisoned examples by the number of clean ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastfedul.data.attacks.pixel_pattern import stamp
from fastfedul.data.dataset import Images, to_model_input
from fastfedul.integrations.torch.trainer import TorchTrainer
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.views import KeptView
from fastfedul.records import Model
from fastfedul.runs.preparation import Prepared

NUM_PAIRS = 200
"""Clean and poisoned examples of which the condition is tried."""


def keeping_by_round(
    ledger: Ledger, keep: Keep, attackers: tuple[str, ...]
) -> dict[str, Any]:
    """Return the keeping probabilities of attackers and others, round by round.

    The result has a list with a number for each round in which an attacker took part:
    the mean probability of the attackers (`attacker`) and of the others (`honest`), and
    whether an attacker's contribution is the largest (`largest`).
    """
    view = KeptView(ledger, keep)
    found: dict[str, list[Any]] = {"attacker": [], "honest": [], "largest": []}
    for round_ in ledger.rounds():
        updates = view.updates_in(round_.index)
        own = [u for u in updates if u.client in attackers]
        others = [u for u in updates if u.client not in attackers]
        if own and others:
            found["attacker"].append(float(np.mean([u.keep_probability for u in own])))
            honest = float(np.mean([u.keep_probability for u in others]))
            found["honest"].append(honest)
            most = max(u.share * u.norm for u in own)
            found["largest"].append(most > max(u.share * u.norm for u in others))
    return found


def condition(prepared: Prepared, model: Model) -> dict[str, Any]:
    """Return how often the lemma's condition holds for a model's features.

    The result counts features of pairs (`features`, of `num_features`), and pairs for
    which every feature fulfils the condition (`pairs`, of `num_pairs`).
    """
    import torch

    clean, poisoned = _pairs(prepared)
    ratio = prepared.attack.ratio
    # The edge-case attacker adds its poison; every other attacker replaces images.
    added = prepared.attack.kind == "edge-case"
    xi = ratio if added else ratio / (1 - ratio)
    features = _features(prepared, model)
    first = torch.from_numpy(to_model_input(clean))
    way = torch.from_numpy(to_model_input(poisoned)) - first
    derive: Any = torch.autograd.functional.jvp
    values, slopes = derive(features, first, way)
    holds = slopes > 2 / xi * values
    return {
        "xi": xi,
        "features": int(holds.sum()),
        "num_features": holds.numel(),
        "pairs": int(holds.all(dim=1).sum()),
        "num_pairs": len(holds),
    }


def _pairs(prepared: Prepared) -> tuple[Images, Images]:
    """Return clean test images, and the poisoned form of each."""
    images, labels = prepared.dataset.test
    attack = prepared.attack
    if attack.kind == "pixel":
        clean = images[labels != attack.target_label][:NUM_PAIRS]
        return clean, stamp(clean)
    true_label = 7 if prepared.dataset.num_classes > 7 else 0
    if prepared.dataset.name == "cifar10":
        true_label = 0
    clean, poisoned = images[labels == true_label], prepared.backdoor.images
    count = min(len(clean), len(poisoned), NUM_PAIRS)
    return clean[:count], poisoned[:count]


def _features(prepared: Prepared, model: Model) -> Any:
    """Return the network without its last layer, with a model's parameters."""
    import torch

    from fastfedul.integrations.torch.models import build

    trainer = prepared.trainer
    assert isinstance(trainer, TorchTrainer)
    module = build(trainer.model, trainer.image_shape, trainer.num_classes)
    arrays = {**model.params.exported(), **model.buffers}
    state = {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()}
    module.load_state_dict(state)
    module.eval().requires_grad_(False)
    # Every network of this project is a row of layers, the last of them linear.
    return torch.nn.Sequential(*list(module.children())[:-1])
