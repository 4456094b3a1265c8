"""The ClientApp of a project's own simulation: trains one client for one round."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    RecordDict,
)
from flwr.clientapp import ClientApp

from fastfedul.errors import FastFedULError
from fastfedul.federation.local import LocalResult, train_client
from fastfedul.federation.trainer import LocalTraining, TrainingError
from fastfedul.integrations.flower.client import PARTITION, identify
from fastfedul.params import Layout, Params
from fastfedul.records import Model
from fastfedul.runs.config import RunConfig
from fastfedul.runs.preparation import Prepared, prepare

_FLAT, _BUFFERS, _ORDER, _FAILURE = "flat", "buffers", "order", "failure"

app = identify(ClientApp())


def to_content(
    config: Path, model: Model, index: int, local: LocalTraining | None
) -> RecordDict:
    """Return the message to a client in a round."""
    order = ConfigRecord({"config": str(config), "index": index})
    order["layout"] = model.params.layout.to_json()
    if local is not None:
        order["local"] = json.dumps(asdict(local))
    return RecordDict({**_model_records(model), _ORDER: order})


def to_result(reply: Message, layout: Layout) -> LocalResult:
    """Return a client's result.

    Raises:
        TrainingError: If it failed.
    """
    if reply.has_error():
        raise TrainingError(f"a client failed: {reply.error.reason}")
    failure = reply.content.config_records.get(_FAILURE)
    if failure is not None:
        raise TrainingError(str(failure["reason"]))
    model = _model_of(reply.content, layout)
    return LocalResult(model.params, model.buffers)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the client of this node from the model in the message."""
    try:
        content = RecordDict({**_model_records(_trained(message.content, context))})
    except FastFedULError as error:
        content = RecordDict({_FAILURE: ConfigRecord({"reason": str(error)})})
    return Message(content=content, reply_to=message)


def _trained(content: RecordDict, context: Context) -> Model:
    order = content.config_records[_ORDER]
    prepared = _prepared(str(order["config"]))
    model = _model_of(content, Layout.from_json(str(order["layout"])))
    given = order.get("local")
    local = None if given is None else LocalTraining(**json.loads(str(given)))
    index, number = order["index"], context.node_config[PARTITION]
    assert isinstance(index, int)
    assert isinstance(number, int)
    data, seed = prepared.clients[number], prepared.config.seed
    result = train_client(prepared.trainer, model, data, index, seed, local)
    return Model(result.delta, result.buffers)


@lru_cache(1)
def _prepared(config: str) -> Prepared:
    """Return data and trainer of a run, made once in each process."""
    return prepare(RunConfig.load(Path(config)))


def _model_records(model: Model) -> dict[str, ArrayRecord]:
    flat = ArrayRecord({_FLAT: Array(np.asarray(model.params.flat))})
    buffers = {name: Array(np.asarray(b)) for name, b in model.buffers.items()}
    return {_FLAT: flat, _BUFFERS: ArrayRecord(buffers)}


def _model_of(content: RecordDict, layout: Layout) -> Model:
    records = content.array_records
    buffers = {name: array.numpy() for name, array in records[_BUFFERS].items()}
    return Model(Params(layout, records[_FLAT][_FLAT].numpy()), buffers)
