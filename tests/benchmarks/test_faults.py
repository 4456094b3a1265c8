"""Faults at system calls, and power loss: a short part of `benchmarks/faults.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.fault_power import Call, lose_power, power_losses
from benchmarks.fault_scenarios import SCENARIOS, Wanted, copy_run, needles, wrong
from benchmarks.fault_server import Server, compiler
from benchmarks.fault_sweep import Sweep, attempt_of, sweep
from benchmarks.faults import batches, run_part
from benchmarks.measuring import progress
from fastfedul.rng import stream

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    if compiler() is None:
        if os.environ.get("CI"):
            pytest.fail("a C compiler is needed here and is not installed")
        pytest.skip("no C compiler is installed")


@pytest.mark.parametrize(
    ("run", "faults"),
    [
        (partial(sweep, "kill"), 50),
        (partial(sweep, "fail"), 50),
        (power_losses, 60),
    ],
    ids=["kill", "error", "power loss"],
)
def test_a_repeated_command_leaves_nothing_wrong(
    run: Callable[..., Sweep], faults: int, tmp_path: Path
) -> None:
    with progress() as display:
        found = run(tmp_path, faults, 1, display)
    assert found.faults == faults
    assert found.problems == []


def test_a_removal_that_fails_is_never_called_done(tmp_path: Path) -> None:
    """Whether the harness sees a file that stays: the call is found, not drawn."""
    [scenario] = [one for one in SCENARIOS if one.name == "forget, large"]
    template, run = tmp_path / "run", tmp_path / "try"
    with Server() as server:
        server.must(
            attempt_of(scenario, tmp_path, ("build", scenario.name, str(template)))
        )
        gone = needles(template)
        copy_run(template, run)
        before = Wanted.of(run, gone, deployed=True)
        assert any("is left" in text for text in wrong(run, before))
        calls = server.must(attempt_of(scenario, run)).calls
        codes = []
        for call in range(calls, 0, -1):
            copy_run(template, run)
            done = server.run(
                attempt_of(scenario, run, fault="fail", call=call, error=5)
            )
            if done.place.startswith("unlink /ledger/arrays/"):
                codes.append(done.code)
                assert "cannot be removed" in done.errors
                assert not list((run / "certificates").glob("*.json"))
                assert server.must(attempt_of(scenario, run)).code == 0
                assert list((run / "certificates").glob("*.json"))
        assert codes
        assert set(codes) == {1}


def test_power_loss_drops_what_was_not_synced(tmp_path: Path) -> None:
    calls = [
        Call("create", "a", "", 0, b"", 0),
        Call("write", "a", "", 0, b"x" * 1024, 0),
        Call("sync", "a", "", 0, b"", 0),
        Call("write", "a", "", 1024, b"y" * 1024, 0),
        Call("sync", "", "", 0, b"", -1),
        Call("rename", "a", "b", 0, b"", 0),
    ]
    seen = {
        (*sorted(left), len(next(iter(left.values()))))
        for seed in range(200)
        for left in [lose_power(calls, {}, tmp_path, stream(seed, "test"))]
    }
    assert seen == {(name, size) for name in "ab" for size in (1024, 1536, 2048)}


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def part(folder: Path, count: int, seed: int, display: object) -> object:
        made.append((count, seed))
        if len(made) == 2:
            raise KeyboardInterrupt
        from benchmarks.faults import Found

        return Found({"faults": count}, [])

    monkeypatch.setattr("benchmarks.faults.PARTS", {"flips": part})
    with progress() as display:
        with pytest.raises(KeyboardInterrupt):
            run_part("flips", 240, 0, tmp_path, display)
        counts, problems = run_part("flips", 240, 0, tmp_path, display)
    assert (counts["faults"], problems) == (240, [])
    assert made == [(100, 0), (100, 1_000), (100, 1_000), (40, 2_000)]
    assert list(batches(240)) == [100, 100, 40]
