"""Functions of a user's own that an option names as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastfedul.errors import InvalidInputError
from fastfedul.federation.local import USERS_OWN, one_line


def is_own_function(name: str) -> bool:
    """Return whether an option names a function, not a built-in name."""
    return ":" in name


def import_function(name: str, what: str) -> Callable[..., Any]:
    """Return the function `package.module:function`, also from the working folder.

    Args:
        name: Value of the option.
        what: The product of the function, such as `model`; for errors.

    Raises:
        InvalidInputError: If the function cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except USERS_OWN as error:
        raise InvalidInputError(
            f"cannot load the {what} {name!r:.80}: {one_line(error)}; write "
            "package.module:NAME for something that Python can import from here"
        ) from None
    if not callable(found):
        raise InvalidInputError(
            f"{name:.80} is not a function; name one that makes the {what}"
        )
    function: Callable[..., Any] = found
    return function
