"""Worker processes: the same bits as in one process, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastfedul.data.dataset import ClientData
from fastfedul.data.partition import Partition, split
from fastfedul.data.sources import load
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.federation.rounds import (
    Schedule,
    model_after,
    require_usable,
    run_rounds,
)
from fastfedul.federation.trainer import LocalTraining, TrainingError
from fastfedul.federation.workers.pool import InProcess, WorkerProcesses, open_workers
from fastfedul.federation.workers.shared_arrays import ArrayShape, arrays_in, create
from fastfedul.integrations.torch import TorchTrainer
from fastfedul.records import Model

pytest.importorskip("torch")

DIGITS = load("digits")
CLIENTS = split(DIGITS, 5, Partition.parse("dirichlet:0.5"), seed=3)
SIZES = {data.client: data.num_examples for data in CLIENTS}

TROUBLE = """
import os
import signal
import time

import torch
from torch import nn


class Trouble(nn.Module):
    def __init__(self, action):
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.norm = nn.BatchNorm1d(64)
        self.action = action

    def forward(self, images):
        if self.training:
            self.action()
        return self.linear(self.norm(images.flatten(1)))


def nothing():
    pass


def fail():
    raise RuntimeError("the cat ate it\\nand more")


def healthy(image_shape, num_classes):
    return Trouble(nothing)


def dying(image_shape, num_classes):
    return Trouble(lambda: os.kill(os.getpid(), signal.SIGKILL))


def failing(image_shape, num_classes):
    return Trouble(fail)


def slow(image_shape, num_classes):
    return Trouble(lambda: time.sleep(60))
"""

ORPHAN = """
import time

from fastfedul.data.partition import Partition, split
from fastfedul.data.sources import load
from fastfedul.federation.workers.pool import open_workers
from fastfedul.integrations.torch import TorchTrainer

if __name__ == "__main__":
    clients = split(load("digits"), 2, Partition(), seed=0)
    trainer = TorchTrainer(shape=(8, 8, 1), num_classes=10, model="trouble:slow")
    with open_workers(trainer, clients, seed=0, num_workers=2) as workers:
        model = workers.initial(0)
        print(*workers.pids, flush=True)
        workers.train(model, 0, ["client-0", "client-1"])
"""


def trainer_of(model: str = "auto", **local: float) -> TorchTrainer:
    training = LocalTraining(**local)  # type: ignore[arg-type]
    return TorchTrainer(shape=(8, 8, 1), num_classes=10, model=model, local=training)


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("trouble", None)


def final_of(workers: InProcess | WorkerProcesses, num_rounds: int) -> Model:
    model = workers.initial(7)
    schedule = Schedule(seed=7, per_round=4)
    rounds = run_rounds(workers.train, SIZES, schedule, model=model, stop=num_rounds)
    return model_after(rounds, model)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids: tuple[int, ...], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def shared_files() -> set[Path]:
    folder = Path("/dev/shm")
    return set(folder.iterdir()) if folder.is_dir() else set()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "count"), [("auto", 3), ("trouble:healthy", 2)])
def test_any_number_of_workers_gives_the_same_bits(
    model: str, count: int, trouble: Path
) -> None:
    trainer = trainer_of(model, momentum=0.9)
    images = {"test": DIGITS.test_images}
    found = []
    for num_workers in (1, count):
        with open_workers(
            trainer, CLIENTS, seed=7, num_workers=num_workers, images=images
        ) as workers:
            assert isinstance(workers, InProcess | WorkerProcesses)
            final = final_of(workers, 2)
            buffers = [buffer.tobytes() for buffer in final.buffers.values()]
            logits = workers.predict(final, "test")
            found.append((final.params.flat.tobytes(), buffers, logits.tobytes()))
    assert found[0] == found[1]
    assert bool(found[0][1]) == (model != "auto")


def test_workers_stop_with_the_block_and_leave_nothing() -> None:
    before = shared_files()
    with open_workers(trainer_of(), CLIENTS, seed=0, num_workers=2) as workers:
        assert isinstance(workers, WorkerProcesses)
        pids = workers.pids
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    assert shared_files() <= before
    with pytest.raises(TrainingError, match="have been stopped"):
        workers.initial(0)


@pytest.mark.slow
def test_workers_die_with_their_parent(trouble: Path) -> None:
    """Killed in the middle of a task, so no code of the parent's runs any more."""
    before = shared_files()
    script = trouble / "orphan.py"
    script.write_text(ORPHAN)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pids = tuple(int(pid) for pid in process.stdout.readline().split())
        assert len(pids) == 2
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert wait_until_gone(pids)
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert shared_files() <= before


def test_a_worker_that_dies_gives_a_clear_error(trouble: Path) -> None:
    with open_workers(
        trainer_of("trouble:dying"), CLIENTS, seed=0, num_workers=2
    ) as workers:
        assert isinstance(workers, WorkerProcesses)
        pids, model = workers.pids, workers.initial(0)
        with pytest.raises(TrainingError, match=r"ended by signal 9") as caught:
            workers.train(model, 0, ["client-0", "client-1", "client-2"])
        assert "\n" not in str(caught.value)
        assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("count", [1, 2])
def test_a_client_that_fails_is_named(count: int, trouble: Path) -> None:
    with open_workers(
        trainer_of("trouble:failing"), CLIENTS, seed=0, num_workers=count
    ) as workers:
        model = workers.initial(0)
        with pytest.raises(TrainingError) as caught:
            workers.train(model, 4, ["client-2"])
    assert str(caught.value) == (
        "the training of client-2 failed in round 4: RuntimeError: the cat ate it"
    )


def test_training_that_runs_away_is_named() -> None:
    trainer = trainer_of(lr=1e30)
    with open_workers(trainer, CLIENTS, seed=0, num_workers=1) as workers:
        model = workers.initial(0)
        results = workers.train(model, 7, ["client-1"])
        with pytest.raises(
            TrainingError, match=r"client-1 ran away in round 7.*smaller"
        ):
            require_usable(["client-1"], results, model, 7)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="only once"):
        open_workers(trainer_of(), [*CLIENTS, CLIENTS[0]], seed=0)
    with pytest.raises(InvalidInputError, match="1 or more"):
        open_workers(trainer_of(), CLIENTS, seed=0, num_workers=0)


def test_shared_arrays_are_seen_by_all_and_start_at_zero() -> None:
    shapes = [ArrayShape((3, 2), "<f4"), ArrayShape((), "<i8"), ArrayShape((0,), "|u1")]
    descriptor = create(shapes)
    here, there = arrays_in(descriptor, shapes), arrays_in(descriptor, shapes)
    os.close(descriptor)
    assert [array.shape for array in here] == [(3, 2), (), (0,)]
    assert not here[0].any()
    here[0][1] = 5
    here[1][...] = -7
    np.testing.assert_array_equal(there[0], [[0, 0], [5, 5], [0, 0]])
    assert there[1] == -7


def test_too_much_shared_memory_is_an_error_in_one_line() -> None:
    with pytest.raises(FastFedULError, match="use one worker"):
        create([ArrayShape((1 << 50,), "|u1")])


def test_a_client_is_trained_on_its_own_examples() -> None:
    swapped = [
        ClientData(CLIENTS[0].client, CLIENTS[1].images, CLIENTS[1].labels),
        *CLIENTS[1:],
    ]
    results = []
    for clients in (CLIENTS, swapped):
        workers = InProcess(trainer_of(), clients, seed=0)
        results.append(workers.train(workers.initial(0), 0, ["client-0", "client-2"]))
    [before, same], [after, as_before] = results
    assert before.delta.flat.tobytes() != after.delta.flat.tobytes()
    assert same.delta.flat.tobytes() == as_before.delta.flat.tobytes()
