"""What the command line makes of errors that nobody explained."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator

import click
import pytest
from typer.main import get_command
from typer.testing import CliRunner

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


def commands_of(command: click.Command, *names: str) -> Iterator[tuple[str, ...]]:
    """Yield the names of every verb, alone and with each of its subverbs."""
    yield names
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands_of(inner, *names, name)


@pytest.mark.parametrize(
    "names", list(commands_of(get_command(main.app))), ids=" ".join
)
def test_help_is_whole_on_80_columns(names: tuple[str, ...]) -> None:
    found = CliRunner(env={"COLUMNS": "80"}).invoke(main.app, [*names, "--help"])
    shown = click.unstyle(found.stdout)
    words = shown.split()
    command = get_command(main.app)
    for name in names:
        assert isinstance(command, click.Group)
        command = command.commands[name]

    assert found.exit_code == 0
    assert "…" not in shown
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            metavar = option.make_metavar(click.Context(command))
            takes = [] if metavar == "BOOLEAN" else [metavar]
            for word in (*option.opts, *option.secondary_opts, *takes):
                assert word in words, f"{word} is cut"
