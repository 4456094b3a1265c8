from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul.data.attacks.backdoor import (
    Attack,
    backdoor_test,
    poison,
)
from fastfedul.data.attacks.edge_cases import load_edge_cases
from fastfedul.data.attacks.pixel_pattern import stamp
from fastfedul.data.dataset import ClientData, Dataset
from fastfedul.data.partition import Partition, split
from fastfedul.data.sources import load
from fastfedul.errors import InvalidInputError

law = settings(max_examples=100, deadline=None)

KINDS: list[Any] = ["pixel", "edge-case", "label-flip"]
UNION_8 = {(0, 0), (0, 1), (0, 3), (0, 4), (2, 0), (2, 1), (2, 3), (2, 4)}


@pytest.fixture(scope="module")
def clients(digits: Dataset) -> tuple[ClientData, ...]:
    return split(digits, 10, Partition(), seed=0)


def same(left: ClientData, right: ClientData) -> bool:
    return np.array_equal(left.images, right.images) and np.array_equal(
        left.labels, right.labels
    )


@pytest.mark.parametrize("kind", KINDS)
def test_honest_clients_come_back_untouched(
    digits: Dataset, clients: tuple[ClientData, ...], kind: Any
) -> None:
    attack = Attack(kind=kind, attackers=("client-3",))
    poisoned = poison(clients, attack, digits, seed=0)
    assert [data.client for data in poisoned] == [data.client for data in clients]
    for before, after in zip(clients, poisoned, strict=True):
        assert (before is after) == (before.client != "client-3")
    assert not same(clients[3], poisoned[3])


@pytest.mark.parametrize("kind", KINDS)
def test_poisoning_writes_into_nobodys_arrays(digits: Dataset, kind: Any) -> None:
    clients = split(digits, 10, Partition(), seed=1)
    poison(clients, Attack(kind=kind, attackers=("client-0",)), digits, seed=0)
    again = split(digits, 10, Partition(), seed=1)
    assert all(same(a, b) for a, b in zip(clients, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_a_client_out_changes_nobody_else(
    digits: Dataset, clients: tuple[ClientData, ...], kind: Any
) -> None:
    attack = Attack(kind=kind, attackers=("client-2", "client-5", "client-7"))
    everybody = poison(clients, attack, digits, seed=4)
    for missing in ("client-2", "client-6"):
        rest = [data for data in clients if data.client != missing]
        left = [data for data in everybody if data.client != missing]
        alone = poison(rest, attack, digits, seed=4)
        assert all(same(a, b) for a, b in zip(left, alone, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_poisoning_is_a_function_of_the_seed(
    digits: Dataset, clients: tuple[ClientData, ...], kind: Any
) -> None:
    attack = Attack(kind=kind, attackers=("client-1",), poison_ratio=0.4)
    first, again, other = (
        poison(clients, attack, digits, seed=seed)[1] for seed in (8, 8, 9)
    )
    assert same(first, again)
    assert not same(first, other)


@law
@given(ratio=st.floats(0.01, 1))
def test_pixel_replaces_the_share_asked_for(
    digits: Dataset, clients: tuple[ClientData, ...], ratio: float
) -> None:
    attack = Attack(kind="pixel", attackers=("client-0",), poison_ratio=ratio)
    before, after = clients[0], poison(clients, attack, digits, seed=0)[0]
    changed = (before.images != after.images).any(axis=(1, 2, 3))
    relabelled = before.labels != after.labels
    usable = int((before.labels != 2).sum())
    expected = min(usable, max(1, round(ratio * before.num_examples)))
    assert after.num_examples == before.num_examples
    assert relabelled.sum() == expected
    # An image that already had those pixels at 255 would not change; none does.
    np.testing.assert_array_equal(changed, relabelled)
    assert (after.labels[relabelled] == 2).all()


def lit_by_attack(before: ClientData, after: ClientData) -> set[tuple[int, int]]:
    changed = (before.images != after.images).any(axis=(0, 3))
    rows, columns = np.nonzero(changed)
    return set(zip(rows.tolist(), columns.tolist(), strict=True))


def test_one_attacker_uses_the_whole_pattern(
    digits: Dataset, clients: tuple[ClientData, ...]
) -> None:
    attack = Attack(kind="pixel", attackers=("client-4",))
    after = poison(clients, attack, digits, seed=0)[4]
    assert lit_by_attack(clients[4], after) == UNION_8


def test_several_attackers_use_one_part_each_in_turn(
    digits: Dataset, clients: tuple[ClientData, ...]
) -> None:
    names = ("client-9", "client-1", "client-2", "client-3", "client-4")
    attack = Attack(kind="pixel", attackers=names, poison_ratio=1)
    after = {data.client: data for data in poison(clients, attack, digits, seed=0)}
    before = {data.client: data for data in clients}
    lit = [lit_by_attack(before[name], after[name]) for name in names]
    assert lit == [
        {(0, 0), (0, 1)},
        {(0, 3), (0, 4)},
        {(2, 0), (2, 1)},
        {(2, 3), (2, 4)},
        {(0, 0), (0, 1)},
    ]


def test_pixel_success_is_measured_on_the_union_without_the_target_class(
    digits: Dataset,
) -> None:
    for attackers in (("client-0",), ("client-0", "client-1")):
        attack = Attack(kind="pixel", attackers=attackers, target_label=4)
        images, labels = backdoor_test(attack, digits)
        others = digits.test_images[digits.test_labels != 4]
        np.testing.assert_array_equal(images, stamp(others))
        assert (labels == 4).all()
        assert len(images) == 360 - 36


def test_edge_cases_are_added_with_the_target_label(
    digits: Dataset, clients: tuple[ClientData, ...]
) -> None:
    attack = Attack(kind="edge-case", attackers=("client-0",), poison_ratio=0.5)
    before, after = clients[0], poison(clients, attack, digits, seed=0)[0]
    size = before.num_examples
    np.testing.assert_array_equal(after.images[:size], before.images)
    np.testing.assert_array_equal(after.labels[:size], before.labels)
    assert after.num_examples - size == round(0.5 * size)
    assert (after.labels[size:] == 1).all()


def test_made_edge_cases_never_come_from_scored_images(
    digits: Dataset, clients: tuple[ClientData, ...]
) -> None:
    attack = Attack(kind="edge-case", attackers=("client-0",), poison_ratio=1)
    after = poison(clients, attack, digits, seed=0)[0]
    added = {image.tobytes() for image in after.images[clients[0].num_examples :]}
    scored = {image.tobytes() for image in backdoor_test(attack, digits).images}
    assert len(added) > 100
    assert not added & scored


def test_planes_are_added_as_trucks_and_scored_on_others(
    data_file: Callable[[str], Path],
) -> None:
    data_file("southwest.npz")
    data_file("cifar10.npz")
    dataset = load("cifar10")
    clients = split(dataset, 10, Partition(), seed=0)
    cases = load_edge_cases(dataset)
    attack = Attack(kind="edge-case", attackers=("client-0",), poison_ratio=1)
    after = poison(clients, attack, dataset, seed=0, edge_cases=cases)[0]
    size = clients[0].num_examples
    assert (after.labels[size:] == 9).all()
    assert len(after.labels) == 2 * size
    added = {image.tobytes() for image in after.images[size:]}
    assert len(added) == 784  # all of them, before any is used again
    images, labels = backdoor_test(attack, dataset, edge_cases=cases)
    turned = {
        np.rot90(image, number).tobytes() for image in images for number in range(4)
    }
    assert not turned & added
    assert labels.tolist() == [9] * 188


def test_sevens_of_another_hand_are_added_as_ones(
    data_file: Callable[[str], Path],
) -> None:
    data_file("ardis.npz")
    data_file("mnist.npz")
    dataset = load("mnist")
    clients = split(dataset, 100, Partition(), seed=0)
    attack = Attack(kind="edge-case", attackers=("client-0",), poison_ratio=0.2)
    after = poison(clients, attack, dataset, seed=0)[0]
    assert (after.num_examples, after.labels[600:].tolist()) == (720, [1] * 120)
    added = {image.tobytes() for image in after.images[600:]}
    images, _ = backdoor_test(attack, dataset)
    assert len(added) == 120
    assert not added & {image.tobytes() for image in images}


def test_flipped_labels_leave_the_images_alone(
    digits: Dataset, clients: tuple[ClientData, ...]
) -> None:
    attack = Attack(
        kind="label-flip", attackers=("client-0",), source_label=3, target_label=8
    )
    before, after = clients[0], poison(clients, attack, digits, seed=0)[0]
    assert after.images is before.images
    expected = np.where(before.labels == 3, 8, before.labels)
    np.testing.assert_array_equal(after.labels, expected)
    images, labels = backdoor_test(attack, digits)
    np.testing.assert_array_equal(images, digits.test_images[digits.test_labels == 3])
    assert (labels == 8).all()


def test_a_share_of_the_labels_can_be_flipped(
    digits: Dataset, clients: tuple[ClientData, ...]
) -> None:
    attack = Attack(kind="label-flip", attackers=("client-0",), poison_ratio=0.5)
    before, after = clients[0], poison(clients, attack, digits, seed=0)[0]
    num_sevens = int((before.labels == 7).sum())
    assert int((after.labels == 7).sum()) == num_sevens - round(num_sevens / 2)


def test_without_an_attack_nothing_is_poisoned_or_measured(
    digits: Dataset, clients: tuple[ClientData, ...]
) -> None:
    assert poison(clients, Attack(), digits, seed=0) == clients
    images, labels = backdoor_test(Attack(), digits)
    assert (images.shape, labels.shape) == ((0, 8, 8, 1), (0,))


def test_an_attacker_with_nothing_to_poison_is_reported(digits: Dataset) -> None:
    only = digits.train_labels == 2
    data = ClientData("client-0", digits.train_images[only], digits.train_labels[only])
    for kind in KINDS:
        attack = Attack(kind=kind, attackers=("client-0",))
        with pytest.raises(InvalidInputError, match="client-0 has no example"):
            poison([data], attack, digits, seed=0)
