"""From replies to a round: faults that a simulation cannot have, and laws."""

from __future__ import annotations

from io import BytesIO
from typing import Any
from uuid import uuid4

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
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul import DiskLedger, InvalidInputError, LocalSGD, Model, Params
from fastfedul.integrations.flower.arrays import (
    buffer_rule,
    decoded,
    disagreement,
    to_model,
    to_record,
)
from fastfedul.integrations.flower.rounds import (
    RoundSettings,
    Sent,
    expected_step,
    local_training,
    make_round,
    sort_replies,
)

BEFORE = Model(Params.of({"w": np.array([1, 2, 3], np.float32)}))
SETTINGS = RoundSettings.parse(
    aggregation="mean",
    keep="all",
    keep_use="store",
    dtype="float32",
    min_clients=1,
    max_norm_ratio=1000.0,
    weight_key="num-examples",
    seed=0,
)


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


def test_an_error_sent_by_the_superlink_is_laid_at_the_right_door() -> None:
    sent = asked("a", "b")
    failed = Message(Error(code=5, reason="Node Unavailable"), reply_to=sent[0][0])
    failed.metadata.__dict__["_src_node_id"] = 1
    replies = [failed, replied(sent[1][0], [2, 2, 2])]
    usable, problems = sort_replies(replies, sent, set(), BEFORE, SETTINGS)
    assert [own.client for own in usable] == ["b"]
    assert problems == [("a", "it failed: Node Unavailable")]


def test_a_silent_node_is_noticed() -> None:
    sent = asked("a", "b")
    replies = [replied(sent[0][0], [2, 2, 2])]
    _, problems = sort_replies(replies, sent, set(), BEFORE, SETTINGS)
    assert problems == [("b", "it sent no reply in time")]


def test_replies_of_an_earlier_round_and_second_ones_are_passed_over() -> None:
    earlier, sent = asked("a"), asked("a")
    replies = [
        replied(earlier[0][0], [9, 9, 9]),
        replied(sent[0][0], [2, 2, 2]),
        replied(sent[0][0], [8, 8, 8]),
    ]
    [own], problems = sort_replies(replies, sent, set(), BEFORE, SETTINGS)
    np.testing.assert_array_equal(own.delta, [1, 0, -1])
    assert not problems


def test_a_reply_of_a_client_that_was_forgotten_meanwhile_is_dropped() -> None:
    sent = asked("a", "b")
    replies = [replied(message, [2, 2, 2]) for message, _ in sent]
    usable, problems = sort_replies(replies, sent, {"a"}, BEFORE, SETTINGS)
    assert [own.client for own in usable] == ["b"]
    assert problems == [("a", "it was forgotten while its reply was under way")]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e20, [1, 2]])
def test_a_weight_that_is_none_is_refused(weight: object) -> None:
    sent = asked("a")
    replies = [replied(sent[0][0], [2, 2, 2], weight)]
    usable, [(_, reason)] = sort_replies(replies, sent, set(), BEFORE, SETTINGS)
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
    usable, problems = sort_replies(replies, sent, set(), BEFORE, SETTINGS)
    assert not usable
    assert [client for client, _ in problems] == ["a", "b"]
    assert "arrays cannot be read" in problems[1][1]


def test_metrics_unlike_the_others_do_not_stop_the_round() -> None:
    sent = asked("a", "b", "c")
    replies = [replied(message, [2, 2, 2]) for message, _ in sent]
    [metrics] = replies[2].content.metric_records.values()
    metrics["surprise"] = 1.0
    usable, problems = sort_replies(replies, sent, set(), BEFORE, SETTINGS)
    assert [own.client for own in usable] == ["a", "b"]
    assert "other names" in problems[0][1]


def test_size_alone_is_no_fault_where_there_is_nothing_to_compare_with() -> None:
    sent = asked("a", "b")
    values = ([1.001, 2, 3], [1e6, 2, 3])
    replies = [replied(m, v) for (m, _), v in zip(sent, values, strict=True)]
    usable, problems = sort_replies(replies, sent, set(), BEFORE, SETTINGS)
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
        make_round(
            0, sort_replies(r, sent, set(), BEFORE, SETTINGS)[0], BEFORE, SETTINGS
        )
        for r in (replies, [replies[place] for place in order])
    ]
    steps = [expected_step(round_, SETTINGS) for round_ in rounds]
    np.testing.assert_array_equal(steps[0], steps[1])
    names = [[u.client for u in round_.updates] for round_ in rounds]
    assert names == [list("abcdef")] * 2


TOLD = {"lr": 0.05, "momentum": 0.9, "batch-size": 32, "local-epochs": 2}
USUAL = LocalSGD(lr=0.5, momentum=0.0, batch_size=8, epochs=1)


def telling(*configs: dict[str, Any]) -> list[Message]:
    """Return messages of the server, each with a config of its own."""
    return [
        Message(
            content=RecordDict({"config": ConfigRecord(config)}),
            message_type=MessageType.TRAIN,
            dst_node_id=100 + number,
        )
        for number, config in enumerate(configs)
    ]


def test_what_the_server_tells_all_clients_is_how_they_train() -> None:
    expected = LocalSGD(lr=0.05, momentum=0.9, batch_size=32, epochs=2)
    for usual in (None, USUAL):
        messages = telling({**TOLD, "server-round": 3}, TOLD, TOLD)
        assert local_training(messages, usual) == expected


def test_what_a_message_does_not_say_is_as_usual_or_unknown() -> None:
    partly = telling({"lr": 0.05}, {"lr": 0.05, "server-round": 1})
    assert local_training(partly, USUAL) == LocalSGD(
        lr=0.05, momentum=0.0, batch_size=8, epochs=1
    )
    assert local_training(partly, None) is None
    assert local_training(telling({}, {}), USUAL) == USUAL
    assert local_training(telling({}, {}), None) is None


@pytest.mark.parametrize("usual", [None, USUAL])
def test_clients_that_are_told_different_things_train_in_no_one_way(
    usual: LocalSGD | None,
) -> None:
    assert local_training(telling(TOLD, {**TOLD, "lr": 0.1}), usual) is None
    assert local_training(telling(TOLD, {}), usual) is None


@pytest.mark.parametrize("value", ["fast", True, [0.1, 0.2], b"\x01"])
def test_what_is_no_number_says_nothing(value: Any) -> None:
    assert local_training(telling({**TOLD, "lr": value}), None) is None
    found = local_training(telling({**TOLD, "lr": value}), USUAL)
    assert found is not None
    assert found.lr == USUAL.lr


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 0.0), ("lr", float("nan")), ("momentum", 1.0), ("batch-size", 0),
     ("local-epochs", -1)],
)  # fmt: skip
@pytest.mark.parametrize("usual", [None, USUAL])
def test_training_that_makes_no_sense_is_refused_in_one_line(
    key: str, value: float, usual: LocalSGD | None
) -> None:
    with pytest.raises(InvalidInputError, match=r"the .* is .*; choose") as caught:
        local_training(telling({**TOLD, key: value}), usual)
    assert "\n" not in str(caught.value)


def test_what_a_client_says_of_its_training_is_not_recorded() -> None:
    sent = asked("a", "b")
    replies = [replied(message, [2, 2, 2]) for message, _ in sent]
    for reply in replies:
        reply.content["config"] = ConfigRecord(TOLD)  # type: ignore[arg-type]
        [metrics] = reply.content.metric_records.values()
        metrics.update(TOLD)
    usable, problems = sort_replies(replies, sent, set(), BEFORE, SETTINGS)
    assert not problems
    trained = local_training((message for message, _ in sent), None)
    assert make_round(0, usable, BEFORE, SETTINGS, trained).local is None
    told = local_training((message for message, _ in sent), USUAL)
    assert make_round(0, usable, BEFORE, SETTINGS, told).local == USUAL


def test_the_expected_step_is_the_ledgers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for aggregation in ("mean", "median", "trimmed-mean:0.2"):
        own = RoundSettings.parse(
            aggregation=aggregation,
            keep="all",
            keep_use="store",
            dtype="float32",
            min_clients=1,
            max_norm_ratio=1000.0,
            weight_key="num-examples",
            seed=0,
        )
        sent = asked(*"abcdef")
        rng = np.random.default_rng(3)
        replies = [replied(m, rng.standard_normal(3), 7) for m, _ in sent]
        usable, _ = sort_replies(replies, sent, set(), BEFORE, own)
        round_ = make_round(0, usable, BEFORE, own)
        folder = tmp_path_factory.mktemp("ledger")
        with DiskLedger.create(folder, BEFORE, aggregation=aggregation) as ledger:
            ledger.append(round_)
            np.testing.assert_array_equal(
                ledger.final.params.flat,
                BEFORE.params.flat + expected_step(round_, own),
            )


def test_a_model_goes_to_flower_and_back_in_its_dtypes_and_order() -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "n.running_var": np.ones(2, np.float32),
        "half": np.array([0.5, 0.25], np.float16),
        "count": np.asarray(7, np.int64),
        "double": np.array([[1.5]]),
    }
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    model = to_model(record, buffer_rule(None))
    assert set(model.buffers) == {"n.running_var", "count"}
    back = to_record(model, tuple(arrays))
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(back[name].numpy(), array)


def test_buffers_can_be_listed_or_told_by_a_function() -> None:
    array = np.ones(2, np.float32)
    assert buffer_rule(["mine"])("mine", array)
    assert not buffer_rule(["mine"])("n.running_var", array)
    assert buffer_rule(["mine"])("count", np.ones(2, np.int64))
    assert buffer_rule(lambda name, _: name == "x")("x", array)


def test_another_order_of_adding_up_is_no_disagreement() -> None:
    rng = np.random.default_rng(0)
    own = Params.of({"w": rng.standard_normal(1000).astype(np.float32) * 100})
    near = own["w"] * np.float32(1 + 1e-6)
    far = own["w"] * np.float32(1 + 1e-4)
    for values, agrees in ((near, True), (far, False)):
        record = ArrayRecord({"w": Array(values)})
        assert (disagreement(record, own, 0.01) == "") is agrees
    assert "other arrays" in disagreement(ArrayRecord({}), own, 0.01)


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
    with pytest.raises(ValueError, match="allow_pickle"):
        decoded(Array("object", (1,), "numpy.ndarray", data))
