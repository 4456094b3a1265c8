"""The networks that come with the package, and how to find the user's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fastfedul.errors import InvalidInputError
from fastfedul.federation.local import USERS_OWN, one_line
from fastfedul.federation.own_functions import import_function, is_own_function

ImageShape = tuple[int, int, int]
_LARGEST_TINY = 12


def build(name: str, image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a new network with random weights.

    Args:
        name: As for `TorchTrainer`.
        image_shape: Height, width and channels.
        num_classes: How many logits the network gives.

    Raises:
        InvalidInputError: If no network has that name, or it cannot be used.
    """
    if is_own_function(name):
        function = import_function(name, "model")
        try:
            made = function(image_shape, num_classes)
        except USERS_OWN as error:
            raise InvalidInputError(
                f"{name} failed: {one_line(error)}; it is called with the shape of an "
                "image and the number of classes"
            ) from error
        if not isinstance(made, nn.Module):
            raise InvalidInputError(
                f"{name} returned a {type(made).__name__}; let it return an nn.Module"
            )
        return made
    if name == "auto":
        height, width, channels = image_shape
        tiny = max(height, width) <= _LARGEST_TINY
        grey = channels == 1
        name = "digits-cnn" if tiny else "mnist-cnn" if grey else "cifar-cnn"
    # Convolution, and above all pooling, is faster with the channels last in memory.
    network = _BUILT_IN[name](image_shape, num_classes)
    for parameter in network.parameters():
        if parameter.dim() == 4:
            channels_last = parameter.detach().to(memory_format=torch.channels_last)
            parameter.data = channels_last
    return network


def digits_cnn(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a network for images of about 8 by 8; 38,282 parameters for digits."""
    height, width, channels = image_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        *_convolution(16, 32, kernel=3),
        *_classifier(32 * (height // 2) * (width // 2), 64, num_classes),
    )


def mnist_cnn(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a network for images of about 28 by 28; 215,370 parameters for MNIST."""
    height, width, channels = image_shape
    return nn.Sequential(
        *_convolution(channels, 16, kernel=5),
        *_convolution(16, 32, kernel=5),
        *_classifier(32 * (height // 4) * (width // 4), 128, num_classes),
    )


def cifar_cnn(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a network for photographs; 188,810 parameters for CIFAR-10."""
    height, width, channels = image_shape
    return nn.Sequential(
        *_convolution(channels, 32, kernel=3),
        *_convolution(32, 64, kernel=3),
        *_convolution(64, 64, kernel=3),
        *_classifier(64 * (height // 8) * (width // 8), 128, num_classes),
    )


def _convolution(num_in: int, num_out: int, *, kernel: int) -> list[nn.Module]:
    """Return convolution, pooling and activation; the sides become half as long.

    Pooling comes before the activation, where it gives the same and leaves it less.
    """
    return [
        nn.Conv2d(num_in, num_out, kernel, padding=kernel // 2),
        nn.MaxPool2d(2),
        nn.ReLU(),
    ]


def _classifier(num_in: int, num_hidden: int, num_out: int) -> list[nn.Module]:
    if num_in == 0:
        raise InvalidInputError(
            "the images are too small for this network; choose another with --model"
        )
    return [
        nn.Flatten(),
        nn.Linear(num_in, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, num_out),
    ]


_BUILT_IN: dict[str, Callable[[ImageShape, int], nn.Module]] = {
    "digits-cnn": digits_cnn,
    "mnist-cnn": mnist_cnn,
    "cifar-cnn": cifar_cnn,
}
