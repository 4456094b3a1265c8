"""Entry point: lists the verbs, and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Literal, NoReturn

import click
import typer
from typer.core import TyperGroup
from typer.main import get_command

from fastfedul.cli.stopping import Stopped
from fastfedul.errors import FastFedULError, InvalidInputError

_BEGIN = "Begin here"
_RUN = "Train and measure"
_FORGET = "Forget and prove it"
_KEEP = "Look after the server"


class Verb(click.Command):
    """A line of the contents, and the command behind it.

    The module of the command is imported when somebody calls the command or asks for
    its help. Python takes much longer to import all verbs than to list them.

    Args:
        name: Name of the verb.
        panel: Heading under which the contents list it.
        place: Where the command is: `module:function`, or `module:app` for a group.
        summary: The line of the contents. It is also the help of a group.
    """

    def __init__(self, name: str, panel: str, place: str, summary: str) -> None:
        super().__init__(name, short_help=summary)
        self.rich_help_panel = panel
        self._place, self._summary = place, summary

    def load(self) -> click.Command:
        """Return the command itself."""
        module, _, attribute = self._place.partition(":")
        found = getattr(import_module(f"fastfedul.cli.{module}"), attribute)
        around = _new_app()
        if isinstance(found, typer.Typer):
            around.add_typer(found, name=self.name, help=self._summary)
        else:
            around.command(self.name)(found)
        around.callback()(lambda: None)
        group = get_command(around)
        assert isinstance(group, click.Group)
        assert self.name is not None
        return group.commands[self.name]

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Return a context of the command itself, which a caller then invokes."""
        command = self.load()
        _refuse_opposites(command, kwargs.get("args", args[1] if args[1:] else ()))
        return command.make_context(*args, **kwargs)


def _refuse_opposites(command: click.Command, words: Sequence[str]) -> None:
    """Raise if a flag and its opposite are both given: click lets the last one win.

    Args:
        command: The command.
        words: Its arguments.
    """
    given = list(words)
    given = given[: given.index("--")] if "--" in given else given
    for word in given:
        if isinstance(command, click.Group):
            command = command.commands.get(word, command)
    for option in command.params:
        found = [
            next((word for word in words if word in given), None)
            for words in (option.opts, option.secondary_opts)
        ]
        if all(found):
            raise InvalidInputError(
                f"{found[0]} and {found[1]} exclude each other; leave one out"
            )


def _verbs() -> list[Verb]:
    return [
        Verb("demo", _BEGIN, "demo:run_demo",
             "Train with an attacker, forget it, compare: in one minute."),
        Verb("train", _RUN, "train:train_run",
             "Train a federation and record it in a ledger."),
        Verb("evaluate", _RUN, "evaluate:evaluate_run",
             "Measure the model of a run: accuracy, attack success."),
        Verb("compare", _RUN, "compare:compare_methods",
             "Compare methods with the model before and retraining."),
        Verb("report", _RUN, "compare:write_report",
             "Write one HTML page about a run."),
        Verb("data", _RUN, "data:app",
             "List data sets, fetch them, look into them."),
        Verb("trace", _FORGET, "trace:trace_inputs",
             "Find the clients behind unwanted answers of the model."),
        Verb("audit", _FORGET, "audit:audit_client",
             "Check by attacks whether a client is gone from the model."),
        Verb("contribution", _RUN, "contribution:show_contributions",
             "Show what each client is worth to the model."),
        Verb("forget", _FORGET, "forget:forget_clients",
             "Take clients out of the model and out of the ledger."),
        Verb("request", _FORGET, "request:app",
             "Ask for a client to be forgotten, also during training."),
        Verb("certificate", _FORGET, "certificate:app",
             "Check or time stamp the certificate of a forgetting."),
        Verb("receipt", _FORGET, "receipt:app",
             "Show a client in which rounds the ledger has it."),
        Verb("key", _FORGET, "key:app",
             "Make or show the key that signs, and trust others' keys."),
        Verb("methods", _FORGET, "methods:show_methods",
             "List the methods, their needs and settings."),
        Verb("status", _KEEP, "status:show_status",
             "Show how a run or ledger is doing, and what to do next."),
        Verb("console", _KEEP, "console:open_console",
             "Serve pages in your browser: look, forget, trace, verify."),
        Verb("ledger", _KEEP, "ledger.verbs:app",
             "Look at a ledger; verify, compact, import or estimate one."),
        Verb("flower", _KEEP, "flower:app",
             "Clean the database of a Flower server."),
    ]  # fmt: skip


class _Contents(TyperGroup):
    """The verbs in the order of the contents."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {str(verb.name): verb for verb in _verbs()}


def _new_app(group: type[TyperGroup] = TyperGroup) -> typer.Typer:
    return typer.Typer(
        name="fastfedul",
        cls=group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _new_app(_Contents)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fastfedul {version('fastfedul')}")
        raise typer.Exit


def _choose_log_format(chosen: str) -> None:
    if chosen == "json":
        from fastfedul.cli.output import log_as_json

        log_as_json()


@app.callback()
def main(
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(
            help="Lines on standard error, such as progress, warnings and errors: "
            "text, or a JSON object each. Give it before the verb.",
            callback=_choose_log_format,
            is_eager=True,
        ),
    ] = "text",
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and stop.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Take a client back out of a federated model, without data and without training.

    Start with **fastfedul demo**. Forgetting is an estimate: each result says how much
    of a client's updates it could use. No result certifies that a model has forgotten.

    Every verb has **--help**, and **--json** for scripts: one JSON object on standard
    output. If the verb fails, the object has one key, `error`.

    Exit codes: 0 done, or it was so already; 1 refused, damaged or failed, with one
    line that says why; 2 wrong usage, also a value or a file that cannot be used; 3
    done without a finding that counts: `trace --quiet` accuses nobody, or no key that
    you trust signed what `certificate check` or `receipt check` read; 130 interrupted.
    """


_UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES)
"""Errors of a path that the caller should not have given, as opposed to failures."""


def run() -> None:
    """Run the command line."""
    run_app(app)


def run_app(application: typer.Typer) -> None:
    """Run verbs; errors become one line, or one JSON object, and an exit code."""
    only_json = "--json" in sys.argv[1:]
    logs = any(word.startswith("--log-format") for word in sys.argv[1:])
    try:
        # Outside standalone mode, errors of usage come here to be printed as JSON.
        code = application(standalone_mode=not (only_json or logs))
    except InvalidInputError as error:
        _fail(str(error), 2, only_json)
    except FastFedULError as error:
        _fail(str(error), 1, only_json)
    except Stopped as error:
        _fail(str(error), 130, only_json)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code, only_json)
    except click.Abort:
        _fail("nothing was done: the answer was not yes", 1, only_json)
    except OSError as error:
        # Most errors about files are explained where they arise, with a remedy;
        # the rest at least name the file.
        lost = _is_of_output(error)
        if lost:
            # Else the interpreter would try again on leaving, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 2 if error.errno in _UNUSABLE else 1
        _fail(_told(error), code, only_json and not lost)
    if code == 130:
        _fail("interrupted", code, only_json)
    sys.exit(code)


def _fail(text: str, code: int, only_json: bool) -> NoReturn:
    from fastfedul.cli.output import print_error

    print_error(text, only_json=only_json, stopped=code == 130)
    sys.exit(code)


def _told(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if _is_of_output(error):
        return f"cannot write the output: {reason}"
    if error.filename is None:
        return str(FastFedULError(reason))
    name = error.filename
    name = os.fsdecode(name) if isinstance(name, bytes) else name
    # A file may be called anything: the error class shows it on one line.
    return str(FastFedULError(f"cannot use {name}: {reason}"))


def _is_of_output(error: OSError) -> bool:
    """Return whether standard output failed: it is the one file without a name."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EIO)
