"""CDP: scores by hand, channels that stay cut off, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Clients
from fastfedul.federation.local import LocalResult
from fastfedul.federation.trainer import LocalTraining
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.methods.cdp import (
    CDP,
    ClassActivity,
    channel_mask,
    channel_scores,
    class_means,
    joined,
    top_channels,
)
from fastfedul.methods.protocol import Needs, UnlearnRequest, measured
from fastfedul.params import Params
from fastfedul.records import ClientUpdate, Model, Round
from fastfedul.runs.config import RunConfig
from fastfedul.runs.preparation import federation_for, prepare, start_workers
from tests.support.small_run import SmallRun

LABEL = 2
"""What the attackers of the small run want."""

NETWORKS = """
from torch import nn


def normalised(image_shape, num_classes):
    height, width, channels = image_shape
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * height * width, num_classes),
    )


def linear(image_shape, num_classes):
    height, width, channels = image_shape
    return nn.Sequential(
        nn.Flatten(), nn.Linear(height * width * channels, num_classes)
    )
"""


@pytest.fixture
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cdp_networks.py").write_text(NETWORKS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cdp_networks", raising=False)
    return "cdp_networks"


def request_with(model: str) -> UnlearnRequest:
    """Return a request to a federation of four that has done nothing yet."""
    config = RunConfig.from_options(
        clients=4, rounds=1, epochs=1, train_size=240, model=model, workers=1
    )
    prepared = prepare(config)
    workers = start_workers(prepared)
    ledger = MemoryLedger.create(workers.initial(0))
    nothing = Params.zeros(ledger.settings.layout)
    names = sorted(prepared.sizes)
    ledger.append(Round(0, tuple(ClientUpdate(n, 0.25, nothing) for n in names)))
    federation = federation_for(prepared, workers)
    return UnlearnRequest(ledger, frozenset({"client-0"}), federation)


def cut_off(params: Params) -> list[tuple[str, int]]:
    """Return the channels of a network whose weights and bias are all zero."""
    return [
        (name.removesuffix(".weight"), channel)
        for name in params
        if params[name].ndim == 4
        for channel, weights in enumerate(params[name])
        if not weights.any() and not bias_of(params, name, channel)
    ]


def bias_of(params: Params, name: str, channel: int) -> float:
    bias = name.replace("weight", "bias")
    return float(params[bias][channel]) if bias in params else 0.0


def test_scores_by_hand() -> None:
    rows = np.array([[4.0, 1.0, 1.0], [3.0, 3.0, 0.0], [1.0, 0.0, 5.0]])
    # Means of the rows are 2, 2, 2: channel 0 is active for two classes, 1 and 2 for
    # one each. Of three classes: IDF is log(4/3), log(4/2), log(4/2).
    rarity = np.log([4 / 3, 2, 2])
    np.testing.assert_allclose(
        channel_scores(rows, 1), np.array([0.5, 0.5, 0]) * rarity
    )
    np.testing.assert_allclose(
        channel_scores(rows, 2), np.array([1, 0, 5]) / 6 * rarity
    )


def test_a_channel_that_fires_for_one_class_only_is_the_first_to_go() -> None:
    rows = np.array([[9.0, 5.0, 0.0], [8.0, 5.0, 0.0], [9.0, 5.0, 8.0]])
    scores = {"0": channel_scores(rows, 2)}
    assert top_channels(scores, 0.05) == (("0", 2),)


def test_a_channel_as_active_as_the_average_counts_as_active() -> None:
    rows = np.array([[2.0, 2.0], [1.0, 3.0]])
    # Class 0 counts for both channels, class 1 for the second one.
    expected = [0.25 * np.log(3 / 2), 0.75 * np.log(3 / 3)]
    np.testing.assert_allclose(channel_scores(rows, 1), expected)


def test_a_class_on_which_nothing_is_active_scores_nothing() -> None:
    assert not channel_scores(np.array([[0.0, 0.0], [1.0, 2.0]]), 0).any()


def test_channels_of_all_layers_compete() -> None:
    scores = {"0": np.array([0.3, 0.1]), "2": np.array([0.4, 0.2, 0.5])}
    assert top_channels(scores, 0.6) == (("2", 2), ("2", 0), ("0", 0))
    assert top_channels(scores, 0.01) == (("2", 2),)


def test_a_client_averages_within_its_classes() -> None:
    labels = np.array([5, 1, 5])
    found = class_means(labels, {"0": np.array([[1.0, 2.0], [7.0, 8.0], [3.0, 6.0]])})
    assert found.classes.tolist() == [1, 5]
    assert found.counts.tolist() == [1, 2]
    np.testing.assert_array_equal(found.layers["0"], [[7, 8], [2, 4]])


def test_clients_count_by_their_images_and_only_for_classes_they_have() -> None:
    one = ClassActivity(
        np.array([0, 3]), np.array([1, 2]), {"0": np.array([[4.0], [6.0]])}
    )
    two = ClassActivity(np.array([0]), np.array([3]), {"0": np.array([[8.0]])})
    found = joined([one, two])
    assert found.classes.tolist() == [0, 3]
    assert found.counts.tolist() == [4, 2]
    # (1 * 4 + 3 * 8) / 4 = 7; class 3 is the first client's alone.
    np.testing.assert_array_equal(found.layers["0"], [[7], [6]])


def test_weights_and_bias_of_a_channel_are_masked() -> None:
    arrays = {
        "0.weight": np.zeros((2, 1, 1, 2), np.float32),
        "0.bias": np.zeros(2, np.float32),
        "1.weight": np.zeros((2, 2, 1, 1), np.float32),
    }
    mask = channel_mask(Params.of(arrays).layout, [("0", 1), ("1", 0)])
    expected = [0, 0, 1, 1, *(0, 1), *(1, 1, 0, 0)]
    np.testing.assert_array_equal(mask, np.array(expected, bool))
    alone = Params.of({"weight": np.zeros((2, 1, 1, 1), np.float32)}).layout
    assert channel_mask(alone, [("", 1)]).tolist() == [False, True]


def test_pruned_channels_stay_zero_to_the_end(small_run: SmallRun) -> None:
    # 5 % of 48 channels are two.
    before = cut_off(small_run.ledger.final.params)
    result = CDP(label=LABEL)(small_run.request())
    assert not before
    assert len(cut_off(result.params)) == 2
    pruned = CDP(label=LABEL, rounds=0)(small_run.request())
    assert cut_off(result.params) == cut_off(pruned.params)
    assert not np.array_equal(result.params.flat, pruned.params.flat)


def test_only_the_chosen_channels_change_without_repair(small_run: SmallRun) -> None:
    final = small_run.ledger.final.params
    pruned = CDP(label=LABEL, rounds=0)(small_run.request()).params
    mask = channel_mask(final.layout, cut_off(pruned))
    np.testing.assert_array_equal(pruned.flat[~mask], final.flat[~mask])
    assert not pruned.flat[mask].any()


def test_the_attack_weakens_and_the_model_stays_good(small_run: SmallRun) -> None:
    final = small_run.ledger.final
    result = measured(CDP(label=LABEL), small_run.request())
    after = result.model(final)
    assert small_run.main(after) > small_run.main(final) - 0.03
    assert small_run.backdoor(after) < small_run.backdoor(final) - 0.1
    # One look at each of the five others, and five rounds.
    assert result.client_calls == 5 + 5 * 5
    assert result.bytes_read == 0
    assert result.clients == ("client-0",)
    assert result.warnings == (
        "cdp removes class 2, not a client; against a backdoor this is the attack's "
        "label",
    )


def test_the_same_request_gives_the_same_bytes(small_run: SmallRun) -> None:
    method = CDP(label=LABEL, rounds=1)
    first, second = (method(small_run.request()) for _ in range(2))
    assert first.params.flat.tobytes() == second.params.flat.tobytes()


def test_forgotten_clients_have_no_part_in_it(small_run: SmallRun) -> None:
    request = small_run.request("client-0", "client-3")
    assert request.federation is not None
    asked: list[tuple[int, Sequence[str]]] = []
    seen: list[str] = []

    class Watched(Clients):
        def train(
            self,
            model: Model,
            index: int,
            names: Sequence[str],
            local: LocalTraining | None = None,
        ) -> Sequence[LocalResult]:
            asked.append((index, tuple(names)))
            return super().train(model, index, names, local)

        def at(self, name: str) -> Any:
            seen.append(name)
            return super().at(name)

    old = request.federation.clients
    watched = replace(request.federation, clients=Watched(old.workers, old.data))
    result = CDP(label=LABEL, rounds=2)(replace(request, federation=watched))
    staying = ("client-1", "client-2", "client-4", "client-5")
    assert tuple(seen) == staying
    # New rounds come after the eight of the run, with random numbers of their own.
    assert asked == [(8, staying), (9, staying)]
    assert result.clients == ("client-0", "client-3")


@pytest.mark.parametrize(
    "other",
    [
        CDP(label=LABEL, rounds=1, sparsity=0.2),
        CDP(label=LABEL, rounds=2),
        CDP(label=LABEL, rounds=1, lr=0.01),
        CDP(label=0, rounds=1, sparsity=0.2),
    ],
)
def test_settings_matter(small_run: SmallRun, other: CDP) -> None:
    usual = CDP(label=LABEL, rounds=1)
    if other.label != LABEL:
        usual = replace(usual, sparsity=other.sparsity)
    one, two = usual(small_run.request()), other(small_run.request())
    assert not np.array_equal(one.params.flat, two.params.flat)


def test_attackers_that_stay_keep_scaling_their_updates(small_run: SmallRun) -> None:
    request = small_run.request()
    assert request.federation is not None
    method = CDP(label=LABEL, rounds=1)
    scaled = replace(request.federation, scales={"client-1": 3.0})
    one, two = method(request), method(replace(request, federation=scaled))
    assert not np.array_equal(one.params.flat, two.params.flat)


def test_what_is_cut_off_cannot_grow_back(networks: str) -> None:
    # Without a rectifier, and before batch norm, zero weights do have a gradient.
    request = request_with(f"{networks}:normalised")
    assert request.federation is not None
    result = CDP(label=LABEL, sparsity=0.3, rounds=2)(request)
    pruned = cut_off(result.params)
    assert len(pruned) == 2
    [answer] = request.federation.clients.train(
        result.model(request.ledger.final), 9, ["client-1"]
    )
    mask = channel_mask(result.params.layout, pruned)
    assert answer.delta.flat[mask].any()


def test_buffers_follow_the_repair(networks: str) -> None:
    request = request_with(f"{networks}:normalised")
    result = CDP(label=LABEL, rounds=1)(request)
    assert result.buffers is not None
    assert result.buffers.keys() == request.ledger.final.buffers.keys()
    name = "1.running_var"
    before = request.ledger.final.buffers[name]
    assert not np.array_equal(result.buffers[name], before)


def test_it_says_what_it_needs() -> None:
    assert CDP().needs == Needs(others=True)


def test_it_refuses_without_a_class(small_run: SmallRun) -> None:
    with pytest.raises(UnlearnRefusedError, match="a class, not a client"):
        CDP()(small_run.request())


def test_it_refuses_without_a_federation(small_run: SmallRun) -> None:
    request = UnlearnRequest(small_run.ledger, frozenset({"client-0"}))
    with pytest.raises(UnlearnRefusedError, match="cdp needs the help of"):
        CDP(label=LABEL)(request)


def test_it_refuses_a_class_that_nobody_has(small_run: SmallRun) -> None:
    with pytest.raises(UnlearnRefusedError, match="no image of class 10"):
        CDP(label=10)(small_run.request())


def test_it_refuses_when_nobody_stays(small_run: SmallRun) -> None:
    everybody = small_run.ledger.clients()
    with pytest.raises(UnlearnRefusedError, match="nobody stays"):
        CDP(label=LABEL)(small_run.request(*everybody))


def test_it_refuses_a_model_without_convolutions(networks: str) -> None:
    with pytest.raises(UnlearnRefusedError, match="this model has none"):
        CDP(label=LABEL)(request_with(f"{networks}:linear"))


@dataclass
class Blind:
    """A trainer that trains and predicts and shows nothing."""

    initial: Any
    train: Any
    predict: Any


def test_it_refuses_a_trainer_that_shows_no_channels(small_run: SmallRun) -> None:
    request = small_run.request()
    assert request.federation is not None
    able = request.federation.trainer
    blind = Blind(able.initial, able.train, able.predict)
    federation = replace(request.federation, trainer=blind)
    with pytest.raises(UnlearnRefusedError, match="cannot show them"):
        CDP(label=LABEL)(replace(request, federation=federation))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": -1}, "label is -1"),
        ({"sparsity": 0}, "sparsity is 0"),
        ({"sparsity": 1.0}, "sparsity is 1.0"),
        ({"rounds": -1}, "rounds is -1"),
        ({"lr": 0}, "learning rate is 0"),
        ({"lr": float("nan")}, "learning rate is nan"),
        ({"sample": 0}, "sample is 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{message}; choose"):
        CDP(**settings)
