"""The boundary for everything that a client sends, whichever framework carries it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fastfedul import InvalidInputError, Model, Params
from fastfedul.federation.local import LocalResult
from fastfedul.federation.replies import (
    CheckedReply,
    Quarantined,
    ReplyLimits,
    RoundDiscardedError,
    UnusableReplyError,
    check_arrays,
    check_metrics,
    check_weight,
    judge,
    one_line_reason,
)
from fastfedul.federation.rounds import Schedule, run_rounds

Arrays = dict[str, np.ndarray[Any, Any]]

BEFORE = Model(
    Params.of({"w": np.array([1, 2], np.float32), "h": np.ones(2, np.float16)}),
    {
        "n.running_mean": np.zeros(2, np.float32),
        "n.running_var": np.ones(2, np.float32),
        "n.num_batches_tracked": np.asarray(7, np.int64),
        "mask": np.array([True, False]),
    },
)
CLIENTS = ("a", "b", "c", "d", "e")


def local(**changes: Any) -> Arrays:
    """Return the local arrays of an honest client, some of them changed."""
    honest: Arrays = {**BEFORE.params.exported(), **BEFORE.buffers}
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return {**honest, **{n: np.asarray(v) for n, v in changed.items()}}


def test_arrays_come_out_in_the_dtypes_of_the_model() -> None:
    delta, buffers = check_arrays(
        local(
            w=np.array([2.0, 2.0]),
            n__running_mean=np.array([1, 2], np.float64),
            n__num_batches_tracked=np.asarray(9.0),
        ),
        BEFORE,
    )
    np.testing.assert_array_equal(delta, [1, 0, 0, 0])
    assert {n: b.dtype for n, b in buffers.items()} == {
        n: b.dtype for n, b in BEFORE.buffers.items()
    }
    assert int(buffers["n.num_batches_tracked"]) == 9


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("w", [np.nan, 0], "NaN or infinite"),
        ("w", [1e300, 0], "NaN or infinite"),
        ("w", np.array([1e30, 0], np.float32), "norm 1e"),
        ("w", ["1", "2"], "dtype"),
        ("w", [1j, 0], "dtype"),
        ("w", [[1.0, 2.0]], "shape"),
        ("h", np.array([1e5, 0], np.float32), "does not fit into float16"),
        ("n__running_mean", [1e300, 0], "no float32 of a usual size"),
        ("n__running_mean", np.array([1e38, 0], np.float32), "of a usual size"),
        ("n__running_mean", [np.nan, 0], "of a usual size"),
        ("n__running_mean", [0.0], r"shape \(1,\)"),
        ("n__running_mean", ["0", "0"], "is <U1"),
        ("n__running_var", [1, -1e-6], "variance below zero"),
        ("n__num_batches_tracked", 1e30, "no int64"),
        ("n__num_batches_tracked", 7.5, "no int64"),
        ("n__num_batches_tracked", -1, "counts -1 after 7"),
        ("n__num_batches_tracked", 2**62, "counts 4611686018427387904 after 7"),
        ("n__num_batches_tracked", np.uint64(2**64 - 1), "no int64"),
        ("mask", [2, 0], "no bool"),
        ("other", [1.0], "names differ"),
    ],
)
def test_what_the_model_cannot_take_is_refused(
    name: str, value: Any, match: str
) -> None:
    with pytest.raises(UnusableReplyError, match=match):
        check_arrays(local(**{name: value}), BEFORE)


@pytest.mark.parametrize("name", ["w", "n.running_var"])
def test_a_missing_array_is_refused(name: str) -> None:
    arrays = local()
    del arrays[name]
    with pytest.raises(UnusableReplyError, match=name):
        check_arrays(arrays, BEFORE)


@pytest.mark.parametrize(
    "weight", [0, -1, np.nan, np.inf, 1e11, 10**400, "5", None, True, [5], 1j]
)
def test_a_weight_that_is_no_number_of_examples_is_refused(weight: Any) -> None:
    with pytest.raises(UnusableReplyError, match="its num-examples is"):
        check_weight("num-examples", weight)


@pytest.mark.parametrize(
    "value", [np.nan, -np.inf, [0.5, np.nan], "0.5", None, True, {}, 10**400, [[1]]]
)
def test_a_metric_that_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(UnusableReplyError, match="no finite number"):
        check_metrics({"loss": value})


def test_metrics_are_numbers_and_lists_of_numbers() -> None:
    given = {"loss": 0.5, "hits": 7, "curve": [1.0, 0.5], "none": []}
    assert check_metrics(given) == given


def reply(client: str, delta: float = 1.0, weight: float = 10, **more: Any) -> Any:
    vector = np.array([delta, 0], np.float32)
    return CheckedReply(client=client, weight=weight, delta=vector, **more)


def test_a_weight_is_capped_at_a_multiple_of_the_median() -> None:
    replies = [reply(name) for name in "bcde"]
    replies.append(reply("a", weight=1e10))
    found = judge(replies, (), ReplyLimits())
    assert [own.weight for own in found.usable] == [1000, 10, 10, 10, 10]
    assert found.capped == {"a": 1e10}
    found = judge(replies, (), ReplyLimits(max_weight_ratio=2))
    assert found.usable[0].weight == 20
    found = judge(replies, (), ReplyLimits(max_weight_ratio=None))
    assert found.usable[0].weight == 1e10
    assert not found.capped


def test_of_two_weights_the_larger_one_is_capped() -> None:
    found = judge([reply("a", weight=1e9), reply("b")], (), ReplyLimits())
    assert [own.weight for own in found.usable] == [1000, 10]


def test_buffers_far_from_the_others_are_left_out() -> None:
    usual = {"n.running_var": np.ones(2, np.float32)}
    huge = {"n.running_var": np.full(2, 1e6, np.float32)}
    replies = [reply(name, buffers=usual) for name in "abc"]
    found = judge([*replies, reply("d", buffers=huge)], (), ReplyLimits())
    [out] = found.quarantined
    assert out.client == "d"
    assert out.reason == "its buffers have norm 1.41e+06, the round's median is 1.41"


@pytest.mark.parametrize(
    ("num_bad", "num_good", "match"),
    [(3, 2, "3 of 5 clients"), (2, 2, ""), (0, 0, "0 usable replies"), (1, 0, "1 of")],
)
def test_a_round_counts_unless_more_than_half_are_quarantined(
    num_bad: int, num_good: int, match: str
) -> None:
    bad = [Quarantined(f"bad-{number}", "no") for number in range(num_bad)]
    good = [reply(f"good-{number}") for number in range(num_good)]
    limits = ReplyLimits()
    objection = judge(good, bad, limits).objection(num_bad + num_good, limits)
    assert (match in objection) if match else (objection == "")


@pytest.mark.parametrize(
    "limits",
    [
        {"min_clients": 0},
        {"max_discards": 0},
        {"max_norm_ratio": 1.0},
        {"max_weight_ratio": np.inf},
    ],
)
def test_limits_of_no_use_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(limits))):
        ReplyLimits(**limits)


def test_a_reason_is_one_short_line() -> None:
    assert one_line_reason("a\r\n\u202eb\x1b[2J" + "x" * 10**6)[:8] == "a b [2Jx"
    assert len(one_line_reason("x" * 10**6)) == 200


class Federation:
    """Clients of the own engine; some of them send nonsense."""

    def __init__(self, *bad: str) -> None:
        self.bad = bad
        self.asked: list[tuple[str, ...]] = []

    def __call__(
        self, model: Model, index: int, names: Sequence[str]
    ) -> list[LocalResult]:
        self.asked.append(tuple(names))
        results = []
        for name in names:
            flat = np.full(2, np.inf if name in self.bad else 0.5, np.float32)
            results.append(LocalResult(Params(model.params.layout, flat), {}))
        return results

    def run(self, per_round: int | None = None) -> list[list[str]]:
        """Return the participants of three rounds."""
        start = Model(Params.of({"w": np.zeros(2, np.float32)}))
        schedule = Schedule(seed=1, per_round=per_round)
        rounds = run_rounds(
            self, dict.fromkeys(CLIENTS, 5), schedule, model=start, stop=3
        )
        return [[u.client for u in trained.round.updates] for trained in rounds]


def test_the_own_engine_goes_on_without_a_client_that_sends_nonsense(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert Federation("b", "d").run() == [["a", "c", "e"]] * 3
    assert "round 0 without 'b': its parameters have NaN" in caplog.text


def test_the_own_engine_stops_if_more_than_half_send_nonsense() -> None:
    federation = Federation("a", "b", "c")
    with pytest.raises(RoundDiscardedError, match="3 of 5 clients cannot be used"):
        federation.run()
    # A new draw has the same clients, so they do not train again.
    assert federation.asked == [CLIENTS]


def test_a_discarded_round_of_the_own_engine_is_drawn_again() -> None:
    drawn = Federation().run(per_round=2)
    federation = Federation(*drawn[0])
    found = federation.run(per_round=2)
    assert federation.asked[0] == tuple(drawn[0])
    assert len(federation.asked) > 3
    assert not any(set(names) & set(drawn[0]) for names in found)
    assert Federation(*drawn[0]).run(per_round=2) == found
