"""What clean images say about a cleaned model, by hand and on a real run."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import run as fastfedul

pytest.importorskip("torch", reason="training needs the extra torch")

from fastfedul import (
    FastFedUL,
    InvalidInputError,
    LedgerReader,
    Model,
    NoSkew,
    Params,
    UnlearnRequest,
)
from fastfedul.params import Array
from fastfedul.runs.evaluation_source import EvaluationSource, write_source
from fastfedul.runs.training import RunConfig, prepare, train
from fastfedul.runs.validation import Validation, open_validation

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
    config = RunConfig.from_options(**OPTIONS)
    train(config, folder)
    server = prepare(config).server
    np.savez(folder.parent / "own.npz", images=server.images, labels=server.labels)
    np.savez(folder.parent / "bare.npz", images=server.images)
    return folder


BEFORE, AFTER = (
    Model(Params.of({"w": np.full(1, value, np.float32)})) for value in (0, 1)
)


def judge_of(
    before: list[int], after: list[int], labels: list[int] | None
) -> Validation:
    """Images on which two models answer as they are told."""

    def predict(model: Model, inputs: Array) -> Array:
        answers = after if model is AFTER else before
        found: Array = np.eye(3)[np.array(answers)]
        return found

    images = np.zeros((len(before), 1, 8, 8), np.float32)
    known = None if labels is None else np.array(labels, np.int64)
    return Validation(images, known, predict)


def test_with_labels_it_counts_right_answers_and_pairs_them() -> None:
    """Of 100 images 9 are lost and 3 gained, and one changes from wrong to wrong."""
    labels = [0] * 100
    before = [0] * 90 + [1] * 10
    after = [1] * 9 + [0] * 81 + [0] * 3 + [2] + [1] * 6
    found = judge_of(before, after, labels).judge(BEFORE, AFTER)
    assert (found.total, found.right_before, found.right_after) == (100, 90, 84)
    assert found.changed == 9 + 3 + 1
    assert found.drop == pytest.approx(0.06)
    # Agresti and Min: half an image is added to each of the four outcomes, which
    # makes 9.5 lost and 3.5 gained of 102. The difference has the mean 6 / 102 and
    # the standard error sqrt(13 - 36 / 102) / 102.
    error = 1.959963984540054 * math.sqrt(13 - 36 / 102) / 102
    assert found.interval == pytest.approx((6 / 102 - error, 6 / 102 + error))


def wilson(share: float, total: int) -> tuple[float, float]:
    z = 1.959963984540054
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total)
    half *= math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return centre - half, centre + half


def test_without_labels_every_image_that_changes_class_is_lost() -> None:
    found = judge_of([0] * 50, [0] * 44 + [1] * 6, None).judge(BEFORE, AFTER)
    assert (found.total, found.changed) == (50, 6)
    assert found.right_before is found.right_after is None
    assert found.drop == pytest.approx(0.12)
    assert found.interval == pytest.approx(wilson(0.12, 50), abs=1e-9)


def test_a_model_that_answers_as_before_loses_nothing() -> None:
    for labels in (None, [0, 1, 2, 0]):
        found = judge_of([0, 1, 2, 1], [0, 1, 2, 1], labels).judge(BEFORE, AFTER)
        assert (found.changed, found.drop) == (0, 0)
        assert found.interval[0] <= 0 <= found.interval[1]


def test_a_model_that_does_better_has_a_drop_below_zero() -> None:
    found = judge_of([1] * 20, [0] * 20, [0] * 20).judge(BEFORE, AFTER)
    assert found.drop == -1
    assert found.interval[1] < 0


@pytest.mark.slow
@pytest.mark.parametrize("file", ["own.npz", "bare.npz"])
def test_the_command_reports_how_the_cleaned_model_does(run: Path, file: str) -> None:
    asked = ("forget", run, "client-0", "--validation", run.parent / file, "--dry-run")
    found = json.loads(fastfedul(*asked, "--json").stdout)["validation"]
    with LedgerReader(run) as ledger:
        images = open_validation(run.parent / file, ledger, run)
        request = UnlearnRequest(ledger, frozenset({"client-0"}))
        cleaned = Model(FastFedUL()(request).params, ledger.final.buffers)
        judged = images.judge(ledger.final, cleaned)
    assert found == {**asdict(judged), "interval": list(judged.interval)}
    assert found["total"] == 200
    assert (found["right_before"] is None) == (file == "bare.npz")
    shown = " ".join(fastfedul(*asked).stdout.split())
    said = "images change class" if file == "bare.npz" else "images right before"
    assert said in shown


@pytest.mark.slow
def test_a_result_that_loses_more_than_allowed_is_not_written(
    run: Path, tmp_path: Path
) -> None:
    """Labels that the model gives before: whatever changes is lost."""
    with LedgerReader(run) as ledger:
        images = open_validation(run.parent / "bare.npz", ledger, run)
        answers = images.answers(ledger.final)
        cleaned = Model(
            FastFedUL(skew=NoSkew())(
                UnlearnRequest(ledger, frozenset({"client-0"}))
            ).params,
            ledger.final.buffers,
        )
        lost = float(np.mean(images.answers(cleaned) != answers))
    assert lost > 0
    own = tmp_path / "own.npz"
    with np.load(run.parent / "bare.npz") as arrays:
        np.savez(own, images=arrays["images"], labels=answers)
    out = tmp_path / "clean.safetensors"
    asked = ("forget", run, "client-0", "--skew", "none", "--validation", own)
    limit = ("--max-drop", lost / 2)
    refused = fastfedul(*asked, *limit, "--out", out, code=1)
    assert "--max-drop; nothing was written" in " ".join(refused.stderr.split())
    assert not out.exists()
    with LedgerReader(run) as ledger:
        assert ledger.clients()["client-0"].state == "active"
    allowed = ("--max-drop", min(1.0, lost + 0.01), "--dry-run", "--json")
    found = json.loads(fastfedul(*asked, *allowed).stdout)["validation"]
    assert found["drop"] == pytest.approx(lost)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (
            {"pixels": np.zeros((2, 8, 8), np.uint8)},
            "it needs images or val_images or x_val",
        ),
        ({"images": np.zeros((2, 8), np.uint8)}, "images are (number, height"),
        (
            {"images": np.zeros((2, 8, 8), np.uint8), "labels": np.zeros(3, int)},
            "2 examples under images but 3 labels",
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
    error = fastfedul(*asked, code=2).stderr
    assert said in " ".join(error.split())


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
    train(
        RunConfig.from_options(model=network, rounds=1, train_size=300, clients=3),
        folder,
    )
    with LedgerReader(folder) as ledger:
        images = open_validation(run.parent / "own.npz", ledger, folder)
        assert images.predict(ledger.final, images.inputs).shape == (200, 10)
        narrow = tmp_path / "narrow.npz"
        np.savez(narrow, images=np.zeros((2, 7, 8), np.uint8))
        with pytest.raises(InvalidInputError, match=r"\(7, 8, 1\), but .*\(8, 8, 1\)"):
            open_validation(narrow, ledger, folder)
        alone = ledger_alone(folder, tmp_path, "digits-cnn")
        with pytest.raises(InvalidInputError, match="name the right network in alone"):
            open_validation(run.parent / "own.npz", ledger, alone)


def ledger_alone(run: Path, folder: Path, model: str) -> Path:
    """Return a copy of a run's ledger that is in no run, with a file that names it."""
    alone = folder / "alone"
    if not alone.exists():
        shutil.copytree(run / "ledger", alone)
    write_source(alone, EvaluationSource(model=model, test="none.npz"))
    return alone


def test_without_the_runs_data_the_images_are_said_not_to_fit(
    run: Path, tmp_path: Path
) -> None:
    narrow = tmp_path / "narrow.npz"
    np.savez(narrow, images=np.zeros((2, 7, 8), np.uint8))
    alone = ledger_alone(run, tmp_path, "auto")
    with LedgerReader(alone) as ledger:
        images = open_validation(run.parent / "own.npz", ledger, alone)
        assert len(images.inputs) == 200
        with pytest.raises(InvalidInputError, match=r"\(7, 8, 1\), which do not fit"):
            open_validation(narrow, ledger, alone)
        ledger_alone(run, tmp_path, "no.such.module:build")
        with pytest.raises(InvalidInputError, match="cannot load the model"):
            open_validation(narrow, ledger, alone)


@pytest.mark.parametrize("path", ["run", "ledger"])
def test_pixels_of_another_scale_are_refused(
    path: str, run: Path, tmp_path: Path
) -> None:
    """scikit-learn's own digits run from 0 to 16, and the training's to 255."""
    with np.load(run.parent / "own.npz") as arrays:
        images, labels = arrays["images"], arrays["labels"]
    dark = tmp_path / "dark.npz"
    np.savez(dark, images=images // 16, labels=labels)
    place = run if path == "run" else ledger_alone(run, tmp_path, "auto")
    with LedgerReader(run) as ledger:
        with pytest.raises(InvalidInputError, match=r"up to 15, .* up to 255"):
            open_validation(dark, ledger, place)
        np.savez(dark, images=images / 255.0, labels=labels)
        assert len(open_validation(dark, ledger, place).inputs) == 200
