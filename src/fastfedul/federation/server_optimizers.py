"""Server optimizers: how a server turns the mean of a round into its step.

An optimizer is a function of its state and the mean: it returns the next state and the
step. Every value of the step depends on the values at the same place alone, so a
caller may compute any part of a model by itself.

With g the mean of the updates (local minus global), the formulas are

    momentum   m = momentum m + g                    step = lr m
    nesterov   m = momentum m + g                    step = lr (g + momentum m)
    adam       m = beta1 m + (1 - beta1) g           step = lr c m / (sqrt(v) + tau)
               v = beta2 v + (1 - beta2) g^2
    yogi       m as adam                             step = lr m / (sqrt(v) + tau)
               v = v - (1 - beta2) g^2 sign(v - g^2)
    adagrad    v = v + g^2                           step = lr g / (sqrt(v) + tau)

with c = sqrt(1 - beta2^(n + 2)) / (1 - beta1^(n + 2)) after n steps. `momentum`,
`adam`, `yogi` and `adagrad` are Flower's FedAvgM, FedAdam, FedYogi and FedAdagrad.
`nesterov` is the outer step of DiLoCo: Arthur Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.limits import require_choice, require_number, show
from fastfedul.params import Array
from fastfedul.records import ServerState

_SMALLEST, _LARGEST = 1e-30, 1e30
"""Limits of learning rates and tau; a value beyond them is a mistake."""

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "momentum": {"lr": 1.0, "momentum": 0.9},
    "nesterov": {"lr": 0.7, "momentum": 0.9},
    "adam": {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "yogi": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "adagrad": {"lr": 0.1, "tau": 1e-3},
}
"""Every optimizer, with its settings and their defaults.

Of `nesterov` they are DiLoCo's, of `momentum` the usual value; the others are Flower's.
"""

_NUM_VECTORS = {"momentum": 1, "nesterov": 1, "adam": 2, "yogi": 2, "adagrad": 1}


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """A server optimizer with its settings.

    >>> ServerOptimizer.make("adam", lr=0.01).settings["beta2"]
    0.99
    >>> str(ServerOptimizer.make("momentum"))
    'momentum:lr=1.0,momentum=0.9'

    Attributes:
        name: Name of the optimizer: a key of `DEFAULTS`.
        values: Values of its settings, in the order of `DEFAULTS`.
    """

    name: str
    values: tuple[float, ...]

    @classmethod
    def make(cls, name: str, **settings: float | None) -> ServerOptimizer:
        """Return an optimizer; a setting that is not given has its default.

        Raises:
            InvalidInputError: If there is no such optimizer, or it has no such setting.
        """
        require_choice("server optimizer", name, tuple(DEFAULTS))
        defaults = DEFAULTS[name]
        given = {key: value for key, value in settings.items() if value is not None}
        for key in given:
            if key not in defaults:
                raise InvalidInputError(
                    f"the server optimizer {name} has no {key}; it has "
                    f"{', '.join(defaults)}"
                )
        found = {**defaults, **given}
        for key, value in found.items():
            if key in ("lr", "tau"):
                least = 0.0 if key == "tau" else _SMALLEST
                require_number(f"server {key}", value, least=least, most=_LARGEST)
            else:
                require_number(f"server {key}", value, least=0, below=1)
        return cls(name, tuple(float(found[key]) + 0.0 for key in defaults))

    @classmethod
    def parse(cls, text: str) -> ServerOptimizer:
        """Return the optimizer of a text, as `str` gives it.

        >>> ServerOptimizer.parse("adagrad:lr=0.1").settings
        {'lr': 0.1, 'tau': 0.001}
        """
        name, _, rest = text.partition(":")
        settings = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            try:
                settings[key.strip()] = float(value)
            except ValueError:
                raise InvalidInputError(
                    f"cannot read the server optimizer {show(text)}; write "
                    "adam:lr=0.01,beta1=0.9"
                ) from None
        return cls.make(name, **settings)

    def __str__(self) -> str:
        told = ",".join(f"{key}={value!r}" for key, value in self.settings.items())
        return f"{self.name}:{told}"

    @property
    def settings(self) -> dict[str, float]:
        """Settings of the optimizer by their names."""
        return dict(zip(DEFAULTS[self.name], self.values, strict=True))

    @property
    def num_vectors(self) -> int:
        """Number of vectors in the optimizer's state."""
        return _NUM_VECTORS[self.name]

    @property
    def is_linear(self) -> bool:
        """Whether the step is a linear function of the means so far."""
        return self.name in ("momentum", "nesterov")

    def start(self, size: int) -> ServerState:
        """Return the state before the first step, for a model of so many values."""
        return ServerState(0, np.zeros((self.num_vectors, size), np.float32))

    def move(self, vectors: Array, mean: Array, steps: int) -> tuple[Array, Array]:
        """Return the vectors of the next state, and the step; all in float32.

        Args:
            vectors: Vectors of the state, or the same columns of each.
            mean: Weighted mean of the round's updates, or the same columns.
            steps: Number of steps before this one.
        """
        own = self.settings
        if self.is_linear:
            [before] = vectors
            beta = np.float32(own["momentum"])
            m = beta * before + mean
            ahead = mean + beta * m if self.name == "nesterov" else m
            return m[None], np.float32(own["lr"]) * ahead
        square = mean * mean
        if self.name == "adagrad":
            [before] = vectors
            v = before + square
            return v[None], self._scaled(mean, v, steps)
        m_before, v_before = vectors
        beta1, beta2 = np.float32(own["beta1"]), np.float32(own["beta2"])
        m = beta1 * m_before + (np.float32(1) - beta1) * mean
        rest = np.float32(1) - beta2
        if self.name == "adam":
            v = beta2 * v_before + rest * square
        else:
            v = v_before - rest * square * np.sign(v_before - square)
        return np.stack([m, v]), self._scaled(m, v, steps)

    def gain(self, vectors: Array, steps: int) -> Array:
        """Return how far one unit of a round's mean moves the model in the end.

        The preconditioner is taken as it was in this round.

        Args:
            vectors: Vectors of the state after the round, or the same columns of each.
            steps: Number of steps before the round.
        """
        if self.is_linear:
            own = self.settings
            return np.asarray(own["lr"] / (1 - own["momentum"]), np.float32)
        v = vectors[-1]
        return self._scaled(np.ones_like(v), v, steps)

    def _scaled(self, direction: Array, v: Array, steps: int) -> Array:
        """Return a direction, divided by the root of the second moment."""
        own = self.settings
        lr = own["lr"]
        if self.name == "adam":
            after = steps + 2.0
            lr *= math.sqrt(1 - own["beta2"] ** after) / (1 - own["beta1"] ** after)
        below = np.sqrt(v) + np.float32(own["tau"])
        # Without tau, a value that never moved would be divided by 0.
        found: Array = np.divide(
            np.float32(lr) * direction, below, out=np.zeros_like(v), where=below > 0
        )
        return found
