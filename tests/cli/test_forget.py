"""`fastfedul forget` and `fastfedul ledger`, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fastfedul import ClientUpdate, DiskLedger, LedgerReader, Model, Params, Round
from tests.support.commands import COMMAND, one_line, run, run_json, run_program
from tests.support.damage import array_of
from tests.support.rounds import random_round

NAMES = ("ann", "bob", "cyd")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Four rounds of three clients; `cyd` stays away from the last one."""
    rng = np.random.default_rng(5)
    start = Params.of(
        {
            "layer.weight": rng.standard_normal((6, 4)).astype(np.float32),
            "layer.bias": np.zeros(4),
        }
    )
    buffers = {"seen": np.array(7)}
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(start, buffers)) as made:
        for index in range(4):
            names = NAMES if index < 3 else NAMES[:2]
            made.append(random_round(index, names, start.layout, rng))
    return path


def model_of(path: Path) -> np.ndarray:
    with LedgerReader(path) as ledger:
        return np.array(ledger.final.params.flat)


def test_json_has_what_scripts_need(ledger: Path, tmp_path: Path) -> None:
    out = tmp_path / "clean.safetensors"
    before = model_of(ledger)
    found = run_json("forget", ledger, "cyd", "--damping", 0.1, "--out", out)
    assert found["clients"] == ["cyd"]
    assert found["rounds"] == 3
    assert found["coverage"] == 1
    assert found["damping"] == 0.1
    assert found["bound"] > 0
    assert found["lipschitz"] > 0
    assert found["seconds"] > 0
    # Neighbours in a file are read together with what lies between them.
    assert 4 * 28 * (3 + 3) <= found["bytes_read"] <= 2 * 4 * 4096
    assert found["model"] == str(out)
    after = model_of(ledger)
    assert found["delta_norm"] == pytest.approx(np.linalg.norm(after - before))
    assert found["delta_norm"] > 0


def test_every_skew_says_what_it_did(ledger: Path) -> None:
    undamped = run_json("forget", ledger, "cyd", "--skew", "none", "--dry-run")
    assert (undamped["skew"], undamped["damping"]) == ("none", None)
    assert undamped["removed_by_layer"] is None
    paper = run_json("forget", ledger, "cyd", "--skew", "scalar", "--dry-run")
    assert (paper["skew"], paper["damping"], paper["damped"]) == ("scalar", 0.07, "all")
    assert 0 < paper["delta_norm"] < undamped["delta_norm"]
    usual = run_json("forget", ledger, "cyd", "--dry-run")
    assert (usual["skew"], usual["damping"], usual["updates"]) == (
        "kronecker",
        None,
        64,
    )
    assert usual["used"]["updates"] == 8, "ann's and bob's in four rounds"
    assert usual["used"]["rounds_of_unknown_training"] == 4
    assert any("how clients train is not recorded" in w for w in usual["warnings"])
    assert set(usual["removed_by_layer"]) == {"layer.weight", "layer.bias"}
    assert 0 < usual["delta_norm"] < undamped["delta_norm"]
    assert usual["bound"] > undamped["bound"]
    assert usual["bytes_read"] > undamped["bytes_read"]
    named = run_json("forget", ledger, "cyd", "--skew", "kronecker", "--dry-run")
    assert named["delta_norm"] == usual["delta_norm"]


def test_the_skew_is_shown_in_words_and_logged_with_its_settings(ledger: Path) -> None:
    shown = " ".join(run("forget", ledger, "cyd", "--keep-history").stdout.split())
    assert "kronecker, from 8 updates of clients that stay, along" in shown
    shown = " ".join(
        run(
            *("forget", ledger, "ann", "--keep-history"),
            *("--damping", 0.1, "--set", "damped=alternate"),
        ).stdout.split()
    )
    assert "scalar, damping 0.1, every other round" in shown
    shown = " ".join(run("forget", ledger, "bob", "--skew", "none").stdout.split())
    assert "not taken into account" in shown
    with LedgerReader(ledger) as opened:
        used = opened.events()[0].details["used"]
        logged: list[Any] = [e.details["settings"] for e in opened.events()]
        first, second, third = logged
    assert (first["skew"], first["updates"]) == ("kronecker", 64)
    assert isinstance(used, dict)
    assert set(used) == {
        "updates",
        "directions",
        "scale",
        "rounds_of_unknown_training",
    }
    assert (second["skew"], second["damping"], second["damped"]) == (
        "scalar",
        0.1,
        "alternate",
    )
    assert third["skew"] == "none"
    assert "damping" not in third


def test_the_model_written_has_the_names_shapes_and_dtypes_it_came_with(
    ledger: Path, tmp_path: Path
) -> None:
    out = tmp_path / "clean.safetensors"
    run("forget", ledger, "cyd", "--out", out)
    arrays = load_file(out)
    assert arrays["layer.weight"].shape == (6, 4)
    assert arrays["layer.weight"].dtype == np.float32
    assert arrays["layer.bias"].dtype == np.float64
    assert arrays["seen"] == 7
    flat = np.concatenate([arrays["layer.weight"].ravel(), arrays["layer.bias"]])
    np.testing.assert_allclose(flat, model_of(ledger), rtol=1e-6)


def test_a_dry_run_of_every_client_warns(ledger: Path) -> None:
    found = run("forget", ledger, *NAMES, "--dry-run")
    assert "warning: nobody stays: " in found.stderr
    told = run_json("forget", ledger, *NAMES, "--dry-run")["warnings"]
    assert any(text.startswith("nobody stays: ") for text in told)


def test_a_dry_run_leaves_the_ledger_alone_but_writes_the_model(
    ledger: Path, tmp_path: Path
) -> None:
    out = tmp_path / "try.safetensors"
    files = sorted(ledger.rglob("*"))
    content = (ledger / "index.sqlite").read_bytes()
    tried = run_json("forget", ledger, "ann", "--dry-run", "--out", out)
    assert tried["dry_run"] is True
    assert sorted(ledger.rglob("*")) == files
    assert (ledger / "index.sqlite").read_bytes() == content
    real = tmp_path / "real.safetensors"
    run("forget", ledger, "ann", "--out", real)
    np.testing.assert_array_equal(
        load_file(out)["layer.weight"], load_file(real)["layer.weight"]
    )


@pytest.mark.parametrize("width", [30, 52, 79, 100])
def test_a_table_keeps_words_whole_on_a_narrow_screen(
    ledger: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run("ledger", "clients", ledger).stdout.split("\n", 1)[1]
    assert max(map(len, shown.splitlines())) <= width
    words = shown.replace("│", " ").replace("┃", " ").replace(":", "").split()
    assert {"client", "state", "rounds", "updates", *NAMES} <= set(words)
    assert words.count("active") == 3


def test_history_that_is_kept_is_told(ledger: Path) -> None:
    shown = run("forget", ledger, "ann", "--keep-history")
    assert "Not erased" in shown.stdout
    assert "not a guarantee" in " ".join(shown.stdout.split())
    listed = run_json("ledger", "clients", ledger)["clients"]
    assert listed[0]["state"] == "forgotten"
    assert listed[0]["kept"] == 4


def test_erasing_can_be_done_at_once_or_later(ledger: Path) -> None:
    run("forget", ledger, "ann", "--keep-history")
    cleaned = model_of(ledger)
    again = run("forget", ledger, "ann", "--keep-history").stdout
    assert "was forgotten already, and its updates were kept" in again
    both = one_line(run("forget", ledger, "ann", "--keep-history", "--erase", code=2))
    assert "--erase and --keep-history exclude each other" in both
    assert run_json("forget", ledger, "ann", "--dry-run")["would_erase"] == ["ann"]
    found = run_json("forget", ledger, "ann")
    assert found["erased"] is True
    repeated = run_json("forget", ledger, "ann")
    assert repeated["already"] is True
    assert "Nothing to do" in run("forget", ledger, "ann").stdout
    assert "Nothing to do" in run("forget", ledger, "ann", "--dry-run").stdout
    erased = one_line(run("forget", ledger, "ann", "--keep-history", code=1))
    assert "its updates were erased" in erased
    np.testing.assert_array_equal(model_of(ledger), cleaned)
    run_json("forget", ledger, "bob")
    listed = run_json("ledger", "clients", ledger)["clients"]
    assert [row["state"] for row in listed] == ["erased", "erased", "active"]
    assert [row["rounds"] for row in listed] == [0, 0, 3]
    assert run_json("ledger", "verify", ledger)["ok"] is True
    events = run_json("ledger", "info", ledger)["events"]
    assert [event["kind"] for event in events] == [
        "forget",
        "erase",
        "forget and erase",
    ]


def test_a_run_folder_will_do_in_place_of_its_ledger(
    ledger: Path, tmp_path: Path
) -> None:
    assert run_json("ledger", "info", tmp_path)["path"] == str(ledger)
    assert run_json("forget", tmp_path, "ann", "--dry-run")["rounds"] == 4


@pytest.mark.slow
def test_bad_requests_get_one_line_that_says_what_to_do(
    ledger: Path, tmp_path: Path
) -> None:
    before = model_of(ledger)
    assert "did you mean 'ann'" in one_line(run("forget", ledger, "anne", code=2))
    assert "samples" in one_line(run("forget", ledger, "ann", "--sample", 3, code=2))
    assert "0 to 1" in one_line(run("forget", ledger, "ann", "--damping", 2, code=2))
    nowhere = tmp_path / "no" / "such" / "place.safetensors"
    assert "cannot write" in one_line(
        run("forget", ledger, "ann", "--out", nowhere, code=2)
    )
    assert "nothing at" in one_line(run("forget", tmp_path / "none", "ann", code=2))
    assert "not a ledger" in one_line(run("forget", ledger / "arrays", "a", code=2))
    run("forget", ledger, "ann", "--damping", "much", code=2)
    unknown = run("forget", ledger, "ann", "--skew", "diagonal", code=2)
    assert "kronecker, scalar, none" in one_line(unknown)
    unmeasured = run("forget", ledger, "ann", "--max-drop", 0.1, code=2)
    assert "needs --validation" in one_line(unmeasured)
    images = ("--validation", tmp_path / "none.npz")
    assert "ledger.federation.toml" in one_line(
        run("forget", ledger, "ann", *images, code=2)
    )
    run("forget", ledger, code=2)
    np.testing.assert_array_equal(model_of(ledger), before)
    listed = run_json("ledger", "clients", ledger)["clients"]
    assert {row["state"] for row in listed} == {"active"}


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_model_is_never_written_over_the_ledger_nor_where_no_file_can_be(
    options: tuple[str, ...], ledger: Path, tmp_path: Path
) -> None:
    index = ledger / "index.sqlite"
    before = index.read_bytes()
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    for place, said in (
        (index, "choose another"),
        (ledger / "clean.safetensors", "choose another"),
        (ledger / ".." / "ledger" / "lock", "choose another"),
        (tmp_path / "folder.safetensors", "it is there and no file"),
        (tmp_path / "pipe.safetensors", "it is there and no file"),
        (tmp_path / "nothing" / "clean.safetensors", "make it first"),
    ):
        found = run("forget", ledger, "ann", "--out", place, *options, code=2)
        assert said in one_line(found)
    assert index.read_bytes() == before
    assert run_json("ledger", "verify", ledger)["strays"] == 0
    assert run_json("ledger", "info", ledger)["clients"]["active"] == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--skew", "kronecker", "--damping", "0.1"), "damping belongs to skew scalar"),
        (("--skew", "none", "--damping", "0.1"), "damping belongs to skew scalar"),
        (("--skew", "none", "--set", "updates=3"), "updates belongs to skew kronecker"),
        (("--set", "speed=3"), "no such setting: speed"),
        (("--set", "speed"), "write NAME=VALUE"),
        (("--method", "federaser", "--skew", "none"), "no such setting: skew"),
        (("--method", "federaser"), "is no run whose clients could be asked"),
        (("--method", "fastest"), "unknown method 'fastest'; choose from retrain"),
        (("--method", "no.such:Method"), "cannot load the method 'no.such:Method'"),
        (("--max-drop", "0.1"), "needs --validation"),
        (("--validation", "x.npz", "--max-drop", "2"), "from 0 to 1"),
    ],
)
def test_an_option_without_effect_is_refused(
    options: tuple[str, ...], said: str, ledger: Path
) -> None:
    before = model_of(ledger)
    assert said in one_line(run("forget", ledger, "ann", *options, code=2))
    np.testing.assert_array_equal(model_of(ledger), before)


@pytest.mark.parametrize(
    "options",
    [(), ("--skew", "none"), ("--damping", "0.1", "--set", "damped=alternate")],
)
def test_a_dry_run_computes_the_model_that_forgetting_gives(
    options: tuple[str, ...], ledger: Path, tmp_path: Path
) -> None:
    out = tmp_path / "try.safetensors"
    tried = run_json("forget", ledger, "ann", *options, "--dry-run", "--out", out)
    done = run_json("forget", ledger, "ann", *options)
    assert done["delta_norm"] == tried["delta_norm"]
    assert done["skew"] == tried["skew"]
    arrays = load_file(out)
    flat = np.concatenate([arrays["layer.weight"].ravel(), arrays["layer.bias"]])
    np.testing.assert_allclose(flat, model_of(ledger), rtol=1e-6)


@pytest.mark.skipif(
    not Path("/dev/full").is_char_device(), reason="needs /dev/full, which Linux has"
)
def test_output_that_cannot_be_written_gets_one_line(ledger: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "ledger", "clients", str(ledger)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert "cannot write the output: No space left" in one_line(done)


def test_a_second_writer_is_told_who_is_writing(ledger: Path) -> None:
    with DiskLedger(ledger):
        told = one_line(run_program(*COMMAND, "forget", ledger, "ann", code=1))
        assert "is writing to" in told
        assert run_json("forget", ledger, "ann", "--dry-run")["rounds"] == 4


def test_verify_names_the_place_and_exits_with_1(ledger: Path) -> None:
    array_of(ledger, round_=2, client="bob").flip(-1)
    found = run_json("ledger", "verify", ledger, code=1)
    assert found["ok"] is False
    assert "round 2, client 'bob'" in found["problems"][0]
    assert "round 2, client 'bob'" in run("ledger", "verify", ledger, code=1).stderr
    assert "round 2, client 'bob'" in one_line(run("forget", ledger, "bob", code=1))
    # What bob did is part of what the others are compared with, but not in the paper.
    assert "round 2, client 'bob'" in one_line(run("forget", ledger, "ann", code=1))
    paper = ("--damping", 0.07, "--dry-run")
    assert run_json("forget", ledger, "ann", *paper)["coverage"] == 1


def test_strange_client_names_are_printed_harmlessly(tmp_path: Path) -> None:
    start = Params.of({"w": np.zeros(3, np.float32)})
    names = ["../../etc/passwd", "a\nb\x1b[31m", "[bold]x[/bold]", "😀" * 100]
    with DiskLedger.create(tmp_path / "ledger", Model(start)) as made:
        updates = tuple(
            ClientUpdate(name, 0.25, Params(start.layout, np.ones(3, np.float32) * i))
            for i, name in enumerate(names)
        )
        made.append(Round(0, updates))
    shown = run("ledger", "clients", tmp_path).stdout
    assert "[bold]x[/bold]" in shown
    assert "\x1b[31m" not in shown
    listed = run_json("ledger", "clients", tmp_path)["clients"]
    assert sorted(row["client"] for row in listed) == sorted(names)
    for name in names[:3]:
        assert run_json("forget", tmp_path, name)["rounds"] == 1


def test_help_and_version() -> None:
    assert "Exit codes" in run("--help").stdout
    assert run("--version").stdout.startswith("fastfedul ")
    assert "Clients to forget" in run("forget", "--help").stdout
    run("frget", code=2)


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "led[/x]ger"
    start = Params.of({"w": np.zeros(3)})
    deltas = np.eye(3, dtype=np.float32)
    with DiskLedger.create(path, Model(start)) as made:
        updates = (
            ClientUpdate(name, 0.5, Params(start.layout, delta))
            for name, delta in zip(("[/x]", "[bold]c"), deltas, strict=False)
        )
        made.append(Round(0, tuple(updates)))
    assert "[bold]c" in run("forget", path, "[bold]c", "--dry-run").stdout
    assert "[/x]" in run("forget", path, "[/x]").stdout
    assert "led[/x]ger" in run("ledger", "info", path).stdout.replace("\n", "")
    assert "[bold]c" in run("ledger", "clients", path).stdout


def test_erasing_later_still_writes_the_model_asked_for(
    ledger: Path, tmp_path: Path
) -> None:
    out = tmp_path / "later.safetensors"
    run("forget", ledger, "cyd", "--damping", 0.1, "--keep-history")
    cleaned = model_of(ledger)
    found = run_json("forget", ledger, "cyd", "--out", out)
    assert found["model"] == str(out)
    written = load_file(out)
    flat = np.concatenate(
        [written[name].ravel() for name in ("layer.weight", "layer.bias")]
    )
    np.testing.assert_array_equal(flat, cleaned)


@pytest.mark.parametrize("skew", ["kronecker", "none"])
def test_json_always_has_a_damping(ledger: Path, skew: str) -> None:
    found = run_json("forget", ledger, "cyd", "--skew", skew, "--dry-run")
    assert found["skew"] == skew
    assert found["damping"] is None


def test_a_model_file_of_another_kind_is_refused_before_anything_happens(
    ledger: Path, tmp_path: Path
) -> None:
    line = one_line(run("forget", ledger, "ann", "--out", tmp_path / "x.pt", code=2))
    assert "must end in .safetensors" in line
    assert not run_json("ledger", "info", ledger)["events"]


def test_a_setting_that_is_given_twice_is_refused(ledger: Path) -> None:
    words = ("--damping", 0.1, "--set", "damping=0.2")
    done = run("forget", ledger, "cyd", *words, code=2)
    assert "damping is given twice, as --damping and with --set" in one_line(done)
