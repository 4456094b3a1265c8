"""Flower's grid without the nodes that must not be sent anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fastfedul.records import ClientId

Admitted = Callable[[], Mapping[int, ClientId]]


class AdmittedGrid(Grid):
    """A grid as a strategy sees it: only nodes of known clients that may take part.

    Args:
        grid: The real one.
        admitted: Gives the current nodes; asked each time, because strategies wait
            until enough nodes are there.
    """

    def __init__(self, grid: Grid, admitted: Admitted) -> None:
        self._grid = grid
        self._admitted = admitted

    def set_run(self, run: Run) -> None:
        """Set the run of the real grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run of the real grid."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message of the real grid."""
        return self._grid.create_message(
            content, message_type, dst_node_id, group_id, ttl
        )

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that may be sent something."""
        return list(self._admitted())

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return Flower's facts about the nodes that may get a message."""
        admitted = self._admitted()
        return [node for node in self._grid.get_nodes() if node.node_id in admitted]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send by the real grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive by the real grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send and receive by the real grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)
