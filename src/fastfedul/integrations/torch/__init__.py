"""PyTorch as the `Trainer`; it is imported where a network is first used."""

from fastfedul.integrations.torch.trainer import MODELS, TorchTrainer

__all__ = ["MODELS", "TorchTrainer"]
