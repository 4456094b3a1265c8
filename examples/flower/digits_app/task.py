"""What clients and server share: the model, and how to read the prepared data.

In a deployment every message starts a process that imports this, so it imports little:
the package's trainer takes its own steps of SGD, and the data are plain arrays.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, UserConfig

from fastfedul.data.dataset import Examples
from fastfedul.federation.trainer import LocalTraining
from fastfedul.integrations.torch import TorchTrainer
from fastfedul.params import Params
from fastfedul.records import Model


def trainer(config: UserConfig) -> TorchTrainer:
    """Return what trains and applies the model."""
    local = LocalTraining(epochs=float(config["epochs"]), lr=0.1)
    return TorchTrainer(shape=(8, 8, 1), num_classes=10, local=local)


def read_examples(path: Path) -> Examples:
    """Return images and labels of a file that `prepare.py` wrote."""
    with np.load(path) as arrays:
        return Examples(arrays["images"], arrays["labels"])


def folder(config: UserConfig, key: str) -> Path:
    """Return a folder of the run config, which must be an absolute path.

    Flower runs apps in folders of its own choice.
    """
    path = Path(str(config[key]))
    if not path.is_absolute():
        raise ValueError(f"give an absolute path: flwr run . -c '{key}=\"/...\"'")
    return path


def to_model(arrays: ArrayRecord) -> Model:
    """Return the model in a message."""
    return Model(Params.of({name: array.numpy() for name, array in arrays.items()}))


def to_arrays(params: Params) -> ArrayRecord:
    """Return parameters as a message carries them."""
    return ArrayRecord({name: Array(np.array(a)) for name, a in params.items()})
