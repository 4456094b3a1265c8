"""Rounds made from checked replies, and how their clients trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    RecordDict,
)

from fastfedul import DiskLedger, InvalidInputError, LocalSGD, Model, Params
from fastfedul.federation.replies import CheckedReply
from fastfedul.integrations.flower.arrays import (
    buffer_rule,
    disagreement,
    to_model,
    to_record,
)
from fastfedul.integrations.flower.rounds import (
    RoundSettings,
    expected_step,
    local_training,
    make_round,
)

BEFORE = Model(Params.of({"w": np.array([1, 2, 3], np.float32)}))
SETTINGS = RoundSettings()


def checked(client: str, values: object, weight: float = 10) -> CheckedReply:
    """Return a reply that passed all checks."""
    delta = np.asarray(values, np.float32) - BEFORE.params.flat
    return CheckedReply(client=client, weight=weight, delta=delta)


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
    usable = [replace(checked(name, [2, 2, 2]), metrics=TOLD) for name in "ab"]
    trained = local_training(telling({}, {}), None)
    assert make_round(0, usable, BEFORE, SETTINGS, trained).local is None
    told = local_training(telling({}, {}), USUAL)
    assert make_round(0, usable, BEFORE, SETTINGS, told).local == USUAL


_AGGREGATIONS = (
    *("mean", "median", "trimmed-mean:0.2"),
    *("krum:1", "multi-krum:1:3", "bulyan:0"),
)


def test_the_expected_step_is_the_ledgers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for aggregation in _AGGREGATIONS:
        own = RoundSettings(aggregation=aggregation)
        rng = np.random.default_rng(3)
        usable = [checked(name, rng.standard_normal(3)) for name in "abcdef"]
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
