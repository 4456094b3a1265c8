"""Names of a package whose modules are imported when somebody asks for a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names_of: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package.

    So `fastfedul --help` and programs that need one name do not wait for all modules.

    Args:
        package: Name of the package.
        names_of: Public names by module below `fastfedul`. A module without names is
            itself public, by the last part of its name.
    """
    module_of = {name: module for module, own in names_of.items() for name in own}
    whole = {
        module.rpartition(".")[2]: module for module, own in names_of.items() if not own
    }
    public = sorted([*module_of, *whole])

    def find(name: str) -> Any:
        if name in whole:
            return import_module(f"fastfedul.{whole[name]}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"fastfedul.{module_of[name]}"), name)

    return public, find, lambda: public
