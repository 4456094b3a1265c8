"""The client's side of recording: a ClientApp that says which client it is.

Needs Flower and nothing else, because in a deployment every message starts a process
that imports this.

```python
from flwr.clientapp import ClientApp
from fastfedul.integrations.flower.client import identify

app = identify(ClientApp())
```

A simulation needs it, because Flower's simulated nodes have no names, and so does
`Recorded(..., identify="claimed")`. Where nodes are registered with
`flwr supernode register --name` the server knows them without asking.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

ACTION = "fastfedul"
"""The message type is `query.fastfedul`, so a `query` of the app's own stays free."""

WHO = "who"
PARTITION = "partition-id"
NAME = "client-name"


def identify(app: ClientApp) -> ClientApp:
    """Return the app, which now answers when a server asks which client it is.

    The answer is the node's `partition-id` and `client-name` of its node config, as far
    as it has them: `flower-supernode --node-config 'client-name="hospital-7"'`.
    """
    app.query(ACTION)(answer)
    return app


def answer(message: Message, context: Context) -> Message:
    """Return which client this node is, as far as its config says."""
    who = ConfigRecord()
    for key in (PARTITION, NAME):
        if key in context.node_config:
            who[key] = context.node_config[key]
    content = RecordDict({WHO: who})
    return Message(content=content, reply_to=message)
