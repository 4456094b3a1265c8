"""What the command line makes of errors that nobody explained."""

from __future__ import annotations

import errno
import sys

import pytest

from fastfedul.cli import main


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENAMETOOLONG, "too long", "a/b"), "cannot use a/b: too long"),
        (PermissionError(13, "denied", "a\nb"), "cannot use a\\nb: denied"),
        (PermissionError(13, "denied", b"a"), "cannot use a: denied"),
        (OSError(errno.ENOSPC, "full", "[red]x"), "cannot use [red]x: full"),
        (TimeoutError("timed\nout"), "timed\\nout"),
        (ConnectionError(), "ConnectionError"),
    ],
)
def test_an_error_of_the_system_is_one_line_with_the_file(
    error: OSError,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"error: {line}\n"
    # Only where standard output failed is it given up.
    assert not sys.stdout.closed
