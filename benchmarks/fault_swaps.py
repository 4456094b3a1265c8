"""Parts of a run swapped with each other or with older copies, and who notices.

Every swapped byte is genuine: it was written by the ledger itself, at another place or
at another moment. So a digest of the bytes alone does not tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.progress import Progress

from benchmarks.fault_past import (
    KINDS,
    Moment,
    Past,
    anchored,
    build_past,
    key,
    state_of,
)
from benchmarks.fault_writer import Problems
from fastfedul import DiskLedger, FastFedULError, LedgerReader, verify
from fastfedul.forgetting.certificates import (
    certificate_path,
    certificates_folder,
    read_certificate,
)
from fastfedul.forgetting.checking import audit
from fastfedul.forgetting.envelopes import Envelope
from fastfedul.forgetting.folder import (
    RUN_MODEL,
    bring_up_to_date,
    require_newest,
    run_model_problem,
)
from fastfedul.forgetting.statements import is_certified
from fastfedul.ledger.store.folder import ARRAYS, INDEX
from fastfedul.ledger.store.schema import ROWS
from fastfedul.rng import stream

BLOCKS = (16, 512, 4096, 65_536)
"""Bytes of a swapped block; 4,096 is the alignment of images in an array file."""

DRAWS = 50
"""Draws until two parts differ; a swap of equal parts is no fault."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A swap that was made.

    Attributes:
        text: The swapped parts, for a line about a violation.
        to: The moment to which the whole ledger went back; None if a part of it did.
        told: Whether certificates in the run know more than that moment.
    """

    text: str
    to: Moment | None = None
    told: bool = False


@dataclass(slots=True)
class Swaps:
    """Outcomes of the swaps; every swap is counted once from `noticed` on.

    Attributes:
        kinds: Swaps by their kind.
        noticed_by: Swaps that each way of looking noticed; several may notice one swap.
        noticed: At least one way of looking noticed.
        harmless: The ledger, its model file and its certificates are as before.
        undetectable: The whole ledger is an older one. No anchor and no certificate
            in the run knows of a later moment.
        silent: None of these.
        crashed: Another exception than the library's was raised.
        destroyed: Opening for writing removed bytes of a ledger that is damaged.
        problems: A line for each violation.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    noticed_by: Counter[str] = field(default_factory=Counter)
    noticed: int = 0
    harmless: int = 0
    undetectable: int = 0
    silent: int = 0
    crashed: int = 0
    destroyed: int = 0
    problems: Problems = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the counts."""
        return {
            "faults": self.kinds.total(),
            "noticed": self.noticed,
            "harmless": self.harmless,
            "undetectable": self.undetectable,
            "silent": self.silent,
            "crashed": self.crashed,
            "files_destroyed": self.destroyed,
            **{f"of_{name}": n for name, n in sorted(self.kinds.items())},
            **{f"noticed_by_{name}": n for name, n in sorted(self.noticed_by.items())},
        }


Make = Callable[[Past, Path, np.random.Generator], Swap | None]
"""Makes a swap in a copy of the present; None if the draw changed nothing."""


def _array_files(run: Path) -> list[Path]:
    return sorted(p for p in (run / "ledger" / ARRAYS).iterdir() if p.is_file())


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the contents of two files; return whether they differed."""
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return first != second


def swap_array_files(past: Past, run: Path, rng: np.random.Generator) -> Swap | None:
    """Swap two array files."""
    one, other = rng.choice(np.array(_array_files(run)), 2, replace=False)
    return Swap(f"{one.name} and {other.name}") if _exchange(one, other) else None


def swap_blocks(past: Past, run: Path, rng: np.random.Generator) -> Swap | None:
    """Swap two blocks of equal size, in one array file or in two."""
    files = _array_files(run)
    size = int(rng.choice(BLOCKS))
    large = [file for file in files if file.stat().st_size >= 2 * size]
    if not large:
        return None
    one = large[rng.integers(len(large))]
    other = one if rng.random() < 0.5 else large[rng.integers(len(large))]
    places = []
    for file in (one, other):
        place = int(rng.integers(file.stat().st_size // size)) * size
        places.append((file, place))
    blocks = [file.read_bytes()[at : at + size] for file, at in places]
    if blocks[0] == blocks[1]:
        return None
    for (file, place), block in zip(places, reversed(blocks), strict=True):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(block)
    where = " and ".join(f"{file.name}[{at}:{at + size}]" for file, at in places)
    return Swap(where)


@contextlib.contextmanager
def _index(ledger: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(ledger / INDEX, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def _put(index: sqlite3.Connection, table: str, row: tuple[object, ...]) -> None:
    marks = ", ".join("?" * len(row))
    index.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)


def swap_rows(past: Past, run: Path, rng: np.random.Generator) -> Swap | None:
    """Swap the contents of two rows of a table; each keeps the other's digest."""
    row = ROWS[rng.integers(len(ROWS))]
    with _index(run / "ledger") as index:
        found = index.execute(f"SELECT * FROM {row.table}").fetchall()
        if len(found) < 2:
            return None
        one, other = (found[i] for i in rng.choice(len(found), 2, replace=False))
        if one[row.key : -1] == other[row.key : -1]:
            return None
        index.execute(f"DELETE FROM {row.table}")
        changed = {
            one: (*one[: row.key], *other[row.key :]),
            other: (*other[: row.key], *one[row.key :]),
        }
        for values in found:
            _put(index, row.table, changed.get(values, values))
    return Swap(f"{row.table} {one[: row.key]} and {other[: row.key]}")


def roll_back_row(past: Past, run: Path, rng: np.random.Generator) -> Swap | None:
    """Put an older row of the index back; its digest fits."""
    row = ROWS[rng.integers(len(ROWS))]
    moment = past.before[rng.integers(len(past.before))]
    select = f"SELECT * FROM {row.table}"
    with _index(moment.ledger) as index:
        old = index.execute(select).fetchall()
    with _index(run / "ledger") as index:
        now = set(index.execute(select).fetchall())
        changed = [values for values in old if values not in now]
        if not changed:
            return None
        chosen = changed[rng.integers(len(changed))]
        _put(index, row.table, chosen)
    where = f"{row.table} {chosen[: row.key]} of moment {moment.number}"
    return Swap(where)


def roll_back_file(past: Past, run: Path, rng: np.random.Generator) -> Swap | None:
    """Put an older array file, or the run's older model file, back."""
    moment = past.before[rng.integers(len(past.before))]
    files = [*_array_files(moment.run), moment.run / RUN_MODEL]
    old = files[rng.integers(len(files))]
    place = run / old.relative_to(moment.run)
    if place.exists() and place.read_bytes() == old.read_bytes():
        return None
    shutil.copyfile(old, place)
    return Swap(f"{old.name} of moment {moment.number}")


def _replace_folder(place: Path, by: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    if by.exists():
        shutil.copytree(by, place)


def _to(past: Past, moment: Moment, text: str, *, kept: bool) -> Swap:
    """Return the swap of a whole ledger; `kept` if the certificates are today's."""
    told = kept and past.now.entries > moment.entries
    return Swap(f"{text} of moment {moment.number}", moment, told)


def roll_back_index(past: Past, run: Path, rng: np.random.Generator) -> Swap:
    """Put an older index beside today's arrays."""
    moment = past.before[rng.integers(len(past.before))]
    shutil.copyfile(moment.ledger / INDEX, run / "ledger" / INDEX)
    return _to(past, moment, "the index", kept=True)


def roll_back_arrays(past: Past, run: Path, rng: np.random.Generator) -> Swap:
    """Put the older arrays beside today's index."""
    moment = past.before[rng.integers(len(past.before))]
    _replace_folder(run / "ledger" / ARRAYS, moment.ledger / ARRAYS)
    return Swap(f"the arrays of moment {moment.number}")


def mix_moments(past: Past, run: Path, rng: np.random.Generator) -> Swap:
    """Put the index of one older moment beside the arrays of another one."""
    one, other = rng.choice(len(past.before), 2, replace=False)
    index, arrays = past.before[one], past.before[other]
    shutil.copyfile(index.ledger / INDEX, run / "ledger" / INDEX)
    _replace_folder(run / "ledger" / ARRAYS, arrays.ledger / ARRAYS)
    text = f"the arrays of moment {arrays.number} and the index"
    return _to(past, index, text, kept=True)


def roll_back_ledger(past: Past, run: Path, rng: np.random.Generator) -> Swap:
    """Put the whole older ledger back; certificates and model file are today's."""
    moment = past.before[rng.integers(len(past.before))]
    _replace_folder(run / "ledger", moment.ledger)
    return _to(past, moment, "the ledger", kept=True)


def roll_back_run(past: Past, run: Path, rng: np.random.Generator) -> Swap:
    """Put the whole older run back, with its certificates and its model file."""
    moment = past.before[rng.integers(len(past.before))]
    _replace_folder(run, moment.run)
    return _to(past, moment, "the run", kept=False)


def swap_certificates(past: Past, run: Path, rng: np.random.Generator) -> Swap | None:
    """Swap two certificates, or put one in the place of another one."""
    files = sorted(certificates_folder(run / "ledger").glob("*.json"))
    if len(files) < 2:
        return None
    one, other = (files[i] for i in rng.choice(len(files), 2, replace=False))
    if rng.random() < 0.5:
        _exchange(one, other)
        return Swap(f"{one.name} and {other.name}")
    shutil.copyfile(one, other)
    return Swap(f"{one.name} in the place of {other.name}")


def roll_back_certificates(past: Past, run: Path, rng: np.random.Generator) -> Swap:
    """Put an older folder of certificates back, or a certificate without signature."""
    folder = certificates_folder(run / "ledger")
    if rng.random() < 0.5:
        files = sorted(folder.glob("*.json"))
        file = files[rng.integers(len(files))]
        bare = Envelope(read_certificate(file).envelope.payload)
        file.write_text(bare.to_text())
        return Swap(f"{file.name} without its signature")
    moment = past.before[rng.integers(len(past.before))]
    _replace_folder(folder, certificates_folder(moment.ledger))
    return Swap(f"the certificates of moment {moment.number}")


MAKES: dict[str, Make] = {
    "array_files_swapped": swap_array_files,
    "blocks_swapped": swap_blocks,
    "rows_swapped": swap_rows,
    "row_rolled_back": roll_back_row,
    "file_rolled_back": roll_back_file,
    "index_rolled_back": roll_back_index,
    "arrays_rolled_back": roll_back_arrays,
    "moments_mixed": mix_moments,
    "ledger_rolled_back": roll_back_ledger,
    "run_rolled_back": roll_back_run,
    "certificates_swapped": swap_certificates,
    "certificates_rolled_back": roll_back_certificates,
}
"""Kinds of swaps; they take turns."""


def swap_parts(folder: Path, wanted: int, seed: int, display: Progress) -> Swaps:
    """Swap parts of runs, with an anchor and without, and look at the outcome.

    Args:
        folder: Where runs are put.
        wanted: Number of swaps.
        seed: Seed of the draws.
        display: Shows the progress.
    """
    tally = Swaps()
    rng = stream(seed, "swap")
    own = (folder / "swaps").resolve()
    pasts = [build_past(own / f"{n}", kind, seed) for n, kind in enumerate(KINDS)]
    task = display.add_task("swapping parts of runs", total=wanted)
    names = list(MAKES)
    turn = 0
    while tally.kinds.total() < wanted:
        name, turn = names[turn % len(names)], turn + 1
        past = pasts[rng.integers(len(pasts))]
        has_anchor = bool(rng.random() < 0.5)
        made = _make(MAKES[name], past, own / "try", rng)
        if made is None:
            continue
        tally.kinds[name] += 1
        examine(past, own / "try", made, name, tally, has_anchor=has_anchor)
        display.advance(task)
    shutil.rmtree(own)
    return tally


def _make(make: Make, past: Past, run: Path, rng: np.random.Generator) -> Swap | None:
    """Return a swap made in a fresh copy of the present; None if none changes it."""
    for _ in range(DRAWS):
        _replace_folder(run, past.now.run)
        made = make(past, run, rng)
        if made is not None:
            return made
    return None


def examine(
    past: Past, run: Path, made: Swap, name: str, tally: Swaps, *, has_anchor: bool
) -> None:
    """Look at a run in every way that its operator has, and judge the outcome.

    Args:
        past: The run's true present and its moments.
        run: The run with a swap.
        made: The swap.
        name: Kind of the swap.
        tally: Outcomes of all swaps.
        has_anchor: Whether the operator has an anchor.
    """
    anchor = run.with_name("anchor.jsonl") if has_anchor else None
    if anchor is not None:
        shutil.copyfile(past.anchor, anchor)
    kept = _contents(run)
    noticed: list[str] = []
    try:
        with anchored(anchor):
            noticed = [way for way, look in LOOKS.items() if look(run)]
            outcome, detail = _outcome(past, run, made, noticed, anchor is not None)
    except Exception as error:
        outcome, detail = "crashed", f"{type(error).__name__}: {error}"
    tally.noticed_by.update(noticed)
    setattr(tally, outcome, getattr(tally, outcome) + 1)
    with_anchor = "anchor" if has_anchor else "no anchor"
    where = f"{name}, {past.kind}, {made.text}, {with_anchor}"
    if outcome in ("silent", "crashed"):
        tally.problems.append(f"{where}: {outcome}: {detail}")
    refused = {"reading", "verify", "writing"} & set(noticed)
    if refused and not kept <= _contents(run):
        tally.destroyed += 1
        tally.problems.append(f"{where}: a writer removed bytes of a damaged ledger")


def _contents(run: Path) -> set[bytes]:
    """Return digests of the array files of a run, wherever they lie in the ledger."""
    return {
        hashlib.sha256(path.read_bytes()).digest()
        for path in (run / "ledger").rglob("*.safetensors")
    }


def _outcome(
    past: Past, run: Path, made: Swap, noticed: list[str], anchored_: bool
) -> tuple[str, str]:
    """Return the outcome of a swap, and what is wrong if it is silent."""
    if noticed:
        return "noticed", ""
    with LedgerReader(run) as ledger:
        state = state_of(ledger)
        wrong = list(_wrong_beside(ledger))
    if state == past.now.state:
        return ("silent", wrong[0]) if wrong else ("harmless", "")
    differing = [n for n, found in past.now.state.items() if state.get(n) != found]
    older = made.to is not None and state == made.to.state and not wrong
    # Requests are no part of an anchor's line.
    same_line = made.to is not None and (made.to.entries, made.to.num_rounds) == (
        past.now.entries,
        past.now.num_rounds,
    )
    if older and not made.told and (same_line or not anchored_):
        return "undetectable", ""
    return "silent", f"wrong: {', '.join([*differing, *wrong])}"


def _wrong_beside(ledger: LedgerReader) -> Iterator[str]:
    """Yield what is wrong with the model file and the certificates."""
    problem = run_model_problem(ledger)
    if problem:
        yield problem
    folder = certificates_folder(ledger.path)
    for entry in filter(is_certified, ledger.log()):
        file = certificate_path(folder, entry)
        if not file.is_file():
            yield f"there is no certificate of entry {entry.number}"
        elif not audit(read_certificate(file), ledger, [key().public]).ok:
            yield f"the certificate of entry {entry.number} does not hold"


def _reading(run: Path) -> bool:
    """Return whether a reader that asks everything gets an error."""
    try:
        with LedgerReader(run) as ledger:
            state_of(ledger)
    except FastFedULError:
        return True
    return False


def _verify(run: Path) -> bool:
    """Return whether `fastfedul ledger verify` would report damage."""
    try:
        with LedgerReader(run) as ledger:
            require_newest(ledger)
            return bool(verify(ledger).problems or run_model_problem(ledger))
    except FastFedULError:
        return True


def _certificates(run: Path) -> bool:
    """Return whether the check of a certificate of the run does not pass."""
    for file in sorted(certificates_folder(run / "ledger").glob("*.json")):
        try:
            with LedgerReader(run) as ledger:
                if not audit(read_certificate(file), ledger, [key().public]).ok:
                    return True
        except FastFedULError:
            return True
    return False


def _writing(run: Path) -> bool:
    """Return whether a writer refuses the run; else the run is brought up to date."""
    try:
        with DiskLedger(run) as ledger:
            bring_up_to_date(ledger, key())
    except FastFedULError:
        return True
    return False


LOOKS: dict[str, Callable[[Path], bool]] = {
    "reading": _reading,
    "verify": _verify,
    "certificates": _certificates,
    "writing": _writing,
}
"""Ways of looking at a run, in this order: the writer, who may change it, is last."""
