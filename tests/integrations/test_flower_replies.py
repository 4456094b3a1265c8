"""Replies of Flower's nodes: faults that a simulation cannot have, and laws."""

from __future__ import annotations

from collections.abc import Iterable, Set
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul import LedgerReader, Model, Params
from fastfedul.federation.replies import (
    CheckedReply,
    UnusableReplyError,
)
from fastfedul.integrations.flower import Recorded
from fastfedul.integrations.flower.arrays import decoded, to_record
from fastfedul.integrations.flower.replies import (
    Sent,
    by_message,
    judge_evaluation,
    judge_training,
    receive,
)
from fastfedul.integrations.flower.rounds import (
    RoundSettings,
    expected_step,
    make_round,
)
from tests.support.flower import Nodes, node

BEFORE = Model(Params.of({"w": np.array([1, 2, 3], np.float32)}))
SETTINGS = RoundSettings()


def asked(*clients: str) -> Sent:
    """Return the messages of a round, as they are once they have been sent."""
    sent = []
    for number, client in enumerate(clients):
        message = Message(
            content=RecordDict(),
            message_type=MessageType.TRAIN,
            dst_node_id=100 + number,
        )
        message.metadata.__dict__["_message_id"] = str(uuid4())
        sent.append((message, client))
    return sent


def replied(message: Message, values: object, weight: object = 10) -> Message:
    arrays = ArrayRecord({"w": Array(np.asarray(values, np.float32))})
    metrics = MetricRecord({"num-examples": weight})  # type: ignore[dict-item]
    content = RecordDict({"arrays": arrays, "metrics": metrics})
    return Message(content=content, reply_to=message)


def judged(
    replies: list[Message], sent: Sent, gone: Set[str] = frozenset()
) -> tuple[tuple[CheckedReply, ...], list[tuple[str, str]]]:
    """Return usable replies, and clients that are left out with the reasons."""
    found = judge_training(by_message(replies), sent, gone, BEFORE, SETTINGS)
    left_out = (*found.absent, *found.judgement.quarantined)
    return found.judgement.usable, [(one.client, one.reason) for one in left_out]


def test_an_error_sent_by_the_superlink_is_laid_at_the_right_door() -> None:
    sent = asked("a", "b")
    failed = Message(Error(code=5, reason="Node Unavailable"), reply_to=sent[0][0])
    failed.metadata.__dict__["_src_node_id"] = 1
    replies = [failed, replied(sent[1][0], [2, 2, 2])]
    usable, problems = judged(replies, sent)
    assert [own.client for own in usable] == ["b"]
    assert problems == [("a", "it failed: Node Unavailable")]


def test_a_silent_node_is_noticed() -> None:
    sent = asked("a", "b")
    replies = [replied(sent[0][0], [2, 2, 2])]
    _, problems = judged(replies, sent)
    assert problems == [("b", "it sent no reply in time")]


def test_replies_of_an_earlier_round_and_second_ones_are_passed_over() -> None:
    earlier, sent = asked("a"), asked("a")
    replies = [
        replied(earlier[0][0], [9, 9, 9]),
        replied(sent[0][0], [2, 2, 2]),
        replied(sent[0][0], [8, 8, 8]),
    ]
    [own], problems = judged(replies, sent)
    assert own.delta is not None
    np.testing.assert_array_equal(own.delta, [1, 0, -1])
    assert not problems


def test_a_reply_of_a_client_that_was_forgotten_meanwhile_is_dropped() -> None:
    sent = asked("a", "b")
    replies = [replied(message, [2, 2, 2]) for message, _ in sent]
    usable, problems = judged(replies, sent, {"a"})
    assert [own.client for own in usable] == ["b"]
    assert problems == [("a", "it was forgotten while its reply was under way")]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e20, [1, 2]])
def test_a_weight_that_is_none_is_refused(weight: object) -> None:
    sent = asked("a")
    replies = [replied(sent[0][0], [2, 2, 2], weight)]
    usable, [(_, reason)] = judged(replies, sent)
    assert not usable
    assert reason.startswith("its num-examples is")


def test_replies_without_arrays_or_with_unreadable_ones_are_refused() -> None:
    sent = asked("a", "b")
    bad = Array("float32", (3,), "numpy.ndarray", b"not an array")
    metrics = MetricRecord({"num-examples": 3})
    replies = [
        Message(content=RecordDict({"metrics": metrics}), reply_to=sent[0][0]),
        Message(
            content=RecordDict({"m": metrics, "arrays": ArrayRecord({"w": bad})}),
            reply_to=sent[1][0],
        ),
    ]
    usable, problems = judged(replies, sent)
    assert not usable
    assert [client for client, _ in problems] == ["a", "b"]
    assert problems[1][1].startswith("its array 'w' cannot be read: ValueError")


def test_metrics_unlike_the_others_do_not_stop_the_round() -> None:
    sent = asked("a", "b", "c")
    replies = [replied(message, [2, 2, 2]) for message, _ in sent]
    [metrics] = replies[2].content.metric_records.values()
    metrics["surprise"] = 1.0
    usable, problems = judged(replies, sent)
    assert [own.client for own in usable] == ["a", "b"]
    assert "other names" in problems[0][1]


def test_size_alone_is_no_fault_where_there_is_nothing_to_compare_with() -> None:
    sent = asked("a", "b")
    values = ([1.001, 2, 3], [1e6, 2, 3])
    replies = [replied(m, v) for (m, _), v in zip(sent, values, strict=True)]
    usable, problems = judged(replies, sent)
    assert len(usable) == 2
    assert not problems


@given(order=st.permutations(range(6)), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_order_of_replies_makes_no_difference(order: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    sent = asked(*"abcdef")
    replies = [
        replied(m, rng.standard_normal(3), 1 + i) for i, (m, _) in enumerate(sent)
    ]
    rounds = [
        make_round(0, judged(r, sent)[0], BEFORE, SETTINGS)
        for r in (replies, [replies[place] for place in order])
    ]
    steps = [expected_step(round_, SETTINGS) for round_ in rounds]
    np.testing.assert_array_equal(steps[0], steps[1])
    names = [[u.client for u in round_.updates] for round_ in rounds]
    assert names == [list("abcdef")] * 2


@given(
    dtype=st.sampled_from(["<f4", "<f8", "<f2", ">f4", "<i8", "|b1", "|u1"]),
    shape=st.lists(st.integers(0, 4), max_size=3),
    fortran=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_arrays_are_decoded_as_flower_does(
    dtype: str, shape: list[int], fortran: bool
) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    array = Array(np.asarray(values, dtype, order="F" if fortran else "C"))
    found = decoded(array)
    assert found.dtype == array.numpy().dtype
    np.testing.assert_array_equal(found, array.numpy())


@pytest.mark.parametrize("cut", [0, 5, 9, 40, 130])
def test_an_array_that_was_cut_off_is_an_error(cut: int) -> None:
    whole = Array(np.ones(8, np.float32))
    assert len(whole.data) > cut
    with pytest.raises((ValueError, EOFError, SyntaxError)):
        decoded(Array(whole.dtype, whole.shape, whole.stype, whole.data[:cut]))


def test_objects_are_never_unpickled() -> None:
    pickled = BytesIO()
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    data = pickled.getvalue()
    with pytest.raises(ValueError, match="are no object"):
        decoded(Array("object", (1,), "numpy.ndarray", data))


def test_half_precision_is_widened_before_the_strategy_sees_it() -> None:
    sent = asked("a", "b", "c")
    replies = [replied(message, [2, 2, 2]) for message, _ in sent]
    half = ArrayRecord({"w": Array(np.array([2, 2, 2], np.float16))})
    replies[0].content["arrays"] = half
    found = judge_training(by_message(replies), sent, set(), BEFORE, SETTINGS)
    assert len(found.messages) == 3
    arrays, _ = FedAvg().aggregate_train(1, list(found.messages))
    assert arrays is not None
    np.testing.assert_allclose(arrays["w"].numpy(), [2, 2, 2], rtol=1e-6)
    assert replies[0].content.array_records["arrays"] is half


def test_the_strategy_gets_the_capped_weight_in_training_and_evaluation() -> None:
    sent = asked("a", "b", "c")
    replies = [replied(sent[0][0], [1, 1, 1], 10**9)]
    replies += [replied(message, [2, 2, 2], 10) for message, _ in sent[1:]]
    for found in (
        judge_training(by_message(replies), sent, set(), BEFORE, SETTINGS),
        judge_evaluation(by_message(replies), sent, set(), SETTINGS),
    ):
        assert found.judgement.capped == {"a": 1e9}
        records = [
            next(iter(m.content.metric_records.values())) for m in found.messages
        ]
        assert [record["num-examples"] for record in records] == [1000, 10, 10]


def test_records_that_a_strategy_did_not_ask_for_do_not_reach_it() -> None:
    sent = asked("a")
    reply = replied(sent[0][0], [2, 2, 2])
    reply.content["who"] = ConfigRecord({"client-name": "another"})
    found = judge_training(by_message([reply]), sent, set(), BEFORE, SETTINGS)
    [message] = found.messages
    assert set(message.content) == {"arrays", "metrics"}
    assert found.judgement.usable[0].client == "a"


class Replying(Nodes):
    """Nodes whose replies are what a test puts there."""

    def __init__(self, *replies: Any) -> None:
        super().__init__(*(node(100 + number) for number in range(len(replies))))
        self.given = replies
        self.ids: list[str] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.ids = list(super().push_messages(messages))
        return self.ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        [message_id] = message_ids
        reply = self.given[self.ids.index(message_id)]
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, bytes):
            # As Flower's grid of a deployment reads the bytes of a node.
            found = inflate_object_from_contents("id", {"id": reply})
            assert isinstance(found, Message)
            return [found]
        return [] if reply is None else [reply]


def test_bytes_that_flower_cannot_read_harm_no_other_reply() -> None:
    sent = asked(*"abcdef")
    whole = replied(sent[5][0], [2, 2, 2])
    grid = Replying(
        b"", b"Message 0 3\x00abc", b"NoSuchKind  0\x00", b"\xff", None, whole
    )
    found = receive(grid, [message for message, _ in sent], timeout=0.3)
    assert [isinstance(found.get(i), UnusableReplyError) for i in grid.ids] == [
        *(True, True, True, True),
        *(False, False),
    ]
    assert grid.ids[4] not in found
    assert found[grid.ids[5]] is whole


def test_a_reply_answers_the_message_for_which_it_was_pulled() -> None:
    sent = asked("a", "b")
    stolen = replied(sent[0][0], [9, 9, 9])
    grid = Replying(None, stolen)
    replies = receive(grid, [message for message, _ in sent], timeout=0.1)
    found = judge_training(replies, sent, set(), BEFORE, SETTINGS)
    assert [own.client for own in found.judgement.usable] == ["b"]
    assert [one.client for one in found.absent] == ["a"]


def test_a_superlink_in_trouble_is_no_fault_of_a_client() -> None:
    sent = asked("a")
    grid = Replying(httpx.ConnectError("gone"))
    with pytest.raises(httpx.ConnectError):
        receive(grid, [message for message, _ in sent], timeout=1)


def failing(*_: Any) -> MetricRecord:
    raise ZeroDivisionError("a loss of zero")


class Own(FedAvg):
    """A strategy with an aggregation of its own."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        return super().aggregate_train(server_round, replies)


def one_round(
    strategy: FedAvg, path: Path
) -> tuple[MetricRecord | None, MetricRecord | None]:
    """Return the metrics of training and evaluation of a round with two nodes."""
    grid = Nodes(node(11, "hospital-1", b"one"), node(12, "hospital-2", b"two"))
    arrays = to_record(BEFORE, ("w",))
    with Recorded(strategy, path, aggregation="mean") as recorded:
        found = []
        for hook in (recorded.configure_train, recorded.configure_evaluate):
            messages = list(hook(1, arrays, ConfigRecord(), grid))
            list(grid.push_messages(messages))
            found.append([replied(message, [2, 2, 2]) for message in messages])
            if len(found) == 1:
                after, trained = recorded.aggregate_train(1, found[0])
                assert after is not None
                arrays = after
        return trained, recorded.aggregate_evaluate(1, found[1])


def test_a_function_of_metrics_that_fails_costs_the_metrics_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = FedAvg(train_metrics_aggr_fn=failing, evaluate_metrics_aggr_fn=failing)
    with caplog.at_level("ERROR", logger="flwr"):
        assert one_round(strategy, tmp_path / "ledger") == (None, None)
    assert caplog.text.count("has no metrics: ZeroDivisionError: a loss of zero") == 2
    with LedgerReader(tmp_path / "ledger") as ledger:
        assert ledger.num_rounds == 1
        np.testing.assert_array_equal(ledger.final.params.flat, [2, 2, 2])


def test_an_aggregation_of_ones_own_that_fails_records_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        one_round(Own(train_metrics_aggr_fn=failing), tmp_path / "ledger")
    with LedgerReader(tmp_path / "ledger") as ledger:
        assert ledger.num_rounds == 0
