"""A PyTorch network whose parameters lie in one block of memory.

A step of SGD is then a few operations on two vectors, however many layers there are,
and a model goes in and out by copying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fastfedul.errors import InvalidInputError
from fastfedul.federation.local import USERS_OWN, one_line
from fastfedul.federation.trainer import Inputs, Labels, LocalTraining, Logits
from fastfedul.params import Array, Flat, Layout, Params, Slot
from fastfedul.records import Model

_ALIGNMENT = 16
_PART = 500


class Network:
    """Trains and applies a network; between calls only its memory is of use."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module.float()
        named = dict(module.named_parameters())
        if not named:
            raise InvalidInputError("the model has no parameters to train")
        learned = [p for p in named.values() if p.requires_grad]
        self._values, places = _gather(learned)
        self._gradient = torch.zeros_like(self._values)
        for parameter, start in zip(learned, places, strict=True):
            parameter.grad = _window(self._gradient, parameter, start)
        self._parameters = {name: p.detach().numpy() for name, p in named.items()}
        kept = module.state_dict()
        self._buffers = {
            name: buffer.numpy()
            for name, buffer in module.named_buffers()
            if name in kept
        }
        self._layout = Layout(
            tuple(Slot(n, a.shape, "float32") for n, a in self._parameters.items())
        )
        self._channels_last = any(
            p.dim() == 4 and not p.is_contiguous() for p in named.values()
        )

    @property
    def layout(self) -> Layout:
        """Names and shapes of the parameters."""
        return self._layout

    def check_outputs(
        self, image_shape: tuple[int, int, int], num_classes: int
    ) -> None:
        """Raise if the network does not fit the images or the number of classes."""
        height, width, channels = image_shape
        images = self._tensor(np.zeros((2, channels, height, width), np.float32))
        self._module.eval()
        try:
            with torch.inference_mode():
                shape = tuple(self._module(images).shape)
        except USERS_OWN as error:
            raise InvalidInputError(
                f"the model cannot be applied to images of shape {image_shape}: "
                f"{one_line(error)}; mend it, or choose another with --model"
            ) from error
        if len(shape) != 2 or shape[0] != 2:
            raise InvalidInputError(
                f"the model gives outputs of shape {shape} for 2 images; let it give "
                f"one row of {num_classes} numbers per image"
            )
        if shape[1] < num_classes:
            raise InvalidInputError(
                f"the model gives {shape[1]} outputs and the data have {num_classes} "
                "classes; let it give one output per class"
            )

    def read(self) -> Model:
        """Return a copy of the parameters and buffers."""
        buffers = {name: buffer.copy() for name, buffer in self._buffers.items()}
        return Model(Params.of(self._parameters, self._layout), buffers)

    def train(
        self,
        model: Model,
        inputs: Inputs,
        labels: Labels,
        rng: np.random.Generator,
        *,
        local: LocalTraining,
    ) -> Model:
        """Return the model after SGD over all examples, `local.epochs` times."""
        self._write(model)
        self._module.train()
        images = self._tensor(inputs)
        targets = torch.from_numpy(np.array(labels, np.int64))
        velocity = torch.zeros_like(self._values) if local.momentum else None
        with seeded(int(rng.integers(2**63))):
            for batch in _batches(len(targets), local, rng):
                self._gradient.zero_()
                logits = self._module(images[batch])
                loss = functional.cross_entropy(logits, targets[batch])
                torch.autograd.backward(loss)
                self._step(local, velocity)
        return self.read()

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        """Return the logits, computed in evaluation mode."""
        if len(inputs) == 0:
            # Networks that reshape may not run on nothing, but say how many classes.
            return self.predict(model, np.zeros((1, *inputs.shape[1:]), inputs.dtype))[
                :0
            ]
        self._write(model)
        self._module.eval()
        with torch.inference_mode():
            parts = [
                self._module(self._tensor(inputs[start : start + _PART])).numpy()
                for start in range(0, len(inputs), _PART)
            ]
        logits: Logits = np.concatenate(parts).astype(np.float32, copy=False)
        return logits

    def gradient(
        self, model: Model, inputs: Inputs, targets: Array, temperature: float
    ) -> tuple[float, Flat]:
        """Return the mean cross-entropy and its gradient in the parameters.

        In evaluation mode, so that it is a function of the arguments alone: no
        dropout, and the statistics of batch normalisation stay as they are.
        """
        self._write(model)
        self._module.eval()
        self._gradient.zero_()
        logits = self._module(self._tensor(inputs)) / temperature
        wanted = torch.from_numpy(np.array(targets))
        if wanted.dim() == 2:
            wanted = wanted.to(logits.dtype)
        loss = functional.cross_entropy(logits, wanted)
        torch.autograd.backward(loss)
        parts = [
            np.zeros(parameter.shape, np.float32)
            if parameter.grad is None
            else parameter.grad.numpy()
            for parameter in self._module.parameters()
        ]
        flat: Flat = np.concatenate([part.ravel() for part in parts])
        return loss.item(), flat

    def channels(self, model: Model, inputs: Inputs) -> dict[str, Array]:
        """Return how active each channel of each convolution is on each image."""
        self._write(model)
        self._module.eval()
        seen: dict[str, list[torch.Tensor]] = {}
        hooks = []
        for name, layer in self._module.named_modules():
            if isinstance(layer, nn.Conv2d):
                parts = seen.setdefault(name, [])
                hooks.append(layer.register_forward_hook(_pooled_into(parts)))
        try:
            with torch.inference_mode():
                for start in range(0, len(inputs), _PART):
                    self._module(self._tensor(inputs[start : start + _PART]))
        finally:
            for hook in hooks:
                hook.remove()
        return {name: torch.cat(parts).numpy() for name, parts in seen.items()}

    def _step(self, local: LocalTraining, velocity: torch.Tensor | None) -> None:
        """Move the parameters as `torch.optim.SGD` does."""
        with torch.no_grad():
            if local.weight_decay:
                self._gradient.add_(self._values, alpha=local.weight_decay)
            direction = self._gradient
            if velocity is not None:
                direction = velocity.mul_(local.momentum).add_(self._gradient)
            self._values.add_(direction, alpha=-local.lr)

    def _write(self, model: Model) -> None:
        if model.params.layout != self._layout:
            raise InvalidInputError(
                "the model is of another kind than this network; "
                "use the network it was trained with"
            )
        for name, parameter in self._parameters.items():
            np.copyto(parameter, model.params[name])
        for name, buffer in self._buffers.items():
            np.copyto(buffer, model.buffers[name])

    def _tensor(self, inputs: Inputs) -> torch.Tensor:
        images = torch.from_numpy(np.require(inputs, np.float32, ("C", "W")))
        if self._channels_last and images.dim() == 4:
            return images.contiguous(memory_format=torch.channels_last)
        return images


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let PyTorch's own random numbers follow from a seed within a block."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def using(threads: int) -> Iterator[None]:
    """Let PyTorch use so many threads within a block.

    All work belongs inside: a second thread that was woken once keeps looking for more
    work for a while, on a core that another client may need.
    """
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _batches(
    count: int, local: LocalTraining, rng: np.random.Generator
) -> Iterator[torch.Tensor]:
    """Yield the batches of a client's round, each epoch in an order of its own."""
    sizes = [local.batch_size] * (count // local.batch_size)
    if rest := count % local.batch_size:
        sizes.append(rest)
    if len(sizes) > 1 and sizes[-1] == 1:
        # Batch normalisation cannot learn from a single example.
        sizes[-2:] = [sizes[-2] + 1]
    left = math.ceil(local.epochs * len(sizes))
    while left > 0:
        order = torch.from_numpy(rng.permutation(count))
        batches = torch.split(order, sizes)[:left]
        yield from batches
        left -= len(batches)


def _pooled_into(
    parts: list[torch.Tensor],
) -> Callable[[nn.Module, object, torch.Tensor], None]:
    def hook(layer: nn.Module, given: object, output: torch.Tensor) -> None:
        parts.append(functional.relu(output).mean(dim=(2, 3)))

    return hook


def _gather(parameters: list[nn.Parameter]) -> tuple[torch.Tensor, list[int]]:
    """Move parameters into one vector; return it, and where each of them begins."""
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    values = torch.zeros(end)
    for parameter, start in zip(parameters, starts, strict=True):
        window = _window(values, parameter, start)
        window.copy_(parameter.detach())
        parameter.data = window
    return values, starts


def _window(values: torch.Tensor, parameter: nn.Parameter, start: int) -> torch.Tensor:
    """Return a view shaped like a parameter, in the order of its own memory."""
    strides = torch.empty_like(parameter).stride()
    return values.as_strided(parameter.shape, strides, start)
