from typing import Any

import pytest

from fastfedul.data.attacks.backdoor import (
    Attack,
    backdoor_test,
    parse_attackers,
    with_labels,
)
from fastfedul.data.dataset import Dataset
from fastfedul.errors import InvalidInputError, UnknownClientError


@pytest.mark.parametrize(
    ("kind", "labels"),
    [("pixel", (None, 2)), ("edge-case", (None, 1)), ("label-flip", (7, 1))],
)
def test_labels_that_are_not_given_are_the_usual_ones(
    digits: Dataset, kind: Any, labels: tuple[int | None, int]
) -> None:
    attack = with_labels(Attack(kind=kind, attackers=("client-0",)), digits)
    assert (attack.source_label, attack.target_label) == labels


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "edge-case", "target_label": 7}, "another target label"),
        ({"kind": "label-flip", "target_label": 7}, "another target label"),
        ({"kind": "label-flip", "source_label": 10}, "no class 10; choose 0 to 9"),
        ({"kind": "pixel", "target_label": 10}, "no class 10; choose 0 to 9"),
        ({"kind": "pixel", "target_label": -1}, "no class -1"),
    ],
)
def test_an_attack_that_cannot_be_is_refused(
    digits: Dataset, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        backdoor_test(Attack(attackers=("client-0",), **settings), digits)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "trigger"}, "choose none, pixel, edge-case or label-flip"),
        ({"kind": "none"}, "none at all for no attack"),
        ({"attackers": ()}, "name at least one"),
        ({"attackers": ("a", "a")}, "named twice"),
        ({"poison_ratio": 0}, "above 0 and up to 1"),
        ({"poison_ratio": 1.5}, "above 0 and up to 1"),
        ({"poison_ratio": float("nan")}, "above 0 and up to 1"),
        ({"scale": 0}, "above 0"),
        ({"scale": float("inf")}, "above 0"),
        ({"source_label": 3}, "no source label"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    usable: dict[str, Any] = {"kind": "pixel", "attackers": ("client-0",)}
    with pytest.raises(InvalidInputError, match=reason):
        Attack(**(usable | settings))


def test_attackers_are_counted_or_named() -> None:
    names = [f"client-{number}" for number in range(12)]
    assert parse_attackers("0", names) == ()
    assert parse_attackers("3", names) == ("client-0", "client-1", "client-2")
    assert parse_attackers("client-11,client-2", names) == ("client-11", "client-2")
    with pytest.raises(UnknownClientError, match="client-0 to client-11"):
        parse_attackers("client-12", names)
    with pytest.raises(InvalidInputError, match="at most 12"):
        parse_attackers("13", names)
