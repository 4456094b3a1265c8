"""The files of data that tests read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# A law says what is true, not how fast: on a busy machine any example takes long.
settings.register_profile("no deadline", settings.default, deadline=None)
settings.load_profile("no deadline")

pytest.register_assert_rewrite("tests.support")


@pytest.fixture(scope="session")
def data_file() -> Callable[[str], Path]:
    """Return a function from a file's name to its path in `$FASTFEDUL_DATA`.

    Where the file is missing the test is skipped by name; in CI it fails.
    """

    def find(name: str) -> Path:
        path = Path(os.environ.get("FASTFEDUL_DATA", "")) / name
        if not path.is_file():
            reason = f"needs the file {name} in $FASTFEDUL_DATA"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        return path

    return find
