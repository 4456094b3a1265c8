"""Forgetting from models of many parameters: time, bytes read, memory, algebra."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring import seconds_of
from benchmarks.scale_setting import (
    Figures,
    Sizes,
    layout_of,
    made_up,
    random_bases,
)
from fastfedul import DiskLedger, Model, Params
from fastfedul.records import StorageDtype

_ROOT = Path(__file__).resolve().parent.parent

_ANSWER = """
import json, sys
from benchmarks.measuring import seconds_of
from benchmarks.scale_forgetting import peak
from fastfedul import FastFedUL, LedgerReader, UnlearnRequest
with LedgerReader(sys.argv[1]) as ledger:
    request = UnlearnRequest(ledger, frozenset(["client-0"]))
    turns = range(int(sys.argv[2]))
    seconds = [seconds_of(lambda: FastFedUL()(request)) for _ in turns]
print(json.dumps({"seconds": seconds, "peak": peak()}))
"""

_DIFFERENCE = """
import json, sys
from benchmarks.scale_forgetting import peak
from fastfedul import Kronecker, LedgerReader
from fastfedul.methods.fast_fedul.tracing import leaving
with LedgerReader(sys.argv[1]) as ledger, ledger.snapshot():
    rounds = ledger.rounds()
    removal = leaving(ledger, frozenset(["client-0"]), rounds)
    Kronecker().difference(ledger, removal, rounds)
print(json.dumps({"peak": peak()}))
"""

_READ = """
import json, sys
from benchmarks.measuring import seconds_of
from benchmarks.scale_forgetting import read_plainly
from benchmarks.scale_reading import WatchedLedger
from fastfedul import FastFedUL, LedgerReader, UnlearnRequest
with LedgerReader(sys.argv[1]) as reader, reader.snapshot():
    ledger = WatchedLedger(reader)
    found = FastFedUL()(UnlearnRequest(ledger, frozenset(["client-0"])))
    turns = [
        (seconds_of(ledger.read_again), read_plainly(reader.path, ledger.bytes_read))
        for _ in range(int(sys.argv[2]))
    ]
    own = sum(update.kept for update in reader.updates_of("client-0"))
updates = found.reaction.num_updates
print(json.dumps(dict(turns=turns, bytes=ledger.bytes_read, updates=updates, own=own)))
"""

_FORGET = """
import json, sys, time
from benchmarks.scale_forgetting import peak
from fastfedul import DiskLedger, forget
with DiskLedger(sys.argv[1]) as ledger:
    began = time.perf_counter()
    forget(ledger, ["client-0"], erase=True)
    seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "peak": peak()}))
"""


def peak() -> int:
    """Return the most bytes that were resident in this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def run_apart(code: str, *arguments: object) -> dict[str, Any]:
    """Return what a fresh interpreter prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read_plainly(path: Path, num_bytes: int) -> float:
    """Return the seconds to read so many bytes of a ledger, with two threads."""
    files = sorted((path / "arrays").iterdir(), key=lambda p: -p.stat().st_size)
    left, jobs = num_bytes, []
    while left > 0:
        for file in files:
            count = min(left, file.stat().st_size)
            jobs.append((file, count))
            left -= count
            if left <= 0:
                break

    def read(job: tuple[Path, int]) -> None:
        file, count = job
        buffer = bytearray(1 << 22)
        with file.open("rb", buffering=0) as opened:
            while count > 0:
                got = opened.readinto(memoryview(buffer)[: min(count, len(buffer))])
                if not got:
                    break
                count -= got

    with ThreadPoolExecutor(2) as pool:
        return seconds_of(lambda: list(pool.map(read, jobs)))


def write_ledger(
    path: Path,
    name: str,
    num_rounds: int,
    num_clients: int,
    dtype: StorageDtype = "float32",
) -> None:
    """Write a ledger of made-up rounds."""
    shutil.rmtree(path, ignore_errors=True)
    layout = layout_of(name)
    bases = random_bases(layout)
    start = Model(Params.zeros(layout))
    with DiskLedger.create(path, start, update_dtype=dtype) as ledger:
        for index in range(num_rounds):
            ledger.append(made_up(layout, num_clients, index, bases))


def forget_from(name: str, folder: Path, sizes: Sizes) -> Figures:
    """Return the costs of forgetting at one size of the model.

    The reading is measured apart: the same readings are done again without the linear
    algebra. Bytes needed are the steps of the client's rounds and its updates once, and
    the sampled updates three times. A sampled update also needs its round's step and
    the client's update of that round, unless the whole round is in the sample; these
    count as read, and not as needed.
    """
    path = folder / f"forget-{name}"
    write_ledger(path, name, sizes.rounds_of[name], 10)
    size = layout_of(name).size
    turns = 1 if size > 5e7 else sizes.repetitions
    answer = run_apart(_ANSWER, path, turns if turns == 1 else turns + 1)
    total = median(answer["seconds"][turns > 1 :])
    read = run_apart(_READ, path, max(3, turns))
    again, plain = (median(column) for column in zip(*read["turns"], strict=True))
    needed = 4 * size * (2 * read["own"] + 3 * read["updates"])
    difference = run_apart(_DIFFERENCE, path)
    erased = run_apart(_FORGET, path)
    shutil.rmtree(path)
    return {
        f"forget_over_read_{name}": again / plain,
        f"bytes_read_over_needed_{name}": read["bytes"] / needed,
        f"algebra_seconds_{name}": total - again,
        f"forget_seconds_{name}": total,
        f"erase_seconds_{name}": erased["seconds"],
        f"peak_of_difference_gb_{name}": difference["peak"] / 1e9,
        f"peak_gb_{name}": answer["peak"] / 1e9,
        f"peak_erasing_gb_{name}": erased["peak"] / 1e9,
    }


def algebra_of(name: str, folder: Path, sizes: Sizes) -> Figures:
    """Return the seconds of linear algebra with a sample of the largest model's size.

    Four rounds have as many staying clients as make up the sample. Updates are stored
    in bfloat16, so that the ledger stays in the system's memory; the algebra is the
    same.
    """
    path = folder / f"algebra-{name}"
    stay = -(-sizes.sampled // 4)
    write_ledger(path, name, 4, stay + 1, "bfloat16")
    [total] = run_apart(_ANSWER, path, 1)["seconds"]
    read = run_apart(_READ, path, 1)
    shutil.rmtree(path)
    key = f"algebra_seconds_{name}_{read['updates']}"
    return {key: total - read["turns"][0][0]}
