"""Ctrl-C: tells the user how to go on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopped(Exception):  # noqa: N818 - the user stopped the command, nothing failed
    """The user stopped a command; the text says how to go on."""


@contextmanager
def telling_how_to_go_on(text: Callable[[], str | None]) -> Iterator[None]:
    """Turn Ctrl-C into an error that says how to go on.

    Args:
        text: Called after Ctrl-C; returns None if there is nothing to go on with.

    Raises:
        Stopped: If the user pressed Ctrl-C and there is a text.
    """
    try:
        yield
    except KeyboardInterrupt:
        found = text()
        if found is None:
            raise
        raise Stopped(found) from None


def this_command() -> str:
    """Return the command that runs, as a user would type it again."""
    return shlex.join(["fastfedul", *sys.argv[1:]])
