"""`fastfedul train`, run as a user runs it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from fastfedul import LedgerReader
from fastfedul.runs.config import RunConfig
from fastfedul.runs.training import load_config
from tests.support.commands import (
    COMMAND,
    has_text,
    interrupt,
    one_line,
    run,
    run_json,
)

pytest.importorskip("torch")

QUICK = ("--train-size", 200, "--clients", 3, "--epochs", 1, "--workers", 1)
NAMED_OPTIONS = (
    *("data", "train-size", "clients", "per-round", "rounds", "epochs", "batch-size"),
    *("lr", "momentum", "partition", "attack", "attackers", "poison-ratio"),
    *("target-label", "attack-scale", "weighting", "weight-decay", "dropout"),
    *("server-images", "keep", "keep-use", "dtype", "model", "seed", "workers"),
    *("resume", "json", "config", "forget", "budget", "engine", "trainer"),
    *("method", "skew", "damping", "erase", "keep-history", "set"),
    *("server-optimizer", "server-lr", "server-momentum", "server-beta1"),
    *("server-beta2", "server-tau"),
)


@pytest.mark.slow
def test_a_run_is_trained_forgotten_and_taken_up_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    found = run_json("train", folder, *QUICK, "--rounds", 2, "--attack", "pixel")
    assert set(found) == {
        *("path", "rounds", "main", "backdoor", "chain", "seconds"),
        *("clients", "attackers", "requests", "forgotten", "dropped"),
    }
    assert found["requests"] == found["forgotten"] == []
    assert found["path"] == str(folder)
    assert found["rounds"] == 2
    assert found["clients"] == ["client-0", "client-1", "client-2"]
    assert found["attackers"] == ["client-0"]
    assert 0 <= found["main"] <= 1
    assert 0 <= found["backdoor"] <= 1
    with LedgerReader(folder) as ledger:
        assert found["chain"] == ledger.chain.hex()
    run("forget", folder, "client-0")
    longer = run("train", folder, "--resume", "--rounds", 3)
    assert "accuracy" in longer.stdout
    with LedgerReader(folder) as ledger:
        names = {update.client for update in ledger.updates_in(2)}
        assert names == {"client-1", "client-2"}


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(
    tmp_path: Path,
) -> None:
    config = tmp_path / "options.toml"
    config.write_text(
        "rounds = 7\n[local]\nlr = 0.01\n[data]\ntrain-size = 200\nclients = 3\n"
    )
    folder = tmp_path / "run"
    options = ("--rounds", 1, "--set", "minimum_coverage=0.25")
    found = run_json("train", folder, "--config", config, *options)
    assert found["rounds"] == 1
    assert found["attackers"] == []
    assert found["backdoor"] is None
    saved = (folder / "config.toml").read_text()
    assert "lr = 0.01" in saved
    assert "batch-size = 32" in saved
    assert "[forgetting.settings]\nminimum_coverage = 0.25\n" in saved
    assert load_config(folder).forgetting.settings == {"minimum_coverage": 0.25}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--partition", "dirichlet"), "cannot read the split"),
        (("--data", "no-such-data"), "no data set"),
        (("--data", "missing.npz"), "missing.npz"),
        (("--attackers", "2"), "needs an attack"),
        (("--attack-scale", "2"), "--attack-scale needs an attack"),
        (("--model", "nothing"), "there is no model"),
        (("--forget", "client-0"), "CLIENT@ROUND"),
        (("--config", "missing.toml"), "cannot read missing.toml"),
        (("--resume",), "there is no run"),
        (("--resume", "--config", "x.toml"), "leave out --config"),
        (("--train-size", 5), "5 training examples"),
        (("--budget", "1KB"), "the budget is 1,000 bytes, and the models and the"),
        (("--budget", "520KB"), "choose more, fewer rounds, or keep sums"),
        (("--keep", "sums", "--budget", "1KB"), "the models of this ledger take"),
        (("--arrays", "nowhere"), "s3://"),
        (("--method", "federaser"), "cannot forget while a run trains"),
        (("--set", "magic=1"), "has no such setting: magic"),
        (("--set", "updates"), "'updates'; write NAME=VALUE, such as"),
        (("--set", "updates=[1]"), "--set is [1]"),
        (("--trainer", "nobody"), "no installed package has 'nobody'"),
        (("--trainer", "no.module:make"), "cannot load the trainer"),
    ],
)
def test_bad_options_give_one_line(
    options: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert message in one_line(run("train", folder, *options, code=2))
    assert not folder.exists()


def test_options_have_the_names_and_defaults_that_are_promised() -> None:
    text = run("train", "--help").stdout
    for name in NAMED_OPTIONS:
        assert f"--{name} " in text, name
    shown = " ".join(text.replace("│", " ").split())
    default = RunConfig()
    for value in (default.rounds, default.local.epochs, default.local.batch_size):
        assert f"[{value}]" in shown
    for number in (default.local.lr, default.local.momentum):
        assert f"[{number:g}]" in shown
    assert "[10, or as in the file]" in shown


@pytest.mark.parametrize("verb", ["train", "demo", "data list", "data show"])
def test_help_fits_80_columns(verb: str) -> None:
    found = run(*verb.split(), "--help", columns=80)
    assert max(map(len, found.stdout.splitlines())) <= 80
    # Nothing is cut off for want of room.
    assert "…" not in found.stdout
    assert "..." not in found.stdout.replace("[OPTIONS]", "")


@pytest.mark.slow
def test_a_log_gets_a_line_for_each_round(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    found = run("train", folder, *QUICK, "--rounds", 3, "--attack", "pixel")
    lines = found.stderr.splitlines()
    assert len(lines) == 3
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(
            rf"{number} of 3 rounds: accuracy [\d.]+%, attack success [\d.]+%, "
            r"[\d.]+ m?s, \d+:\d\d:\d\d left",
            line,
        )
    longer = run("train", folder, "--resume", "--rounds", 5)
    assert [line.split(":")[0] for line in longer.stderr.splitlines()] == [
        "4 of 5 rounds",
        "5 of 5 rounds",
    ]
    assert run("train", tmp_path / "quiet", *QUICK, "--json").stderr == ""


def on_terminal(width: int, *arguments: object) -> str:
    """Return what a command writes to a terminal of a width."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**environment, "TERM": "xterm"},
    ) as process:
        os.close(child)
        written = b""
        with suppress(OSError):  # Linux reports the end of a terminal so.
            while part := os.read(parent, 65536):
                written += part
    os.close(parent)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 100])
def test_a_narrow_terminal_still_shows_round_and_time_left(
    width: int, tmp_path: Path
) -> None:
    options = (*QUICK, "--rounds", 12, "--attack", "pixel", "--forget", "client-1@3")
    text = on_terminal(width, "train", tmp_path / "run", *options)
    # Once while it trains, and once beside the results.
    assert text.count("Forgot client-1 after 3 rounds: 100.0% of its share") == 2
    shown = [line.strip() for line in re.split(r"[\r\n]+", text) if "left" in line]
    assert all(len(line) <= width for line in shown)
    pattern = (
        r"rounds +\d+/12 .*accuracy [\d.]+%, attack success [\d.]+%.* "
        r"left \d+:\d\d:\d\d"
    )
    assert any(re.fullmatch(pattern, line) for line in shown), shown


@pytest.mark.slow
def test_a_very_narrow_terminal_gives_up_the_accuracy_first(tmp_path: Path) -> None:
    options = (*QUICK, "--rounds", 12, "--attack", "pixel")
    text = on_terminal(36, "train", tmp_path / "run", *options)
    assert re.search(r"rounds +\d+/12 acc.* left \d+:\d\d:\d\d", text)


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_the_run_can_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = [*QUICK[:-1], 2, "--rounds", 400]
    metrics = folder / "metrics.jsonl"
    _, errors = interrupt(
        *(*COMMAND, "train", folder, *options), ready=lambda: has_text(metrics)
    )
    *rounds_told, line = errors.strip().splitlines()
    assert all(" of 400 rounds: " in told for told in rounds_told)
    with LedgerReader(folder) as ledger:
        done = ledger.num_rounds
    rounds = "1 round" if done == 1 else f"{done} rounds"
    again = f"fastfedul train {folder} --resume"
    assert line == f"stopped after {rounds}; go on with: {again}"
    assert run_json("train", folder, "--resume", "--rounds", done + 1)["rounds"] == (
        done + 1
    )


@pytest.mark.slow
def test_ctrl_c_before_there_is_a_run_says_nothing_of_going_on(tmp_path: Path) -> None:
    (tmp_path / "slow_own.py").write_text(
        "import pathlib, time\n\n"
        "def build(image_shape, num_classes):\n"
        "    pathlib.Path('building').touch()\n"
        "    time.sleep(100)\n"
    )
    options = [*QUICK, "--model", "slow_own:build"]
    command = (*COMMAND, "train", "run", *options)
    ready = (tmp_path / "building").exists
    _, errors = interrupt(*command, ready=ready, cwd=tmp_path)
    assert errors.strip() == ""
    assert not (tmp_path / "run").exists()


def suggested(found: subprocess.CompletedProcess[str], folder: Path) -> str | None:
    """Return whom the last line proposes to forget."""
    last = found.stdout.strip().splitlines()[-1]
    told = f"Take a client out with: fastfedul forget {folder} "
    return last.removeprefix(told) if last.startswith(told) else None


@pytest.mark.slow
def test_only_a_client_that_is_still_there_is_proposed_for_forgetting(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    attack = ("--attack", "pixel", "--attackers", "client-0,client-2")
    options = (*QUICK, "--rounds", 2, *attack, "--forget", "client-0@1")
    found = run("train", folder, *options)
    assert "3, 1 of them forgotten" in found.stdout
    line = "Forgot client-0 after 1 round: 100.0% of its share was kept, the model "
    for printed in (found.stderr, found.stdout):
        [told] = [one for one in printed.splitlines() if one.startswith(line)]
        assert told.endswith(f"certificate {folder / 'certificates/event-1.json'}")
    assert suggested(found, folder) == "client-2"
    run("forget", folder, "client-2", "--erase")
    found = run("train", folder, "--resume")
    assert "3, 2 of them forgotten" in found.stdout
    assert suggested(found, folder) == "client-1"
    run("forget", folder, "client-1")
    assert suggested(run("train", folder, "--resume"), folder) is None


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("where", ["import", "build", "forward", "training"])
def test_a_model_that_ends_the_program_gets_one_line(
    where: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text(
        "import sys\nfrom torch import nn\n\n"
        f"where = {where!r}\n"
        "if where == 'import':\n    sys.exit(3)\n\n"
        "class Leaving(nn.Module):\n"
        "    def __init__(self, image_shape, num_classes):\n"
        "        super().__init__()\n"
        "        if where == 'build':\n            sys.exit(3)\n"
        "        self.only = nn.Linear(64, num_classes)\n\n"
        "    def forward(self, images):\n"
        "        if where == 'forward' or (where == 'training' and self.training):\n"
        "            sys.exit(3)\n"
        "        return self.only(images.flatten(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    options = (*QUICK[:-1], workers, "--model", "leaving:Leaving")
    # A model that cannot be used is wrong usage, in this process and in a worker.
    found = run("train", tmp_path / "run", *options, code=2)
    assert "SystemExit: 3" in one_line(found)


@pytest.mark.slow
def test_training_that_runs_away_ends_with_one_line(tmp_path: Path) -> None:
    arguments = ("train", tmp_path / "run", *QUICK, "--rounds", 2, "--lr", 1e25)
    line = one_line(run(*arguments, code=1))
    assert "the replies of 3 of 3 clients cannot be used, more than half" in line
    assert "use a smaller learning rate" in line


def test_a_client_that_was_never_drawn_is_not_taken_for_another(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("train", folder, *QUICK, "--rounds", 1, "--per-round", 1)
    with LedgerReader(folder) as ledger:
        drawn = set(ledger.clients())
    absent = min({f"client-{number}" for number in range(3)} - drawn)
    said = run("forget", folder, absent, code=2).stderr
    assert "never took part" in said
    assert "did you mean" not in said
    assert "did you mean" in run("forget", folder, "clien-0", code=2).stderr
