"""L-BFGS by hand, against dense BFGS, and where pairs are of no use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from fastfedul.methods.curvature import SecantPair, curvature_times, secant_pair
from fastfedul.params import Flat
from fastfedul.rng import stream

Matrix = npt.NDArray[np.float64]


def flat(*values: float) -> Flat:
    return np.array(values, np.float32)


def positive_matrix(size: int, seed: int) -> Matrix:
    rows = stream(seed, "matrix").normal(size=(size, size))
    return rows @ rows.T + np.eye(size)


def pair_of(matrix: Matrix, moved: npt.ArrayLike) -> SecantPair:
    way = np.asarray(moved, np.float32)
    return SecantPair(way, (matrix @ way).astype(np.float32))


def dense_bfgs(pairs: list[SecantPair]) -> Matrix:
    """Update the matrix pair by pair, as in the textbook."""
    last = pairs[-1]
    sigma = last.moved @ last.turned / (last.moved @ last.moved)
    matrix = float(sigma) * np.eye(len(last.moved))
    for pair in pairs:
        s, y = pair.moved.astype(np.float64), pair.turned.astype(np.float64)
        ahead = matrix @ s
        matrix = (
            matrix - np.outer(ahead, ahead) / (s @ ahead) + np.outer(y, y) / (s @ y)
        )
    return matrix


def test_one_pair_by_hand() -> None:
    pair = SecantPair(flat(1, 0), flat(2, 1))
    # 2 I - 2 s s^T + y y^T / 2 = [[2, 1], [1, 2.5]].
    np.testing.assert_allclose(curvature_times([pair], flat(0, 1)), [1, 2.5])
    np.testing.assert_allclose(curvature_times([pair], flat(1, 0)), [2, 1])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_it_is_the_bfgs_matrix(count: int) -> None:
    matrix = positive_matrix(6, seed=1)
    rng = stream(2, "ways")
    pairs = [pair_of(matrix, rng.normal(size=6)) for _ in range(count)]
    way = rng.normal(size=6).astype(np.float32)
    np.testing.assert_allclose(
        curvature_times(pairs, way), dense_bfgs(pairs) @ way, rtol=2e-4, atol=2e-4
    )


def test_the_latest_pair_is_met() -> None:
    matrix = positive_matrix(8, seed=3)
    rng = stream(4, "ways")
    pairs = [pair_of(matrix, rng.normal(size=8)) for _ in range(3)]
    found = curvature_times(pairs, pairs[-1].moved)
    np.testing.assert_allclose(found, pairs[-1].turned, rtol=1e-4, atol=1e-4)


def test_conjugate_ways_that_span_the_space_give_the_matrix_itself() -> None:
    matrix = positive_matrix(3, seed=5)
    # Eigenvectors are conjugate, and so is every multiple of them.
    _, vectors = np.linalg.eigh(matrix)
    pairs = [pair_of(matrix, 2 * vector) for vector in vectors.T]
    way = flat(1, -2, 0.5)
    np.testing.assert_allclose(curvature_times(pairs, way), matrix @ way, rtol=1e-4)


def test_a_pair_that_comes_twice_adds_nothing() -> None:
    pair = pair_of(positive_matrix(4, seed=6), [1, 2, 0, -1])
    way = flat(0.5, 0, 1, 1)
    once, twice = curvature_times([pair], way), curvature_times([pair, pair], way)
    np.testing.assert_allclose(once, twice, rtol=1e-4)


def test_without_a_pair_the_curvature_is_unknown() -> None:
    assert not curvature_times([], flat(1, 2)).any()


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_pair_that_gives_nothing_finite_is_left_out() -> None:
    good = SecantPair(flat(1, 0), flat(2, 1))
    broken = SecantPair(flat(np.inf, 0), flat(1, 1))
    np.testing.assert_allclose(curvature_times([broken, good], flat(0, 1)), [1, 2.5])
    assert not curvature_times([broken], flat(0, 1)).any()


@pytest.mark.parametrize(
    "turned", [flat(-1, 5), flat(0, 1), flat(0, 0), flat(np.inf, 0), flat(np.nan, 0)]
)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_way_without_positive_curvature_makes_no_pair(turned: Flat) -> None:
    assert secant_pair(flat(1, 0), turned) is None


def test_no_way_makes_no_pair() -> None:
    assert secant_pair(flat(0, 0), flat(0, 0)) is None


def test_a_curvature_above_the_limit_is_damped_across_the_way() -> None:
    # |y|^2 / s.y = 10; with a third of the part across the way it is 2.
    pair = secant_pair(flat(1, 0), flat(1, 3), 2)
    assert pair is not None
    np.testing.assert_allclose(pair.turned, [1, 1], rtol=1e-6)


def test_a_curvature_above_the_limit_along_the_way_is_cut() -> None:
    pair = secant_pair(flat(2, 0), flat(10, 3), 2)
    assert pair is not None
    np.testing.assert_allclose(pair.turned, [4, 0])


def test_what_is_within_the_limit_stays_as_it_is() -> None:
    matrix = positive_matrix(5, seed=7)
    matrix *= 2 / np.linalg.eigvalsh(matrix)[-1]
    rng = stream(8, "ways")
    for _ in range(20):
        given = pair_of(matrix, rng.normal(size=5))
        pair = secant_pair(given.moved, given.turned, 2)
        assert pair is not None
        np.testing.assert_array_equal(pair.turned, given.turned)
