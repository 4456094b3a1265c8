"""Worker processes: started once, given small tasks, and always stopped."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from typing import Any

from fastfedul.errors import InvalidInputError
from fastfedul.federation.trainer import TrainingError
from fastfedul.federation.workers.worker_process import Assignment, Failure, serve

_PATIENCE = 5.0
"""Seconds in which a worker may stop by itself."""


class Processes:
    """Worker processes and the connections to them."""

    def __init__(self, assignment: Assignment, num_workers: int) -> None:
        self._workers: dict[Connection, BaseProcess] = {}
        try:
            self._start(assignment, num_workers)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process numbers of the workers."""
        return tuple(process.pid or 0 for process in self._workers.values())

    def close(self) -> None:
        """Stop all workers, even in the middle of a task."""
        for connection, process in self._workers.items():
            connection.close()
            process.terminate()
        for process in self._workers.values():
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._workers = {}

    def hand_over(self, descriptor: int, message: Any = None) -> None:
        """Give all workers an open file, after a message if there is one."""
        for connection, process in self._workers.items():
            if message is not None:
                self._send(connection, message)
            try:
                send_handle(connection, descriptor, process.pid or 0)
            except OSError:
                raise self._death(connection) from None

    def run(self, tasks: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
        """Yield place, worker and answer of each finished task.

        A worker gets its next task after the caller took its answer. Any error stops
        all workers.

        Raises:
            TrainingError: If a task failed or a worker died.
            InvalidInputError: If a worker cannot use the input of the user.
        """
        if not self._workers:
            raise TrainingError("the workers have been stopped; start new ones")
        waiting = deque(enumerate(tasks))
        numbers = {connection: i for i, connection in enumerate(self._workers)}
        idle = deque(self._workers)
        busy: dict[Connection, int] = {}
        try:
            while waiting or busy:
                while waiting and idle:
                    connection, (place, task) = idle.popleft(), waiting.popleft()
                    self._send(connection, task)
                    busy[connection] = place
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    answer = self._receive(ready)
                    yield busy.pop(ready), numbers[ready], answer
                    idle.append(ready)
        except BaseException:
            self.close()
            raise

    def _start(self, assignment: Assignment, num_workers: int) -> None:
        context = get_context("spawn")
        # Starting a process starts this helper first, which would undo the blocking.
        resource_tracker.ensure_running()
        # Ctrl-C is for the parent, which then stops the workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in range(num_workers):
                here, there = context.Pipe()
                process = context.Process(
                    target=serve,
                    args=(there, assignment, number),
                    name=f"fastfedul-worker-{number}",
                    daemon=True,
                )
                process.start()
                there.close()
                self._workers[here] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _send(self, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except OSError:
            raise self._death(connection) from None

    def _receive(self, connection: Connection) -> Any:
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            raise self._death(connection) from None
        if isinstance(answer, Failure):
            kind = InvalidInputError if answer.of_input else TrainingError
            raise kind(answer.reason)
        return answer

    def _death(self, connection: Connection) -> TrainingError:
        process = self._workers[connection]
        process.join(_PATIENCE)
        code = process.exitcode or 0
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return TrainingError(
            f"worker process {process.pid} ended {how}; if memory ran out, use fewer "
            "workers; a script of your own needs `if __name__ == '__main__':`"
        )
