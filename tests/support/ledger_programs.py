"""What tests of the ledger run in processes of their own, and how they do so."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fastfedul import (
    DiskLedger,
    FastFedUL,
    FastFedULError,
    Kronecker,
    LedgerReader,
    add_request,
    forget,
    verify,
)
from fastfedul.records import History
from tests.support.disk_ledgers import (
    answer,
    details_of,
    initial_model,
    problems_of,
    round_of,
)

ROOT = Path(__file__).parents[2]


def command(*arguments: object) -> list[str]:
    """The command that runs this file as a program, in the folder `ROOT`."""
    return [sys.executable, "-m", "tests.support.ledger_programs", *map(str, arguments)]


@contextlib.contextmanager
def holder(path: Path) -> Iterator[int]:
    """Another process that has the ledger open for writing."""
    with process("hold", path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        yield other.pid


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """This file run as a program; it is gone when the block ends."""
    other = subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield other
    finally:
        other.kill()
        other.communicate()


def report_of(*arguments: object) -> dict[str, Any]:
    """Run this file as a program and return the object it prints."""
    done = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def error_of(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def hold(path: Path) -> None:
    with DiskLedger(path):
        print("ready", flush=True)
        sys.stdin.read()


def read_on(path: Path) -> None:
    """Hold a snapshot, say so, and answer when a line comes in."""
    with LedgerReader(path) as reader, reader.snapshot():
        num_rounds = reader.num_rounds
        print("ready", flush=True)
        sys.stdin.readline()
        model = reader.final.params.flat.tobytes().hex()
        kind, message = error_of(lambda: answer(reader, "b"))
        report = {
            "same": reader.num_rounds == num_rounds == len(reader.rounds()),
            "num_rounds": num_rounds,
            "model": model,
            "error": f"{kind}: {message}" if kind else "",
        }
        print(json.dumps(report), flush=True)


def read_again_and_again(path: Path) -> None:
    """Read in small views without end."""
    with LedgerReader(path) as reader:
        print("ready", flush=True)
        while True:
            with reader.snapshot():
                if reader.num_rounds != len(reader.rounds()):
                    raise AssertionError("a view of two moments")


def ask_for_quiet(path: Path) -> None:
    """Hold the lock by which a reader asks the writer not to commit."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    print("ready", flush=True)
    sys.stdin.readline()


def ask_and_stop(path: Path, client: str, number: str) -> None:
    """File a request, and be stopped at the event of this number that uses a file."""
    left = int(number)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        names = [str(one) for one in arguments[:2]]
        if any(str(path) in name for name in names):
            left -= 1
            if left == 0:
                os.write(1, b"%s\n" % event.encode())
                os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(watch)
    os.write(1, b"%d\n" % add_request(path, client).number)


def append_rounds(path: Path, num_rounds: str) -> None:
    with DiskLedger(path) as ledger:
        for index in range(ledger.num_rounds, int(num_rounds)):
            ledger.append(round_of(index))
            os.write(1, b"%d\n" % (index + 1))


def die_before_commit(path: Path, index: str) -> None:
    """Append a round and be killed once its files are written, but not committed."""
    with DiskLedger(path) as ledger:

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            # The folder is opened to sync it when every file in it is synced.
            if event == "open" and str(arguments[0]).endswith("/arrays"):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        ledger.append(round_of(int(index)))


def erase_a_client(path: Path) -> None:
    with DiskLedger(path) as ledger:
        os.write(1, b"ready\n")
        forget(ledger, ["b"], erase=True)
        os.write(1, b"done\n")


def drop_privileges() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def read_unprivileged(path: Path) -> None:
    drop_privileges()
    report: dict[str, object] = {}
    with LedgerReader(path) as reader:
        report["num_rounds"] = reader.num_rounds
        report["answer"] = repr(answer(reader))
        report["problems"] = verify(reader).problems
    report["open for writing"] = error_of(lambda: DiskLedger(path))
    report["create"] = error_of(
        lambda: DiskLedger.create(path.parent / "other", initial_model())
    )
    print(json.dumps(report))


def turn_read_only(path: Path) -> None:
    owner = os.getuid()
    if owner == 0:
        for entry in (path, *path.rglob("*")):
            os.chown(entry, 65534, 65534)
    drop_privileges()
    report: dict[str, object] = {}
    with DiskLedger(path) as ledger:
        ledger.append(round_of(0))
        for what, folder in (("arrays", path / "arrays"), ("folder", path)):
            folder.chmod(0o555)
            kind, message = error_of(lambda: ledger.append(round_of(1)))
            found = verify(ledger)
            report[what] = (
                kind,
                message,
                (found.num_rounds, found.problems, found.num_strays),
            )
            folder.chmod(0o777)
        ledger.append(round_of(1))
        report["num_rounds"] = ledger.num_rounds
        report["problems"] = verify(ledger).problems
    print(json.dumps(report))


def append_limited(path: Path) -> None:
    import resource

    def limit(size: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    many = tuple(f"client-{i}" for i in range(60))
    outcomes: dict[int, object] = {}
    with DiskLedger(path) as ledger:
        chain = ledger.chain
        full = (path / "index.sqlite").stat().st_size
        # Below the size of an array, of the index, and of the index after the round.
        for size in (0, 100, 300, 4096, full // 2, full, full + 4096):
            limit(size)
            kind, message = error_of(lambda: ledger.append(round_of(3, clients=many)))
            limit(resource.RLIM_INFINITY)
            outcomes[size] = (
                kind,
                message,
                ledger.num_rounds,
                ledger.chain == chain,
                verify(ledger).problems,
            )
        ledger.append(round_of(3, clients=many))
        print(json.dumps({"limits": outcomes, "num_rounds": ledger.num_rounds}))


def open_without_room(path: Path) -> None:
    import resource

    (path / "lock").unlink()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    refused = error_of(lambda: DiskLedger(path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    again: object = error_of(lambda: DiskLedger(path).close())
    if again == ("", ""):
        with DiskLedger(path) as ledger:
            again = ledger.num_rounds
    print(json.dumps({"open": refused, "again": again}))


def append_with_few_files(path: Path, limit: str, kind: History) -> None:
    import resource

    number = int(limit)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    other = path.parent / "other"
    num_rounds = 0
    error = ""
    try:
        with DiskLedger.create(other, initial_model(), history=kind) as ledger:
            for index in range(number // 2 + 20):
                ledger.append(round_of(index, clients=("a", "b", "c")))
                num_rounds = ledger.num_rounds
            ledger.own_difference("a")
            details_of(ledger, FastFedUL(skew=Kronecker("all")))
    except FastFedULError as failure:
        error = str(failure)
    print(json.dumps({"num_rounds": num_rounds, "error": error}))


def fill_a_disk(folder: Path, kind: History) -> None:
    """Fill a small file system a little less each time until a change goes through."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    subprocess.run(mount, check=True)
    path = disk / "ledger"
    failures: list[tuple[object, ...]] = []

    def until_it_works(what: str, action: Callable[[], object]) -> None:
        for room in range(0, 1_000_000, 8192):
            ballast = disk / "ballast"
            with ballast.open("wb", buffering=0) as file:
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * 4096):
                        pass
                file.truncate(max(0, ballast.stat().st_size - room))
            exists = (path / "index.sqlite").exists()
            before, files = state() if exists else None, arrays()
            kind, message = error_of(action)
            ballast.unlink()
            files.remove(ballast.name)
            if not kind:
                return
            after = state() if (path / "index.sqlite").exists() else None
            problems = problems_of(path) if exists else ()
            same = before == after and arrays() == files
            failures.append((what, room, kind, message, same, problems))

    def arrays() -> list[str]:
        """Array files, and whatever a failed creation left beside its place."""
        left = [entry.name for entry in disk.iterdir() if entry != path]
        return sorted([*left, *(file.name for file in path.glob("arrays/*"))])

    def state() -> tuple[object, ...]:
        with LedgerReader(path) as reader:
            return (
                reader.num_rounds,
                reader.chain,
                reader.final.params.flat.tobytes(),
                reader.clients()["b"].state if "b" in reader.clients() else "",
            )

    until_it_works(
        "create",
        lambda: DiskLedger.create(path, initial_model(), history=kind).close(),
    )
    with DiskLedger(path) as ledger:
        for index in range(4):
            until_it_works("append", partial(ledger.append, round_of(index)))
        until_it_works("erase", lambda: forget(ledger, ["b"], erase=True))
        report: dict[str, object] = {
            "failures": failures,
            "appended": ledger.num_rounds,
            "state of b": ledger.clients()["b"].state,
            "problems": verify(ledger).problems,
        }
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with LedgerReader(path) as reader:
        report["read-only"] = {
            "num_rounds": reader.num_rounds,
            "open for writing": error_of(lambda: DiskLedger(path)),
        }
    print(json.dumps(report))


def run_traced(folder: Path, kind: History) -> None:
    def marked(what: str, action: Callable[[], object]) -> None:
        (folder / f"{what}-begin").mkdir()
        action()
        (folder / f"{what}-end").mkdir()

    path = folder / "ledger"
    marked(
        "create",
        lambda: DiskLedger.create(path, initial_model(), history=kind).close(),
    )
    with DiskLedger(path) as ledger:
        for index in range(4):
            marked(
                f"append-{index}",
                partial(ledger.append, round_of(index, dropped=frozenset({"d"}))),
            )
        marked("forget", lambda: forget(ledger, ["a"], erase=False))
        marked("erase", lambda: forget(ledger, ["b"], erase=True))


PROGRAMS: dict[str, Callable[..., None]] = {
    "hold": hold,
    "read-on": read_on,
    "read-again": read_again_and_again,
    "ask-for-quiet": ask_for_quiet,
    "ask-and-stop": ask_and_stop,
    "append": append_rounds,
    "die-before-commit": die_before_commit,
    "erase": erase_a_client,
    "unprivileged": read_unprivileged,
    "turns-read-only": turn_read_only,
    "limited": append_limited,
    "no-room-for-lock": open_without_room,
    "few-files": append_with_few_files,
    "full": fill_a_disk,
    "traced": run_traced,
}


if __name__ == "__main__":
    program, place, *others = sys.argv[1:]
    PROGRAMS[program](Path(place), *others)
