"""Noise that the server adds: it is no client's, and forgetting leaves it as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    CentralPrivacy,
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    MemoryLedger,
    NoSkew,
    Params,
    Round,
    forget,
    verify,
)
from fastfedul.ledger.protocol import models
from tests.support.histories import (
    LAYOUT,
    TARGET,
    Maker,
    assert_adds_up,
    close_to,
    history,
    initial,
    normal,
    recorded,
    steps_of,
    without,
)

PRIVACY = CentralPrivacy(clipping_norm=2.0, noise_stdev=0.5, next_clipping_norm=2.5)


def noisy(rounds: list[Round]) -> list[Round]:
    return [
        replace(r, noise=Params(LAYOUT, 5 * normal(70, r.index)), privacy=PRIVACY)
        for r in rounds
    ]


def test_the_model_has_the_noise_and_the_step_has_not(make: Maker) -> None:
    ledger, plain = make(), make()
    rounds = noisy(history(4))
    found = recorded(ledger, rounds)
    recorded(plain, history(4))
    for mine, yours in zip(steps_of(ledger), steps_of(plain), strict=True):
        np.testing.assert_array_equal(mine, yours)
    for index, params in enumerate(models(ledger)):
        close_to(params.flat, found[index], scale=20)
    noise = sum(5 * normal(70, index) for index in range(4))
    close_to(found[-1], plain.final.params.flat + noise, scale=20)
    assert [entry.privacy for entry in ledger.rounds()] == [PRIVACY] * 4
    assert [entry.privacy for entry in plain.rounds()] == [None] * 4
    assert_adds_up(ledger)


@pytest.mark.parametrize("aggregation", ["mean", "median", "krum:1"])
@pytest.mark.parametrize("erase", [True, False])
def test_forgetting_leaves_the_noise_as_it_was(
    make: Maker, aggregation: str, erase: bool
) -> None:
    rounds = noisy(history(6))
    ledger, never = make(aggregation=aggregation), make(aggregation=aggregation)
    recorded(ledger, rounds)
    recorded(never, [without(r, {TARGET}) for r in rounds])
    done = forget(ledger, [TARGET], FastFedUL(skew=NoSkew()), erase=erase)
    close_to(ledger.final.params.flat, never.final.params.flat, scale=20)
    assert_adds_up(ledger)
    assert done.privacy is not None
    assert done.privacy["noisy_rounds"] == 6
    assert any("does not cover the cleaned model" in text for text in done.warnings)


def test_a_ledger_of_sums_takes_noise_too(tmp_path: Path) -> None:
    rounds = noisy(history(5))
    whole = MemoryLedger.create(initial())
    recorded(whole, rounds)
    with DiskLedger.create(tmp_path / "sums", initial(), history="sums") as sums:
        recorded(sums, rounds)
        np.testing.assert_array_equal(sums.final.params.flat, whole.final.params.flat)
        assert not verify(sums).problems
        forget(sums, [TARGET])
        assert sums.clients()[TARGET].state == "erased"


def test_without_noise_nothing_is_said_of_it(make: Maker) -> None:
    ledger = make()
    recorded(ledger, history(3))
    done = forget(ledger, [TARGET], erase=False)
    assert done.privacy is None
    assert not any("epsilon" in text for text in done.warnings)


def test_noise_of_no_sense_is_refused_and_changes_nothing(make: Maker) -> None:
    ledger = make()
    [first] = noisy(history(1))
    endless = Params(LAYOUT, np.full(LAYOUT.size, np.inf, np.float32))
    for bad, match in (
        (replace(first, privacy=None), "give noise and privacy together"),
        (replace(first, noise=None), "give noise and privacy together"),
        (replace(first, noise=endless), "the noise of round 0 is infinite"),
        (replace(first, privacy=(1, 2)), "fastfedul.CentralPrivacy"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInputError, match=match):
            ledger.append(bad)
    assert ledger.num_rounds == 0
    with pytest.raises(InvalidInputError, match="the clipping norm is 0"):
        replace(PRIVACY, clipping_norm=0.0)
