"""Names of clients for Flower's nodes.

A node id is no identity: it changes with every simulation and, without keys, with every
start of a SuperNode. The ledger records the operator's name of the node. A file beside
the ledger has the fingerprint of its key, so that no other node can take the name over.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR, WARNING
from pathlib import Path
from typing import Literal, get_args

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.logger import log
from flwr.superlink.grid import InMemoryGrid

from fastfedul.data.partition import client_name
from fastfedul.errors import InvalidInputError
from fastfedul.federation.local import one_line
from fastfedul.federation.replies import UnusableReplyError, one_line_reason
from fastfedul.files import read_regular_text, write_whole
from fastfedul.integrations.flower.client import ACTION, NAME, PARTITION, WHO
from fastfedul.integrations.flower.errors import IdentityError
from fastfedul.integrations.flower.replies import content_of, receive
from fastfedul.ledger.checks import check_name
from fastfedul.records import ClientId

IdentifyMode = Literal["auto", "registered", "partition", "claimed"]
Identify = IdentifyMode | Callable[[NodeInfo], ClientId]

_AGAIN = 30.0
"""Seconds after which a node that was not admitted is looked at again."""

_LONGEST_CLAIM = 200
"""Characters of a name that a client may claim; an operator may choose longer ones."""

_ONE_LINE = (
    "add one line to the ClientApp: app = identify(ClientApp()) with "
    "fastfedul.integrations.flower.client.identify"
)


@dataclass(frozen=True, slots=True)
class Found:
    """Identity of a node.

    Attributes:
        client: Name of its client; None if unknown.
        fingerprint: Fingerprint of its key; None where nodes have no keys.
        problem: Why the client is unknown.
        silent: Whether the node did not answer at all, as a node that is about to go.
    """

    client: ClientId | None = None
    fingerprint: str | None = None
    problem: str = ""
    silent: bool = False


class Identities:
    """Tells which client a node is, and holds every name to the key it first had.

    Args:
        path: File with the names and fingerprints seen so far.
        identify: `auto`: in a simulation the partition, else the registered name;
            `registered`, `partition` or `claimed`; or a function of Flower's facts
            of the node.
        timeout: How many seconds a node may take to tell its name.
    """

    def __init__(self, path: Path, identify: Identify, timeout: float) -> None:
        if not callable(identify) and identify not in get_args(IdentifyMode):
            raise InvalidInputError(
                f"identify is {identify!r:.40}; choose "
                f"{', '.join(get_args(IdentifyMode))} or a function of the node"
            )
        self._path = path
        self._identify = identify
        self._timeout = timeout
        self._names: dict[int, ClientId] = {}
        self._refused: dict[int, float] = {}
        self._keys: dict[ClientId, str | None] | None = None

    @property
    def clients(self) -> Sequence[ClientId]:
        """All clients that were ever seen, also in earlier runs."""
        return tuple(self._known())

    def identified(self, grid: Grid, *, strict: bool) -> Mapping[int, ClientId]:
        """Return the clients of all nodes that are there; ask unknown nodes.

        Args:
            grid: Where the nodes are.
            strict: Whether it is an error, namely the operator's, if no node at all
                can be admitted. A single node is left out with a line in the log, or
                one client could keep a run from starting.

        Raises:
            IdentityError: If no node can be admitted, and not all of them are silent.
        """
        present, now = set(grid.get_node_ids()), time.monotonic()
        refused = {i for i, until in self._refused.items() if until > now}
        unknown = sorted(present - set(self._names) - refused)
        if unknown:
            found = self._find(grid, unknown)
            problems = [self._admit(i, found[i], present) for i in unknown]
            told = [problem for problem in problems if problem]
            if strict and told and not present & set(self._names):
                raise IdentityError(told[0])
            self._save()
        return {i: self._names[i] for i in sorted(present & set(self._names))}

    def _find(self, grid: Grid, node_ids: Sequence[int]) -> Mapping[int, Found]:
        nodes = {node.node_id: node for node in grid.get_nodes()}
        infos = {i: nodes.get(i, NodeInfo(node_id=i)) for i in node_ids}
        if callable(self._identify):
            return {
                i: Found(self._identify(info), _fingerprint(info))
                for i, info in infos.items()
            }
        mode = self._identify
        if mode == "auto":
            mode = "partition" if isinstance(grid, InMemoryGrid) else "registered"
        if mode == "registered":
            return {i: _registered(info) for i, info in infos.items()}
        answers = ask_nodes(grid, node_ids, self._timeout)
        return {i: _answered(answers.get(i), mode) for i in node_ids}

    def _admit(self, node_id: int, found: Found, present: set[int]) -> str:
        """Admit a node; return the problem if it cannot be, unless it was silent."""
        problem = found.problem or self._objection(found, present)
        if problem:
            problem = f"node {node_id} is not admitted: {problem}"
            log(ERROR, "%s", problem)
            self._refused[node_id] = time.monotonic() + _AGAIN
            return "" if found.silent else problem
        assert found.client is not None
        self._names = {i: c for i, c in self._names.items() if c != found.client}
        self._names[node_id] = found.client
        self._known().setdefault(found.client, found.fingerprint)
        return ""

    def _objection(self, found: Found, present: set[int]) -> str:
        """Return why a node cannot be the client it seems to be, if it cannot."""
        try:
            check_name(found.client)  # type: ignore[arg-type]
        except InvalidInputError as error:
            return str(error)
        held = [i for i, c in self._names.items() if c == found.client and i in present]
        if held:
            return (
                f"node {held[0]} is called {found.client!r:.80} too; two nodes cannot "
                "be one client, so give each its own name"
            )
        known = self._known()
        if found.client in known and known[found.client] != found.fingerprint:
            return (
                f"{found.client!r:.80} was known by another key; if the client has a "
                f"new one, take its line out of {self._path}"
            )
        return ""

    def _known(self) -> dict[ClientId, str | None]:
        if self._keys is None:
            self._keys = _read(self._path)
        return self._keys

    def _save(self) -> None:
        known = self._known()
        if known == _read(self._path):
            return
        text = json.dumps({"clients": known}, indent=1, sort_keys=True) + "\n"
        try:
            write_whole(self._path, text)
        except OSError as error:
            raise IdentityError(
                f"cannot write {self._path}: {error.strerror}; see to it, then restart"
            ) from None


def ask_nodes(
    grid: Grid, node_ids: Iterable[int], timeout: float
) -> Mapping[int, Mapping[str, object] | UnusableReplyError]:
    """Return the facts that nodes tell of themselves; silent nodes are absent."""
    messages = [
        Message(
            content=RecordDict(),
            message_type=f"{MessageType.QUERY}.{ACTION}",
            dst_node_id=node_id,
        )
        for node_id in node_ids
    ]
    replies = receive(grid, messages, timeout)
    asked = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
    return {asked[message_id]: _facts(reply) for message_id, reply in replies.items()}


def _facts(
    reply: Message | UnusableReplyError,
) -> Mapping[str, object] | UnusableReplyError:
    try:
        return dict(content_of(reply).config_records.get(WHO, ConfigRecord()))
    except UnusableReplyError as error:
        return error
    except Exception as error:  # A record of a hostile client may raise anything.
        return UnusableReplyError(one_line_reason(one_line(error)))


def _read(path: Path) -> dict[ClientId, str | None]:
    if not path.exists():
        return {}
    try:
        found = json.loads(read_regular_text(path))["clients"]
        return {str(name): key and str(key) for name, key in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IdentityError(
            f"{path} cannot be read ({error}); restore it from a backup, because it "
            "says which key each client has"
        ) from None


def _registered(node: NodeInfo) -> Found:
    if node.name:
        return Found(node.name, _fingerprint(node))
    return Found(
        problem="it has no name; register it with `flwr supernode register KEY.pub "
        'LINK --name CLIENT`, or trust the word of clients with identify="claimed"'
    )


def _fingerprint(node: NodeInfo) -> str | None:
    if not node.public_key:
        return None
    return f"SHA256:{hashlib.sha256(node.public_key).hexdigest()}"


def _answered(
    who: Mapping[str, object] | UnusableReplyError | None, mode: IdentifyMode
) -> Found:
    if who is None:
        return Found(problem="it did not say in time who it is", silent=True)
    if isinstance(who, UnusableReplyError):
        log(WARNING, "no answer to who it is: %s", who)
        return Found(problem=f"it cannot say who it is; {_ONE_LINE}")
    if mode == "partition":
        number = who.get(PARTITION)
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            return Found(client_name(number))
        return Found(problem="it has no partition-id in its node config")
    claimed = who.get(NAME)
    if isinstance(claimed, str):
        if claimed.isprintable() and len(claimed) <= _LONGEST_CLAIM:
            return Found(claimed)
        return Found(
            problem=f"the name {claimed!r:.80} that it claims has more than "
            f"{_LONGEST_CLAIM} characters, or invisible ones"
        )
    return Found(
        problem="it has no client-name in its node config; start it with "
        "--node-config 'client-name=\"CLIENT\"'"
    )
