"""A ledger recorded in full, seen as if a policy had kept less of it."""

from __future__ import annotations

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    FastFedUL,
    InvalidInputError,
    Keep,
    MemoryLedger,
    Model,
    NoSkew,
    Params,
    Round,
    UnlearnRefusedError,
    UnlearnRequest,
)
from fastfedul.ledger.views import CountedLedger, KeptView
from fastfedul.methods.protocol import method_settings
from fastfedul.methods.registry import SHOWN_BY_DEFAULT, find_method
from fastfedul.records import VectorRef

LAYOUT = Params.of({"w": np.zeros(6, np.float32)}).layout
NAMES = ("a", "b", "c", "d", "e", "f", "g")


def recorded(keep: Keep | None) -> MemoryLedger:
    rng = np.random.default_rng(11)
    ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)))
    for index in range(12):
        names = [name for name in NAMES if rng.random() < 0.9] or ["a"]
        updates = tuple(
            ClientUpdate(
                name,
                1 / len(names),
                Params(LAYOUT, rng.normal(0, 1 + i, 6).astype(np.float32)),
            )
            for i, name in enumerate(names)
        )
        round_ = Round(index, updates)
        ledger.append(keep(round_) if keep else round_)
    return ledger


@pytest.mark.parametrize("text", ["all", "optimal:3", "top:3", "uniform:3"])
def test_a_view_shows_what_the_policy_would_have_kept(text: str) -> None:
    keep = Keep.parse(text, seed=4)
    view, real = KeptView(recorded(None), keep), recorded(keep)
    for name in NAMES:
        assert view.updates_of(name) == real.updates_of(name)
    method = FastFedUL(minimum_coverage=0)
    seen = method(UnlearnRequest(view, frozenset({"g"})))
    kept = method(UnlearnRequest(real, frozenset({"g"})))
    np.testing.assert_allclose(seen.params.flat, kept.params.flat, rtol=1e-5)
    assert seen.coverage == kept.coverage
    assert (seen.coverage < 1) == (text not in ("all", "top:3"))


def test_what_happened_in_training_cannot_be_changed_by_a_view() -> None:
    with pytest.raises(InvalidInputError, match="train with that policy"):
        KeptView(recorded(None), Keep("uniform", 3, use="aggregate"))


def test_every_method_that_needs_only_the_history_answers() -> None:
    ledger = recorded(None)
    request = UnlearnRequest(ledger, frozenset({"g"}))
    found = {name: find_method(name)(request) for name in SHOWN_BY_DEFAULT}
    models = {result.params.flat.tobytes() for result in found.values()}
    assert len(models) == len(SHOWN_BY_DEFAULT)
    plain = FastFedUL(skew=NoSkew())(request)
    assert np.array_equal(found["fast-fedul-2"].params.flat, plain.params.flat)
    with pytest.raises(InvalidInputError, match="fast-fedul-3"):
        find_method("fast-fedul-9")
    with pytest.raises(InvalidInputError, match="no such setting: speed"):
        find_method("fast-fedul", {"speed": 9})


@pytest.mark.parametrize("name", ["fast-fedul-2", "fast-fedul-3"])
def test_a_variant_of_the_paper_can_be_tried_on_a_sample(name: str) -> None:
    request = UnlearnRequest(recorded(None), frozenset({"g"}))
    sampled = find_method(name, {"keep": "optimal:3", "keep_seed": 4})
    assert method_settings(sampled)["keep"] == "optimal:3"
    view = KeptView(request.ledger, Keep("optimal", 3, seed=4))
    own = find_method(name, {})(UnlearnRequest(view, request.forget))
    found = sampled(request).params.flat
    assert np.array_equal(found, own.params.flat)
    assert not np.array_equal(found, find_method(name)(request).params.flat)


def test_a_counted_ledger_counts_the_bytes_of_what_is_read() -> None:
    counted = CountedLedger(recorded(None))
    size = counted.settings.layout.size
    where = counted.updates_of("g")[0].round
    counted.combine([VectorRef(0), VectorRef(where, "g")], [[1.0, 1.0]])
    assert counted.bytes_read == 2 * 4 * size
    counted.stack([VectorRef(2)]).read(0, size)
    assert counted.bytes_read == 3 * 4 * size


def test_a_sample_of_a_sample_is_refused() -> None:
    ledger = recorded(Keep.parse("uniform:3", seed=4))
    request = UnlearnRequest(ledger, frozenset({"g"}))
    with pytest.raises(UnlearnRefusedError, match="not every update of client 'g'"):
        find_method("fast-fedul-1")(request)
