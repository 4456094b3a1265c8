"""`fastfedul trace` and `fastfedul contribution`, as a user runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import one_line, run, run_json

pytest.importorskip("torch", reason="training needs the extra torch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an attacked run, an honest run, and files of inputs."""
    folder = tmp_path_factory.mktemp("trace")
    usual = ("--clients", 6, "--rounds", 8, "--workers", 1, "--seed", 11)
    attack = ("--attack", "pixel", "--poison-ratio", 0.5)
    run("train", "run", *usual, *attack, cwd=folder)
    run("train", "sums", *usual, *attack, "--keep", "sums", cwd=folder)
    run("train", "honest", *usual, cwd=folder)
    bad = np.zeros((1, 8, 8), np.uint8)
    np.savez(folder / "not.npz", images=bad, unwanted=np.array([11]))
    np.savez(folder / "small.npz", images=np.zeros((1, 5, 5), np.uint8))
    np.savez(folder / "empty.npz", images=np.zeros((0, 8, 8), np.uint8))
    return folder


@pytest.mark.parametrize("name", ["run", "sums"])
def test_one_backdoor_image_is_traced_to_the_attacker(folder: Path, name: str) -> None:
    found = run_json("trace", name, "--backdoor", 1, cwd=folder)
    assert found["clients"][0]["client"] == "client-0"
    assert found["verdict"] == "client-0 stands out"
    assert {"client", "score", "p_value"} <= set(found["clients"][0])
    assert (found["clients"][0]["trajectory"] is None) == (name == "sums")


def test_fewer_backdoor_images_than_asked_for_are_told(folder: Path) -> None:
    found = run_json("trace", "run", "--backdoor", 10_000, cwd=folder)
    told = found["notes"][0]
    assert told.startswith("the attack works on ")
    assert f"traces {found['inputs']:,} and not 10,000" in told


def test_quiet_names_the_attacker_and_page_shows_it(folder: Path) -> None:
    page = folder / "page.html"
    words = ("trace", "run", "--backdoor", 3, "--quiet", "--out", page)
    assert run(*words, cwd=folder).stdout == "client-0\n"
    text = page.read_text()
    assert "without client-0" in text
    assert "data:image/png" in text


def test_nobody_stands_out_for_right_answers(folder: Path) -> None:
    from fastfedul.data.sources import load

    data = load("digits")
    np.savez(folder / "right.npz", images=data.test_images[:3])
    words = ("trace", "honest", "--inputs", "right.npz")
    # True classes in the file do not count as unwanted answers.
    wrong = (data.test_labels[:3] + 1) % 10
    np.savez(folder / "classes.npz", images=data.test_images[:3], labels=wrong)
    again = ("trace", "honest", "--inputs", "classes.npz")
    assert run_json(*again, cwd=folder) == run_json(*words, cwd=folder)
    found = run(*words, "--quiet", code=3, cwd=folder)
    assert found.stdout == ""
    assert run_json(*words, cwd=folder)["verdict"] == "nobody stands out"
    assert "Verdict: nobody stands out." in run(*words, cwd=folder).stdout
    shown = run("trace", "run", "--backdoor", 10, cwd=folder).stdout
    assert "Verdict: client-0 stands out." in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run",), "--inputs FILE.npz"),
        (("run", "--inputs", "small.npz"), "shape"),
        (("run", "--inputs", "empty.npz"), "no image"),
        (("run", "--inputs", "missing.npz"), "there is no file"),
        (("honest", "--backdoor", "1"), "nobody attacks"),
        (("run", "--backdoor", "0"), "--backdoor"),
        (("run", "--inputs", "not.npz"), "labels 11 to 11, but the model has 10"),
    ],
)
def test_bad_input_gets_one_line(
    folder: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in one_line(run("trace", *words, code=2, cwd=folder, columns=300))


def test_contribution_has_a_row_for_every_client(folder: Path) -> None:
    page = folder / "worth.html"
    words = ("contribution", "run", "--shapley", 2, "--out", page)
    found = run_json(*words, cwd=folder)
    assert len(found["clients"]) == 6
    assert found["permutations"] == 2
    low, high = found["clients"][0]["loss_interval"]
    assert low <= found["clients"][0]["loss"] <= high
    assert "What is each client worth?" in page.read_text()
