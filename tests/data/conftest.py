"""Data sets that tests share."""

import pytest

from fastfedul.data.dataset import Dataset
from fastfedul.data.sources import load


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load("digits")
