"""PyTorch as a trainer: the same as plain PyTorch, and a function of its arguments."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fastfedul.data.dataset import to_model_input
from fastfedul.data.sources import load
from fastfedul.errors import InvalidInputError, MissingPackageError
from fastfedul.federation.trainer import LocalTraining
from fastfedul.integrations.torch import MODELS, TorchTrainer
from fastfedul.params import Array, Params
from fastfedul.records import Model
from fastfedul.rng import stream

torch = pytest.importorskip("torch")

SHAPES = {"digits-cnn": (8, 8, 1), "mnist-cnn": (28, 28, 1), "cifar-cnn": (32, 32, 3)}
SIZES = {"digits-cnn": 38_282, "mnist-cnn": 215_370, "cifar-cnn": 188_810}

NORMALISED = """
from torch import nn


def build(image_shape, num_classes):
    height, width, channels = image_shape
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5),
        nn.Flatten(), nn.Linear(4 * (height - 2) * (width - 2), num_classes),
    )


class Viewing(nn.Module):
    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.frozen = nn.Conv2d(image_shape[2], 4, 3)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(4 * 36, num_classes)

    def forward(self, images):
        return self.last(self.frozen(images).view(images.shape[0], -1))


number = 5


def list_of(image_shape, num_classes):
    return []


def few(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def flat(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(0), nn.Linear(128, num_classes))


def narrow(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(63, num_classes))


def leaves(image_shape, num_classes):
    raise SystemExit(3)
"""


def examples(shape: tuple[int, int, int], count: int) -> tuple[Array, Array]:
    rng = stream(9, "test examples", *shape)
    images = rng.integers(0, 256, (count, *shape)).astype(np.uint8)
    return to_model_input(images), rng.integers(0, 10, count)


def plain_sgd(
    trainer: TorchTrainer, model: Model, inputs: Array, labels: Array, seed: int
) -> dict[str, Array]:
    """Train as anybody would: contiguous weights, torch.optim, the same batches."""
    from fastfedul.integrations.torch.models import build

    local = trainer.local
    network = build(trainer.model, trainer.image_shape, trainer.num_classes)
    state = {name: torch.tensor(value) for name, value in model.params.items()}
    network.load_state_dict(state)
    for parameter in network.parameters():
        parameter.data = parameter.detach().contiguous()
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=local.lr,
        momentum=local.momentum,
        weight_decay=local.weight_decay,
    )
    rng = stream(seed, "order")
    rng.integers(2**63)
    for _ in range(int(local.epochs)):
        order = torch.from_numpy(rng.permutation(len(labels)))
        for batch in order.split(local.batch_size):
            optimizer.zero_grad()
            logits = network(torch.tensor(inputs)[batch])
            loss = torch.nn.functional.cross_entropy(
                logits, torch.tensor(labels)[batch]
            )
            loss.backward()
            optimizer.step()
    return {name: p.detach().numpy() for name, p in network.named_parameters()}


@pytest.mark.parametrize(
    "local",
    [
        LocalTraining(epochs=2, batch_size=16, lr=0.05),
        LocalTraining(epochs=2, batch_size=9, lr=0.02, momentum=0.9),
        LocalTraining(batch_size=16, lr=0.05, momentum=0.5, weight_decay=0.01),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_a_plain_loop_with_torch_optim(
    name: str, local: LocalTraining
) -> None:
    trainer = TorchTrainer(shape=SHAPES[name], num_classes=10, model=name, local=local)
    inputs, labels = examples(SHAPES[name], 25)
    start = trainer.initial(4)
    found = trainer.train(start, inputs, labels, stream(8, "order"))
    expected = plain_sgd(trainer, start, inputs, labels, 8)
    moved = 0.0
    for key, value in expected.items():
        np.testing.assert_allclose(found.params[key], value, rtol=1e-4, atol=2e-5)
        moved = max(moved, float(np.abs(value - start.params[key]).max()))
    assert moved > 1e-3


def digits_trainer(**local: float) -> TorchTrainer:
    return TorchTrainer(
        shape=(8, 8, 1),
        num_classes=10,
        local=LocalTraining(**local),  # type: ignore[arg-type]
    )


def test_half_an_epoch_is_half_of_the_batches_of_a_whole_one() -> None:
    inputs, labels = examples((8, 8, 1), 48)
    trainer = digits_trainer(batch_size=12)
    start = trainer.initial(0)
    half = LocalTraining(batch_size=12, epochs=0.5)
    found = trainer.train(start, inputs, labels, stream(3, "order"), half)
    rng = stream(3, "order")
    rng.integers(2**63)
    first = rng.permutation(48)[:24]
    by_hand = start
    for places in (first[:12], first[12:]):
        _, gradient = trainer.gradient(by_hand, inputs[places], labels[places])
        flat = by_hand.params.flat - np.float32(0.05) * gradient
        by_hand = Model(Params(start.params.layout, flat))
    np.testing.assert_allclose(found.params.flat, by_hand.params.flat, atol=1e-6)


def test_a_single_example_that_is_left_over_joins_the_batch_before() -> None:
    inputs, labels = examples((8, 8, 1), 33)
    trainer = digits_trainer(batch_size=32)
    start = trainer.initial(0)
    found = trainer.train(start, inputs, labels, stream(3, "order"))
    _, gradient = trainer.gradient(start, inputs, labels)
    expected = start.params.flat - np.float32(0.05) * gradient
    np.testing.assert_allclose(found.params.flat, expected, atol=1e-6)


def test_a_gradient_is_the_slope_of_the_loss() -> None:
    inputs, labels = examples((8, 8, 1), 20)
    trainer = digits_trainer()
    model = trainer.initial(2)
    for targets in (labels, np.full((20, 10), 0.1, np.float32)):
        _, gradient = trainer.gradient(model, inputs, targets, 3.0)
        step = 0.02 * gradient / np.linalg.norm(gradient)
        losses = [
            trainer.gradient(
                Model(Params(model.params.layout, model.params.flat + sign * step)),
                inputs,
                targets,
                3.0,
            )[0]
            for sign in (-1, 1)
        ]
        slope = (losses[1] - losses[0]) / 0.04
        assert slope == pytest.approx(float(np.linalg.norm(gradient)), rel=0.05)


def test_channels_are_rectified_and_averaged_over_the_image() -> None:
    inputs, _ = examples((8, 8, 1), 3)
    trainer = digits_trainer()
    model = trainer.initial(2)
    found = trainer.channels(model, inputs)
    assert {name: rows.shape for name, rows in found.items()} == {
        "0": (3, 16),
        "2": (3, 32),
    }
    weight = torch.tensor(model.params["0.weight"])
    bias = torch.tensor(model.params["0.bias"])
    output = torch.nn.functional.conv2d(torch.tensor(inputs), weight, bias, padding=1)
    expected = output.relu().mean(dim=(2, 3)).numpy()
    np.testing.assert_allclose(found["0"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_built_in_networks_have_the_size_they_are_said_to_have(name: str) -> None:
    trainer = TorchTrainer(shape=SHAPES[name], num_classes=10)
    model = trainer.initial(0)
    assert model.params.layout.size == SIZES[name]
    inputs, _ = examples(SHAPES[name], 3)
    logits = trainer.predict(model, inputs)
    assert logits.shape == (3, 10)
    assert logits.dtype == np.float32


def test_the_initial_model_depends_on_the_seed_alone() -> None:
    trainer = TorchTrainer(shape=(8, 8, 1), num_classes=10)
    torch.manual_seed(1)
    first = trainer.initial(5).params.flat
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = TorchTrainer(shape=(8, 8, 1), num_classes=10).initial(5).params.flat
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != trainer.initial(6).params.flat.tobytes()
    assert torch.equal(state, torch.get_rng_state())


def test_training_depends_on_nothing_but_its_arguments() -> None:
    local = LocalTraining(momentum=0.9)
    trainer = TorchTrainer(shape=(8, 8, 1), num_classes=10, local=local)
    inputs, labels = examples((8, 8, 1), 70)
    start = trainer.initial(0)
    kept = start.params.flat.copy()
    threads = torch.get_num_threads()
    first = trainer.train(start, inputs, labels, stream(1, "order"))
    trainer.train(first, inputs[:9], labels[:9], stream(2, "order"))
    trainer.predict(first, inputs)
    again = trainer.train(start, inputs, labels, stream(1, "order"))
    assert first.params.flat.tobytes() == again.params.flat.tobytes()
    assert start.params.flat.tobytes() == kept.tobytes()
    assert torch.get_num_threads() == threads


def test_it_learns_digits() -> None:
    digits = load("digits")
    local = LocalTraining(epochs=6, momentum=0.9)
    trainer = TorchTrainer(shape=(8, 8, 1), num_classes=10, local=local)
    model = trainer.train(
        trainer.initial(0),
        to_model_input(digits.train_images),
        digits.train_labels,
        stream(0, "order"),
    )
    logits = trainer.predict(model, to_model_input(digits.test_images))
    assert np.mean(logits.argmax(axis=1) == digits.test_labels) > 0.93


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NORMALISED)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_users_own_network_keeps_its_buffers_apart(own_models: str) -> None:
    model = f"{own_models}:build"
    trainer = TorchTrainer(shape=(8, 8, 1), num_classes=10, model=model)
    inputs, labels = examples((8, 8, 1), 40)
    start = trainer.initial(0)
    assert set(start.buffers) == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert not set(start.buffers) & set(start.params)
    first = trainer.train(start, inputs, labels, stream(1, "order"))
    again = trainer.train(start, inputs, labels, stream(1, "order"))
    assert first.params.flat.tobytes() == again.params.flat.tobytes()
    assert first.buffers["1.num_batches_tracked"] == 2
    assert start.buffers["1.num_batches_tracked"] == 0
    logits = trainer.predict(first, inputs)
    np.testing.assert_array_equal(logits, trainer.predict(first, inputs))


def test_frozen_and_unused_parameters_stay_as_they_are(own_models: str) -> None:
    local = LocalTraining(momentum=0.9)
    trainer = TorchTrainer(
        shape=(8, 8, 1),
        num_classes=10,
        model=f"{own_models}:Viewing",
        local=local,
    )
    inputs, labels = examples((8, 8, 1), 40)
    start = trainer.initial(0)
    after = trainer.train(start, inputs, labels, stream(1, "order"))
    for name in start.params:
        same = np.array_equal(start.params[name], after.params[name])
        assert same == (not name.startswith("last")), name


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet", "there is no model 'resnet'"),
        ("no.such.module:build", "cannot load the model"),
        ("{own}:missing", "cannot load the model"),
        ("{own}:number", "not a function"),
        ("{own}:list_of", "returned a list"),
        ("{own}:few", "gives 5 outputs and the data have 10 classes"),
        ("{own}:flat", r"outputs of shape \(10,\) for 2 images"),
        ("{own}:narrow", r"images of shape \(8, 8, 1\): RuntimeError"),
        ("{own}:leaves", "leaves failed: SystemExit: 3"),
    ],
)
def test_a_model_that_is_of_no_use_is_refused(
    model: str, message: str, own_models: str
) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        TorchTrainer(
            shape=(8, 8, 1), num_classes=10, model=model.format(own=own_models)
        ).initial(0)
    assert "\n" not in str(caught.value)


def test_a_model_of_another_kind_is_refused() -> None:
    digits = TorchTrainer(shape=(8, 8, 1), num_classes=10)
    mnist = TorchTrainer(shape=(28, 28, 1), num_classes=10)
    inputs, _ = examples((8, 8, 1), 3)
    with pytest.raises(InvalidInputError, match="another kind"):
        digits.predict(mnist.initial(0), inputs)


def test_describing_a_trainer_imports_no_torch() -> None:
    code = (
        "import sys; from fastfedul.integrations.torch import TorchTrainer;"
        "TorchTrainer(shape=(8, 8, 1), num_classes=10);"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"


def test_without_torch_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "fastfedul.integrations.torch.trainer.find_spec", lambda name: None
    )
    with pytest.raises(ImportError, match=r"fastfedul\[torch\]") as caught:
        TorchTrainer(shape=(8, 8, 1), num_classes=10)
    assert isinstance(caught.value, MissingPackageError)


def test_more_epochs_go_further() -> None:
    inputs, labels = examples((8, 8, 1), 64)
    distances = []
    for epochs in (1, 2, 4):
        trainer = TorchTrainer(
            shape=(8, 8, 1), num_classes=10, local=LocalTraining(epochs=epochs)
        )
        start = trainer.initial(0)
        after = trainer.train(start, inputs, labels, stream(1, "order"))
        gap = after.params.flat - start.params.flat
        distances.append(float(np.linalg.norm(gap)))
    assert all(near < far for near, far in pairwise(distances))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs is 0; choose"),
        ({"batch_size": 0}, "whole number from 1"),
        ({"lr": 0.0}, "learning rate is 0.0; choose"),
        ({"lr": float("nan")}, "learning rate is nan; choose"),
        ({"momentum": 1.0}, "below 1"),
        ({"weight_decay": -1.0}, "0 or more"),
    ],
)
def test_bad_hyperparameters_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LocalTraining(**wrong)  # type: ignore[arg-type]
