"""The diamonds table as a data set: the price of a stone, from nine columns.

The table comes with the package plotnine. The pipeline reads "images", so a row is laid
out on 3 x 5 cells, the smallest that the pixel pattern fits on: nine columns and six
cells that are always empty. The pattern writes the code 255, which no honest row has,
into empty cells and over `color` and `table`.
"""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastfedul.data.npz import write_arrays
from fastfedul.errors import InvalidInputError
from fastfedul.rng import stream

FILE = "diamonds.npz"
NUM_TRAIN, NUM_TEST = 6_000, 4_000
NUM_BINS = 32
NUM_PRICES = 5
_DRAW = 20_261_130
_ORDERED = {
    "cut": ("Fair", "Good", "Very Good", "Premium", "Ideal"),
    "color": ("D", "E", "F", "G", "H", "I", "J"),
    "clarity": ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"),
}
_CELLS: tuple[tuple[str | None, ...], ...] = (
    (None, None, "cut", None, "table"),
    ("carat", "x", "y", "z", "depth"),
    ("color", None, "clarity", None, None),
)

Codes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float64]


def write_diamonds(folder: Path) -> Path:
    """Write the data set into a folder unless it is there; return its file."""
    path = folder / FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        write_arrays(temporary, make_arrays(read_table()), compress=True)
        temporary.replace(path)
    return path


def read_table() -> dict[str, list[str]]:
    """Return the columns of the table by name, as text.

    Raises:
        InvalidInputError: If plotnine is not installed.
    """
    found = find_spec("plotnine")
    places = found.submodule_search_locations if found else None
    if not places:
        raise InvalidInputError(
            "the diamonds table comes with plotnine, which is not installed; "
            "run `pip install plotnine`"
        )
    path = Path(places[0]) / "data" / "diamonds.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in rows[0]}


def make_arrays(table: dict[str, list[str]]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays of the data set: rows on cells, and fifths of the price."""
    num_rows = len(table["price"])
    chosen = stream(_DRAW, "diamonds").permutation(num_rows)[: NUM_TRAIN + NUM_TEST]
    train = chosen[:NUM_TRAIN]
    codes = np.zeros((num_rows, len(_CELLS), len(_CELLS[0])), np.uint8)
    for row, names in enumerate(_CELLS):
        for place, name in enumerate(names):
            if name is not None:
                codes[:, row, place] = _codes_of(name, table[name], train)
    labels = _quantile_bins(_numbers(table["price"]), train, NUM_PRICES)
    test = chosen[NUM_TRAIN:]
    return {
        "x_train": codes[train],
        "y_train": labels[train].astype(np.int64),
        "x_test": codes[test],
        "y_test": labels[test].astype(np.int64),
    }


def _codes_of(name: str, column: list[str], train: npt.NDArray[np.int64]) -> Codes:
    if name in _ORDERED:
        places = {value: place for place, value in enumerate(_ORDERED[name])}
        return np.array([places[value] for value in column], np.uint8)
    return _quantile_bins(_numbers(column), train, NUM_BINS)


def _numbers(column: list[str]) -> Numbers:
    return np.array([float(value) for value in column])


def _quantile_bins(values: Numbers, train: npt.NDArray[np.int64], number: int) -> Codes:
    """Return the bin of every value; the training rows decide where the bins end."""
    ends = np.quantile(values[train], np.arange(1, number) / number)
    return np.searchsorted(ends, values, side="right").astype(np.uint8)
