"""How the ledger and forgetting grow: parameters, rounds, clients, a wide round.

Every figure is a ratio to a limit measured in the same minute, a growth, a count or a
time that a person waits. A part that is done is kept in the work folder, so that an
interrupted run goes on where it was. The whole is meant for less than 50 minutes on two
idle cores and takes 20 GB of disk; `--quick` takes about a minute and tries every part.
The part `recorded` needs the extra `flower` and is left out without it.

    python benchmarks/scale.py [--json] [--quick] [--work FOLDER] [--only PART ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import client_name, machine, seconds_of, write_result
from benchmarks.scale_appending import append_at, recorded_at, wide_round
from benchmarks.scale_forgetting import algebra_of, forget_from
from benchmarks.scale_setting import (
    FULL,
    LOCAL,
    QUICK,
    TARGET,
    Figures,
    Sizes,
    random_bases,
)
from fastfedul import (
    ClientUpdate,
    DiskLedger,
    Keep,
    LedgerReader,
    Model,
    Params,
    Round,
    forget,
    preview,
    verify,
)
from fastfedul.methods.protocol import coverage_of
from fastfedul.params import Layout, Slot
from fastfedul.records import StorageDtype
from fastfedul.rng import stream


def tiny_rounds(folder: Path, sizes: Sizes) -> Figures:
    """Return how appending, opening and forgetting grow with the rounds."""
    # In memory if there is room: a sync of a disk would hide what the ledger does.
    path = fast_folder(folder) / "tiny"
    shutil.rmtree(path, ignore_errors=True)
    layout = Layout((Slot("w", (15, 16), "float32"), Slot("b", (16,), "float32")))
    rng = stream(0, "scale tiny")
    seconds = []
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(sizes.rounds):
            values = rng.standard_normal((10, layout.size), dtype=np.float32)
            updates = tuple(
                ClientUpdate(client_name(c), 0.1, Params(layout, values[c] * 1e-2))
                for c in range(10)
            )
            began = time.process_time()
            ledger.append(Round(index, updates, local=LOCAL))
            seconds.append(time.process_time() - began)
    files = len(list((path / "arrays").iterdir()))
    opening = min(seconds_of(lambda: DiskLedger(path).close()) for _ in range(5))
    looking = min(seconds_of(partial(look_at, path)) for _ in range(2))
    with DiskLedger(path) as ledger:
        whole = seconds_of(lambda: forget(ledger, [TARGET]))
        intact = not verify(ledger).problems
    shutil.rmtree(path.parent if path.parent != folder else path)
    early = seconds[sizes.early : sizes.early + 200]
    return {
        "append_growth_rounds": median(seconds[-200:]) / median(early),
        "append_tiny_ms": 1e3 * median(seconds[-200:]),
        f"files_{sizes.rounds}_rounds": files,
        "open_to_write_seconds": opening,
        f"forget_{sizes.rounds}_rounds_seconds": looking,
        f"forget_and_erase_{sizes.rounds}_rounds_seconds": whole,
        "intact_after_erasing": float(intact),
    }


def look_at(path: Path) -> None:
    """Preview the forgetting of a client, by a reader that remembers no row."""
    with LedgerReader(path) as reader:
        preview(reader, [TARGET])


def many_clients(folder: Path, sizes: Sizes) -> Figures:
    """Return how long the commands take that show many clients."""
    path = fast_folder(folder) / "clients"
    shutil.rmtree(path, ignore_errors=True)
    layout = Layout((Slot("w", (4, 4), "float32"),))
    rng = stream(0, "scale clients")
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(sizes.client_rounds):
            drawn = rng.choice(sizes.clients, sizes.drawn, replace=False)
            values = rng.standard_normal((sizes.drawn, 16), dtype=np.float32)
            updates = tuple(
                ClientUpdate(client_name(c), 1 / sizes.drawn, Params(layout, v))
                for c, v in zip(drawn.tolist(), values, strict=True)
            )
            ledger.append(Round(index, updates))
    found = {}
    for verb in ("clients", "info"):
        command = [sys.executable, "-m", "fastfedul", "ledger", verb, path, "--json"]
        found[f"{verb}_seconds"] = min(
            seconds_of(partial(run_silently, command)) for _ in range(3)
        )
    shutil.rmtree(path.parent if path.parent != folder else path)
    return found


def phone_federation(folder: Path, sizes: Sizes) -> Figures:
    """Return what a federation of phones costs, by what its ledger keeps."""
    clients, drawn, rounds, values = sizes.phones
    layout = Layout((Slot("w", (values // 100, 100), "float32"),))
    figures = {
        "phones_gb_with_all": rounds * (drawn + 1) * 4 * layout.size / 1e9,
    }
    # The budget is a third of what the sums take without one.
    for name, text, dtype, part in (
        ("optimal", "optimal:10", "float32", None),
        ("sums", "sums:3", "int8", None),
        ("budget", "sums:3", "int8", 1 / 3),
    ):
        path = folder / f"phones-{name}"
        shutil.rmtree(path, ignore_errors=True)
        budget = None
        if part is not None:
            budget = int(1e9 * figures["phones_sums_gb"] * part)
        keep = Keep.parse(text, seed=1)
        with DiskLedger.create(
            path,
            Model(Params.zeros(layout)),
            update_dtype=cast(StorageDtype, dtype),
            history=keep.history,
            sums_from=keep.sums_from,
            budget=budget,
        ) as ledger:
            seconds = _phones(ledger, keep, layout, sizes)
            figures |= {
                f"phones_{name}_append_ms": 1e3 * median(seconds[-20:]),
                f"phones_{name}_gb": ledger.num_array_bytes() / 1e9,
            }
            # Of a sample, because each one's rows are read.
            some = sorted(ledger.clients())[:: max(1, clients // 500)]
            covered = {c for c in some if coverage_of(ledger.updates_of(c)) >= 0.2}
            figures[f"phones_{name}_forgettable"] = len(covered) / len(some)
            leaver = min(covered)
            took = seconds_of(partial(preview, ledger, [leaver]))
            figures[f"phones_{name}_forget_seconds"] = took
        shutil.rmtree(path)
    return figures


def erased_phones(folder: Path, sizes: Sizes) -> Figures:
    """Return how many phones can still be forgotten after erasures from sums.

    The vectors are small: which sums an erasure gives up depends on the rounds alone.
    """
    layout = Layout((Slot("w", (16, 16), "float32"),))
    figures = {}
    for text in ("sums", "sums:3", "sums:16"):
        path = fast_folder(folder) / text
        keep = Keep.parse(text, seed=1)
        with DiskLedger.create(
            path,
            Model(Params.zeros(layout)),
            history=keep.history,
            sums_from=keep.sums_from,
        ) as ledger:
            _phones(ledger, keep, layout, sizes)
            name = f"erased_phones_{text.replace(':', '_')}"
            figures[f"{name}_forgettable"] = _forgettable(ledger)
            for number in range(1, 11):
                active = sorted(c for c, n in _coverages(ledger).items() if n >= 0.2)
                if not active:
                    break
                place = stream(number, "scale erased phones").integers(len(active))
                forget(ledger, [active[int(place)]], key=None)
                if number in (1, 10):
                    figures[f"{name}_after_{number}"] = _forgettable(ledger)
        shutil.rmtree(path)
    return figures


def _coverages(ledger: DiskLedger) -> dict[str, float]:
    """Return the kept part of each active client."""
    return {
        name: entry.num_summed / entry.num_updates
        for name, entry in ledger.clients().items()
        if entry.state == "active"
    }


def _forgettable(ledger: DiskLedger) -> float:
    """Return the part of the active clients that can be forgotten."""
    found = list(_coverages(ledger).values())
    return sum(part >= 0.2 for part in found) / len(found)


def _phones(
    ledger: DiskLedger, keep: Keep, layout: Layout, sizes: Sizes
) -> list[float]:
    """Record the rounds of a phone federation; return how long each append took."""
    clients, drawn, rounds, _ = sizes.phones
    bases = random_bases(layout)
    rng = stream(0, "scale phones")
    seconds = []
    for index in range(rounds):
        names = rng.choice(clients, drawn, replace=False).tolist()
        updates = tuple(
            ClientUpdate(
                client_name(c),
                1 / drawn,
                Params(layout, np.roll(bases[c % 2], 7 * c + index)),
            )
            for c in names
        )
        round_ = keep(Round(index, updates, local=LOCAL))
        seconds.append(seconds_of(partial(ledger.append, round_)))
    return seconds


def start_up(folder: Path, sizes: Sizes) -> Figures:
    """Return how long the command line takes to say what it can do."""
    commands = {
        "help": [sys.executable, "-m", "fastfedul", "--help"],
        "numpy": [sys.executable, "-c", "import numpy"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(4 * sizes.repetitions):
        for name, command in commands.items():
            times[name].append(seconds_of(partial(run_silently, command)))
    best = {name: min(found) for name, found in times.items()}
    return {"help_over_numpy": best["help"] / best["numpy"]}


def run_silently(command: Sequence[object]) -> None:
    """Run a command and look at nothing but its success."""
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def fast_folder(folder: Path) -> Path:
    """Return a folder in memory if there is one with room, else the one given."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 4e9:
        return Path(tempfile.mkdtemp(prefix="fastfedul-", dir=memory))
    return folder


WANTED: dict[str, tuple[str, float]] = {
    "forget_over_read_1e6": ("<=", 4),
    "forget_over_read_1e7": ("<=", 4),
    "forget_over_read_1e8": ("<=", 4),
    "bytes_read_over_needed": ("<=", 1.1),
    "algebra_seconds_1e8_32": ("<=", 180),
    "peak_gb_1e8": ("<=", 2),
    "peak_erasing_gb_1e8": ("<=", 2),
    "append_over_write_1e6": ("<=", 1.3),
    "append_over_write_1e7": ("<=", 1.3),
    "append_over_write_1e8": ("<=", 1.3),
    "append_growth_rounds": ("<=", 1.2),
    "files_50000_rounds": ("<=", 1000),
    "clients_seconds": ("<=", 1),
    "info_seconds": ("<=", 1),
    "forget_50000_rounds_seconds": ("<=", 5),
    "append_wide_over_write": ("<=", 1.5),
    "recorded_over_write_1e7": ("<=", 1.3),
    "help_over_numpy": ("<=", 3),
}
"""What is wanted of a figure, where something is."""


def parts_of(sizes: Sizes) -> dict[str, Callable[[Path, Sizes], Figures]]:
    """Return every part of the benchmark by its name."""
    largest, name = sizes.parameters[-1], sizes.recorded
    flower = find_spec("flwr") is not None
    return {
        "start": start_up,
        "tiny-rounds": tiny_rounds,
        "clients": many_clients,
        **{f"append-{n}": partial(append_at, n) for n in sizes.written},
        "wide-round": wide_round,
        "phones": phone_federation,
        "erased-phones": erased_phones,
        **({f"recorded-{name}": partial(recorded_at, name)} if flower else {}),
        **{f"forget-{n}": partial(forget_from, n) for n in sizes.parameters},
        f"algebra-{largest}": partial(algebra_of, largest),
    }


def main() -> None:
    """Run every part that is not done yet, and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute")
    parser.add_argument("--work", type=Path, help="folder that keeps what is done")
    parser.add_argument("--only", nargs="+", help="parts to run")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    parts = parts_of(sizes)
    unknown = set(arguments.only or ()) - set(parts)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; parts: {', '.join(parts)}")
    with ExitStack() as stack:
        if arguments.work is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            work = arguments.work
            work.mkdir(parents=True, exist_ok=True)
        state = work / ("quick.json" if arguments.quick else "done.json")
        done: dict[str, Figures] = (
            json.loads(state.read_text()) if state.exists() else {}
        )
        for name in arguments.only or parts:
            if name in done:
                continue
            print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
            done[name] = parts[name](work, sizes)
            state.write_text(json.dumps(done, indent=2))
    figures = {key: value for own in done.values() for key, value in own.items()}
    read = [v for k, v in figures.items() if k.startswith("bytes_read_over_needed_")]
    if read:
        figures["bytes_read_over_needed"] = max(read)
    rows = []
    for key, value in figures.items():
        sign, limit = WANTED.get(key, ("", 0.0))
        wanted = f"{sign} {limit:g}" if sign else ""
        met = "" if not sign else ("yes" if value <= limit else "no")
        rows.append(
            (key, f"{value:.3g}" if value < 1e4 else f"{value:,.0f}", wanted, met)
        )
    write_result(
        {**figures, "machine": machine()},
        only_json=arguments.json,
        title="How it grows",
        columns=("figure", "found", "wanted", "met"),
        rows=rows,
    )


if __name__ == "__main__":
    main()
