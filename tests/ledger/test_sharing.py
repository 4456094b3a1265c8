"""One process, several hands on a ledger: models, threads, forks and Ctrl-C."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    InvalidInputError,
    LedgerError,
    MemoryLedger,
    Model,
    Params,
    Round,
    forget,
    verify,
)
from fastfedul.ledger.store.index import Index

AnyLedger = DiskLedger | MemoryLedger


def params(value: float, size: int = 3) -> Params:
    return Params.of({"w": np.full(size, value, np.float32)})


def round_of(index: int, *names: str, value: float = 1.0, **more: Any) -> Round:
    updates = (ClientUpdate(name, 1 / len(names), params(value)) for name in names)
    return Round(index, tuple(updates), **more)


@pytest.fixture(params=["disk", "memory"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyLedger]:
    start = Model(params(0.0), {"seen": np.array([5])})
    if request.param == "memory":
        yield MemoryLedger.create(start)
        return
    with DiskLedger.create(tmp_path / "ledger", start) as found:
        yield found


def test_who_changes_a_returned_model_does_not_change_the_ledger(
    ledger: AnyLedger,
) -> None:
    model = ledger.append(round_of(0, "a", buffers={"seen": np.array([6])}))
    model.buffers["seen"][0] = 99
    flat = model.params.flat
    flat.setflags(write=True)
    flat += 5
    with contextlib.suppress(ValueError):  # It may be read-only as well.
        ledger.final.buffers["seen"][0] = 7
    again = ledger.append(round_of(1, "a"))
    for found in (again, ledger.final):
        assert found.buffers["seen"].tolist() == [6]
        assert found.params.flat.tolist() == [2, 2, 2]
    assert ledger.initial.buffers["seen"].tolist() == [5]


def test_a_round_that_comes_while_a_forgetting_is_computed_is_not_lost(
    ledger: AnyLedger,
) -> None:
    for index in range(3):
        ledger.append(round_of(index, "a", "b"))
    late = round_of(3, "b", value=100.0)
    with pytest.raises(LedgerError, match="changed since the forgetting was computed"):
        forget(ledger, ["a"], accept=lambda _before, _after: _done(ledger.append, late))
    assert ledger.num_rounds == 4
    assert ledger.clients()["a"].state == "active"
    assert ledger.final.params.flat.tolist() == [103, 103, 103]
    forget(ledger, ["a"])
    assert ledger.clients()["a"].state == "erased"


def _done(function: Callable[[Any], object], argument: object) -> None:
    function(argument)


def test_two_threads_do_not_change_a_ledger_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()
    with DiskLedger.create(tmp_path / "ledger", Model(params(0.0))) as ledger:
        add = Index.add

        def slow(self: Index, *rows: Any) -> None:
            started.set()
            go_on.wait(30)
            add(self, *rows)

        monkeypatch.setattr(Index, "add", slow)
        other = threading.Thread(target=ledger.append, args=[round_of(0, "a")])
        other.start()
        assert started.wait(30)
        with pytest.raises(LedgerError, match="one thread at a time"):
            ledger.set_budget(None)
        go_on.set()
        other.join()
        assert ledger.num_rounds == 1
        assert verify(ledger).problems == ()


@pytest.mark.parametrize("verb", ["reading", "writing"])
def test_an_interruption_right_after_the_begin_leaves_nothing_open(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskLedger.create(tmp_path / "ledger", Model(params(0.0))) as ledger:
        execute = Index._execute

        def interrupted(self: Index, sql: str, arguments: Any = ()) -> Any:
            found = execute(self, sql, arguments)
            if sql.startswith("BEGIN"):
                raise KeyboardInterrupt
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Index, "_execute", interrupted)
            with pytest.raises(KeyboardInterrupt), getattr(ledger.index, verb)():
                pass
        ledger.append(round_of(0, "a"))
        assert ledger.num_rounds == 1


def test_a_file_of_a_change_that_was_not_committed_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(params(0.0))) as ledger:
        for number in range(2, 6):
            (path / "arrays" / f"{number:08d}.safetensors").write_bytes(b"left over")
        ledger.append(round_of(0, "a"))
        assert verify(ledger).problems == ()


def _append_in_child(path: Path, size: int) -> None:
    with DiskLedger(path) as ledger:
        update = ClientUpdate("a", 1.0, params(1.0, size))
        ledger.append(Round(0, (update,)))
        assert verify(ledger).problems == ()


def test_a_forked_process_can_write(tmp_path: Path) -> None:
    """Threads do not survive a fork, so that nothing may wait for a pool of threads."""
    size = 300_000
    DiskLedger.create(tmp_path / "ledger", Model(params(0.0, size))).close()
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=_append_in_child, args=[tmp_path / "ledger", size])
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0


WRONG: list[tuple[Any, str]] = [
    (None, "fastfedul.Round"),
    (Round(0, None), "tuple"),  # type: ignore[arg-type]
    (Round(0, ({},)), "ClientUpdate"),  # type: ignore[arg-type]
    (Round(0, (ClientUpdate("a", "1", params(1.0)),)), "share"),  # type: ignore[arg-type]
    (Round(0, (ClientUpdate("a", 1.0, params(1.0), None),)), "keep prob"),  # type: ignore[arg-type]
    (Round(0, (ClientUpdate("a", 1.0, params(1.0), kept=2),)), "kept"),  # type: ignore[arg-type]
    (Round(0, (ClientUpdate("a", 1.0, 3),)), "mapping"),  # type: ignore[arg-type]
    (round_of(0, "a", step=3), "mapping"),
    (round_of(0, "a", buffers=3), "mapping"),
    (round_of(0, "a", local={"lr": 1}), "LocalSGD"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_a_round_of_the_wrong_types_is_refused(
    wrong: Any, said: str, ledger: AnyLedger
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        ledger.append(wrong)
    assert ledger.num_rounds == 0


def test_a_generator_of_updates_is_read_once(ledger: AnyLedger) -> None:
    updates: Any = (ClientUpdate(name, 0.5, params(1.0)) for name in ("a", "b"))
    ledger.append(Round(0, updates))
    assert len(ledger.updates_in(0)) == 2


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", 3, ""])
def test_a_buffer_must_have_a_name_that_a_file_can_hold(
    name: Any, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="name of an array"):
        DiskLedger.create(tmp_path / "it", Model(params(0.0), {name: np.zeros(1)}))
    with pytest.raises(InvalidInputError, match="choose less"):
        DiskLedger.create(tmp_path / "it", Model(params(0.0)), budget=2**63)
