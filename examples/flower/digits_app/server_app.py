"""The server: averages, records every round, and forgets whom it is asked to."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits_app.task import folder, read_examples, to_arrays, to_model, trainer
from fastfedul.data.dataset import to_model_input
from fastfedul.integrations.flower import Recorded

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train until the ledger has so many rounds; go on where an earlier run ended."""
    config = context.run_config
    own = trainer(config)
    images, labels = read_examples(folder(config, "data") / "test.npz")
    inputs = to_model_input(images)

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        logits = own.predict(to_model(arrays), inputs)
        return MetricRecord({"accuracy": float((logits.argmax(1) == labels).mean())})

    num_clients = int(config["num-clients"])
    strategy = Recorded(
        FedAvg(
            fraction_evaluate=0.0,
            min_train_nodes=num_clients,
            min_available_nodes=num_clients,
        ),
        ledger=folder(config, "ledger"),
    )
    strategy.start(
        grid=grid,
        initial_arrays=to_arrays(own.initial(int(config["seed"])).params),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
