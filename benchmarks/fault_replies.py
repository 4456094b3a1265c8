"""Hostile replies to a Flower server with a ledger, and whether one gets through.

Server, strategy, messages and arrays are the real ones; messages go by memory and not
by a network. `tests/integrations/test_flower_hostile.py` has a real simulation.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MessageType
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from rich.progress import Progress

from benchmarks.fault_writer import Problems
from benchmarks.flower_made_up import NodesGrid
from benchmarks.hostile_replies import (
    COUNTER,
    Arrays,
    Hostile,
    evaluate_replies,
    honest,
    initial_arrays,
    train_replies,
)
from benchmarks.measuring import client_name
from fastfedul import LedgerReader, verify
from fastfedul.integrations.flower import Recorded
from fastfedul.rng import stream

NUM_HONEST, NUM_HOSTILE = 4, 3
"""Hostile clients are fewer than half: a hostile majority ends a run on purpose."""

HOSTILE = tuple(client_name(NUM_HONEST + number + 1) for number in range(NUM_HOSTILE))
LONGEST_REASON = 200

Key = tuple[int, str, str]
"""A round counted from 1, `train` or `evaluate`, and a client."""


@dataclass(slots=True)
class Replies:
    """Outcomes of hostile replies.

    Attributes:
        kinds: Replies by the task that they answer.
        left_out: Replies that the server left out, with one line for each.
        silent: Replies that counted, or that no line tells of.
        crashed: Runs that a reply ended.
        problems: A line for each violation.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    silent: int = 0
    crashed: int = 0
    problems: Problems = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the counts."""
        return {
            "faults": self.kinds.total(),
            "left_out": self.left_out,
            "silent": self.silent,
            "crashed": self.crashed,
            **{f"of_{name}": n for name, n in sorted(self.kinds.items())},
        }


class HostileGrid(NodesGrid):
    """Honest nodes, and hostile ones that send the replies they are given.

    Args:
        plan: Hostile replies by round, task and client; others are honest.
        num_clients: Number of nodes.
    """

    def __init__(self, plan: dict[Key, Hostile], num_clients: int) -> None:
        super().__init__(num_clients)
        self._plan = plan
        self._replies: dict[str, Message] = {}
        self.sent: set[Key] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:  # type: ignore[override]
        """Return the numbers of messages, which the nodes answer now."""
        numbers = []
        for message in messages:
            number = str(uuid4())
            message.metadata.__dict__["_message_id"] = number
            self._replies[number] = self._answer(message)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # type: ignore[override]
        """Return the replies to messages."""
        return [self._replies.pop(number) for number in message_ids]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        config = message.content.config_records["config"]
        server_round = int(str(config["server-round"]))
        training = message.metadata.message_type == MessageType.TRAIN
        task = "train" if training else "evaluate"
        arrays: Arrays = {}
        if training:
            record = message.content.array_records["arrays"]
            own = {name: array.numpy() for name, array in record.items()}
            arrays = honestly_trained(own, node, server_round)
        metrics = {"num-examples": 10 * node, "score": node / 10}
        place = (server_round, task, client_name(node))
        hostile = self._plan.get(place)
        if hostile is None:
            return honest(message, arrays, metrics)
        self.sent.add(place)
        try:
            reply = hostile.answer(message, arrays, metrics)
        except Exception as error:
            # Flower's client answers so for an app that fails.
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            return Message(Error(code, str(error)), reply_to=message)
        assert isinstance(reply, Message)
        return reply


def honestly_trained(arrays: Arrays, node: int, server_round: int) -> Arrays:
    """Return an honest client's model, a function of the arguments alone."""
    rng = stream(0, "honest reply", node, server_round)
    trained = {
        name: (own + rng.standard_normal(own.shape) * 0.1).astype(own.dtype)
        for name, own in arrays.items()
    }
    trained["norm.running_var"] = np.abs(trained["norm.running_var"])
    trained[COUNTER] = np.asarray(arrays[COUNTER] + node, np.int64)
    return trained


def send_replies(folder: Path, wanted: int, seed: int, display: Progress) -> Replies:
    """Send hostile replies to a server, and look at its ledger and its lines.

    Args:
        folder: Where ledgers are put.
        wanted: Number of replies.
        seed: Seed of the replies.
        display: Shows the progress.
    """
    own = (folder / "replies").resolve()
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    plan = planned(wanted, seed)
    task = display.add_task("sending hostile replies", total=wanted)
    tally = Replies(Counter(task for _, task, _ in plan))
    rounds = max(number for number, *_ in plan)
    try:
        run_server(own / "honest", HostileGrid({}, NUM_HONEST), rounds)
        grid = HostileGrid(plan, NUM_HONEST + NUM_HOSTILE)
        run_server(own / "hostile", grid, rounds)
    except Exception as error:
        tally.crashed += 1
        tally.problems.append(f"the run ended: {type(error).__name__}: {error}"[:500])
    else:
        examine(own, plan, grid.sent, tally)
    display.advance(task, wanted)
    shutil.rmtree(own)
    return tally


def planned(wanted: int, seed: int) -> dict[Key, Hostile]:
    """Return hostile replies, each with its round, task and client.

    Every hostile client sends a hostile reply to both tasks of every round. The last
    round may have some more than wanted.
    """
    plan: dict[Key, Hostile] = {}
    lists = {"train": train_replies(seed), "evaluate": evaluate_replies(seed)}
    server_round = 0
    while len(plan) < wanted:
        server_round += 1
        for task, replies in lists.items():
            for number, client in enumerate(HOSTILE):
                place = (server_round - 1) * NUM_HOSTILE + number
                plan[server_round, task, client] = replies[place % len(replies)]
    return plan


def run_server(path: Path, grid: HostileGrid, num_rounds: int) -> None:
    """Run a federation of Flower's FedAvg that a ledger records."""
    # Flower lets nobody make a message outside a run.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    number = len(list(grid.get_node_ids()))
    strategy = FedAvg(
        min_train_nodes=number, min_evaluate_nodes=number, min_available_nodes=number
    )
    arrays = ArrayRecord({n: Array(a) for n, a in initial_arrays().items()})
    with quiet_flower():
        Recorded(strategy, path, identify=lambda node: client_name(node.node_id)).start(
            grid, arrays, num_rounds=num_rounds, timeout=60
        )


@contextlib.contextmanager
def quiet_flower() -> Iterator[None]:
    """Let Flower log nothing: it has a line for every reply."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def examine(
    folder: Path, plan: dict[Key, Hostile], sent: set[Key], tally: Replies
) -> None:
    """Compare the ledger with the honest clients' one, and replies with the lines."""
    with LedgerReader(folder / "hostile") as ledger:
        counted = {
            (index + 1, "train", update.client)
            for index in range(ledger.num_rounds)
            for update in ledger.updates_in(index)
        }
        chain = ledger.chain
        tally.problems += verify(ledger).problems
    with LedgerReader(folder / "honest") as ledger:
        if ledger.chain != chain:
            tally.problems.append("the ledger is not the honest clients' ledger")
    lines = (folder / "hostile.failures.jsonl").read_text("utf-8").splitlines()
    told = {}
    for line in lines:
        one = json.loads(line)
        told[one["round"], one["task"], one["client"]] = one
    for place, hostile in plan.items():
        line = told.pop(place, None)
        wrong = _wrong(place in sent, place in counted, line)
        tally.left_out += wrong is None
        if wrong is not None:
            tally.silent += 1
            tally.problems.append(f"{place}, {hostile.name:.80}: {wrong}")
    tally.problems += [f"{place}: an honest client was left out" for place in told]


def _wrong(sent: bool, counted: bool, line: dict[str, str] | None) -> str | None:
    """Return what is wrong with the outcome of a hostile reply; None if nothing is."""
    if not sent:
        return "it was never sent"
    if counted:
        return "it counted"
    if line is None or line["outcome"] != "left out":
        return "no line says that it was left out"
    reason = line["reason"]
    if not reason.isprintable() or not 0 < len(reason) <= LONGEST_REASON:
        return f"its line is not one short line: {reason!r:.300}"
    return None
