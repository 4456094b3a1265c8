"""The laws of methods: every method of ours keeps them, and each law can be broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from fastfedul import FastFedUL, Kronecker, Needs, NoSkew, Scalar
from fastfedul.methods.cdp import CDP
from fastfedul.methods.federaser import FedAccum, FedEraser
from fastfedul.methods.fedrecover import FedRecover
from fastfedul.methods.kd import KD
from fastfedul.methods.pga import PGA
from fastfedul.methods.protocol import UnlearnRequest, UnlearnResult
from fastfedul.methods.registry import BUILT_IN
from fastfedul.methods.retrain import Retrain
from fastfedul.params import Params
from fastfedul.testing import check_method, small_federation


@pytest.mark.parametrize(
    "make",
    [
        FastFedUL,
        lambda: FastFedUL(skew=Scalar(0.07)),
        lambda: FastFedUL(skew=NoSkew()),
        lambda: FastFedUL(skew=Kronecker("all")),
        FedAccum,
        FedEraser,
        FedRecover,
        KD,
        PGA,
        Retrain,
        *(BUILT_IN[name] for name in BUILT_IN if name.startswith("fast-fedul")),
    ],
)
def test_every_method_keeps_the_laws(make: Callable[[], object]) -> None:
    check_method(make)


def test_a_method_that_refuses_everything_is_told_apart() -> None:
    with pytest.raises(AssertionError, match="cdp refuses a small federation"):
        check_method(CDP)


@dataclass(frozen=True)
class Good:
    """Adds nothing to the model."""

    name: ClassVar[str] = "good"
    needs: ClassVar[Needs] = Needs()

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        params = request.ledger.final.params
        return UnlearnResult(params=params, clients=tuple(request.forget))


class Nameless(Good):
    name: ClassVar[str] = ""


class Needless(Good):
    needs: ClassVar[Needs] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class NoJson(Good):
    setting: object = field(default_factory=object)


class Infinite(Good):
    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        flat = np.full(request.ledger.settings.layout.size, np.nan, np.float32)
        params = Params(request.ledger.settings.layout, flat)
        return UnlearnResult(params=params, clients=tuple(request.forget))


class OtherShape(Good):
    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        params = Params.of({"w": np.zeros(3, np.float32)})
        return UnlearnResult(params=params, clients=tuple(request.forget))


class OtherClients(Good):
    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        return UnlearnResult(params=request.ledger.final.params, clients=("eve",))


class Nothing(Good):
    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        return None  # type: ignore[return-value]


class Random(Good):
    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        layout = request.ledger.settings.layout
        flat = np.random.default_rng().normal(size=layout.size).astype(np.float32)
        return UnlearnResult(params=Params(layout, flat), clients=tuple(request.forget))


class Changing(Good):
    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        ledger = request.ledger
        zero = np.zeros(ledger.settings.layout.size, np.float32)
        ledger.commit_forgetting(sorted(request.forget), zero, {})  # type: ignore[attr-defined]
        return super().__call__(request)


class Careless(Good):
    needs: ClassVar[Needs] = Needs(others=True)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Nameless, "is empty"),
        (Needless, "has no needs"),
        (NoJson, "no JSON"),
        (Infinite, "NaN or infinite"),
        (OtherShape, "other arrays"),
        (OtherClients, "names"),
        (Nothing, "returned NoneType"),
        (Random, "another model when repeated"),
        (Changing, "the ledger was changed"),
        (Careless, "without the clients whose help it needs was answered"),
        (lambda: Good, "it is a class"),
        (lambda: 3, "no method"),
    ],
)
def test_each_law_can_be_broken(make: Callable[[], object], said: str) -> None:
    check_method(Good)
    with pytest.raises(AssertionError, match=said):
        check_method(make)


def test_the_small_federation_really_learns() -> None:
    ledger, federation = small_federation(num_rounds=10)
    data = [federation.clients.data[name] for name in federation.clients.data]
    inputs = np.concatenate([d.images for d in data]).astype(np.float32) / 127.5 - 1
    labels = np.concatenate([d.labels for d in data])
    trainer = federation.trainer
    right = trainer.predict(ledger.final, inputs).argmax(axis=1) == labels
    first = trainer.predict(ledger.initial, inputs).argmax(axis=1) == labels
    assert right.mean() > first.mean() + 0.2
