"""Forgetting from an object store, over reading the same ranges plainly.

A server on this machine stores a ledger. Each method forgets a client. The ranges that
it read are then read again with obstore alone, as many at a time. Both wait for one
server, so that the ratio says what the ledger adds to the network.

    python benchmarks/object_store.py [--json] [--quick]
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import (
    MadeUpRounds,
    client_name,
    machine,
    progress,
    seconds_of,
    work_folder,
    write_result,
)
from fastfedul import create_ledger, methods, open_ledger
from fastfedul.ledger.store.object_arrays import READS_AT_ONCE, ObjectArrays
from fastfedul.ledger.store.object_store import ObjectStore
from tests.support.s3_server import running_server

METHODS: Mapping[str, methods.FastFedUL] = {
    "scalar": methods.FastFedUL(skew=methods.Scalar(0.07)),
    "default": methods.FastFedUL(),
}
Range = tuple[str, int, int]


@dataclass
class Ranges:
    """Ranges of objects that were read.

    Attributes:
        store: The store that reads them.
        found: Name, number of bytes and offset of each range.
    """

    store: ObjectStore
    found: list[Range] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, name: str, count: int, offset: int) -> Any:
        """Read a range and note it."""
        with self.lock:
            self.found.append((name, count, offset))
        return self.store.read(name, count, offset)

    def read_again(self) -> None:
        """Read all ranges plainly, many at a time."""
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            for data in pool.map(lambda one: self.store.read(*one), self.found):
                memoryview(data)


def main() -> None:
    """Measure, and print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--quick", action="store_true", help="a small ledger")
    arguments = parser.parse_args()
    size, clients, rounds = (10**5, 4, 3) if arguments.quick else (10**6, 10, 10)
    result: dict[str, object] = {"machine": machine(), "parameters": size}
    rows = []
    with progress() as display, work_folder(None) as folder, running_server() as server:
        task = display.add_task("object store", total=len(METHODS) + 1)
        os.environ.update(server.environment)
        address = f"s3://{server.bucket()}/ledger"
        made_up = MadeUpRounds.of(size, clients)
        with create_ledger(folder / "ledger", made_up.initial, arrays=address) as made:
            for index in range(rounds):
                made.append(made_up.round(index))
        display.advance(task)
        for name, method in METHODS.items():
            figures = measured(folder / "ledger", method)
            result |= {f"{name}_{key}": value for key, value in figures.items()}
            rows.append([name, *(f"{value:.3g}" for value in figures.values())])
            display.advance(task)
    write_result(
        result,
        only_json=arguments.json,
        title=f"{size:,} parameters, {clients} clients, {rounds} rounds",
        columns=["method", "forget s", "plain read s", "ratio", "requests", "MB"],
        rows=rows,
    )


def measured(path: Path, method: methods.FastFedUL) -> dict[str, float]:
    """Return the figures of one method."""
    with open_ledger(path, read_only=True) as ledger:
        assert isinstance(ledger.files, ObjectArrays)
        store = ledger.files.store
        ranges = Ranges(store)
        request = methods.UnlearnRequest(ledger, frozenset({client_name(0)}))
        method(request)  # warms up
        ledger.files.store = ranges  # type: ignore[assignment]
        method(request)
        ledger.files.store = store
        forgetting = min(seconds_of(lambda: method(request)) for _ in range(3))
        plain = min(seconds_of(ranges.read_again) for _ in range(3))
    return {
        "forget_seconds": forgetting,
        "read_seconds": plain,
        "forget_over_read": forgetting / plain,
        "requests": len(ranges.found),
        "megabytes": sum(count for _, count, _ in ranges.found) / 1e6,
    }


if __name__ == "__main__":
    main()
