"""What training is compared with: plain PyTorch, as one would write it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.train_setting import LOCAL, MODEL, NUM_CLASSES, SHAPE
from fastfedul.data.dataset import ClientData, to_model_input
from fastfedul.integrations.torch.models import build


def new_network(*, channels_last: bool) -> nn.Module:
    """Return the network with its weights in one of the two orders in memory."""
    network = build(MODEL, SHAPE, NUM_CLASSES)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for parameter in network.parameters():
        if parameter.dim() == 4:
            # A copy in any case: with one channel both orders look alike.
            parameter.data = parameter.detach().clone(memory_format=layout)
    return network


def tensors_of(
    data: ClientData, *, channels_last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's examples, ready to be trained on."""
    images = torch.from_numpy(to_model_input(data.images))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    labels = torch.from_numpy(np.array(data.labels))
    return images.clone(memory_format=layout), labels


def train_plainly(
    network: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> None:
    """Train a network in place: no data loader, one gather per batch."""
    network.train()
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=LOCAL.lr,
        momentum=LOCAL.momentum,
        weight_decay=LOCAL.weight_decay,
    )
    for _ in range(int(LOCAL.epochs)):
        for batch in torch.split(torch.randperm(len(labels)), LOCAL.batch_size):
            optimizer.zero_grad()
            loss = functional.cross_entropy(network(images[batch]), labels[batch])
            torch.autograd.backward(loss)
            optimizer.step()


class SequentialLoop:
    """Federated averaging with one client after the other, in one process."""

    def __init__(
        self, clients: tuple[ClientData, ...], *, threads: int, channels_last: bool
    ) -> None:
        self._threads = threads
        self._network = new_network(channels_last=channels_last)
        self._data = [tensors_of(c, channels_last=channels_last) for c in clients]
        self._global = [p.detach().clone() for p in self._network.parameters()]

    def round(self) -> None:
        """Train one round and move the global model."""
        torch.set_num_threads(self._threads)
        parameters = list(self._network.parameters())
        total = [torch.zeros_like(p) for p in self._global]
        for images, labels in self._data:
            with torch.no_grad():
                for parameter, start in zip(parameters, self._global, strict=True):
                    parameter.copy_(start)
            train_plainly(self._network, images, labels)
            with torch.no_grad():
                for so_far, parameter in zip(total, parameters, strict=True):
                    so_far.add_(parameter, alpha=1 / len(self._data))
        self._global = total
