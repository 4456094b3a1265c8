"""Asking to forget or erase who is not there."""

from __future__ import annotations

import math

import pytest

from fastfedul import (
    FastFedUL,
    FastFedULError,
    InvalidInputError,
    Scalar,
    UnknownClientError,
    UnlearnRequest,
    erase,
    forget,
)
from fastfedul.errors import AlreadyForgottenError
from tests.support.refusals import WritableLedger, state_of, with_value


@pytest.mark.parametrize("name", ["stranger", "two\nlines", "x" * 10_000, "A", "a "])
def test_forgetting_somebody_unknown_is_refused(
    ledger: WritableLedger, name: str
) -> None:
    before = state_of(ledger)
    with pytest.raises(UnknownClientError) as caught:
        forget(ledger, ["a", name], erase=True)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert state_of(ledger) == before


def test_forgetting_nobody_is_refused(ledger: WritableLedger) -> None:
    before = state_of(ledger)
    with pytest.raises(InvalidInputError, match="at least one"):
        forget(ledger, [], erase=False)
    assert state_of(ledger) == before


def test_forgetting_twice_is_refused(ledger: WritableLedger) -> None:
    before = state_of(ledger)
    with pytest.raises(AlreadyForgottenError, match=r"'d' was forgotten already"):
        forget(ledger, ["d"], erase=False)
    erase(ledger, ["d"])
    after = state_of(ledger)
    assert after != before
    with pytest.raises(InvalidInputError, match=r"'d' was forgotten before"):
        forget(ledger, ["a", "d"], erase=False)
    with pytest.raises(InvalidInputError, match=r"'d' must be forgotten before"):
        erase(ledger, ["d"])
    assert state_of(ledger) == after


def test_erasing_somebody_who_was_not_forgotten_is_refused(
    ledger: WritableLedger,
) -> None:
    before = state_of(ledger)
    with pytest.raises(InvalidInputError, match=r"'a' must be forgotten before"):
        erase(ledger, ["d", "a"])
    assert state_of(ledger) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_forgetting_that_would_make_the_model_infinite_is_refused(
    ledger: WritableLedger, value: float
) -> None:
    before = state_of(ledger)
    with pytest.raises(InvalidInputError, match="infinite"):
        ledger.commit_forgetting(["a"], with_value(value).flat, {}, erase=True)
    assert state_of(ledger) == before


def test_a_request_refused_by_the_method_changes_nothing(
    ledger: WritableLedger,
) -> None:
    before = state_of(ledger)
    with pytest.raises(FastFedULError):
        forget(ledger, ["a"], FastFedUL(skew=Scalar((0.1, 0.1, 0.1))), erase=True)
    with pytest.raises(FastFedULError):
        FastFedUL()(UnlearnRequest(ledger, frozenset({"a", "d"})))
    assert state_of(ledger) == before
