"""PyTorch as the `Trainer`. Needs the extra `torch`.

A `TorchTrainer` is a description that costs nothing to make or to send to another
process; PyTorch is imported and the network built where it is first used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.errors import InvalidInputError, MissingPackageError
from fastfedul.federation.trainer import (
    AUTO,
    Inputs,
    Labels,
    LocalTraining,
    Logits,
)
from fastfedul.params import Array, Flat, Layout
from fastfedul.records import Model
from fastfedul.rng import stream

if TYPE_CHECKING:
    from fastfedul.integrations.torch.network import Network

MODELS = ("digits-cnn", "mnist-cnn", "cifar-cnn")
"""Networks that come with the package."""


@dataclass(frozen=True, kw_only=True)
class TorchTrainer:
    """Trains a PyTorch network by SGD on the CPU.

    Attributes:
        shape: Height, width and channels. The network itself gets images shaped
            (number, channels, height, width).
        num_classes: How many logits the network gives.
        model: `auto` for the one of `MODELS` that suits the images; one of them; or
            `package.module:function`, which is called with the shape and the
            number of classes and returns the network.
        local: How a client trains.
        threads: How many threads PyTorch uses. Only with 1 are the bits the same on
            every run.
    """

    shape: tuple[int, ...]
    num_classes: int
    model: str = AUTO
    local: LocalTraining = field(default_factory=LocalTraining)
    threads: int = 1

    def __post_init__(self) -> None:
        if find_spec("torch") is None:
            raise MissingPackageError("torch", "training needs PyTorch")
        if len(self.shape) != 3:
            raise InvalidInputError(
                f"the trainer torch takes images, and these examples have the shape "
                f"{self.shape}; give a trainer of your own as --trainer "
                "package.module:function"
            )
        if self.model not in (AUTO, *MODELS) and ":" not in self.model:
            raise InvalidInputError(
                f"there is no model {self.model!r}; choose {AUTO}, "
                f"{', '.join(MODELS)}, or package.module:function"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images."""
        height, width, channels = self.shape
        return height, width, channels

    @cached_property
    def network(self) -> Network:
        """The network, built on first use; its weights are from the last call."""
        from fastfedul.integrations.torch.models import build
        from fastfedul.integrations.torch.network import Network

        return Network(build(self.model, self.image_shape, self.num_classes))

    @property
    def layout(self) -> Layout:
        """Names and shapes of the network's parameters."""
        return self.network.layout

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        state.pop("network", None)
        return state

    def initial(self, seed: int) -> Model:
        """Return the freshly built network, a function of the seed alone.

        Raises:
            InvalidInputError: If the network does not fit the images and classes.
        """
        from fastfedul.integrations.torch.models import build
        from fastfedul.integrations.torch.network import Network, seeded, using

        start = int(stream(seed, "initial model").integers(2**63))
        with using(self.threads):
            with seeded(start):
                built = build(self.model, self.image_shape, self.num_classes)
                network = Network(built)
                # Read first: trying it may change buffers of a user's network.
                model = network.read()
                network.check_outputs(self.image_shape, self.num_classes)
            return model

    def train(
        self,
        model: Model,
        inputs: Inputs,
        labels: Labels,
        rng: np.random.Generator,
        local: LocalTraining | None = None,
    ) -> Model:
        """Return the model after local training."""
        from fastfedul.integrations.torch.network import using

        with using(self.threads):
            return self.network.train(
                model, inputs, labels, rng, local=local or self.local
            )

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        """Return the logits, computed in evaluation mode."""
        from fastfedul.integrations.torch.network import using

        with using(self.threads):
            return self.network.predict(model, inputs)

    def gradient(
        self, model: Model, inputs: Inputs, targets: Array, temperature: float = 1.0
    ) -> tuple[float, Flat]:
        """Return the mean cross-entropy and its gradient in the parameters."""
        from fastfedul.integrations.torch.network import using

        with using(self.threads):
            return self.network.gradient(model, inputs, targets, temperature)

    def channels(self, model: Model, inputs: Inputs) -> dict[str, Array]:
        """Return how active each channel of each convolution is on each image."""
        from fastfedul.integrations.torch.network import using

        with using(self.threads):
            return self.network.channels(model, inputs)
