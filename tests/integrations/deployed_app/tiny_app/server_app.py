"""A server that records, and forgets whom it is asked to."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fastfedul.integrations.flower import Recorded

SIZE = 2000

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train until the ledger has so many rounds."""
    least = int(context.run_config["min-nodes"])
    strategy = Recorded(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=least, min_available_nodes=least),
        ledger=str(context.run_config["ledger"]),
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"weights": Array(np.zeros(SIZE, np.float32))}),
        num_rounds=int(context.run_config["num-server-rounds"]),
        timeout=240,
    )
