"""A client: trains the model it is sent on its own examples."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import folder, read_examples, to_arrays, to_model, trainer
from fastfedul.data.dataset import ClientData
from fastfedul.federation.local import train_client
from fastfedul.integrations.flower.client import identify
from fastfedul.params import Params

app = identify(ClientApp())


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the trained model, and on how many examples it was trained."""
    config, own = context.run_config, context.node_config
    number = int(own["partition-id"])
    # A SuperNode knows where its own data are; in a simulation they lie side by side.
    path = own.get("data") or folder(config, "data") / f"part-{number}.npz"
    images, labels = read_examples(Path(str(path)))
    before = to_model(message.content.array_records["arrays"])
    index = int(str(message.content.config_records["config"]["server-round"]))
    found = train_client(
        trainer(config),
        before,
        ClientData(f"client-{number}", images, labels),
        index,
        seed=int(config["seed"]),
    )
    after = Params(before.params.layout, before.params.flat + found.delta.flat)
    content = RecordDict(
        {
            "arrays": to_arrays(after),
            "metrics": MetricRecord({"num-examples": len(labels)}),
        }
    )
    return Message(content=content, reply_to=message)
