"""Any sequence of changes, crashes and readers leaves the ledger that it should.

Hypothesis draws the sequence. A ledger in memory takes the same changes; the ledger on
disk must have its model bit by bit, its clients, and its updates as far as the ledger
on disk says that it keeps them. A crash is a copy of the folder in the midst of a
change: the copy has every byte that a killed writer would have left.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedULError,
    LedgerReader,
    MemoryLedger,
    Model,
    Params,
    Round,
    verify,
)
from fastfedul.ledger.protocol import vector
from fastfedul.records import VectorRef
from fastfedul.rng import stream

SIZE = 40
NAMES = ("anna", "../bela", "çelik", "dora", "emil")
LAYOUT = Params.of({"w": np.zeros((4, 5)), "b": np.zeros(20)}).layout
MOST_CALLS = 14
"""A change makes fewer calls that a crash can come before, most of the time."""

SEEDS = st.integers(0, 2**20)
CRASH = st.none() | st.integers(0, MOST_CALLS)
Change = Callable[[Any], object]


def params(*key: int) -> Params:
    return Params(LAYOUT, stream(3, "states", *key).normal(size=SIZE).astype("f4"))


def facts(ledger: DiskLedger | LedgerReader | MemoryLedger) -> tuple[object, ...]:
    """The facts that both ledgers must agree on."""
    clients = ledger.clients()
    return (
        ledger.num_rounds,
        ledger.final.params.flat.tobytes(),
        {name: entry.state for name, entry in clients.items()},
        [[e.client for e in ledger.updates_in(i)] for i in range(ledger.num_rounds)],
        {name: float(own["mean"]) for name, own in ledger.last_buffers().items()},
    )


@contextlib.contextmanager
def crash_before(call: int | None, folder: Path, left: Path) -> Iterator[None]:
    """Copy a folder right before a call that syncs, cuts or removes a file."""
    with pytest.MonkeyPatch.context() as patch:
        made = 0

        def watched(real: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **options: Any) -> Any:
                nonlocal made
                if made == call:
                    shutil.copytree(folder, left)
                made += 1
                return real(*arguments, **options)

            return run

        for name in ("fsync", "fdatasync", "unlink", "truncate"):
            patch.setattr(os, name, watched(getattr(os, name)))
        yield


class LedgerStates(RuleBasedStateMachine):
    """A ledger on disk beside a ledger in memory that has seen the same changes."""

    @initialize(sums=st.booleans())
    def create(self, sums: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fastfedul-states-"))
        self.number = 0
        self.budget: int | None = None
        self.sums = sums
        self.readers: list[tuple[contextlib.ExitStack, LedgerReader, object]] = []
        start = Model(params(0), {"mean": np.array(0, np.float32)})
        self.memory = MemoryLedger.create(start)
        self.disk = DiskLedger.create(
            self.path, start, history="sums" if sums else "rounds"
        )

    @property
    def path(self) -> Path:
        return self.folder / f"ledger-{self.number}"

    def change(self, change: Change, crash: int | None) -> bool:
        """Make a change of both ledgers; return whether the ledger on disk has it.

        A change that the disk refuses must leave it as it was. After a crash the change
        may have been made or not, but nothing in between.
        """
        before, after = facts(self.memory), copy.deepcopy(self.memory)
        try:
            change(after)
        except FastFedULError:
            with pytest.raises(FastFedULError):
                change(self.disk)
            return False
        left = self.folder / f"ledger-{self.number + 1}"
        done = True
        with crash_before(crash, self.path, left):
            try:
                change(self.disk)
            except FastFedULError:
                done = False
        if left.exists():
            self.drop_readers()
            self.disk.close()
            shutil.rmtree(self.path)
            self.number += 1
            with LedgerReader(self.path) as reader:
                seen = facts(reader)
                assert verify(reader).problems == ()
            self.disk = DiskLedger(self.path)
            assert seen in (before, facts(after))
            done = seen == facts(after) if before != facts(after) else done
        if done:
            self.memory = after
        return done

    def active(self) -> list[str]:
        known = self.memory.clients()
        return [n for n in NAMES if n not in known or known[n].state == "active"]

    @precondition(lambda self: self.active())
    @rule(seed=SEEDS, crash=CRASH)
    def append(self, seed: int, crash: int | None) -> None:
        rng = stream(seed, "round")
        names = self.active()
        count = int(rng.integers(1, len(names) + 1))
        chosen = sorted(rng.choice(names, count, replace=False).tolist())
        shares = rng.uniform(0.5, 2, count)
        updates = tuple(
            ClientUpdate(
                name,
                float(share),
                params(seed, number),
                buffers={"mean": np.array(seed % 1000 + number, np.float32)},
            )
            for number, (name, share) in enumerate(
                zip(chosen, shares / shares.sum(), strict=True)
            )
        )
        round_ = Round(self.memory.num_rounds, updates)
        done = self.change(lambda ledger: ledger.append(round_), crash)
        if done and self.budget is not None and crash is None:
            found = self.disk.num_array_bytes() + self.disk.index.num_bytes()
            assert found <= self.budget

    @precondition(lambda self: self.memory.clients())
    @rule(seed=SEEDS, erase=st.booleans(), crash=CRASH)
    def forget(self, seed: int, erase: bool, crash: int | None) -> None:
        known = sorted(self.memory.clients())
        name = known[seed % len(known)]
        if self.memory.clients()[name].state != "active":
            return
        delta = params(seed, 99).flat
        self.change(
            lambda ledger: ledger.commit_forgetting([name], delta, {}, erase=erase),
            crash,
        )

    @precondition(lambda self: self.with_state("forgotten"))
    @rule(seed=SEEDS, crash=CRASH)
    def erase(self, seed: int, crash: int | None) -> None:
        found = self.with_state("forgotten")
        name = found[seed % len(found)]
        self.change(lambda ledger: ledger.commit_erasure([name], {}), crash)

    def with_state(self, state: str) -> list[str]:
        return [n for n, e in self.memory.clients().items() if e.state == state]

    @precondition(lambda self: not self.sums and self.memory.num_rounds > 3)
    @rule(crash=CRASH)
    def compact(self, crash: int | None) -> None:
        def turn(ledger: MemoryLedger | DiskLedger) -> None:
            if isinstance(ledger, DiskLedger):
                ledger.compact()

        self.change(turn, crash)
        self.sums = self.disk.settings.history == "sums"

    @precondition(lambda self: self.memory.num_rounds > 2)
    @rule(part=st.floats(0.6, 1.5))
    def set_budget(self, part: float) -> None:
        now = self.disk.num_array_bytes() + self.disk.index.num_bytes()
        self.budget = int(now * part)
        self.disk.set_budget(self.budget)

    @rule()
    def reopen(self) -> None:
        self.disk.close()
        self.disk = DiskLedger(self.path)
        assert verify(self.disk).num_strays == 0

    @precondition(lambda self: len(self.readers) < 3)
    @rule()
    def begin_reading(self) -> None:
        stack = contextlib.ExitStack()
        reader = stack.enter_context(LedgerReader(self.path))
        stack.enter_context(reader.snapshot())
        self.readers.append((stack, reader, facts(reader)))

    @precondition(lambda self: self.readers)
    @rule()
    def end_reading(self) -> None:
        """A reader's view is as it was, whatever came since."""
        stack, reader, seen = self.readers.pop(0)
        with stack:
            assert facts(reader) == seen

    @rule()
    def look_closely(self) -> None:
        """Every update that the ledger says it keeps is the one that was sent."""
        assert verify(self.disk).problems == ()
        assert self.disk.settings.history == ("sums" if self.sums else "rounds")
        for index in range(self.memory.num_rounds):
            for entry in self.disk.updates_in(index):
                if entry.kept and not self.sums:
                    ref = VectorRef(index, entry.client)
                    sent = vector(self.memory, ref)
                    np.testing.assert_array_equal(vector(self.disk, ref), sent)
                assert entry.kept or self.sums or self.budget is not None
        gone = self.with_state("erased")
        assert not [e for name in gone for e in self.disk.updates_of(name)]

    @invariant()
    def both_are_the_same(self) -> None:
        if hasattr(self, "disk"):
            assert facts(self.disk) == facts(self.memory)

    def drop_readers(self) -> None:
        for stack, _, _ in self.readers:
            stack.close()
        self.readers = []

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.drop_readers()
            try:
                self.look_closely()
            finally:
                self.disk.close()
                shutil.rmtree(self.folder)


@pytest.mark.slow
def test_any_sequence_of_changes_and_crashes_leaves_the_right_ledger() -> None:
    run_state_machine_as_test(
        LedgerStates,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            deadline=None,
            # Threads write at the same time, so that no two crashes are quite the same.
            phases=(Phase.generate,),
            derandomize=bool(os.environ.get("CI")),
        ),
    )
