"""Values of any type in any argument: an error of the package in one line, or a result.

Each public function is called with good arguments of which one was replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastfedul as ff
from fastfedul.data.attacks.backdoor import Attack
from fastfedul.data.partition import Partition
from fastfedul.federation.rounds import Schedule
from fastfedul.federation.trainer import LocalTraining
from fastfedul.ledger.protocol import state_of
from fastfedul.methods.cdp import CDP
from fastfedul.methods.federaser import FedAccum, FedEraser
from fastfedul.methods.fedrecover import FedRecover
from fastfedul.methods.kd import KD
from fastfedul.methods.pga import PGA
from fastfedul.rng import stream
from tests.support.rounds import random_round

CLIENTS = ("ann", "bob", "cyd")
START = ff.Params.of({"w": np.zeros((3, 2), np.float32)})


class Unprintable:
    """An object whose text breaks the line."""

    def __repr__(self) -> str:
        return "two\nlines"


class AnyArguments:
    """A class that can be made from anything."""

    def __init__(self, *_: object) -> None:
        pass


ODD: dict[str, Any] = {
    "none": None,
    "true": True,
    "zero": 0,
    "negative": -1,
    "whole": 7,
    "enormous": 10**400,
    "without text": 10**5000,
    "fraction": 0.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "complex": 1j,
    "text": "text",
    "no-text": "",
    "surrogate": "\ud800",
    "nul": "a\0b",
    "lines": "a\nb",
    "bytes": b"bytes",
    "list": [],
    "numbers": [1, 2],
    "nested": [["ann"]],
    "names-and-none": ["ann", None],
    "tuple": (1, "a"),
    "set": {"ann"},
    "dict": {},
    "mapping": {"a": 1},
    "mapping-of-text": {"w": "x"},
    "mapping-of-ragged": {"w": [[1.0], [1.0, 2.0]]},
    "mapping-by-number": {1: np.zeros(2)},
    "mapping-of-objects": {"w": np.array([object()])},
    "array": np.zeros(3),
    "scalar": np.float64(0.25),
    "objects": np.array([object()]),
    "path": Path("nowhere"),
    "object": object(),
    "unprintable": Unprintable(),
    "class": AnyArguments,
    "function": lambda *_: None,
    "generator": iter(()),
    "params": START,
    "model": ff.Model(START),
}


@dataclass(frozen=True)
class Case:
    """A function of the package, and arguments that it takes.

    Attributes:
        call: The function.
        good: Returns the arguments, given a ledger on disk open for writing.
    """

    call: Callable[..., Any]
    good: Callable[[ff.DiskLedger], dict[str, Any]]

    def arguments(self) -> list[str]:
        """Return the names of all arguments."""
        found = inspect.signature(self.call).parameters.values()
        return [a.name for a in found if a.kind is not a.VAR_KEYWORD]


def recorded() -> ff.MemoryLedger:
    ledger = ff.MemoryLedger.create(ff.Model(START, {"seen": np.arange(2)}))
    record(ledger)
    return ledger


def record(ledger: ff.MemoryLedger | ff.DiskLedger) -> None:
    for index in range(2):
        rng = stream(3, "odd types", index)
        ledger.append(random_round(index, CLIENTS, START.layout, rng))


ONE_UPDATE = (ff.ClientUpdate("ann", 1.0, START),)


def append_round(
    index: Any = 2,
    updates: Any = ONE_UPDATE,
    step: Any = None,
    buffers: Any = None,
    use: Any = "store",
    local: Any = None,
) -> ff.Model:
    """Record a round of these fields; a ledger that refuses it stays as it was."""
    ledger = recorded()
    before = state_of(ledger)
    try:
        return ledger.append(ff.Round(index, updates, step, buffers, use, local))
    except ff.FastFedULError:
        assert state_of(ledger) == before
        raise


def append_update(
    client: Any = "ann",
    share: Any = 1.0,
    delta: Any = START,
    keep_probability: Any = 1.0,
    kept: Any = True,
) -> ff.Model:
    update = ff.ClientUpdate(client, share, delta, keep_probability, kept)
    return append_round(updates=(update,), step=START)


def start_ledger(params: Any, buffers: Any) -> ff.MemoryLedger:
    return ff.MemoryLedger.create(ff.Model(params, buffers))


def keep(
    policy: Any = "optimal", number: Any = 3, use: Any = "store", seed: Any = 0
) -> ff.Keep:
    return ff.Keep(policy, number, use, seed)


def in_memory(disk: ff.DiskLedger) -> dict[str, Any]:
    return {"ledger": recorded(), "clients": ["bob"]}


def on_disk(disk: ff.DiskLedger) -> dict[str, Any]:
    return {"ledger": disk, "clients": ["bob"]}


def no_arguments(disk: ff.DiskLedger) -> dict[str, Any]:
    return {}


CASES = {
    "preview": Case(ff.preview, in_memory),
    "forget": Case(ff.forget, in_memory),
    "forget on disk": Case(ff.forget, on_disk),
    "erase": Case(ff.erase, in_memory),
    "erase on disk": Case(ff.erase, on_disk),
    "add_request": Case(
        ff.add_request, lambda disk: {"path": disk.path, "client": "cyd"}
    ),
    "add_request of a method": Case(
        ff.add_request,
        lambda disk: {"path": disk.path, "client": "cyd", "method": "fast-fedul"},
    ),
    "cancel_request": Case(
        ff.cancel_request, lambda disk: {"path": disk.path, "number": 1}
    ),
    "apply_requests": Case(ff.apply_requests, lambda disk: {"ledger": disk}),
    "params_at": Case(ff.params_at, lambda _: {"ledger": recorded(), "index": 1}),
    "read_round": Case(ff.read_round, lambda _: {"ledger": recorded(), "index": 1}),
    "Params.of": Case(ff.Params.of, lambda _: {"arrays": {"w": np.zeros(2)}}),
    "Params": Case(ff.Params, lambda _: {"layout": START.layout, "flat": START.flat}),
    "Model": Case(start_ledger, lambda _: {"params": START, "buffers": {}}),
    "Round": Case(append_round, no_arguments),
    "ClientUpdate": Case(append_update, no_arguments),
    "LocalSGD": Case(
        ff.LocalSGD,
        lambda _: {"lr": 0.1, "momentum": 0.9, "batch_size": 32, "epochs": 2},
    ),
    "Keep": Case(keep, no_arguments),
    "Keep.parse": Case(ff.Keep.parse, lambda _: {"text": "optimal:3"}),
    "Schedule": Case(Schedule, lambda _: {"seed": 1}),
    "Partition": Case(Partition, lambda _: {"kind": "level"}),
    "Attack": Case(Attack, lambda _: {"kind": "pixel", "attackers": ("ann",)}),
    **{
        kind.__name__: Case(kind, no_arguments)
        for kind in (
            *(ff.FastFedUL, ff.Scalar, ff.Kronecker, LocalTraining),
            *(PGA, KD, CDP, FedRecover, FedEraser, FedAccum),
        )
    },
}


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ff.DiskLedger]:
    """A ledger with a request that waits; the working folder is empty."""
    monkeypatch.delenv("FASTFEDUL_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with ff.DiskLedger.create(tmp_path / "ledger", ff.Model(START)) as ledger:
        record(ledger)
        ff.add_request(ledger.path, "ann")
        yield ledger


def outcome(case: Case, arguments: dict[str, Any]) -> Exception | None:
    """Return the error of a call; None if it gave a result."""
    try:
        case.call(**arguments)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", CASES)
def test_good_arguments_are_good(name: str, disk: ff.DiskLedger) -> None:
    error = outcome(CASES[name], CASES[name].good(disk))
    # Nobody was forgotten, so there is nothing to erase.
    assert error is None or name.startswith("erase"), error


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, case in CASES.items() for argument in case.arguments()],
)
def test_an_odd_value_is_refused_in_one_line(
    name: str, argument: str, disk: ff.DiskLedger
) -> None:
    case = CASES[name]
    for kind, value in ODD.items():
        error = outcome(case, {**case.good(disk), argument: value})
        if error is not None:
            assert isinstance(error, ff.FastFedULError), (kind, error)
            assert len(str(error).splitlines()) == 1, (kind, error)
            assert len(str(error)) < 500, (kind, error)
