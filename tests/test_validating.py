"""The damping that clean images choose, on a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra torch")

from fastfedul import (
    FastFedUL,
    InvalidInputError,
    LedgerReader,
    Model,
    UnlearnRefusedError,
    UnlearnRequest,
)
from fastfedul.experiment import RunConfig, prepare, train
from fastfedul.params import Array
from fastfedul.validating import (
    TRIED_SPREADS,
    ByValidation,
    Validation,
    open_validation,
)

OPTIONS: dict[str, Any] = {
    "attack": "pixel",
    "poison_ratio": 0.4,
    "rounds": 8,
    "server_images": 200,
    "seed": 7,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, with the server's own images beside it, labelled and not."""
    folder = tmp_path_factory.mktemp("validating") / "run"
    config = RunConfig(**OPTIONS)
    train(folder, config)
    server = prepare(config).server
    np.savez(folder.parent / "own.npz", images=server.images, labels=server.labels)
    np.savez(folder.parent / "bare.npz", images=server.images)
    return folder


def fastfedul(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "fastfedul", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("file", ["own.npz", "bare.npz"])
def test_the_least_damping_within_the_tolerance_is_taken(run: Path, file: str) -> None:
    with LedgerReader(run) as ledger:
        images = open_validation(run.parent / file, ledger, run, None)
        request = UnlearnRequest(ledger, frozenset({"client-0"}))
        results = {
            tolerance: ByValidation(FastFedUL(), images, tolerance)(request)
            for tolerance in (0.0, 0.05, 1.0)
        }
    for tolerance, result in results.items():
        choice = result.choice
        assert choice is not None
        assert choice.source == "validation"
        assert tuple(value for value, _ in choice.curve) == TRIED_SPREADS
        drops = dict(choice.curve)
        stronger = [value for value in TRIED_SPREADS if value >= choice.value]
        assert choice.kept == all(drops[value] <= tolerance for value in stronger)
        weaker = [value for value in TRIED_SPREADS if value < choice.value]
        if choice.kept and weaker:
            assert drops[weaker[-1]] > tolerance
    chosen = [results[tolerance].spread or 0.0 for tolerance in (0.0, 0.05, 1.0)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 0.0


def test_the_scalar_can_be_chosen_too_and_what_is_given_cannot(run: Path) -> None:
    with LedgerReader(run) as ledger:
        images = open_validation(run.parent / "own.npz", ledger, run, None)
        request = UnlearnRequest(ledger, frozenset({"client-0"}))
        found = ByValidation(FastFedUL(skew="scalar"), images, 0.02)(request)
        assert found.choice is not None
        assert found.choice.setting == "damping"
        assert found.damping[0] == found.choice.value
        with pytest.raises(InvalidInputError, match="nothing to choose"):
            ByValidation(FastFedUL(damping=0.1), images)(request)
        with pytest.raises(InvalidInputError, match="from 0 to 1"):
            ByValidation(FastFedUL(), images, 2.0)
        with pytest.raises(UnlearnRefusedError, match="nothing was written"):
            # Removing all of it costs more images than none.
            ByValidation(FastFedUL(skew="scalar"), images, 1.0, 0.0)(request)


def test_the_command_reports_the_choice_and_writes_nothing_that_loses_more(
    run: Path, tmp_path: Path
) -> None:
    own = run.parent / "own.npz"
    asked = ("forget", run, "client-0", "--validation", own)
    found = json.loads(fastfedul(*asked, "--dry-run", "--json").stdout)
    assert found["choice"]["source"] == "validation"
    assert found["spread"] == found["choice"]["value"]
    out = tmp_path / "clean.safetensors"
    limits = ("--tolerance", 1, "--skew", "scalar", "--max-drop", 0)
    refused = fastfedul(*asked, *limits, "--out", out, code=1)
    assert "--max-drop" in refused.stderr
    assert not out.exists()
    with LedgerReader(run) as ledger:
        assert ledger.clients()["client-0"].state == "active"


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"pixels": np.zeros((2, 8, 8), np.uint8)}, "it needs images, labels"),
        ({"images": np.zeros((2, 8), np.uint8)}, "images are (number, height"),
        (
            {"images": np.zeros((2, 8, 8), np.uint8), "labels": np.zeros(3, int)},
            "2 images under images but 3 labels",
        ),
        *(
            (
                {"images": np.zeros((2, *shape), np.uint8)},
                f"has images of shape {shape}, but the network was trained on images "
                "of shape (8, 8, 1)",
            )
            for shape in ((28, 28, 1), (7, 8, 1), (8, 8, 3), (1, 1, 1))
        ),
        (
            {"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([5, 14])},
            "has labels 5 to 14, but the model has 10 classes",
        ),
        (
            {"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([-1, 3])},
            "has labels -1 to 3 in labels",
        ),
    ],
)
def test_bad_images_get_one_line(
    run: Path, tmp_path: Path, arrays: dict[str, Any], said: str
) -> None:
    file = tmp_path / "bad.npz"
    np.savez(file, **arrays)
    asked = ("forget", run, "client-0", "--dry-run", "--validation", file)
    error = fastfedul(*asked, code=1).stderr
    assert said in " ".join(error.split())


def test_a_result_that_loses_more_is_refused_even_if_it_may_be_chance(
    run: Path,
) -> None:
    """Six of fifty are 12 %, and 7.4 % beyond a standard error."""
    with LedgerReader(run) as ledger:
        final = ledger.final.params.flat

        def predict(model: Model, inputs: Array) -> Array:
            answers = np.eye(2)[np.zeros(len(inputs), int)]
            if not np.array_equal(model.params.flat, final):
                answers[:6] = [0, 1]
            return answers

        images = np.zeros((50, 1, 8, 8), np.float32)
        few = Validation(images, np.zeros(50, np.int64), predict)
        request = UnlearnRequest(ledger, frozenset({"client-0"}))
        with pytest.raises(UnlearnRefusedError, match=r"loses 12\.0%"):
            ByValidation(FastFedUL(), few, max_drop=0.08)(request)
        found = ByValidation(FastFedUL(), few, max_drop=0.12)(request)
    assert found.choice is not None
    assert found.choice.curve[0][1] == pytest.approx(0.074, abs=0.001)


OWN = """
from torch import nn


class HeadFirst(nn.Module):
    wide = 1

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.head = nn.Linear(32, num_classes * self.wide)
        self.body = nn.Linear(64, 32)

    def forward(self, images):
        found = self.head(self.body(images.flatten(1)).relu())
        return found.unflatten(1, (self.num_classes, self.wide)).amax(2)


class TwoPerClass(HeadFirst):
    wide = 2
"""


@pytest.mark.parametrize("name", ["HeadFirst", "TwoPerClass"])
def test_the_classes_of_a_users_own_network_are_found(
    name: str, tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it declares last, and if the number stands in none of its shapes."""
    (tmp_path / f"own_{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    network = f"own_{name}:{name}"
    folder = tmp_path / "run"
    train(folder, RunConfig(model=network, rounds=1, train_size=300, clients=3))
    with LedgerReader(folder) as ledger:
        images = open_validation(run.parent / "own.npz", ledger, folder, None)
        assert images.predict(ledger.final, images.inputs).shape == (200, 10)
        narrow = tmp_path / "narrow.npz"
        np.savez(narrow, images=np.zeros((2, 7, 8), np.uint8))
        with pytest.raises(InvalidInputError, match=r"\(7, 8, 1\), but .*\(8, 8, 1\)"):
            open_validation(narrow, ledger, folder, None)
        with pytest.raises(InvalidInputError, match="another network than that"):
            open_validation(run.parent / "own.npz", ledger, folder, "digits-cnn")


def test_without_the_runs_data_the_images_are_said_not_to_fit(
    run: Path, tmp_path: Path
) -> None:
    narrow = tmp_path / "narrow.npz"
    np.savez(narrow, images=np.zeros((2, 7, 8), np.uint8))
    with LedgerReader(run) as ledger:
        ledger_alone = run / "ledger"
        images = open_validation(run.parent / "own.npz", ledger, ledger_alone, "auto")
        assert len(images.inputs) == 200
        with pytest.raises(InvalidInputError, match=r"\(7, 8, 1\), which do not fit"):
            open_validation(narrow, ledger, ledger_alone, "auto")
        with pytest.raises(InvalidInputError, match="cannot load the model"):
            open_validation(narrow, ledger, ledger_alone, "no.such.module:build")
