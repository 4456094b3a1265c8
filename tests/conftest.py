"""The order of the test files, and the files of data that tests read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# A law says what is true, not how fast: on a busy machine any example takes long.
settings.register_profile("no deadline", settings.default, deadline=None)
settings.load_profile("no deadline")

pytest.register_assert_rewrite("tests.support")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first.

    A process takes one file after the other. If a long file came last, the other
    processes would wait for it.
    """
    marked = Counter(
        item.path
        for item in items
        for mark in ("slow", "deploy")
        if item.get_closest_marker(mark)
    )
    items.sort(key=lambda item: -marked[item.path])


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
