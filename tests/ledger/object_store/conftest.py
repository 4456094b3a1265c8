"""A real S3 server for the tests of this folder, and the environment to reach it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.s3_server import S3Server, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as found:
        yield found


@pytest.fixture(autouse=True)
def reached(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials and endpoint, as a user sets them."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
