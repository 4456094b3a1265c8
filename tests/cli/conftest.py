"""What several tests of the command line start from."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no trusted key, and lines that are not broken."""
    monkeypatch.delenv("FASTFEDUL_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
