"""What the default skew costs, and how far its shortcuts are from the whole answer.

Three tables. The first times forgetting with the default skew beside the paper's scalar
and beside the plain read of the bytes it needs, with the linear algebra apart, on a
network of 215,370 parameters with 10 clients and 20 rounds. The second times wide
layers with exact and with leading eigenvectors, and says how far apart the answers are.
The third trains small federations and says how far an answer from fewer updates, or
from a ledger of sums, is from the answer from all updates, beside the distance between
two draws. It takes about five minutes.

    python benchmarks/kronecker.py [--json] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import (
    client_name,
    interleaved,
    machine,
    progress,
    seconds_of,
    write_result,
)
from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    Kronecker,
    LedgerReader,
    LocalSGD,
    Model,
    Params,
    Round,
    Scalar,
    UnlearnRequest,
)
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.views import CountedLedger, LedgerView
from fastfedul.methods.fast_fedul import eigenbases
from fastfedul.methods.fast_fedul.columns import rows_of
from fastfedul.methods.fast_fedul.deviations import Sink
from fastfedul.methods.fast_fedul.kronecker import HeldBack, hold_back
from fastfedul.methods.fast_fedul.marks import HeldMarks
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.methods.fast_fedul.undamped import undamped
from fastfedul.params import Array, Flat, Layout, Slot
from fastfedul.rng import stream
from fastfedul.runs.config import RunConfig
from fastfedul.runs.training import train
from paper.recoding import recoded

CNN = (
    ("conv1", (16, 1, 5, 5)),
    ("bias1", (16,)),
    ("conv2", (32, 16, 5, 5)),
    ("bias2", (32,)),
    ("dense1", (128, 1568)),
    ("bias3", (128,)),
    ("dense2", (10, 128)),
    ("bias4", (10,)),
)
TARGET = client_name(0)
LOCAL = LocalSGD(lr=0.05, momentum=0.0, batch_size=32, epochs=1)
FEDERATIONS = {
    "even": {},
    "skewed": {"partition": "dirichlet:0.3"},
    "skewed, half a round": {"partition": "dirichlet:0.3", "per_round": 5},
}
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything.

    Attributes:
        clients: Participants of each round of the timed ledger.
        rounds: Rounds of the timed ledger.
        repetitions: How often everything is timed.
        layers: Shapes of the wide layers.
        updates: Updates of a wide layer.
        draws: Other draws that an answer is compared with.
        trained_rounds: Rounds of the small federations.
    """

    clients: int = 10
    rounds: int = 20
    repetitions: int = 11
    layers: tuple[tuple[int, int], ...] = ((512, 4608), (128, 1568), (3000, 64))
    updates: int = 64
    draws: int = 5
    trained_rounds: int = 20


OLD = [[(1.0, 1.0)]]
"""A single mark, older than the training."""

QUICK = Sizes(
    rounds=4,
    repetitions=3,
    layers=((20, 1200),),
    updates=8,
    draws=2,
    trained_rounds=4,
)


def main() -> None:
    """Run every measurement and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes()
    before = machine()
    with progress() as display, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timed, rows = time_forgetting(folder / "timed", sizes, display)
        wide, wide_rows = time_wide_layers(sizes, display)
        near, near_rows = compare_answers(folder, sizes, display)
    write_result(
        {
            **timed,
            "wide_layers": wide,
            "distances": near,
            "sizes": asdict(sizes),
            "machine": before,
        },
        only_json=arguments.json,
        title="skew kronecker: what it costs, and what its shortcuts cost",
        columns=("measurement", "result", "wanted", "behind it"),
        rows=[*rows, *wide_rows, *near_rows],
    )


def time_forgetting(
    path: Path, sizes: Sizes, display: Progress
) -> tuple[dict[str, object], list[Row]]:
    """Time both skews, the plain read and the linear algebra in turns."""
    layout = Layout(tuple(Slot(name, shape, "float32") for name, shape in CNN))
    rng = stream(0, "benchmark kronecker")
    start = Model(Params.zeros(layout))
    with DiskLedger.create(path, start) as ledger:
        for index in range(sizes.rounds):
            updates = tuple(
                ClientUpdate(
                    client_name(client),
                    1 / sizes.clients,
                    Params(layout, low_rank(layout, rng)),
                )
                for client in range(sizes.clients)
            )
            ledger.append(Round(index, updates, local=LOCAL))
    with LedgerReader(path) as reader:
        usual, scalar = FastFedUL(), FastFedUL(skew=Scalar())
        request = UnlearnRequest(reader, frozenset({TARGET}))
        counted = CountedLedger(reader)
        usual(replace(request, ledger=counted))
        rounds = reader.rounds()
        removal = leaving(reader, request.forget, rounds)
        terms = undamped(reader, removal, rounds, 64)
        held = InMemory(rows_of(terms.deviations, 0, layout.size))
        read = partial(read_plainly, path, counted.bytes_read)
        task = display.add_task("forgetting", total=sizes.repetitions + 1)
        functions: dict[str, Callable[[], object]] = {
            "kronecker": partial(usual, request),
            "scalar": partial(scalar, request),
            "plain read": read,
            "linear algebra": partial(
                hold_back,
                terms.marks,
                terms.ages,
                held,
                layout,
                terms.scale,
                reader.chain,
            ),
        }
        seconds = interleaved(
            functions, sizes.repetitions, partial(display.advance, task)
        )
    over_scalar = seconds["kronecker"] / seconds["scalar"]
    beyond = seconds["kronecker"] - seconds["linear algebra"]
    over_read = beyond / seconds["plain read"]
    found: dict[str, object] = {
        "kronecker_seconds": seconds["kronecker"],
        "kronecker_over_scalar": over_scalar,
        "without_linear_algebra_over_read": over_read,
        "linear_algebra_seconds": seconds["linear algebra"],
        "bytes_read": counted.bytes_read,
    }
    ms = {name: f"{1000 * value:.0f} ms" for name, value in seconds.items()}
    return found, [
        ("forgetting, 215,370 parameters", ms["kronecker"], "< 300 ms", ""),
        (
            "over the scalar",
            f"{over_scalar:.1f}",
            "<= 10",
            f"{ms['kronecker']} / {ms['scalar']}",
        ),
        ("linear algebra of it, alone", ms["linear algebra"], "", ""),
        (
            "the rest over a plain read of its bytes",
            f"{over_read:.2f}",
            "<= 3",
            f"{1000 * beyond:.0f} ms / {ms['plain read']}, "
            f"{counted.bytes_read / 1e6:.0f} MB",
        ),
    ]


def low_rank(layout: Layout, rng: np.random.Generator) -> Flat:
    """Return an update whose matrices have a spectrum that falls, as real ones do."""
    parts = []
    for slot in layout.slots:
        if len(slot.shape) < 2:
            parts.append(rng.standard_normal(slot.size))
            continue
        side = slot.size // slot.shape[0]
        rank = min(12, slot.shape[0], side)
        falling = 0.7 ** np.arange(rank)
        left = rng.standard_normal((slot.shape[0], rank)) * falling
        parts.append((left @ rng.standard_normal((rank, side))).ravel())
    return (1e-3 * np.concatenate(parts)).astype(np.float32)


def read_plainly(path: Path, num_bytes: int) -> int:
    """Read so many bytes of the ledger's files, and do nothing with them."""
    done = 0
    while done < num_bytes:
        for file in sorted((path / "arrays").iterdir()):
            with file.open("rb", buffering=0) as opened:
                done += len(opened.read(num_bytes - done))
            if done >= num_bytes:
                break
    return done


@dataclass(frozen=True, slots=True)
class InMemory:
    """Deviations that need not be read."""

    rows: Array

    def __len__(self) -> int:
        return len(self.rows)

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        rows[...] = self.rows[:, start : start + rows.shape[1]]

    def visit(self, start: int, stop: int, sinks: Sequence[Sink]) -> None:
        """Give each row to one sink."""
        for number, row in enumerate(self.rows):
            sinks[number % len(sinks)](row[start:stop].copy())

    def add_to(self, flat: Flat, factors: Array) -> None:
        """Add the sum of factor times row to a vector, in place."""
        flat += factors.astype(np.float32) @ self.rows


def time_wide_layers(
    sizes: Sizes, display: Progress
) -> tuple[list[dict[str, object]], list[Row]]:
    """Time exact and leading eigenvectors on wide layers, and compare the answers."""
    found: list[dict[str, object]] = []
    rows: list[Row] = []
    task = display.add_task("wide layers", total=len(sizes.layers))
    for shape in sizes.layers:
        layout = Layout((Slot("wide", shape, "float32"),))
        rng = stream(0, "benchmark wide", *shape)
        updates = np.stack([low_rank(layout, rng) for _ in range(sizes.updates)])
        deviations = InMemory(updates / np.float32(np.sqrt(sizes.updates)))
        difference = low_rank(layout, rng)
        answer = partial(
            hold_back,
            HeldMarks(difference[None]),
            OLD,
            deviations,
            layout,
            1e3,
            b"seed",
        )
        leading, seconds = timed(answer)
        limit, eigenbases.EXACT_SIDE = eigenbases.EXACT_SIDE, max(shape)
        try:
            exact, exact_seconds = timed(answer)
        finally:
            eigenbases.EXACT_SIDE = limit
        off = distance(leading.difference, exact.difference)
        found.append(
            {
                "shape": shape,
                "seconds": seconds,
                "exact_seconds": exact_seconds,
                "distance": off,
            }
        )
        rows.append(
            (
                f"a layer of {shape[0]} x {shape[1]}, {sizes.updates} updates",
                f"{seconds:.2f} s",
                "",
                f"exact {exact_seconds:.2f} s; {off:.1%} apart",
            )
        )
        display.advance(task)
    return found, rows


def timed(answer: Callable[[], HeldBack]) -> tuple[HeldBack, float]:
    """Return an answer, and the seconds it took."""
    kept: list[HeldBack] = []
    seconds = seconds_of(lambda: kept.append(answer()))
    return kept[0], seconds


class OtherDraw(LedgerView):
    """A ledger whose sample of updates is drawn another time."""

    def __init__(self, ledger: Ledger, number: int) -> None:
        super().__init__(ledger)
        self._number = number

    @property
    def chain(self) -> bytes:
        """A digest that is another for every draw."""
        return bytes([self._number]) * 32


def compare_answers(
    folder: Path, sizes: Sizes, display: Progress
) -> tuple[list[dict[str, object]], list[Row]]:
    """Return how far answers from less are from the answer from all updates."""
    found: list[dict[str, object]] = []
    rows: list[Row] = []
    task = display.add_task("federations", total=len(FEDERATIONS))
    for number, (name, options) in enumerate(FEDERATIONS.items()):
        run = folder / str(number)
        config = RunConfig.from_options(
            options,  # type: ignore[arg-type]
            rounds=sizes.trained_rounds,
            seed=100,
        )
        train(config, run)
        with LedgerReader(run) as full:
            recoded(full, run / "sums", keep=Keep("sums")).close()
            with LedgerReader(run / "sums") as sums:
                measured = distances(full, sums, sizes)
        found.append({"federation": name, **measured})
        for what, value in measured.items():
            rows.append((f"{name}: {what}", f"{value:.1%}", "", "median over clients"))
        display.advance(task)
    return found, rows


def distances(full: Ledger, sums: Ledger, sizes: Sizes) -> dict[str, float]:
    """Return median distances over clients, relative to the answer from all updates."""
    parts: dict[str, list[float]] = {}
    for client in full.clients():
        whole = answer_of(full, client, Kronecker("all"))
        draws = {
            count: [
                answer_of(OtherDraw(full, draw), client, Kronecker(count))
                for draw in range(sizes.draws)
            ]
            for count in (64, 32, 16)
        }
        for count, answers in draws.items():
            far = [distance(answer, whole) for answer in answers]
            parts.setdefault(f"{count} updates, from all", []).append(median(far))
        first, *others = draws[64]
        between = [distance(answer, first) for answer in others]
        parts.setdefault("64 updates, two draws apart", []).append(median(between))
        from_sums = answer_of(sums, client, Kronecker())
        parts.setdefault("sums, from all", []).append(distance(from_sums, whole))
        parts.setdefault("scalar 0.07, from all", []).append(
            distance(answer_of(full, client, Scalar()), whole)
        )
    return {name: median(values) for name, values in parts.items()}


def answer_of(ledger: Ledger, client: str, skew: Kronecker | Scalar) -> Flat:
    """Return what forgetting a client adds to the model."""
    method = FastFedUL(skew=skew)
    return method(UnlearnRequest(ledger, frozenset({client}))).delta.flat


def distance(one: Flat, other: Flat) -> float:
    """Return how far apart two answers are, relative to the second."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


if __name__ == "__main__":
    main()
