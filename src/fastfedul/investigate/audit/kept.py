"""The folder in which an audit keeps what it has measured, so that it can go on.

A file holds margins or numbers of one model and is written whole or not at all. There
are no models in it and no examples. A file that cannot be read is measured again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from fastfedul.errors import FastFedULError
from fastfedul.files import placed, read_regular, write_whole
from fastfedul.investigate.audit.whole import Whole
from fastfedul.ledger.store.schema import digest_of

LEAVER, OTHERS, TEST = "leaver", "others", "test"
"""The examples: of the client, of the clients that stay, and nobody's."""

Margins = Mapping[str, npt.NDArray[np.float32]]
"""Margins of one model by group of examples."""

_MOST_BYTES = 1 << 32
_WHOLE = TypeAdapter(Whole)


@dataclass(frozen=True, slots=True)
class Kept:
    """The folder of one audit.

    Attributes:
        folder: The folder; it need not be there yet.
        sizes: Number of examples of each group.
    """

    folder: Path
    sizes: Mapping[str, int]

    def margins(self, number: int, kind: str) -> Margins | None:
        """Return the margins of a model of a shadow federation, if they are there."""
        try:
            found = safetensors.load(
                read_regular(self._shadow(number, kind), _MOST_BYTES)
            )
        except (OSError, SafetensorError, ValueError, KeyError):
            return None
        sizes = {name: own.shape for name, own in found.items()}
        fits = sizes == {name: (size,) for name, size in self.sizes.items()}
        sound = fits and all(np.isfinite(own).all() for own in found.values())
        return found if sound else None

    def keep_margins(self, number: int, kind: str, margins: Margins) -> None:
        """Keep the margins of a model of a shadow federation."""
        self._write(self._shadow(number, kind), safetensors.save(dict(margins)))

    def whole(self, kind: str) -> Whole | None:
        """Return what a model of the whole federation does, if it is there."""
        try:
            return _WHOLE.validate_json(read_regular(self._whole(kind), _MOST_BYTES))
        except (OSError, ValidationError, FastFedULError):
            return None

    def keep_whole(self, kind: str, found: Whole) -> None:
        """Keep what a model of the whole federation does."""
        self._write(self._whole(kind), _WHOLE.dump_json(found))

    def _shadow(self, number: int, kind: str) -> Path:
        return self.folder / f"shadow-{number:04d}-{_key(kind)}.safetensors"

    def _whole(self, kind: str) -> Path:
        return self.folder / f"whole-{_key(kind)}.json"

    def _write(self, path: Path, content: bytes) -> None:
        try:
            self._make_folder()
            with placed(path, [content]):
                pass
        except OSError as error:
            raise FastFedULError(
                f"cannot write {path}: {error.strerror or error}; see to it and repeat "
                "the command, or name another folder with --work"
            ) from None

    def _make_folder(self) -> None:
        if self.folder.is_dir():
            return
        self.folder.mkdir(parents=True)
        write_whole(self.folder / "README.txt", _README)


_README = (
    "Margins of shadow models, kept by `fastfedul audit` so that it can go on.\n"
    "Some are of examples of the client that was audited. Delete the folder when the\n"
    "audit is done.\n"
)


def _key(kind: str) -> str:
    """Return a kind as a part of a file's name, whatever a method is called."""
    return digest_of(kind).hex()[:16]
