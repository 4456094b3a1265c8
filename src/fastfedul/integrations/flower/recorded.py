"""Flower, with a ledger: every round recorded, every client removable.

Needs the extra `flower`: `pip install 'fastfedul[flower]'`. A ServerApp changes by one
line, and trains as before:

```diff
 from flwr.serverapp.strategy import FedAvg
+from fastfedul.integrations.flower import Recorded

 @app.main()
 def main(grid, context):
-    strategy = FedAvg(fraction_train=0.5)
+    strategy = Recorded(FedAvg(fraction_train=0.5), ledger="/srv/federation/ledger")
     result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=50)
```

In a simulation, where nodes have no names, the ClientApp changes by one line too:

```diff
-app = ClientApp()
+app = identify(ClientApp())  # from fastfedul.integrations.flower.client
```

The federation trains with the ledger's own model. The ledger adds up the updates of a
round in the order of the clients' names, so the model does not depend on the order in
which replies arrive.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, Self

from fastfedul.errors import InvalidInputError, require_extra
from fastfedul.integrations.flower.errors import StrategyRefusedError

with require_extra("flower", "this needs Flower"):
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info
from flwr.supercore.logger import log

from fastfedul.federation.aggregation import named_rule, require_enough
from fastfedul.federation.local import one_line
from fastfedul.federation.replies import ReplyLimits, RoundDiscardedError
from fastfedul.forgetting.certificates import certificates_folder
from fastfedul.forgetting.signing import SigningKey, find_key
from fastfedul.integrations.flower.arrays import Buffers, buffer_rule, disagreement
from fastfedul.integrations.flower.grid import AdmittedGrid
from fastfedul.integrations.flower.identity import Identify, Identities
from fastfedul.integrations.flower.privacy import (
    PrivateAggregation,
    Wrapper,
    inner_of,
    require_no_buffers,
)
from fastfedul.integrations.flower.replies import (
    JudgedReplies,
    Replies,
    Sent,
    by_message,
    judge_evaluation,
    judge_training,
    receive,
)
from fastfedul.integrations.flower.rounds import (
    RoundSettings,
    expected_step,
    local_training,
    make_round,
)
from fastfedul.integrations.flower.run import Answering, RecordedRun
from fastfedul.integrations.flower.server_optimizers import (
    give_state,
    optimizer_of,
    server_step,
)
from fastfedul.integrations.flower.strategies import aggregation_of, is_known
from fastfedul.integrations.flower.watch import Watch
from fastfedul.ledger.keeping import Keep
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.protocol import Method, needs_help
from fastfedul.methods.registry import require_method
from fastfedul.params import Params, norm
from fastfedul.records import ClientId, KeepUse, LocalSGD, Model, StorageDtype
from fastfedul.runs.evaluation_source import EvaluationSource

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]

_OTHER_CHOICE = (
    "round %s: Flower chose other updates (%s); it also compares buffers, and in "
    "float32; the ledger's choice counts"
)

_LIMITS = ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes")


class Recorded(Strategy):
    """A Flower strategy that records its rounds and leaves out forgotten clients.

    It wraps FedAvg, FedProx, FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan,
    FedAvgM, FedAdam, FedYogi, FedAdagrad, classes derived from them, and differential
    privacy around those without a server optimizer. It refuses other strategies by
    name; docs/flower.md has a table of all of them.

    If the ledger exists, training goes on with it: the ledger's model replaces the
    initial arrays, its rounds count towards `num_rounds`, and its forgotten clients get
    no message.

    Requests to forget may be filed at any time, with `fastfedul request add LEDGER
    CLIENT` or `fastfedul.add_request`. They are applied between two rounds: training
    goes on from the cleaned model and without the client.

    Beside the ledger lie `LEDGER.nodes.json`, the names and key fingerprints of all
    clients, and `LEDGER.failures.jsonl`: clients that a round left out or capped, with
    the reasons. With `evaluate` there are two files more, see below. Everything that a
    client sends is checked; docs/flower.md lists how.

    Args:
        strategy: The strategy to wrap. When clients are forgotten, `Recorded` lowers
            the numbers of nodes that it waits for, or it would wait for ever.
        ledger: Folder of the ledger; created if there is none.
        identify: How nodes become clients. `auto`: in a simulation `client-N` by
            partition, else the name of `flwr supernode register --name`. `claimed`:
            the name that the client claims, if you trust it. Or a function of
            Flower's NodeInfo.
        keep: Updates to keep: `all`, `optimal:M`, `top:M` or `uniform:M`. With `sums`
            the ledger keeps a vector per client and a few differences of two clients;
            with `sums:K` only clients of K rounds or more have a vector.
        keep_use: `store`: all updates count. `aggregate`: only kept updates count.
        dtype: How the ledger stores updates: `float32`, `bfloat16`, `float16` or
            `int8`.
        budget: Bytes that a new ledger may take; it gives up what is worth least.
        arrays: Where the array files of a new ledger lie, such as
            `s3://bucket/prefix`; None for the ledger's own folder.
        aggregation: Aggregation of the strategy, if it has an `aggregate_train` of its
            own; every round is checked against it.
        local: How clients train, where the server's messages do not say so. `lr`,
            `momentum`, `batch-size` and `local-epochs` in the train config win. Without
            all four, forgetting takes a usual value and says so.
        min_clients: Usable updates that a round needs.
        max_discards: Discarded rounds in a row after which the run ends. A round is
            discarded and drawn again if it has fewer usable updates than
            `min_clients`, or if more than half of its clients sent unusable replies.
        max_norm_ratio: An update this many times larger than the round's median is
            left out.
        max_weight_ratio: A weight this many times the round's median is capped; None
            for no cap.
        buffers: Names of arrays that are not learned, or a function of name and array;
            None for whole numbers and the statistics of batch normalisation.
        query_timeout: Seconds that a node may take to tell its name.
        seed: Seed of the draws of `keep`.
        method: The method that forgets, with its settings; None for Fast-FedUL. It
            must need nothing but the ledger.
        erase: Also erase the updates of forgotten clients from the ledger.
        certificates: Folder for the certificates; None for the ledger's usual one.
        key: Key that signs the certificates; None for the key of the usual place, if
            there is one.
        federation: Name of the federation, which the certificates of a new ledger
            state.
        evaluate: Network and test examples of the server's own. Each round then gets a
            line in `LEDGER.metrics.jsonl`, and `LEDGER.federation.toml` tells the
            commands that measure a model.
        watch: A mark to watch: the log warns if it is back in a model from which a
            client was forgotten.
        metrics_port: Port of 127.0.0.1 on which Prometheus finds metrics while the
            ledger is open; 0 for any that is free, None for no metrics.
    """

    def __init__(
        self,
        strategy: Strategy,
        ledger: Path | str,
        *,
        identify: Identify = "auto",
        keep: str = "all",
        keep_use: KeepUse = "store",
        dtype: StorageDtype = "float32",
        budget: int | None = None,
        arrays: str | None = None,
        aggregation: str | None = None,
        local: LocalSGD | None = None,
        min_clients: int = 1,
        max_discards: int = 3,
        max_norm_ratio: float = 1000.0,
        max_weight_ratio: float | None = 100.0,
        buffers: Buffers | None = None,
        query_timeout: float = 120.0,
        seed: int = 0,
        method: Method | None = None,
        erase: bool = True,
        certificates: Path | str | None = None,
        key: SigningKey | None = None,
        federation: str | None = None,
        evaluate: EvaluationSource | None = None,
        watch: Watch | None = None,
        metrics_port: int | None = None,
    ) -> None:
        if isinstance(strategy, Recorded):
            raise StrategyRefusedError("the strategy is recorded already")
        inner = inner_of(strategy)
        named = aggregation_of(inner, aggregation)
        optimizer = optimizer_of(inner)
        self._private = None
        if isinstance(strategy, Wrapper):
            if optimizer is not None:
                raise StrategyRefusedError(
                    "differential privacy adds its noise after the server optimizer "
                    f"{optimizer.name}, whose replay has no place for it; wrap a "
                    "strategy without a server optimizer"
                )
            if keep_use == "aggregate":
                raise InvalidInputError(
                    "differential privacy counts on every update of a round; use "
                    'keep_use="store"'
                )
            self._private = PrivateAggregation(strategy)
        rule = named_rule(named, {})
        self._chooses = rule is not None and rule.choose is not None
        self._settings = RoundSettings(
            aggregation=named,
            keep=Keep.parse(keep, use=keep_use, seed=seed),
            dtype=dtype,
            budget=budget,
            arrays=arrays,
            weight_key=getattr(inner, "weighted_by_key", "num-examples"),
            optimizer=optimizer,
            limits=ReplyLimits(
                min_clients=max(min_clients, rule.least) if rule else min_clients,
                max_discards=max_discards,
                max_norm_ratio=max_norm_ratio,
                max_weight_ratio=max_weight_ratio,
            ),
        )
        path = Path(ledger).absolute()
        self._strategy = strategy
        self._inner: Any = inner
        self._local = local
        self._trained: LocalSGD | None = local
        self._limits = {n: getattr(inner, n) for n in _LIMITS if hasattr(inner, n)}
        self._identities = Identities(
            path.with_name(f"{path.name}.nodes.json"), identify, query_timeout
        )
        folder = certificates_folder(path) if certificates is None else certificates
        answering = Answering(
            method=_usable(method),
            erase=erase,
            certificates=Path(folder).absolute(),
            key=find_key() if key is None else key,
        )
        self._rule = buffer_rule(buffers)
        self._run = RecordedRun(
            path,
            self._settings,
            answering,
            self._rule,
            federation,
            evaluate,
            watch,
            metrics_port,
        )
        self._sent: Sent = ()
        self._evaluated: Sent = ()
        self._before: Model | None = None
        self._any_sent = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write to the ledger; `start` does this by itself."""
        self._run.close()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
    ) -> Result:
        """Return the model and metrics after training to a number of rounds.

        Args:
            grid: Flower's connection to the nodes.
            initial_arrays: The model to start from; the model of an existing ledger
                takes its place.
            num_rounds: How many rounds the ledger has in the end, with the rounds of
                earlier runs.
            timeout: Seconds to wait for the replies of a round.
            train_config: Sent to clients that train.
            evaluate_config: Sent to clients that evaluate.
            evaluate_fn: Called with round and model before the first round of this
                run and after every round; rounds count from 1 over all runs.

        Raises:
            RoundDiscardedError: If `max_discards` rounds in a row were discarded.
        """
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        result, began = Result(), time.monotonic()
        try:
            self._open(initial_arrays, num_rounds)
            self._log_start(num_rounds, train_config, evaluate_config)
            if evaluate_fn:
                found = evaluate_fn(self._run.num_rounds, self._run.arrays)
                log(INFO, "Initial global evaluation results: %s", found)
                if found is not None:
                    result.evaluate_metrics_serverapp[self._run.num_rounds] = found
            while (number := self._run.num_rounds + 1) <= num_rounds:
                log(INFO, "")
                log(INFO, "[ROUND %s/%s]", number, num_rounds)
                metrics = self._train_round(number, train_config, grid, timeout)
                if metrics is not None:
                    log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
                    result.train_metrics_clientapp[number] = metrics
                metrics = self._evaluate_round(number, evaluate_config, grid, timeout)
                if metrics is not None:
                    log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
                    result.evaluate_metrics_clientapp[number] = metrics
                if evaluate_fn:
                    log(INFO, "Global evaluation")
                    found = evaluate_fn(number, self._run.arrays)
                    log(INFO, "\t└──> MetricRecord: %s", found)
                    if found is not None:
                        result.evaluate_metrics_serverapp[number] = found
            result.arrays = self._run.arrays
        finally:
            self.close()
        _log_end(result, time.monotonic() - began)
        return result

    def _open(self, arrays: ArrayRecord, num_rounds: int = 1) -> None:
        """Open the ledger, and go on with the strategy's state."""
        if self._private is not None:
            require_no_buffers(arrays, self._rule)
        opened = self._run.open(arrays, num_rounds)
        if opened and self._private is not None:
            self._private.resume(self._run.ledger)

    def _log_start(
        self, num_rounds: int, train_config: ConfigRecord, evaluate_config: ConfigRecord
    ) -> None:
        """Log the lines with which Flower's strategies start, and the rounds so far."""
        log(INFO, "Starting %s strategy:", type(self).__name__)
        arrays, done = self._run.arrays, self._run.num_rounds
        log_strategy_start_info(num_rounds, arrays, train_config, evaluate_config)
        self.summary()
        if done >= num_rounds:
            log(WARNING, "all %s rounds are recorded; raise num_rounds", done)
        elif done:
            log(INFO, "going on with round %s of %s", done + 1, self._run.path)
        log(INFO, "")

    def summary(self) -> None:
        """Log the settings of the ledger, then the wrapped strategy's own summary."""
        log(INFO, "Recorded: %s", self._run)
        self._strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages, none to a forgotten client."""
        self._open(arrays)
        self._before = self._run.require_current(arrays)
        open_to = self._admitted_grid(grid)
        if open_to is None:
            raise InvalidInputError("no client is left to train with")
        number = self._run.num_rounds + 1
        messages = self._strategy.configure_train(number, arrays, config, open_to)
        self._sent = self._only_admitted(messages, grid)
        rule = named_rule(self._settings.aggregation, {})
        if rule is not None:
            # Sooner than after the training, whose replies cannot be more.
            require_enough(rule.least, len(self._sent), number)
        if self._private is not None:
            self._private.begin()
        self._trained = local_training((m for m, _ in self._sent), self._local)
        self._any_sent = True
        return [message for message, _ in self._sent]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the round and return the next model: aggregated, and cleaned.

        It returns when the round survives power loss.

        Raises:
            RoundDiscardedError: If too few updates can be used; nothing is recorded.
            StrategyRefusedError: If the strategy's result is not the aggregation that
                the ledger records; nothing is recorded.
        """
        return self._aggregate(by_message(replies))

    def _aggregate(
        self, replies: Replies
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the round of these replies; return the next model, and metrics."""
        if self._before is None:
            raise InvalidInputError("aggregate_train comes after configure_train")
        before, self._before = self._before, None
        index, settings = self._run.num_rounds, self._settings
        number = index + 1
        judged = judge_training(replies, self._sent, self._gone(), before, settings)
        self._run.report(number, "train", judged)
        usable = judged.judgement.usable
        if problem := judged.judgement.objection(len(self._sent), settings.limits):
            if self._private is not None:
                self._private.discard(number)
            raise RoundDiscardedError(
                f"round {number} is discarded: {problem}; see {self._run.failures}"
            )
        counted = number
        if settings.optimizer is not None:
            counted = give_state(self._inner, before, self._run.arrays)
        result, metrics = self._aggregated_by_strategy(counted, judged)
        if self._private is not None:
            usable = tuple(self._private.clipped(usable, before))
        round_ = make_round(index, usable, before, settings, self._trained)
        mean = expected_step(round_, settings)
        step = server_step(mean, before, settings.optimizer)
        if result is not None and settings.keep.use == "store":
            own = Params(before.params.layout, before.params.flat + step)
            gap = disagreement(result, own, norm(step))
            if gap and self._chooses and is_known(self._inner):
                log(WARNING, _OTHER_CHOICE, number, gap)
            elif gap:
                raise StrategyRefusedError(
                    f"{type(self._inner).__name__} does not compute the "
                    f"{settings.aggregation} of the updates: {gap}"
                )
        if self._private is not None:
            round_ = self._private.with_noise(round_, before.params.layout)
        self._run.append(round_)
        self._run.answer_waiting()
        return self._run.arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages, none to a forgotten client."""
        self._run.open(arrays)
        open_to = self._admitted_grid(grid)
        if open_to is None:
            return []
        number = self._run.num_rounds
        messages = self._strategy.configure_evaluate(number, arrays, config, open_to)
        self._evaluated = self._only_admitted(messages, grid)
        return [message for message, _ in self._evaluated]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the wrapped strategy's metrics of the usable replies."""
        return self._evaluate(by_message(replies))

    def _evaluate(self, replies: Replies) -> MetricRecord | None:
        """Return the wrapped strategy's metrics; None if it fails."""
        number, gone = self._run.num_rounds, self._gone()
        judged = judge_evaluation(replies, self._evaluated, gone, self._settings)
        self._run.report(number, "evaluate", judged)
        try:
            return self._strategy.aggregate_evaluate(number, list(judged.messages))
        except Exception as error:
            # Metrics of clients go into no model, so they end no run.
            log(ERROR, "round %s has no metrics: %s", number, one_line(error))
            return None

    def _aggregated_by_strategy(
        self, number: int, judged: JudgedReplies
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the strategy's own model and metrics, to compare and to report."""
        if self._private is not None:
            # A failure ends the run: without the noise there is no private model.
            return self._private.aggregated(number, judged.messages)
        try:
            return self._strategy.aggregate_train(number, list(judged.messages))
        except Exception as error:
            if not is_known(self._strategy):
                raise
            # Flower's own aggregation takes checked replies; the caller's function of
            # the metrics failed.
            log(ERROR, "round %s has no metrics: %s", number, one_line(error))
            return None, None

    def _train_round(
        self, number: int, config: ConfigRecord, grid: Grid, timeout: float
    ) -> MetricRecord | None:
        most = self._settings.limits.max_discards
        for discarded in itertools.count(1):
            messages = self.configure_train(number, self._run.arrays, config, grid)
            wait = self._run.stages.timed("train", receive)
            replies = wait(grid, list(messages), timeout)
            try:
                _, metrics = self._aggregate(replies)
            except RoundDiscardedError as error:
                if discarded == most:
                    raise RoundDiscardedError(
                        f"{error}; the run ends because this was discarded round "
                        f"{most} in a row"
                    ) from None
                log(WARNING, "%s; drawing it again", error)
            else:
                return metrics
        raise AssertionError("unreachable")

    def _evaluate_round(
        self, number: int, config: ConfigRecord, grid: Grid, timeout: float
    ) -> MetricRecord | None:
        arrays = self._run.arrays
        messages = list(self.configure_evaluate(number, arrays, config, grid))
        if not messages:
            return None
        wait = self._run.stages.timed("evaluate", receive)
        return self._evaluate(wait(grid, messages, timeout))

    def _gone(self) -> frozenset[ClientId]:
        entries = self._run.ledger.clients().items()
        return frozenset(name for name, entry in entries if entry.state != "active")

    def _admitted_grid(self, grid: Grid) -> AdmittedGrid | None:
        """Return the grid for the strategy; None if all clients were forgotten."""
        gone = self._gone()
        self._admitted(grid, gone)
        left = [c for c in self._identities.clients if c not in gone]
        if gone and not left:
            return None
        self._lower_limits(len(gone), len(left))
        return AdmittedGrid(grid, lambda: self._admitted(grid, gone))

    def _admitted(
        self, grid: Grid, gone: frozenset[ClientId]
    ) -> Mapping[int, ClientId]:
        found = self._identities.identified(grid, strict=not self._any_sent)
        return {node: client for node, client in found.items() if client not in gone}

    def _only_admitted(self, messages: Iterable[Message], grid: Grid) -> Sent:
        """Drop messages to nodes that are not admitted."""
        allowed, given = self._admitted(grid, self._gone()), list(messages)
        nodes = [message.metadata.dst_node_id for message in given]
        kept = [
            (message, allowed[node])
            for message, node in zip(given, nodes, strict=True)
            if node in allowed
        ]
        if len(kept) < len(given):
            log(WARNING, "%s messages not sent", len(given) - len(kept))
        return kept

    def _lower_limits(self, num_gone: int, num_left: int) -> None:
        """Require fewer nodes if so many clients are not left, or it would hang."""
        for name, wanted in self._limits.items():
            short = num_gone > 0 and wanted > num_left
            lowered = max(1, wanted - num_gone) if short else wanted
            if getattr(self._inner, name) != lowered:
                log(INFO, "%s is now %s: forgotten clients are out", name, lowered)
                setattr(self._inner, name, lowered)


def _log_end(result: Result, seconds: float) -> None:
    """Log the lines with which Flower's strategies end."""
    log(INFO, "")
    log(INFO, "Strategy execution finished in %.2fs", seconds)
    log(INFO, "")
    log(INFO, "Final results:")
    log(INFO, "")
    for line in str(result).splitlines():
        log(INFO, "\t%s", line)
    log(INFO, "")


def _usable(method: Method | None) -> Method:
    """Return the method that forgets.

    Raises:
        InvalidInputError: If it needs clients or images, which are not here.
    """
    found = require_method(method or FastFedUL())
    if needs_help(found):
        raise InvalidInputError(
            f"{found.name} needs clients or images of the server, which a recorded "
            "federation cannot give; use a method that needs the ledger alone"
        )
    return found
