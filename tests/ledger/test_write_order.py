"""The order of the system calls, on which a loss of power depends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

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
    """A ledger is created, four rounds are appended, a client is erased."""
    if shutil.which("strace") is None:
        if os.environ.get("CI"):
            pytest.fail("strace is needed here and is not installed")
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("strace")
    log = folder / "log"
    calls = "write,pwrite64,fsync,fdatasync,?rename,?renameat,?renameat2"
    calls += ",?unlink,?unlinkat,?mkdir,?mkdirat,?ftruncate"
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


@pytest.mark.parametrize("what", CHANGES)
def test_data_then_folder_then_commit_is_the_order_on_disk(
    trace: list[Call], what: str
) -> None:
    calls = between(trace, what)
    commits = [
        c
        for c in calls
        if c.name.startswith("unlink") and c.on("/index.sqlite-journal")
    ]
    [commit] = commits
    everything = [c for c in calls if c.name.startswith("rename")]
    renames = [c for c in everything if "/arrays/" in c.text]
    # The certificate comes after the commit, and its folder is synced too.
    for rename in everything:
        if rename not in renames:
            assert commit.end < rename.start
            folders = [c for c in calls if c.name == "fsync" and c.on("/certificates")]
            assert any(rename.end < c.start for c in folders)
    assert renames
    for rename in renames:
        temporary = rename.paths[-2].rsplit("/", 1)[1]
        written = [c for c in calls if c.name == "write" and c.on(temporary)]
        synced = [c for c in calls if c.name == "fdatasync" and c.on(temporary)]
        assert written, rename.text
        assert synced, rename.text
        assert last(written) < first(synced)
        assert last(synced) < rename.start
    folder_synced = [c for c in calls if c.name == "fsync" and c.on("/arrays")]
    assert any(last(renames) < c.start and c.end < commit.start for c in folder_synced)
    index_written = [c for c in calls if c.name == "pwrite64" and c.on("/index.sqlite")]
    journal_synced = synced_file(calls, "/index.sqlite-journal")
    index_synced = synced_file(calls, "/index.sqlite")
    assert index_written
    assert first(journal_synced) < first(index_written)
    assert any(
        last(index_written) < c.start and c.end < commit.start for c in index_synced
    )


def synced_file(calls: list[Call], ending: str) -> list[Call]:
    found = [c for c in calls if c.name in ("fsync", "fdatasync") and c.on(ending)]
    assert found, f"{ending} was never synced"
    return found


@pytest.mark.parametrize("what", CHANGES)
def test_the_commit_itself_is_on_disk_before_the_call_returns(
    trace: list[Call], what: str
) -> None:
    calls = between(trace, what)
    [commit] = [c for c in calls if "unlink" in c.name and c.on("-journal")]
    synced = synced_file(calls, "/ledger")
    assert any(commit.end < call.start for call in synced)


@pytest.mark.parametrize("what", ["append-1", "append-3", "erase"])
def test_no_file_is_removed_before_the_commit_that_makes_it_superfluous(
    trace: list[Call], what: str
) -> None:
    calls = between(trace, what)
    [commit] = [c for c in calls if "unlink" in c.name and c.on("-journal")]
    removed = [c for c in calls if "unlink" in c.name and c.on(".safetensors")]
    assert removed
    assert commit.end < first(removed)
    if what == "erase":
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
