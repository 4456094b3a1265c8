"""Numbers worked by hand, and everything that may be missing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fastfedul.evaluate.intervals import Mean, Proportion
from paper.cells import CellStore
from paper.experiments import Line, lines_of
from paper.summary import Summary, by_table, summarize

Build = Callable[..., Line]


def one(line: Line, store: CellStore) -> Summary:
    (found,) = summarize([line], store)
    return found


def test_means_intervals_and_counts_are_those_worked_by_hand(
    line_with: Build, store: CellStore
) -> None:
    results = [
        {"main": m, "backdoor": b, "backdoor_count": c, "backdoor_total": 100}
        for m, b, c in ((0.97, 0.0, 0), (0.98, 0.01, 1), (0.99, 0.05, 5))
    ]
    found = one(line_with(*results), store)
    assert found.main is not None
    assert found.main.interval is not None
    assert found.main.value == pytest.approx(0.98)
    # t(2) = 4.3027, standard error 0.01 / sqrt(3)
    half = 4.302652729750 * 0.01 / math.sqrt(3)
    assert found.main.interval == pytest.approx((0.98 - half, 0.98 + half))
    assert found.backdoor is not None
    assert found.backdoor.value == pytest.approx(0.02)
    assert found.backdoor_pooled == Proportion(6, 300)
    assert found.main_pooled is None
    assert (found.seeds_done, found.seeds_wanted) == (3, 3)


def test_the_difference_is_ours_minus_the_papers_in_points(
    line_with: Build, store: CellStore
) -> None:
    found = one(line_with({"main": 0.9747, "backdoor": 0.0118}), store)
    assert found.paper == (0.9847, 0.0018)
    assert found.main_difference == pytest.approx(-1.0)
    assert found.backdoor_difference == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("label", "data", "more", "expected"),
    [
        ("fast-fedul-paper", "cifar10", {}, (0.9413, 0.0132)),
        ("fast-fedul-paper, all kept", "mnist", {}, None),
        ("fast-fedul", "mnist", {}, None),
        ("fast-fedul-2", "mnist", {}, (0.8143, 0.0)),
        ("fast-fedul-2", "cifar10", {}, None),
        ("before", "digits", {}, None),
        ("federaser", "mnist", {"parameter": 1}, None),
        ("federaser", "mnist", {"partition": "level:2"}, None),
        ("fedaccum", "mnist", {}, None),
    ],
)
def test_the_paper_has_some_figures_and_not_others(
    line_with: Build,
    store: CellStore,
    label: str,
    data: str,
    more: dict[str, object],
    expected: tuple[float, float] | None,
) -> None:
    line = line_with({"main": 0.5}, label=label, data=data, **more)
    assert one(line, store).paper == expected


def test_a_missing_seed_is_left_out(line_with: Build, store: CellStore) -> None:
    found = one(line_with({"main": 0.5}, None, {"main": 0.7}), store)
    assert (found.seeds_done, found.seeds_wanted) == (2, 3)
    assert found.main is not None
    assert found.main.value == pytest.approx(0.6)


def test_no_result_at_all_is_a_summary_without_numbers(
    line_with: Build, store: CellStore
) -> None:
    found = one(line_with(None, None), store)
    assert (found.seeds_done, found.main, found.seconds) == (0, None, None)
    assert found.main_difference is None
    assert found.mean_unit_angle is None


def test_a_refused_seed_counts_as_done_and_not_as_measured(
    line_with: Build, store: CellStore
) -> None:
    found = one(line_with({"refused": "no images"}, {"main": 0.5}), store)
    assert (found.seeds_done, found.num_refused, found.num_measured) == (2, 1, 1)
    assert found.refused == "no images"
    assert found.main == Mean(0.5, None)


def test_a_share_of_nothing_at_all_is_a_value(
    line_with: Build, store: CellStore
) -> None:
    found = one(line_with({"main": 0.0, "backdoor": 0.0, "seconds": 0.0}), store)
    assert found.main == Mean(0.0, None)
    assert found.backdoor == Mean(0.0, None)
    assert found.seconds == 0


def test_none_and_values_that_are_not_finite_are_dropped(
    line_with: Build, store: CellStore
) -> None:
    first = {"main": 0.5, "backdoor": None, "distance": math.nan, "seconds": 2}
    second = {"main": 0.5, "backdoor": 0.2, "distance": 3.0, "seconds": None}
    found = one(line_with(first, second), store)
    assert found.backdoor == Mean(0.2, None)
    assert found.distance == 3.0
    assert found.seconds == 2
    assert found.peak_bytes is None


def test_angles_of_all_seeds_are_one_sample(line_with: Build, store: CellStore) -> None:
    first, second = {"unit_angles": [10.0, None, 30.0]}, {"unit_angles": [20.0, 4.0]}
    found = one(line_with(first, second, {"unit_angles": None}), store)
    assert found.unit_angles == (10.0, 30.0, 20.0, 4.0)
    assert found.mean_unit_angle == 16.0
    assert found.max_unit_angle == 30.0
    assert found.wide_share == 0.25  # 20 itself is not above 20


def test_iterations_are_averaged_one_by_one(line_with: Build, store: CellStore) -> None:
    first = {"main": [0.9, 0.8, 0.7], "backdoor": [0.5, 0.3, None]}
    second = {"main": [0.7, 0.6], "backdoor": [0.7, 0.1]}
    found = one(line_with(first, second, label="0.07", parameter=0.07), store)
    assert found.kind == "iterations"
    assert found.main_iterations == pytest.approx((0.8, 0.7, 0.7))
    assert found.backdoor_iterations[:2] == pytest.approx((0.6, 0.2))
    assert found.backdoor_iterations[2] is None
    assert found.main is not None
    assert found.main.value == pytest.approx(0.65)
    assert found.backdoor == Mean(0.1, None)


def test_a_warning_is_said_once(line_with: Build, store: CellStore) -> None:
    results = [{"warnings": ["a", "b"]}, {"warnings": ["b"]}, {"warnings": None}]
    assert one(line_with(*results), store).warnings == ("a", "b")


def test_the_stand_in_is_not_called_by_the_name_of_what_it_stands_for(
    line_with: Build, store: CellStore
) -> None:
    line = line_with({"main": 0.5}, data="oct", source="oct-retina-subset")
    assert one(line, store).data_name == "retinal subset (paper: OCTMNIST)"
    line = line_with({"main": 0.5}, data="oct", source="octmnist")
    assert one(line, store).data_name == "octmnist"


def test_a_table_has_all_its_lines_also_when_they_are_apart(store: CellStore) -> None:
    lines = lines_of("sampling", "smoke", 1)
    tables = by_table(summarize(lines, store))
    assert [len(found) for found in tables.values()] == [10, 10]
