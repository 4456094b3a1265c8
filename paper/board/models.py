"""Networks that the package does not have: batch norm, a transformer, embeddings.

Each function is called with the shape of an image and the number of classes, as
`RunConfig.model` wants it.
"""

from __future__ import annotations

import torch
from torch import nn

ImageShape = tuple[int, int, int]

NUM_CODES = 256
"""Number of values of a table's column: one byte."""

_WIDTH = 32
_HEADS = 4
_PATCH = 2
_EMBEDDING = 6
_WIDE = 512


def batch_norm_cnn(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return the network for digits with batch normalisation; 38,378 parameters."""
    height, width, channels = image_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (height // 2) * (width // 2), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


def transformer(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a transformer of one block on patches of 2 x 2 pixels."""
    return _Transformer(image_shape, num_classes)


def embedding_table(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a network for tables: an embedding per column, then a wide layer."""
    return _EmbeddingTable(image_shape, num_classes)


class _Transformer(nn.Module):
    def __init__(self, image_shape: ImageShape, num_classes: int) -> None:
        super().__init__()
        height, width, channels = image_shape
        num_tokens = (height // _PATCH) * (width // _PATCH)
        self.patches = nn.Conv2d(channels, _WIDTH, _PATCH, stride=_PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(num_tokens, _WIDTH))
        self.block = _Block()
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(num_tokens * _WIDTH, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        logits: torch.Tensor = self.head(self.norm(self.block(tokens)).flatten(1))
        return logits


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_before = nn.LayerNorm(_WIDTH)
        self.ask = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.answer = nn.Linear(_WIDTH, _WIDTH)
        self.norm_between = nn.LayerNorm(_WIDTH)
        self.wide = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.narrow = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        number, length, _ = tokens.shape
        asked = self.ask(self.norm_before(tokens))
        shaped = asked.view(number, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*shaped)
        tokens = tokens + self.answer(found.transpose(1, 2).reshape(tokens.shape))
        wide = nn.functional.gelu(self.wide(self.norm_between(tokens)))
        out: torch.Tensor = tokens + self.narrow(wide)
        return out


class _EmbeddingTable(nn.Module):
    def __init__(self, image_shape: ImageShape, num_classes: int) -> None:
        super().__init__()
        height, width, _ = image_shape
        self.columns = nn.ModuleList(
            nn.Embedding(NUM_CODES, _EMBEDDING) for _ in range(height * width)
        )
        self.wide = nn.Linear(_EMBEDDING * height * width, _WIDE)
        self.head = nn.Linear(_WIDE, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # The pipeline hands bytes over as numbers from -1 to 1.
        codes = torch.round((images.flatten(1) + 1) * 127.5).long()
        found = [table(codes[:, i]) for i, table in enumerate(self.columns)]
        wide = nn.functional.relu(self.wide(torch.cat(found, dim=1)))
        logits: torch.Tensor = self.head(wide)
        return logits
