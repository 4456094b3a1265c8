"""How fast federated training is, what recording costs, and how memory grows.

MNIST, a network of 206,922 parameters, 10 clients, one epoch, batches of 32, two
workers. Every ratio is taken within one run and comes with the seconds behind it. The
comparison with Flower needs the extra `flower`; without it its figures are null. The
default sizes are meant for less than five minutes on two idle cores.

    python benchmarks/train.py [--json] [--quick | --thorough] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import (
    interleaved,
    machine,
    progress,
    seconds_of,
    work_folder,
    write_result,
)
from benchmarks.train_loops import SequentialLoop
from benchmarks.train_setting import (
    leave_without_mnist,
    mnist_clients,
    save_clients,
    trainer,
)
from fastfedul import DiskLedger, Round
from fastfedul.data.dataset import ClientData
from fastfedul.federation.rounds import Schedule, run_rounds
from fastfedul.federation.workers.pool import Workers, open_workers

ROOT = Path(__file__).resolve().parent.parent
NUM_WORKERS = 2
LEAST = "one worker, its part of the clients"

WHOLE_RUN = """
import sys
from pathlib import Path
from benchmarks.train_setting import load_client, trainer
from fastfedul.federation.rounds import Schedule, run_rounds
from fastfedul.federation.workers.pool import open_workers

def main():
    path, num_clients, num_rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])
    clients = [load_client(path, number) for number in range(num_clients)]
    sizes = {data.client: data.num_examples for data in clients}
    with open_workers(trainer(), clients, seed=0, num_workers=2) as workers:
        model = workers.initial(0)
        for _ in run_rounds(
            workers.train, sizes, Schedule(seed=0), model=model, stop=num_rounds
        ):
            pass

if __name__ == "__main__":
    main()
"""

ONLY_TRAINING = """
import sys
from pathlib import Path
from benchmarks.train_setting import load_client, trainer
from fastfedul.federation.local import train_client
from fastfedul.federation.workers.worker_process import keep_freed_memory

keep_freed_memory()
path, num_rounds, *numbers = Path(sys.argv[1]), *map(int, sys.argv[2:])
clients = [load_client(path, number) for number in numbers]
own = trainer()
model = own.initial(0)
for index in range(num_rounds):
    for data in clients:
        train_client(own, model, data, index, 0)
"""

PEAK = """
import sys
from multiprocessing import active_children
from fastfedul.runs.training import RunConfig, train

def peak(pid):
    status = open(f"/proc/{pid}/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

def main():
    folder, size, num_clients, num_rounds = sys.argv[1], *map(int, sys.argv[2:])
    config = RunConfig.from_options(
        data="mnist", train_size=size, clients=num_clients, per_round=10, workers=2,
        rounds=num_rounds, epochs=1, momentum=0.0,
    )
    def show(metrics):
        if metrics.round == num_rounds - 1:
            print(sum(peak(p) for p in ("self", *(c.pid for c in active_children()))))
    train(config, folder, show)

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        clients: Of the federation.
        images: Images of a client, against the sequential loop and for recording.
        flower_images: Images of a client, against Flower.
        repetitions: Rounds each of the competitors has.
        recorded_rounds: Rounds that are recorded.
        flower_turns: Rounds in which Flower and the workers take turns.
        flower_rounds: Rounds of a whole run.
        runs: How often whole runs take turns.
        memory_clients: Numbers of clients between which memory is compared.
        memory_images: Images of all clients together.
        memory_rounds: Rounds after which memory is looked at.
    """

    clients: int = 10
    images: int = 800
    flower_images: int = 600
    repetitions: int = 3
    recorded_rounds: int = 4
    flower_turns: int = 5
    flower_rounds: int = 20
    runs: int = 1
    memory_clients: tuple[int, int] = (10, 1_000)
    memory_images: int = 6_000
    memory_rounds: int = 3


THOROUGH = Sizes(
    images=2_000,
    repetitions=5,
    recorded_rounds=8,
    flower_turns=20,
    runs=3,
    memory_images=20_000,
)
QUICK = Sizes(
    images=100,
    flower_images=60,
    repetitions=2,
    recorded_rounds=2,
    flower_turns=3,
    flower_rounds=3,
    runs=1,
    memory_clients=(10, 100),
    memory_images=1_000,
    memory_rounds=2,
)


@dataclass
class Figures:
    """What came out: results for scripts, and lines for people."""

    results: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lines: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, name: str, value: float | None, target: str, behind: str) -> None:
        """Note one result with its target and what is behind it."""
        self.results[name] = None if value is None else round(value, 4)
        shown = "not measured" if value is None else f"{value:.3g}"
        self.lines.append((name, shown, target, behind))


def main() -> None:
    """Run every measurement and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="small sizes, seconds")
    amount.add_argument("--thorough", action="store_true", help="more turns, minutes")
    parser.add_argument("--folder", type=Path, help="where runs are put")
    arguments = parser.parse_args()
    leave_without_mnist("train")
    usual = THOROUGH if arguments.thorough else Sizes()
    sizes = QUICK if arguments.quick else usual
    figures, before = Figures(), machine()
    with progress() as display, work_folder(arguments.folder) as folder:
        measure_rounds(folder, sizes, figures, display)
        measure_flower(folder, sizes, figures, display)
        measure_memory(folder, sizes, figures, display)
    result = {
        **figures.results,
        "seconds": {name: round(value, 4) for name, value in figures.seconds.items()},
        "notes": figures.notes,
        "sizes": asdict(sizes),
        "machine": before,
    }
    write_result(
        result,
        only_json=arguments.json,
        title="Federated training on MNIST, two workers"
        + (" (too small for the targets)" if arguments.quick else ""),
        columns=("measurement", "result", "target", "behind it"),
        rows=figures.lines,
    )


def measure_rounds(
    folder: Path, sizes: Sizes, figures: Figures, display: Progress
) -> None:
    """Compare rounds with the sequential loop, and time what recording adds.

    The loop runs with both orders of weights in memory; the faster one counts. One
    worker with its part of the clients and both cores to itself is the least that a
    round could take.
    """
    clients = mnist_clients(sizes.clients, sizes.images)
    part = clients[: -(-len(clients) // NUM_WORKERS)]
    task = display.add_task("rounds", total=sizes.repetitions + 1)
    with (
        open_workers(trainer(), clients, seed=0, num_workers=NUM_WORKERS) as workers,
        open_workers(trainer(), part, seed=0, num_workers=1) as alone,
    ):
        ours = endless_rounds(workers, clients)
        loops: dict[str, Callable[[], object]] = {
            f"sequential {name}": SequentialLoop(
                clients, threads=2, channels_last=name == "channels last"
            ).round
            for name in ("plain", "channels last")
        }
        found = interleaved(
            {
                **loops,
                "two workers": ours,
                LEAST: endless_rounds(alone, part),
            },
            sizes.repetitions,
            lambda: display.advance(task),
        )
        figures.seconds |= found
        plain = found["sequential plain"]
        best = min(found[name] for name in loops)
        for name, theirs, other, target in (
            ("over_sequential", best, "two workers", "at least 1.5"),
            ("over_sequential_plain", plain, "two workers", ""),
            ("over_sequential_possible", best, LEAST, ""),
        ):
            behind = f"{theirs:.2f} s against {found[other]:.2f} s a round"
            figures.add(name, theirs / found[other], target, behind)
        measure_recording(folder, sizes, figures, display, ours, workers)


def measure_recording(
    folder: Path,
    sizes: Sizes,
    figures: Figures,
    display: Progress,
    next_round: Callable[[], Round],
    workers: Workers,
) -> None:
    """Time appending beside training."""
    trained, recorded = 0.0, 0.0
    task = display.add_task("recording", total=sizes.recorded_rounds)
    with DiskLedger.create(folder / "ledger", workers.initial(0)) as ledger:
        for index in range(sizes.recorded_rounds):
            start = time.perf_counter()
            round_ = next_round()
            trained += time.perf_counter() - start
            renumbered = Round(index, round_.updates)
            recorded += seconds_of(partial(ledger.append, renumbered))
            display.advance(task)
    figures.seconds["training of the recorded rounds"] = trained
    figures.seconds["recording them"] = recorded
    figures.add(
        "recording_share",
        recorded / trained,
        "at most 0.03",
        f"{recorded / sizes.recorded_rounds * 1000:.0f} ms a round",
    )


def endless_rounds(
    workers: Workers, clients: tuple[ClientData, ...]
) -> Callable[[], Round]:
    """Return what trains the next round each time it is called."""
    rounds = run_rounds(
        workers.train,
        {data.client: data.num_examples for data in clients},
        Schedule(seed=0),
        model=workers.initial(0),
        stop=sys.maxsize,
    )
    return lambda: next(rounds).round


def measure_flower(
    folder: Path, sizes: Sizes, figures: Figures, display: Progress
) -> None:
    """Compare rounds and whole runs with Flower's simulation engine.

    Its clients train with the loop that PyTorch's own layout of weights gives; what
    the faster layout and the package's trainer make of it is measured too.
    """
    names = {
        "plain": "over_flower_round",
        "channels-last": "over_flower_round_channels_last",
        "fastfedul": "over_flower_round_same_trainer",
    }
    if find_spec("flwr") is None or find_spec("ray") is None:
        figures.notes.append("Flower is not installed: pip install 'fastfedul[flower]'")
        for name in (
            *names.values(),
            "over_flower_run",
            "over_flower_run_training_alone",
        ):
            figures.add(name, None, "", "Flower is not installed")
        return
    clients = mnist_clients(sizes.clients, sizes.flower_images)
    save_clients(folder / "clients.npz", clients)
    task = display.add_task("Flower", total=len(names) + 1)
    with open_workers(trainer(), clients, seed=0, num_workers=NUM_WORKERS) as workers:
        ours = endless_rounds(workers, clients)
        for loop, name in names.items():
            theirs, own = take_turns(folder, sizes, loop, ours)
            figures.seconds[f"Flower round, {loop}"] = theirs
            figures.seconds[f"our round beside {loop}"] = own
            behind = f"{theirs:.2f} s against {own:.2f} s"
            target = "at least 1.3" if loop == "plain" else ""
            figures.add(name, theirs / own, target, behind)
            display.advance(task)
    measure_runs(folder, sizes, figures)
    display.advance(task)


def measure_runs(folder: Path, sizes: Sizes, figures: Figures) -> None:
    """Compare whole runs, which take turns: this machine's speed drifts."""
    runs: dict[str, Callable[[], object]] = {
        "our run": partial(run_ours, folder, sizes),
        "Flower run, plain": partial(
            run_flower, folder, sizes.clients, sizes.flower_rounds, "plain"
        ),
        "local training alone": partial(run_only_training, folder, sizes),
    }
    turns = [
        {name: seconds_of(run) for name, run in runs.items()} for _ in range(sizes.runs)
    ]
    found = {name: median(turn[name] for turn in turns) for name in runs}
    figures.seconds |= found
    theirs = found["Flower run, plain"]
    for name, other, target in (
        ("over_flower_run", "our run", "at least 2"),
        ("over_flower_run_training_alone", "local training alone", ""),
    ):
        behind = f"{theirs:.1f} s against {found[other]:.1f} s"
        figures.add(name, theirs / found[other], target, behind)


def take_turns(
    folder: Path, sizes: Sizes, loop: str, ours: Callable[[], object]
) -> tuple[float, float]:
    """Return the median seconds of a round of Flower's and of ours, one by one."""
    address = folder / "turns"
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(address))
        listener.listen()
        turns = sizes.flower_turns
        pool.submit(
            run_flower, folder, sizes.clients, turns, loop, address
        ).add_done_callback(lambda _: listener.shutdown(socket.SHUT_RDWR))
        connection, _ = listener.accept()
        seconds: list[tuple[float, float]] = []
        with connection, connection.makefile("r") as answers:
            for _ in range(turns):
                connection.send(b".")
                theirs = float(answers.readline())
                seconds.append((theirs, seconds_of(ours)))
    warm = seconds[1 + len(seconds) // 10 :]
    return median(pair[0] for pair in warm), median(pair[1] for pair in warm)


def run_ours(folder: Path, sizes: Sizes) -> None:
    """Train a whole run in a process of its own, from its start to its end."""
    script = folder / "whole_run.py"
    script.write_text(WHOLE_RUN)
    numbers = (sizes.clients, sizes.flower_rounds)
    run_alone([script, folder / "clients.npz", *numbers], quiet=True)


def run_only_training(folder: Path, sizes: Sizes) -> None:
    """Train as many clients in two processes that exchange nothing: the least time."""
    script = folder / "only_training.py"
    script.write_text(ONLY_TRAINING)
    shared = (script, folder / "clients.npz", sizes.flower_rounds)
    halves = [range(i, sizes.clients, NUM_WORKERS) for i in range(NUM_WORKERS)]
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        for done in [pool.submit(run_alone, [*shared, *half]) for half in halves]:
            done.result()


def run_flower(
    folder: Path,
    num_clients: int,
    num_rounds: int,
    loop: str,
    address: Path | None = None,
) -> None:
    """Run Flower's simulation in a process of its own, from its start to its end."""
    arguments = (folder / "clients.npz", num_clients, num_rounds, loop)
    module = ("-m", "benchmarks.train_flower")
    run_alone([*module, *arguments, *([address] if address else [])], quiet=True)


def measure_memory(
    folder: Path, sizes: Sizes, figures: Figures, display: Progress
) -> None:
    """Compare resident memory of all processes between few and many clients."""
    script = folder / "peak.py"
    script.write_text(PEAK)
    peaks = []
    task = display.add_task("memory", total=len(sizes.memory_clients))
    for num_clients in sizes.memory_clients:
        run = folder / f"run-{num_clients}"
        numbers = (sizes.memory_images, num_clients, sizes.memory_rounds)
        peaks.append(int(run_alone([script, run, *numbers])))
        display.advance(task)
    few, many = peaks
    figures.add(
        "memory_growth_clients",
        many / few,
        "at most 1.3",
        f"{many / 2**20:.0f} MiB against {few / 2**20:.0f} MiB",
    )


def run_alone(arguments: list[object], *, quiet: bool = False) -> str:
    """Return what a fresh interpreter prints."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    finished = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=True,
    )
    return finished.stdout


if __name__ == "__main__":
    main()
