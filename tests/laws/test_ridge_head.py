"""A ridge head over a frozen backbone: forgetting equals retraining, to rounding."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastfedul as ff
from fastfedul.methods import NoSkew

PROGRAM = Path(__file__).parents[2] / "examples" / "ridge_head" / "ridge_head.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ridge_head", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    num_gone=st.integers(1, 5),
)
def test_forgetting_equals_retraining(
    example: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    sizes: list[int],
    num_gone: int,
) -> None:
    rng = np.random.default_rng(seed)
    clients = {
        f"c{number}": (rng.normal(size=(size, 8)), rng.integers(0, 10, size))
        for number, size in enumerate(sizes)
    }
    gone = [f"c{number}" for number in range(min(num_gone, len(sizes) - 1))]
    rest = {name: own for name, own in clients.items() if name not in gone}
    folder = tmp_path_factory.mktemp("ridge")
    with example.record(folder / "all", clients) as ledger:
        before = example.head(ledger.final.params)
        ff.forget(ledger, gone, method=ff.FastFedUL(skew=NoSkew()))
        forgotten = example.head(ledger.final.params)
    with example.record(folder / "rest", rest) as ledger:
        retrained = example.head(ledger.final.params)
    # A ridge of 0.01 makes the head at most a hundred times as sensitive as the means.
    assert np.abs(forgotten - retrained).max() < 1e-3 * np.abs(retrained).max()
    assert np.abs(before - retrained).max() > 1e-3 * np.abs(retrained).max()


def test_the_example_says_so(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main()
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert float(said["before"].split()[-1]) > 0.01
    assert float(said["forgotten"].split()[-1]) < 1e-4
    for line in ("forgotten", "retrained"):
        assert said[line].split()[2] == said["retrained"].split()[2]
    assert said["before"].split()[2] != said["retrained"].split()[2]
