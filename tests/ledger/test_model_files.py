"""Writing a model to a file of the user's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fastfedul import FastFedULError, Model, Params
from fastfedul.ledger.store.model_files import model_written
from fastfedul.params import Layout

HALF = Layout.of({"x": np.zeros(2, np.float16), "y": np.zeros((), np.float16)})


def half(*values: float) -> Model:
    return Model(Params(HALF, np.array(values, np.float32)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("values", "name"),
    [((80_000, 1, 2), "x"), ((1, 2, -65_520), "y"), ((np.inf, 1e9, 1), "x")],
)
def test_a_value_too_large_for_its_dtype_is_refused_before_the_block_runs(
    values: tuple[float, ...], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "h.safetensors"
    with (
        pytest.raises(FastFedULError, match=f"'{name}' is float16") as caught,
        model_written(path, half(*values)),
    ):
        pytest.fail("the ledger would have been changed")
    assert str(path) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error")
def test_the_largest_values_of_a_dtype_are_written(tmp_path: Path) -> None:
    path = tmp_path / "h.safetensors"
    with model_written(path, half(65_504, -65_504, 65_519)):
        pass
    found = load_file(path)
    assert found["x"].tolist() == [65_504, -65_504]
    assert found["y"] == 65_504
    assert found["y"].shape == ()


@pytest.mark.parametrize("length", [250, 300])
def test_a_name_too_long_for_a_file_is_refused_in_one_line(
    length: int, tmp_path: Path
) -> None:
    path = tmp_path / ("x" * length)
    with (
        pytest.raises(FastFedULError, match="too long") as caught,
        model_written(path, half(1, 2, 3)),
    ):
        pytest.fail("the ledger would have been changed")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_place_that_is_taken_meanwhile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with (
        pytest.raises(FastFedULError, match="was not put at") as caught,
        model_written(path, half(1, 2, 3)),
    ):
        path.mkdir()
    assert str(path) in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]
