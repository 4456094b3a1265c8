"""The command line as a whole: its contents, its help, its errors."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fastfedul import ClientUpdate, DiskLedger, Model, Params, Round
from fastfedul.cli import main
from fastfedul.federation.aggregation import MEAN
from fastfedul.forgetting.requests import add_request
from fastfedul.methods.fast_fedul.skews import Scalar, usual_skew, usual_updates
from fastfedul.methods.fast_fedul.variants import VARIANTS
from fastfedul.methods.protocol import method_settings
from fastfedul.methods.registry import find_method
from tests.support.commands import COMMAND, run, run_json, run_program
from tests.support.damage import array_of
from tests.support.disk_ledgers import record


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (OSError(errno.ENAMETOOLONG, "too long", "a/b"), "cannot use a/b: too long", 2),
        (PermissionError(13, "denied", "a\nb"), "cannot use a\\nb: denied", 2),
        (PermissionError(13, "denied", b"a"), "cannot use a: denied", 2),
        (OSError(errno.ENOSPC, "full", "[red]x"), "cannot use [red]x: full", 1),
        (TimeoutError("timed\nout"), "timed\\nout", 1),
        (ConnectionError(), "ConnectionError", 1),
    ],
)
def test_an_error_of_the_system_is_one_line_with_the_file(
    error: OSError,
    line: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*, standalone_mode: bool) -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert caught.value.code == code
    assert capsys.readouterr().err == f"error: {line}\n"
    # Only where standard output failed is it given up.
    assert not sys.stdout.closed


def loaded(command: click.Command) -> click.Command:
    """Return the command behind a line of the contents."""
    return command.load() if isinstance(command, main.Verb) else command


def commands_of(command: click.Command, *names: str) -> Iterator[tuple[str, ...]]:
    """Yield the names of every verb, alone and with each of its subverbs."""
    yield names
    command = loaded(command)
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands_of(inner, *names, name)


def find(names: tuple[str, ...]) -> click.Command:
    command = get_command(main.app)
    for name in names:
        assert isinstance(command, click.Group)
        command = loaded(command.commands[name])
    return command


ALL = list(commands_of(get_command(main.app)))


def shown_help(*names: str) -> str:
    found = CliRunner(env={"COLUMNS": "80"}).invoke(main.app, [*names, "--help"])
    assert found.exit_code == 0
    return click.unstyle(found.stdout)


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_help_is_whole_on_80_columns(names: tuple[str, ...]) -> None:
    shown = shown_help(*names)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    command, words = find(names), shown.split()
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            metavar = option.make_metavar(click.Context(command))
            takes = [] if metavar == "BOOLEAN" else [metavar]
            for word in (*option.opts, *option.secondary_opts, *takes):
                assert word in words, f"{word} is cut"


@pytest.mark.parametrize(
    "names", [names for names in ALL if isinstance(find(names), click.Group)]
)
def test_the_contents_have_a_line_for_each_verb(names: tuple[str, ...]) -> None:
    group = find(names)
    assert isinstance(group, click.Group)
    lines = [line.strip("│ ") for line in shown_help(*names).splitlines()]
    for name, command in group.commands.items():
        summary = command.get_short_help_str(limit=200)
        assert summary.endswith(".")
        [line] = [line for line in lines if line.split()[:1] == [name]]
        assert line.split(maxsplit=1)[1] == summary


def test_the_contents_import_no_verb() -> None:
    code = (
        "import atexit, sys\n"
        "from fastfedul.cli import main\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "sys.argv[1:] = ['--help']\n"
        "main.run()"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded_modules = set(found.stderr.split())
    assert not loaded_modules & {"numpy", "pydantic", "blake3", "safetensors"}
    own = {name for name in loaded_modules if name.startswith("fastfedul.")}
    assert own == {
        *("fastfedul.cli", "fastfedul.cli.main", "fastfedul.cli.stopping"),
        *("fastfedul.errors", "fastfedul.lazy_names"),
    }


def test_looking_at_a_ledger_imports_neither_pydantic_nor_methods() -> None:
    code = "import sys, fastfedul.cli.ledger.verbs; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded_modules = set(found.stdout.split())
    assert "fastfedul.ledger.reader" in loaded_modules
    assert not loaded_modules & {"pydantic", "fastfedul.methods.registry"}


@pytest.mark.parametrize("option", ["method", "skew", "damping", "erase"])
def test_an_option_of_forgetting_says_the_same_everywhere(option: str) -> None:
    texts, flags = {}, set()
    for names in ALL:
        for found in find(names).params:
            if isinstance(found, click.Option) and f"--{option}" in found.opts:
                texts[names] = str(found.help).partition(" [")[0]
                flags.add((*found.opts, *found.secondary_opts))
    assert {("train",), ("forget",), ("request", "apply")} <= set(texts)
    assert len(set(texts.values())) == 1, texts
    assert len(flags) == 1


def test_every_method_says_its_settings() -> None:
    every = {own["name"]: own for own in run_json("methods")["methods"]}
    for name, facts in every.items():
        alone = run_json("methods", name)
        assert alone == facts
        assert all(own["note"] for own in alone["settings"]), name
    usual = {own["name"]: own["default"] for own in every["kd"]["settings"]}
    assert usual["temperature"] == 2.0
    # Each default that a note names is the one that a method without settings has.
    own = {one["name"]: one["default"] for one in every["fast-fedul"]["settings"]}
    assert own["skew"] == usual_skew(MEAN).name
    assert own["damping"] == Scalar().damping
    assert own["damped"] == Scalar().damped
    assert own["updates"] == usual_updates(10_000)
    for name in VARIANTS:
        settings = {one["name"]: one["default"] for one in every[name]["settings"]}
        least = method_settings(find_method(name))["minimum_coverage"]
        assert settings["minimum_coverage"] == least, name
    shown = run("methods", "fast-fedul", columns=60).stdout
    assert {"skew", "damping", "minimum_coverage"} <= set(shown.split())


FAILING = [
    (("forget", "none", "ann"), 2, "there is nothing at none"),
    (("train", "run", "--data", "minst"), 2, "no data set 'minst'"),
    (("train",), 2, "Missing argument 'RUN'"),
    (("train", "run", "--rounds", "many"), 2, "'many' is not a valid integer"),
    (("train", "run", "--speed", "9"), 2, "No such option: --speed"),
    (("certificate", "check", "none.json"), 2, "cannot read none.json"),
    (("demo", "--out", "taken"), 2, "is no run of ours"),
    (("evaluate", "none"), 2, "there is nothing at none"),
    (("compare", "none"), 2, "there is nothing at none"),
    (("report", "none"), 2, "there is nothing at none"),
    (("data", "show", "minst"), 2, "no data set 'minst'"),
    (("request", "add", "none", "ann"), 2, "there is nothing at none"),
    (("key", "show", "none.pem"), 2, "cannot read the key none.pem"),
    (("methods", "more"), 2, "unknown method 'more'"),
    (("ledger", "info", "none"), 2, "there is nothing at none"),
    (("ledger", "estimate"), 2, "Missing option"),
    (("nonsense",), 2, "No such command 'nonsense'"),
]


@pytest.mark.parametrize(("words", "code", "told"), FAILING)
def test_an_error_with_json_is_one_json_object(
    words: tuple[str, ...],
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.chdir(tmp_path)
    for extra in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["fastfedul", *words, *extra])
        with pytest.raises(SystemExit) as caught:
            main.run()
        assert caught.value.code == code
        said = capsys.readouterr()
        if extra:
            found = json.loads(said.out)
            assert list(found) == ["error"]
            assert told in found["error"]
            assert said.err == ""
        else:
            assert said.out == ""
            shown = " ".join(click.unstyle(said.err).replace("│", " ").split())
            assert told in shown
    assert {path.name for path in tmp_path.iterdir()} == {"taken"}


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts_of(inner)
    elif isinstance(value, str):
        yield value


def test_80_columns_break_no_digest_path_or_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a-folder-whose-name-alone-takes-more-than-half-of-a-line"
    folder.mkdir()
    ledger, key = folder / "ledger", folder / "key.pem"
    zero = Params.of({"x": np.zeros(2, np.float32)})
    update = Params.of({"x": np.ones(2, np.float32)})
    names = ("ann", "bob", "cyd")
    with DiskLedger.create(ledger, Model(zero)) as opened:
        opened.append(
            Round(0, tuple(ClientUpdate(name, 1 / 3, update) for name in names))
        )
    for name in names[:2]:
        add_request(ledger, name)
    monkeypatch.setenv("FASTFEDUL_KEY", str(key))
    runner, seen = CliRunner(env={"COLUMNS": "80"}), 0
    certificate = folder / "certificates" / "1.json"
    for words in (
        ("key", "new", key),
        ("key", "show", key),
        ("request", "apply", ledger),
        ("request", "list", ledger),
        ("ledger", "info", ledger),
        ("ledger", "verify", ledger),
        ("ledger", "lineage", ledger),
        ("certificate", "check", certificate, "--public-key", f"{key}.pub"),
        ("forget", ledger, "cyd", "--keep-history"),
    ):
        shown = runner.invoke(main.app, [*map(str, words)], catch_exceptions=False)
        assert shown.exit_code == 0
        if words[:2] in (("key", "new"), ("request", "apply")) or words[0] == "forget":
            assert str(folder) in shown.stdout
            continue
        found = runner.invoke(main.app, [*map(str, words), "--json"]).stdout
        facts = json.loads(found)
        facts.pop("events", None)
        for request in facts.get("requests", ()):
            del request["decided"]  # The table shows the certificate in its place.
        if words[0] == "certificate":
            inner = facts.pop("certificate")
            subjects = [one["digest"]["sha256"] for one in facts.pop("subject")]
            facts |= {"applied": inner["applied"], "models": subjects}
        if words[1] == "lineage":
            del facts["models"][1:]
        for text in texts_of(facts):
            if re.fullmatch(r"[0-9a-f]{64}|/\S+|\d{4}-\d\d-\d\dT\S+", text):
                assert text in shown.stdout, (words, text)
                seen += 1
    assert seen > 10


def test_lines_on_standard_error_are_json_objects_if_asked(tmp_path: Path) -> None:
    found = run_program(*COMMAND, "--log-format", "json", "bogus", code=2)
    (line,) = map(json.loads, found.stderr.splitlines())
    assert (line["level"], line["message"]) == ("error", "No such command 'bogus'.")
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta()
    ledger = record(tmp_path / "ledger", 2)
    array_of(ledger, round_=1, client="b").flip(-1)
    words = ("--log-format", "json", "ledger", "verify", ledger)
    found = run_program(*COMMAND, *words, code=1)
    lines = [json.loads(line) for line in found.stderr.splitlines()]
    assert {line["level"] for line in lines} == {"error"}
    assert lines[0]["message"].startswith("damaged: ")


def test_pythons_own_loggers_write_the_same_lines() -> None:
    code = (
        "import logging; from fastfedul.cli import output; output.log_as_json();"
        "logging.getLogger('fastfedul.x').warning('round %s of \\n', 3)"
    )
    found = run_program(sys.executable, "-c", code)
    line = json.loads(found.stderr)
    assert (line["level"], line["logger"]) == ("warning", "fastfedul.x")
    assert line["message"] == "round 3 of \n"
