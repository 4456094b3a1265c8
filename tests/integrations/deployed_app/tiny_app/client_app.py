"""A client that does what files in a folder say, and notes down what it did.

`hold-CLIENT-ROUND`: wait while this file is there. `poison-CLIENT-ROUND`: send NaN.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

PATIENCE = 240

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model moved by numbers that depend on the client and the round."""
    client = int(context.node_config["partition-id"])
    folder = Path(str(context.node_config["folder"]))
    number = int(str(message.content["config"]["server-round"]))
    me = f"{client}-{number}"
    (folder / f"started-{me}").touch()
    deadline = time.monotonic() + PATIENCE
    while (folder / f"hold-{me}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    weights = message.content.array_records["arrays"]["weights"].numpy()
    rng = np.random.default_rng([client, number])
    trained = (weights + rng.normal(size=weights.shape) / 10).astype(np.float32)
    if (folder / f"poison-{me}").exists():
        trained[7] = np.nan
    np.save(folder / f"sent-{me}.npy", trained)
    content = RecordDict(
        {
            "arrays": ArrayRecord({"weights": Array(trained)}),
            "metrics": MetricRecord({"num-examples": 10 + client}),
        }
    )
    return Message(content=content, reply_to=message)
