"""The list of runs, and the networks and the table that it uses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fastfedul.data.npz import write_arrays
from fastfedul.data.sources import load
from fastfedul.errors import InvalidInputError
from fastfedul.integrations.torch import TorchTrainer
from paper.board import rows, runs
from paper.board.tabular import NUM_TEST, NUM_TRAIN, make_arrays, read_table


def test_list_has_the_promised_counts() -> None:
    found = runs.all_runs()
    counted = Counter(run.data for run in found)
    assert counted == {
        "digits": 66,
        "diamonds": 20,
        "mnist": 15,
        "cifar10": 9,
        "oct": 8,
    }
    assert sum(counted[data] for data in runs.SMALL) >= 80
    assert sum(counted[data] for data in runs.LARGE) >= 30
    small = [run for run in found if run.data in runs.SMALL]
    stressed = sum(run.training != runs.USUAL for run in small)
    assert 0.28 < stressed / len(small) < 0.4
    assert 0.3 < sum(run.rivals for run in found) / len(found) < 0.37
    assert {run.network for run in found} == set(runs.NETWORKS)


def test_list_is_the_same_each_time_and_names_are_its_own() -> None:
    found = runs.all_runs()
    assert found == runs.all_runs()
    assert [run.number for run in found] == list(range(len(found)))
    assert len({run.key for run in found}) == len(found)


def test_no_seed_is_used_twice_or_below_4000() -> None:
    seeds = [seed for run in runs.all_runs() for seed in run.seeds]
    assert min(seeds) >= 4000
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("name", ["split", "half", "attack"])
def test_levels_come_equally_often_within_a_data_set(name: str) -> None:
    for data in runs.DATA:
        own = runs.chosen(runs.all_runs(), [data])
        counts = Counter(getattr(run, name) for run in own).values()
        assert max(counts) - min(counts) <= 1


def test_development_has_seeds_of_its_own() -> None:
    seeds = [
        seed for run in runs.for_development(runs.all_runs()) for seed in run.seeds
    ]
    assert min(seeds) == 100
    assert max(seeds) < 150


def test_every_part_of_the_order_is_balanced() -> None:
    found = runs.in_order(runs.all_runs())
    assert sorted(run.number for run in found) == list(range(len(found)))
    half = Counter(run.data for run in found[: len(found) // 2])
    whole = Counter(run.data for run in found)
    assert all(abs(half[data] - whole[data] / 2) <= 1 for data in whole)


def test_options_of_every_run_are_valid() -> None:
    for run in runs.all_runs():
        config = runs.config_of(run, "table.npz")
        assert config.workers == 1
        assert config.data.clients == run.clients
        assert len(config.attack.of_clients(config.data.names or ()).attackers) == (
            0 if run.attack == runs.HONEST else run.leavers
        )


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no data set or run 'moon'"):
        runs.chosen(runs.all_runs(), ["moon"])
    assert {run.data for run in runs.chosen(runs.all_runs(), ["large"])} == set(
        runs.LARGE
    )


def test_rivals_are_only_on_marked_runs() -> None:
    for run in runs.all_runs():
        assert (rows.KD in rows.cells_of(run)) == run.rivals


@pytest.mark.parametrize("network", ["batch norm", "transformer", "embedding"])
def test_own_networks_can_be_trained(network: str) -> None:
    trainer = TorchTrainer(shape=(8, 8, 1), num_classes=5, model=runs.NETWORKS[network])
    model = trainer.initial(0)
    rng = np.random.default_rng(0)
    inputs = rng.uniform(-1, 1, (40, 1, 8, 8)).astype(np.float32)
    labels = rng.integers(5, size=40)
    trained = trainer.train(model, inputs, labels, rng)
    assert not np.array_equal(trained.params.flat, model.params.flat)
    assert trainer.predict(trained, inputs).shape == (40, 5)


def test_table_is_read_as_images(tmp_path: Path) -> None:
    pytest.importorskip("plotnine", reason="the diamonds table comes with plotnine")
    arrays = make_arrays(read_table())
    path = tmp_path / "diamonds.npz"
    write_arrays(path, arrays, compress=False)
    data = load(path)
    assert data.shape == (3, 5, 1)
    assert data.num_classes == 5
    assert (len(data.train_labels), len(data.test_labels)) == (NUM_TRAIN, NUM_TEST)
    shares = np.bincount(data.train_labels) / NUM_TRAIN
    assert shares.min() > 0.19
    assert data.train_images.max() < 255
    assert not data.train_images[:, 0, 0].any()
