"""What other packages need for their own tests: a small federation, and the laws.

`check_method` runs a method through the laws that every method must keep; it is meant
for a test of the package that offers the method.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from fastfedul.data.dataset import ClientData, to_model_input
from fastfedul.errors import FastFedULError, InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Clients, Federation
from fastfedul.federation.rounds import Schedule, run_rounds
from fastfedul.federation.trainer import Inputs, Labels, LocalTraining, Logits
from fastfedul.federation.workers.pool import InProcess
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.methods.protocol import (
    Method,
    UnlearnRequest,
    UnlearnResult,
    method_settings,
    needs_help,
)
from fastfedul.methods.registry import require_method
from fastfedul.params import Array, Flat, Params
from fastfedul.records import Model
from fastfedul.rng import stream

CLIENTS = ("ann", "bob", "cyd", "dee")
_SIDE, _CLASSES, _EXAMPLES = 4, 3, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxTrainer:
    """Softmax regression in NumPy: the smallest trainer that really learns.

    Attributes:
        local: How clients train.
    """

    local: LocalTraining = field(
        default_factory=lambda: LocalTraining(epochs=1, batch_size=6, lr=0.1)
    )
    size: ClassVar[int] = _SIDE * _SIDE

    def initial(self, seed: int) -> Model:
        """Return the model to start from, a function of the seed alone."""
        rng = stream(seed, "small federation")
        weight = rng.normal(0, 0.1, (_CLASSES, self.size)).astype(np.float32)
        return Model(
            Params.of({"weight": weight, "bias": np.zeros(_CLASSES, np.float32)})
        )

    def train(
        self,
        model: Model,
        inputs: Inputs,
        labels: Labels,
        rng: np.random.Generator,
        local: LocalTraining | None = None,
    ) -> Model:
        """Return the model after some epochs of SGD."""
        how = local or self.local
        flat = np.array(model.params.flat)
        steps = max(1, round(how.epochs * len(labels) / how.batch_size))
        for _ in range(steps):
            places = rng.permutation(len(labels))[: how.batch_size]
            current = Model(Params(model.params.layout, flat), model.buffers)
            _, gradient = self.gradient(current, inputs[places], labels[places])
            flat = flat - np.float32(how.lr) * gradient
        return Model(Params(model.params.layout, flat), model.buffers)

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        """Return a row per example and a column per class."""
        rows = inputs.reshape(len(inputs), -1)
        logits: Logits = rows @ model.params["weight"].T + model.params["bias"]
        return logits

    def gradient(
        self, model: Model, inputs: Inputs, targets: Array, temperature: float = 1.0
    ) -> tuple[float, Flat]:
        """Return the mean cross-entropy and its gradient in the parameters."""
        wanted = np.eye(_CLASSES)[targets] if targets.ndim == 1 else targets
        logits = self.predict(model, inputs).astype(np.float64) / temperature
        logits -= logits.max(axis=1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        loss = -float((wanted * logs).sum(axis=1).mean())
        error = (np.exp(logs) - wanted) / len(inputs) / temperature
        rows = inputs.reshape(len(inputs), -1)
        found = {"weight": error.T @ rows, "bias": error.sum(axis=0)}
        return loss, model.params.layout.flatten(found)


def small_federation(
    seed: int = 0, *, num_rounds: int = 5
) -> tuple[MemoryLedger, Federation]:
    """Return a trained federation of four clients, and the ledger of its rounds.

    Args:
        seed: Seed of the examples and of the training.
        num_rounds: How many rounds they train.
    """
    rng = stream(seed, "small federation")
    centres = rng.uniform(60, 190, (_CLASSES, _SIDE * _SIDE))
    data = [_examples(name, centres, rng) for name in CLIENTS]
    server = _examples("server", centres, rng)
    trainer = SoftmaxTrainer()
    federation = Federation(
        clients=Clients(
            InProcess(trainer, data, seed=seed), {own.client: own for own in data}
        ),
        trainer=trainer,
        schedule=Schedule(seed=seed, per_round=None, dropout=0.0, weighting="size"),
        local=trainer.local,
        scales={},
        server=to_model_input(server.images),
        seed=seed,
    )
    model = trainer.initial(seed)
    ledger = MemoryLedger.create(model)
    for _ in run_rounds(
        federation.clients.train,
        federation.clients.sizes,
        federation.schedule,
        model=model,
        stop=num_rounds,
        record=lambda _, round_: ledger.append(round_),
    ):
        pass
    return ledger, federation


def check_method(make: Callable[[], object]) -> None:
    """Raise AssertionError, with one line, if a method breaks a law of all methods.

    The laws: it has a name, needs and JSON settings. It forgets one client and two of
    a small federation, with a model of the same shape and finite values. It names the
    clients it forgot. It leaves the ledger as it was. Asked twice it answers the same.
    Without the help that it needs it raises `UnlearnRefusedError`. It still answers
    after another client was forgotten.

    Args:
        make: Class of the method, or a function that returns one.
    """
    try:
        method = require_method(make())
    except InvalidInputError as error:
        raise AssertionError(str(error)) from None
    name = method.name
    _require(name == name.strip() and bool(name), f"the name {name!r} is empty")
    try:
        json.dumps(method_settings(method))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{name}: the settings are no JSON: {error}") from None
    ledger, federation = small_federation()
    for forget in (CLIENTS[:1], CLIENTS[:2]):
        request = UnlearnRequest(ledger, frozenset(forget), federation)
        before = ledger.final.params.flat.tobytes(), ledger.events(), ledger.num_rounds
        first = _answer(method, request)
        _check_result(name, first, request)
        after = ledger.final.params.flat.tobytes(), ledger.events(), ledger.num_rounds
        _require(before == after, f"{name}: the ledger was changed by a call")
        second = _answer(method, request)
        same = np.array_equal(first.params.flat, second.params.flat)
        _require(same, f"{name}: the same request gave another model when repeated")
    _check_refusals(method, ledger, federation)


def _check_result(name: str, result: object, request: UnlearnRequest) -> None:
    _require(
        isinstance(result, UnlearnResult),
        f"{name}: a call returned {type(result).__name__}, not an UnlearnResult",
    )
    assert isinstance(result, UnlearnResult)
    layout = request.ledger.settings.layout
    _require(
        result.params.layout == layout, f"{name}: the model has other arrays than asked"
    )
    _require(
        bool(np.isfinite(result.params.flat).all()),
        f"{name}: the model has NaN or infinite values",
    )
    _require(
        set(result.clients) == set(request.forget),
        f"{name}: the result names {result.clients}, not {sorted(request.forget)}",
    )


def _check_refusals(
    method: Method, ledger: MemoryLedger, federation: Federation
) -> None:
    asked = frozenset(CLIENTS[:1])
    if needs_help(method):
        _require_error(
            method,
            UnlearnRequest(ledger, asked),
            "a request without the clients whose help it needs",
            UnlearnRefusedError,
        )
    gone, _ = small_federation()
    gone.commit_forgetting(CLIENTS[:1], np.zeros_like(gone.final.params.flat), {})
    stayer = UnlearnRequest(gone, frozenset(CLIENTS[1:2]), federation)
    _check_result(method.name, _answer(method, stayer), stayer)


def _require_error(
    method: Method, request: UnlearnRequest, what: str, error: type[FastFedULError]
) -> None:
    try:
        method(request)
    except error:
        return
    except Exception as other:
        raise AssertionError(
            f"{method.name}: {what} raised {type(other).__name__}, not {error.__name__}"
        ) from other
    raise AssertionError(f"{method.name}: {what} was answered; raise {error.__name__}")


def _answer(method: Method, request: UnlearnRequest) -> UnlearnResult:
    try:
        return method(request)
    except UnlearnRefusedError as error:
        raise AssertionError(
            f"{method.name} refuses a small federation that kept everything: {error}"
        ) from error


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def _examples(client: str, centres: Array, rng: np.random.Generator) -> ClientData:
    labels = np.arange(_EXAMPLES, dtype=np.int64) % _CLASSES
    values = centres[labels] + rng.normal(0, 25, (_EXAMPLES, _SIDE * _SIDE))
    images = np.clip(values, 0, 255).astype(np.uint8)
    return ClientData(client, images.reshape(_EXAMPLES, _SIDE, _SIDE, 1), labels)
