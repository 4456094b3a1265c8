from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastfedul.data.dataset import Dataset, Labels
from fastfedul.data.partition import (
    Partition,
    assign,
    class_ratio,
    client_name,
    find_concentration,
    split,
)
from fastfedul.data.sources import load
from fastfedul.errors import InvalidInputError

law = settings(max_examples=100, deadline=None)

CLIENTS = st.integers(1, 60)
SPLITS = st.one_of(
    st.just(Partition("iid")),
    st.floats(0.001, 1000).map(lambda value: Partition("dirichlet", value)),
)


@st.composite
def labelled(draw: st.DrawFn) -> Labels:
    size = draw(st.integers(1, 400))
    num_classes = draw(st.integers(1, 12))
    seed = draw(st.integers(0, 1000))
    return np.random.default_rng(seed).integers(0, num_classes, size)


def class_counts(labels: Labels, owned: tuple[Any, ...]) -> Any:
    num_classes = int(labels.max()) + 1
    return np.array([np.bincount(labels[own], minlength=num_classes) for own in owned])


def ratios(counts: Any) -> Any:
    return counts.max(axis=1) / counts.min(axis=1)


@law
@given(
    labels=labelled(), num_clients=st.integers(1, 60), how=SPLITS, seed=st.integers(0)
)
def test_every_example_goes_to_exactly_one_client(
    labels: Labels, num_clients: int, how: Partition, seed: int
) -> None:
    assume(len(labels) >= num_clients)
    owned = assign(labels, num_clients, how, seed)
    assert len(owned) == num_clients
    assert sorted(np.concatenate(owned).tolist()) == list(range(len(labels)))


@law
@given(
    labels=labelled(), num_clients=st.integers(1, 60), how=SPLITS, seed=st.integers(0)
)
def test_every_client_gets_a_few_examples(
    labels: Labels, num_clients: int, how: Partition, seed: int
) -> None:
    assume(len(labels) >= num_clients)
    owned = assign(labels, num_clients, how, seed)
    assert min(len(own) for own in owned) >= min(5, len(labels) // num_clients)


@law
@given(seed=st.integers(0, 2**32), how=SPLITS)
def test_the_split_is_a_function_of_the_seed(seed: int, how: Partition) -> None:
    labels = np.arange(200) % 7
    first, again = assign(labels, 8, how, seed), assign(labels, 8, how, seed)
    other = assign(labels, 8, how, seed + 1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@law
@given(num_examples=st.integers(1, 500), num_clients=st.integers(1, 50))
def test_iid_sizes_differ_by_at_most_one(num_examples: int, num_clients: int) -> None:
    assume(num_examples >= num_clients)
    owned = assign(np.zeros(num_examples, int), num_clients, Partition(), 0)
    sizes = [len(own) for own in owned]
    assert max(sizes) - min(sizes) <= 1


def test_a_small_concentration_makes_clients_more_different() -> None:
    labels = np.arange(6000) % 10
    spread = []
    for concentration in (0.1, 1.0, 100.0):
        owned = assign(labels, 10, Partition("dirichlet", concentration), 3)
        shares = class_counts(labels, owned) / 600
        spread.append(float(shares.std()))
    assert spread[0] > spread[1] > spread[2]
    assert spread[2] < 0.02


def test_dirichlet_shares_have_the_distributions_mean_and_variance() -> None:
    labels = np.zeros(2_000, int)
    shares = np.concatenate(
        [
            class_counts(labels, assign(labels, 5, Partition("dirichlet", 2.0), seed))
            for seed in range(1_000)
        ]
    )[:, 0] / len(labels)
    # Dir(2, ..., 2) over five: mean 1/5, variance (1/5)(4/5) / (10 + 1).
    assert shares.mean() == pytest.approx(0.2)
    assert shares.var() == pytest.approx(0.16 / 11, rel=0.15)


@law
@given(
    num_classes=st.integers(2, 12),
    num_clients=st.integers(1, 40),
    level=st.floats(1, 6),
    seed=st.integers(0, 2**32),
)
def test_at_every_client_the_classes_have_the_ratio_asked_for(
    num_classes: int, num_clients: int, level: float, seed: int
) -> None:
    labels = np.arange(num_classes * num_clients * 50) % num_classes
    owned = assign(labels, num_clients, Partition("level", level), seed)
    everything = np.concatenate(owned)
    assert len(np.unique(everything)) == len(everything)
    counts = class_counts(labels, owned)
    np.testing.assert_allclose(
        ratios(counts), level, atol=0.5 / float(counts.min()) + 1e-9
    )


@pytest.mark.parametrize("level", [1.5, 2, 3, 4])
@pytest.mark.parametrize("num_clients", [5, 10, 25])
def test_digits_are_split_by_level_without_loss(
    digits: Dataset, num_clients: int, level: float
) -> None:
    labels = digits.train_labels
    owned = assign(labels, num_clients, Partition("level", level), 0)
    assert len(np.unique(np.concatenate(owned))) == len(labels)
    np.testing.assert_allclose(ratios(class_counts(labels, owned)), level, rtol=0.07)


@pytest.mark.parametrize("level", [2, 3, 4])
def test_mnist_has_exactly_the_papers_levels(
    data_file: Callable[[str], Path], level: float
) -> None:
    data_file("mnist.npz")
    labels = load("mnist").train_labels
    owned = assign(labels, 25, Partition("level", level), 1)
    assert sum(len(own) for own in owned) == 60_000
    assert set(ratios(class_counts(labels, owned))) == {level}


def test_level_one_is_balanced() -> None:
    labels = np.repeat([0, 1, 2], [40, 31, 50])
    counts = class_counts(labels, assign(labels, 3, Partition("level", 1), 0))
    assert counts.tolist() == [[10, 10, 10]] * 3


def test_a_class_too_frequent_for_the_ratio_loses_its_surplus_only() -> None:
    labels = np.repeat([0, 1, 2], [1000, 100, 150])
    counts = class_counts(labels, assign(labels, 10, Partition("level", 2), 0))
    assert counts.sum(axis=0).tolist() == [200, 100, 150]


def test_frequent_classes_differ_from_client_to_client() -> None:
    labels = np.arange(5000) % 10
    counts = class_counts(labels, assign(labels, 10, Partition("level", 4), 0))
    assert sorted(counts.argmax(axis=1)) == list(range(10))
    assert sorted(counts.argmin(axis=1)) == list(range(10))


@pytest.mark.parametrize(("num_clients", "level"), [(50, 2), (2, 200)])
def test_too_few_examples_for_a_level_are_refused(
    num_clients: int, level: float
) -> None:
    with pytest.raises(InvalidInputError, match="too few for level"):
        assign(np.arange(90) % 3, num_clients, Partition("level", level), 0)


def test_one_class_has_no_level() -> None:
    with pytest.raises(InvalidInputError, match="two classes"):
        assign(np.zeros(90, int), 3, Partition("level", 2), 0)


@pytest.mark.parametrize("num_clients", [0, -3])
def test_a_split_among_nobody_is_refused(num_clients: int) -> None:
    with pytest.raises(InvalidInputError, match="1 or more"):
        assign(np.arange(9), num_clients, Partition(), 0)


def test_more_clients_than_examples_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at most 9 clients"):
        assign(np.arange(9), 10, Partition("dirichlet", 1), 0)


def test_clients_hold_the_images_that_belong_to_their_labels(digits: Dataset) -> None:
    clients = split(digits, 7, Partition("dirichlet", 0.5), 4)
    assert [data.client for data in clients] == [client_name(n) for n in range(7)]
    truth = {
        image.tobytes(): int(label) for image, label in zip(*digits.train, strict=True)
    }
    for data in clients:
        assert data.num_examples == len(data.images)
        found = [truth[image.tobytes()] for image in data.images]
        assert found == data.labels.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_a_dirichlet_split_is_found_for_a_ratio_of_classes(seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 10, 19_000)
    found = {}
    for ratio in (2.0, 3.0, 4.0):
        owned = assign(labels, 10, Partition("ratio", ratio), seed)
        counts = class_counts(labels, owned)
        assert counts.sum() == len(labels), "every example is used"
        assert class_ratio(counts) == pytest.approx(ratio, rel=0.05)
        assert ratios(counts).std() > 0.1, "clients differ, unlike with a level"
        found[ratio] = find_concentration(labels, 10, ratio, seed)
    assert found[2.0] > found[3.0] > found[4.0]


def test_a_ratio_that_no_dirichlet_split_has_is_refused() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 200)
    with pytest.raises(InvalidInputError, match="the nearest has"):
        assign(labels, 20, Partition("ratio", 1.2), 0)


def test_all_clients_share_one_array(digits: Dataset) -> None:
    bases = {id(data.images.base) for data in split(digits, 50, Partition(), 0)}
    assert len(bases) == 1


@pytest.mark.parametrize(
    "text",
    [
        "iid",
        "dirichlet:0.5",
        "dirichlet:0.123456789",
        "level:3",
        "level:1.5",
        "ratio:2",
    ],
)
def test_a_split_is_written_as_it_is_read(text: str) -> None:
    assert str(Partition.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "IID", "iid:1", "dirichlet", "dirichlet:", "level:x", "even", "level"]
)
def test_an_unreadable_split_shows_how_to_write_one(text: str) -> None:
    with pytest.raises(
        InvalidInputError, match=r"iid, dirichlet:0\.5, level:3 or ratio"
    ):
        Partition.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "dirichlet:0",
        "dirichlet:-1",
        "dirichlet:nan",
        "level:0.5",
        "level:inf",
        "ratio:1",
    ],
)
def test_an_impossible_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="choose"):
        Partition.parse(text)
