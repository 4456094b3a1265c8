"""The order of the system calls, on which a loss of power depends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from fastfedul.ledger.store.arrays import PAGE
from tests.support.ledger_programs import ROOT, command


class Call:
    """One system call of a trace: when it began and ended, and on which file."""

    def __init__(self, name: str, text: str, start: int) -> None:
        self.name = name
        self.start = self.end = start
        descriptor = re.match(r"\d+<([^>]*)>", text)
        quoted = re.findall(r'"([^"]*)"', text)
        self.paths = [descriptor.group(1)] if descriptor else quoted
        self.text = text

    def on(self, ending: str) -> bool:
        return self.paths[-1].endswith(ending)

    @property
    def span(self) -> tuple[int, int]:
        """First byte that a `pwrite64` writes, and the byte behind the last one."""
        assert self.name == "pwrite64"
        found = re.search(r", (\d+), (\d+)(?:\)| <unfinished)", self.text)
        assert found, self.text
        count, offset = map(int, found.groups())
        return offset, offset + count


def traced_calls(log: str) -> list[Call]:
    """Parse a trace; lines of several threads may be cut in two."""
    calls: list[Call] = []
    open_calls: dict[str, Call] = {}
    for number, line in enumerate(log.splitlines()):
        thread, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if resumed := re.match(r"<\.\.\. (\w+) resumed>", rest):
            call = open_calls.pop(thread)
            assert call.name == resumed.group(1)
            call.end = number
        elif called := re.match(r"(\w+)\((.*)", rest):
            call = Call(called.group(1), called.group(2), number)
            calls.append(call)
            if "<unfinished" in rest:
                open_calls[thread] = call
    return calls


@pytest.fixture(scope="module", params=["rounds", "sums"])
def trace(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Call]:
    """A ledger is created, four rounds are appended, clients are forgotten, erased."""
    if shutil.which("strace") is None:
        if os.environ.get("CI"):
            pytest.fail("strace is needed here and is not installed")
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("strace")
    log = folder / "log"
    calls = "write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync"
    calls += ",?rename,?renameat,?renameat2,?link,?linkat,?copy_file_range"
    calls += ",?unlink,?unlinkat,?mkdir,?mkdirat,?truncate,?ftruncate"
    calls += ",?fallocate,?open,openat"
    tracing = ["strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={calls}"]
    done = subprocess.run(
        [*tracing, *command("traced", folder, request.param)],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return traced_calls(log.read_text())


def between(trace: list[Call], what: str) -> list[Call]:
    """The calls from one marker to the other; the markers are folders made."""
    [begin] = [c for c in trace if c.name.startswith("mkdir") and c.on(f"{what}-begin")]
    [end] = [c for c in trace if c.name.startswith("mkdir") and c.on(f"{what}-end")]
    return [call for call in trace if begin.end < call.start and call.end < end.start]


def last(calls: list[Call]) -> int:
    return max(call.end for call in calls)


def first(calls: list[Call]) -> int:
    return min(call.start for call in calls)


CHANGES = ["append-0", "append-1", "append-2", "append-3", "forget", "erase"]
WRITES = ("write", "pwrite64")


def of_arrays(calls: list[Call], *names: str) -> list[Call]:
    """The calls of these names on array files."""
    return [c for c in calls if c.name in names and re.search(ARRAY, c.text)]


ARRAY = r"/ledger/arrays/\d{8}\.safetensors[>\"]"
OTHER_WAYS = (
    *("writev", "pwritev", "pwritev2", "copy_file_range", "fallocate"),
    *("truncate", "ftruncate", "rename", "renameat", "renameat2", "link", "linkat"),
)
"""Other calls that change files or their names; none is used on arrays."""


def created(calls: list[Call]) -> list[Call]:
    return [c for c in of_arrays(calls, "open", "openat") if "O_CREAT" in c.text]


def commit_of(calls: list[Call]) -> Call:
    """The removal of the journal, which is what commits a change of the index."""
    [commit] = [
        c
        for c in calls
        if c.name.startswith("unlink") and c.on("/index.sqlite-journal")
    ]
    return commit


@pytest.mark.parametrize("what", CHANGES)
def test_data_then_folder_then_commit_is_the_order_on_disk(
    trace: list[Call], what: str
) -> None:
    calls = between(trace, what)
    commit = commit_of(calls)
    journal_synced = synced_file(calls, "/index.sqlite-journal")
    index_written = [c for c in calls if c.name == "pwrite64" and c.on("/index.sqlite")]
    index_synced = synced_file(calls, "/index.sqlite")
    assert index_written
    written = of_arrays(calls, *WRITES)
    files = {c.paths[-1] for c in written}
    assert files
    for file in files:
        own = [c for c in written if c.on(file)]
        synced = [c for c in calls if c.name == "fdatasync" and c.on(file)]
        # All that was written is synced before the index so much as begins to change.
        assert any(
            last(own) < c.start and c.end < first(index_written) for c in synced
        ), file
    new = created(calls)
    assert new, "at least the model is a new file"
    assert all("O_EXCL" in c.text for c in new)
    assert {c.paths[-1] for c in new} <= files
    folder_synced = [c for c in calls if c.name == "fsync" and c.on("/arrays")]
    assert any(
        last(new) < c.start and c.end < first(index_written) for c in folder_synced
    )
    assert first(journal_synced) < first(index_written)
    assert any(
        last(index_written) < c.start and c.end < commit.start for c in index_synced
    )
    assert not of_arrays(calls, *OTHER_WAYS)


@pytest.mark.parametrize("what", ["forget", "erase"])
def test_the_certificate_comes_after_the_commit(trace: list[Call], what: str) -> None:
    calls = between(trace, what)
    commit = commit_of(calls)
    renames = [c for c in calls if c.name.startswith("rename")]
    assert renames
    for rename in renames:
        assert commit.end < rename.start
        folders = [c for c in calls if c.name == "fsync" and c.on("/certificates")]
        assert any(rename.end < c.start for c in folders)


def test_nothing_that_was_committed_is_ever_overwritten(
    trace: list[Call], request: pytest.FixtureRequest
) -> None:
    """What is added to a file begins on a page of its own, behind all others."""
    ends: dict[str, int] = {}
    continued = 0
    for what in CHANGES:
        calls = between(trace, what)
        new = {c.paths[-1] for c in created(calls)}
        assert not new & ends.keys(), "a name is never used again"
        spans: dict[str, list[tuple[int, int]]] = {}
        for call in of_arrays(calls, "pwrite64"):
            spans.setdefault(call.paths[-1], []).append(call.span)
        for call in of_arrays(calls, "write"):
            # Only whole models are written without saying where.
            assert call.paths[-1] in new
        for file, own in spans.items():
            begin = min(start for start, _ in own)
            assert begin % PAGE == 0
            assert begin >= ends.get(file, 0)
            assert (begin == 0) == (file in new)
            continued += file not in new
            ends[file] = max(stop for _, stop in own)
    kind = request.node.callspec.params["trace"]
    assert continued == (3 if kind == "rounds" else 0)


def synced_file(calls: list[Call], ending: str) -> list[Call]:
    found = [c for c in calls if c.name in ("fsync", "fdatasync") and c.on(ending)]
    assert found, f"{ending} was never synced"
    return found


@pytest.mark.parametrize("what", CHANGES)
def test_the_commit_itself_is_on_disk_before_the_call_returns(
    trace: list[Call], what: str
) -> None:
    calls = between(trace, what)
    commit = commit_of(calls)
    synced = synced_file(calls, "/ledger")
    assert any(commit.end < call.start for call in synced)


@pytest.mark.parametrize("what", CHANGES)
def test_no_file_is_removed_before_the_commit_that_makes_it_superfluous(
    trace: list[Call], what: str
) -> None:
    calls = between(trace, what)
    commit = commit_of(calls)
    removed = of_arrays(calls, "unlink", "unlinkat")
    if what == "append-0":
        assert not removed, "the initial model stays"
        return
    assert removed
    assert commit.end < first(removed)
    if what in ("forget", "erase"):
        # What is erased must not come back after a loss of power.
        synced = [c for c in calls if c.name == "fsync" and c.on("/arrays")]
        assert any(last(removed) < call.start for call in synced)


def test_a_new_ledger_appears_only_once_it_is_on_disk(trace: list[Call]) -> None:
    calls = between(trace, "create")
    [appearance] = [c for c in calls if c.name.startswith("rename") and c.on("/ledger")]
    building = appearance.paths[-2].rsplit("/", 1)[1]
    for ending in (
        f"{building}/arrays",
        f"{building}/index.sqlite",
        building,
    ):
        synced = [c for c in calls if "sync" in c.name and c.on(ending)]
        assert any(call.end < appearance.start for call in synced), ending
    parent = [c for c in calls if c.name == "fsync" and c.start > appearance.end]
    assert any(not call.on("/ledger") and not call.on("/arrays") for call in parent)
