import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fastfedul.cli.data import app
from fastfedul.data.download import Download, FetchError
from fastfedul.data.recipes import RECIPES, Recipe
from fastfedul.data.sources import SOURCES
from fastfedul.errors import InvalidInputError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for data, and a terminal wide enough not to break lines."""
    monkeypatch.setenv("FASTFEDUL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def parsed(*words: str) -> Any:
    """The one JSON object on standard output."""
    return json.loads(run(*words, "--json"))


def own_file(folder: Path) -> Path:
    images = np.zeros((6, 9, 7, 3), np.uint8)
    path = folder / "own [x].npz"
    labels = np.array([0, 1, 1, 2, 2, 2])
    np.savez(path, x_train=images, y_train=labels, x_test=images[:2], y_test=[0, 2])
    return path


def test_list_names_every_data_set_and_where_it_is(home: Path) -> None:
    np.savez(home / "mnist.npz")
    found = parsed("list")
    rows = {row["name"]: row for row in found["datasets"]}
    assert list(rows) == list(SOURCES)
    assert found["folders"][0] == str(home)
    assert rows["mnist"]["path"] == str(home / "mnist.npz")
    here = [name for name, row in rows.items() if row["here"]]
    assert here == ["digits", "mnist"]


def test_list_knows_whether_scikit_learn_is_there() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = None; sys.argv.insert(1, 'list'); "
        "from fastfedul.cli.data import app; app()"
    )
    command = [sys.executable, "-c", code]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [digits] = [line for line in text.splitlines() if "digits " in line][:1]
    assert "no, pip install scikit-learn" in digits
    found = subprocess.run([*command, "--json"], capture_output=True, check=True)
    rows = {row["name"]: row for row in json.loads(found.stdout)["datasets"]}
    assert not rows["digits"]["here"]


def test_rows_and_their_clients_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    rows, labels = np.zeros((4, 13)), np.array([0, 1, 1, 0])
    arrays = {"x_train": rows, "y_train": labels, "x_test": rows, "y_test": labels}
    np.savez(path, **arrays, clients=[2, 10, 2, 2])  # type: ignore[arg-type]
    assert "rows.npz: rows of 13 values, of 2 clients" in run("show", str(path))
    found = parsed("show", str(path))
    assert (found["shape"], found["clients"]) == ([13], ["2", "10"])


def test_list_is_readable_and_says_how_to_get_the_rest() -> None:
    text = run("list")
    assert "data fetch cifar10" in text
    assert "needs oct_retina_subset.npz" in text
    assert "digits" in text


def test_show_counts_the_classes_of_digits() -> None:
    found = parsed("show")
    assert found["name"] == "digits"
    assert found["shape"] == [8, 8, 1]
    assert found["train"]["count"] == sum(found["train"]["per_class"]) == 1437
    assert found["test"]["count"] == 360
    text = run("show", "digits")
    assert "1,437" in text
    assert "8 x 8 pixels, grey" in text


def test_show_reads_a_file_of_the_users_own(tmp_path: Path) -> None:
    path = own_file(tmp_path)
    found = parsed("show", str(path))
    assert found["path"] == str(path)
    assert found["train"]["per_class"] == [1, 2, 3]
    assert found["class_names"] == ["0", "1", "2"]
    assert "own [x].npz: images of 9 x 7 pixels, RGB" in run("show", str(path))


def test_show_counts_pictures_that_have_no_labels(home: Path) -> None:
    pictures = np.zeros((8, 32, 32, 3), np.uint8)
    np.savez(home / "southwest.npz", x_train=pictures, x_test=pictures[:4])
    found = parsed("show", "southwest")
    assert (found["train"]["count"], found["test"]["count"]) == (8, 4)
    assert found["num_classes"] == 0
    assert "all" in run("show", "southwest")


def test_class_names_are_shown_where_they_fit(home: Path) -> None:
    images, labels = np.zeros((10, 32, 32, 3), np.uint8), np.arange(10)
    path = home / "cifar10.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert "9 truck" in run("show", "cifar10")
    labels %= 3
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert parsed("show", "cifar10")["class_names"] == ["0", "1", "2"]


def test_fetch_says_when_there_is_nothing_to_do(home: Path) -> None:
    own_file(home).rename(home / "mnist.npz")
    assert f"mnist is already at {home / 'mnist.npz'}" in run("fetch", "mnist")
    found = parsed("fetch", "mnist")
    assert found["fetched"] is False
    assert found["bytes"] == (home / "mnist.npz").stat().st_size


def test_a_failed_fetch_raises_an_error_for_the_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = Recipe((Download("http://127.0.0.1:9/x", "md5:0"),))
    monkeypatch.setitem(RECIPES, "octmnist", recipe)
    with pytest.raises(FetchError, match=r"put octmnist\.npz"):
        run("fetch", "octmnist")


@pytest.mark.parametrize("words", [("show", "minst"), ("fetch", "minst")])
def test_an_unknown_name_raises_an_error_for_the_entry_point(
    words: tuple[str, ...],
) -> None:
    with pytest.raises(InvalidInputError, match="no data set 'minst'"):
        run(*words)


@pytest.mark.parametrize("command", ["list", "fetch", "show"])
def test_every_command_explains_itself(command: str) -> None:
    assert "--json" in run(command, "--help")
