"""The formula of the authors' public code, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fastfedul import InvalidInputError, UnlearnRequest
from fastfedul.methods.registry import find_method
from paper.authors import AuthorsFormula
from paper.experiments import AUTHORS
from tests.support.by_hand import ledger_from, params


def test_it_fades_by_alpha_times_the_share_that_stays_and_adds_nothing_back() -> None:
    ledger = ledger_from(
        params(0, 0),
        {"a": (0.5, (2, 0)), "b": (0.5, (0, 8))},
        {"a": (0.25, (0, 4)), "b": (0.75, (4, 0))},
        {"b": (1.0, (0, 1))},
    )
    found = find_method(AUTHORS, {"alpha": 0.4})(
        UnlearnRequest(ledger, frozenset({"a"}))
    )
    # Minus (1, 0), faded by 1 - 0.4 * 0.75 and 1 - 0.4; minus (0, 1), by the last.
    expected = [-1 * 0.7 * 0.6, -1 * 0.6]
    assert found.delta is not None
    np.testing.assert_allclose(found.delta.flat, expected, rtol=1e-6)
    now = ledger.final.params.flat
    np.testing.assert_allclose(found.params.flat, now + expected, rtol=1e-6)


def test_a_client_that_sent_nothing_changes_nothing() -> None:
    ledger = ledger_from(params(1, 2), {"b": (1.0, (0, 1))})
    found = AuthorsFormula()(UnlearnRequest(ledger, frozenset({"a"})))
    assert np.array_equal(found.params.flat, ledger.final.params.flat)


def test_alpha_is_from_0_to_1() -> None:
    with pytest.raises(InvalidInputError, match="alpha"):
        AuthorsFormula(alpha=1.5)
