"""Distance and angle by hand."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.closeness import (
    angle_degrees,
    closeness,
    distance,
    last_layer,
    only,
    unit_angles,
)
from fastfedul.params import Params

NAN, INF = math.nan, math.inf


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def model(**arrays: npt.ArrayLike) -> Params:
    """Parameters whose names have dots for underscores."""
    named = {name.replace("_", "."): values for name, values in arrays.items()}
    return Params.of({n: np.array(v, np.float32) for n, v in named.items()})


def test_distance_and_angle_by_hand() -> None:
    left, right = model(a=[3, 0], b=[0]), model(a=[3, 0], b=[3])
    assert distance(left, right) == 3
    assert angle_degrees(left, right) == pytest.approx(45)
    assert angle_degrees(left, model(a=[-1, 0], b=[0])) == 180
    assert angle_degrees(left, left) == 0


def test_zero_and_infinite_models_have_no_angle() -> None:
    some = model(a=[1, 2])
    for other in (model(a=[0, 0]), model(a=[INF, 1]), model(a=[NAN, 1])):
        assert angle_degrees(some, other) is None
        assert angle_degrees(other, some) is None
    assert distance(model(a=[INF, 0]), some) == INF


def test_long_vectors_are_summed_in_float64() -> None:
    left, right = (
        Params.of({"w": random(s).normal(0, 1e25, 200_000).astype(np.float32)})
        for s in (8, 9)
    )
    one, other = (side.flat.astype(np.float64) for side in (left, right))
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert distance(left, right) == pytest.approx(
        np.linalg.norm(one - other), rel=1e-12
    )
    found = angle_degrees(left, right)
    assert found == pytest.approx(math.degrees(math.acos(cosine)), rel=1e-12)


def test_a_tiny_angle_is_not_lost() -> None:
    found = angle_degrees(model(a=[1, 0]), model(a=[1, 1e-12]))
    assert found == pytest.approx(math.degrees(1e-12), rel=1e-6)


def test_models_of_another_form_are_refused() -> None:
    first = model(a=[1, 2], b=[3, 4])
    for other in (model(a=[1, 2]), model(a=[1, 2], b=[3]), model(b=[3, 4], a=[1, 2])):
        for function in (distance, angle_degrees, unit_angles, closeness):
            with pytest.raises(InvalidInputError, match="the models differ"):
                function(first, other)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"0.weight": (4, 3), "0.bias": 4, "2.weight": (2, 4)}, ("2.weight", None)),
        (
            {"c.weight": (3, 1, 2, 2), "f.weight": (2, 4), "f.bias": 2},
            "f.weight f.bias",
        ),
        ({"f.weight": (2, 4), "f.bias": 2, "norm.weight": 2}, "f.weight f.bias"),
        ({"f.weight": (2, 4), "norm.weight": 2}, ("f.weight", None)),
        ({"f.weight": (2, 4), "f.scale": 3}, ("f.weight", None)),
        ({"weights": (64, 10), "bias": 10}, "weights bias"),
        ({"w1": (3, 4), "b1": 4, "w2": (2, 4)}, ("w2", None)),
        ({"Dense_0/bias": 2, "Dense_0/kernel": (4, 2)}, "Dense_0/kernel Dense_0/bias"),
    ],
)
def test_the_last_layer_is_the_last_matrix_with_its_own_bias(
    shapes: dict[str, int | tuple[int, ...]], expected: str | tuple[str, None]
) -> None:
    params = Params.of({name: np.ones(shape) for name, shape in shapes.items()})
    wanted = tuple(expected.split()) if isinstance(expected, str) else expected
    assert last_layer(params) == wanted


def test_units_are_the_rows_of_a_torch_layer_with_their_bias() -> None:
    left = model(f_weight=[[1, 0, 0], [0, 2, 0]], f_bias=[0, 0])
    right = model(f_weight=[[5, 0, 0], [0, 0, 3]], f_bias=[5, 0])
    np.testing.assert_allclose(unit_angles(left, right), [45, 90])


def test_units_of_a_square_layer_are_rows_with_or_without_bias() -> None:
    left = model(f_weight=[[1, 0], [0, 1]], f_bias=[0, 0])
    right = model(f_weight=[[1, 1], [0, 1]], f_bias=[0, 0])
    np.testing.assert_allclose(unit_angles(left, right), [45, 0], atol=1e-12)
    bare = only(left, ["f.weight"]), only(right, ["f.weight"])
    np.testing.assert_allclose(unit_angles(*bare), [45, 0], atol=1e-12)


def test_units_are_columns_where_only_so_the_bias_fits() -> None:
    left = model(weights=[[1, 0], [0, 2], [0, 0]], bias=[0, 0])
    right = model(weights=[[5, 0], [0, 0], [0, 3]], bias=[5, 0])
    np.testing.assert_allclose(unit_angles(left, right), [45, 90])


def test_a_dead_unit_has_no_angle() -> None:
    left, right = model(w=[[0, 0], [1, 0]]), model(w=[[1, 0], [1, 0]])
    np.testing.assert_array_equal(unit_angles(left, right), [NAN, 0])


def test_closeness_is_overall_and_for_the_last_layer() -> None:
    left = model(conv=[9, 9], f_weight=[[1, 0], [0, 1]], f_bias=[0, 0])
    right = model(conv=[9, 5], f_weight=[[1, 0], [0, 1]], f_bias=[0, 3])
    found = closeness(left, right)
    assert found.distance == 5
    assert found.angle_degrees == angle_degrees(left, right)
    assert found.last_layer_angle_degrees == pytest.approx(
        math.degrees(math.acos(2 / math.sqrt(2 * 11)))
    )
    assert found.unit_angles == tuple(unit_angles(left, right).tolist())


def test_a_model_without_a_matrix_has_no_last_layer() -> None:
    found = closeness(model(a=[0, 0]), model(a=[3, 4]))
    assert found.distance == 5
    assert found.last_layer_angle_degrees is None
    assert found.unit_angles is None
    with pytest.raises(InvalidInputError, match="no last layer"):
        last_layer(model(a=[3, 4]))
