"""Compares ways to forget on one run: before, retrained, and a row per method."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfedul.errors import (
    FastFedULError,
    InvalidInputError,
    LedgerError,
    UnlearnRefusedError,
)
from fastfedul.evaluate.comparison import (
    BEFORE,
    NOW,
    RETRAINED,
    Answers,
    Evaluation,
    evaluate,
)
from fastfedul.federation.local import USERS_OWN, one_line
from fastfedul.federation.own_functions import is_own_function
from fastfedul.federation.workers.pool import Workers
from fastfedul.files import read_regular_text, write_whole
from fastfedul.forgetting.folder import RETRAINED_MODELS
from fastfedul.forgetting.service import checked_names
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.folder import find_ledger
from fastfedul.ledger.store.model_files import model_written, read_model
from fastfedul.ledger.store.schema import digest_of
from fastfedul.ledger.views import KeptView
from fastfedul.methods.fast_fedul.removal import Removal
from fastfedul.methods.fast_fedul.skews import Reaction
from fastfedul.methods.protocol import (
    Method,
    RunFacts,
    UnlearnRequest,
    UnlearnResult,
    measured,
    method_settings,
    needs_help,
)
from fastfedul.methods.registry import (
    SHOWN_BY_DEFAULT,
    find_method,
    has_setting,
    require_method,
)
from fastfedul.methods.retrain import Retrain
from fastfedul.records import ClientId, Model
from fastfedul.runs.evaluation_source import run_at
from fastfedul.runs.exam import Exam, exam_of, exam_of_run
from fastfedul.runs.preparation import Prepared, federation_for, prepare, start_workers
from fastfedul.runs.training import load_config

Settings = Mapping[str, Mapping[str, Any]]
"""Settings of methods: name of the method, name of the setting, value."""

Say = Callable[[str, int, int], None]
"""Called with the name of a stage, the work done, and the work in all."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """How likely optimal keeping is to keep an update, attackers beside the others.

    Attributes:
        num_kept: Updates kept of a round.
        attackers: Mean probability of the attackers' updates; None without attackers.
        others: Mean probability of the other clients' updates.
    """

    num_kept: int
    attackers: float | None
    others: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Result of a comparison.

    Attributes:
        prepared: Data, attack and model of the run; None for a ledger outside a run.
        subject: The data of the run, or the ledger, in a word.
        num_clients: Number of clients.
        rounds: Rounds that the model was trained for.
        forget: Clients that the methods forgot, or that had gone before.
        rows: `before`, `retrained`, then a row per method; or `now` and, if anybody
            has gone, `retrained`. Nobody can retrain a ledger outside a run.
        reaction: Reaction of the others as Fast-FedUL saw it; None if it was not
            asked, or does not look.
        keeping: Chances of attackers and others under optimal keeping.
        damping: Damping of skew scalar, if one was given.
        refused: Methods that could not be used here, or failed, and why.
        settings: Settings of methods, as they were given.
        caveats: Sentences on limits of some of the methods.
        used: Settings with which each row's method ran, as JSON values.
        methods: Methods that were asked for, as `compare --methods` takes them.
    """

    prepared: Prepared | None
    subject: str
    num_clients: int
    rounds: int
    forget: tuple[ClientId, ...]
    rows: tuple[Evaluation, ...]
    reaction: Reaction | None
    keeping: Keeping
    damping: float | None
    refused: Mapping[str, str]
    settings: Settings = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    used: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    methods: tuple[str, ...] = ()

    @property
    def seed(self) -> int | None:
        """The seed of the run; None for a ledger outside a run."""
        return self.prepared.config.seed if self.prepared else None


def compare(
    folder: Path,
    forget: Sequence[ClientId] = (),
    *,
    methods: Sequence[str | Method] = SHOWN_BY_DEFAULT,
    damping: float | None = None,
    settings: Settings | None = None,
    say: Say = lambda what, done, total: None,
) -> Comparison:
    """Forget clients of a run or ledger in every way asked for; it is unchanged.

    A ledger outside a run has no clients here that could train. So its comparison has
    no retrained model, and methods that ask clients are refused.

    A method that cannot be used here, or fails, is left out and named in `refused`; if
    none is left, that is an error.

    Args:
        folder: The finished run, or a ledger with an `EvaluationSource`.
        forget: Clients to forget; by default a run's attackers that are still there.
        methods: Names of methods, or methods with their settings.
        damping: Damping of skew scalar, for every named method that takes it, as in
            `forget`; None for the methods' own.
        settings: Settings of methods, by name of the method and of the setting.
        say: Told how far it is.
    """
    run = run_at(folder)
    prepared = prepare(load_config(run)) if run else None
    names = _names(folder, prepared, forget)
    asked = find_methods(methods, prepared, damping, settings or {})
    retraining = [n for n, m in asked.items() if getattr(m, "is_retraining", False)]
    chosen = {n: method for n, method in asked.items() if n not in retraining}
    helped = prepared is not None and any(map(needs_help, chosen.values()))
    with (
        start_workers(prepared) if helped and prepared else nullcontext() as workers,
        LedgerReader(folder) as ledger,
        unchanged(ledger),
    ):
        exam = exam_of_run(prepared, names) if prepared else exam_of(ledger, folder)
        before, again = exam.ask(ledger.final), None
        rows = []
        federation = None
        if run is not None and prepared is not None:
            reference, seconds, calls = retrained_model(
                run, prepared, ledger, names, say, workers
            )
            again = exam.ask(reference)
            rows.append(_row(RETRAINED, again, exam, before, again, seconds, calls))
            federation = federation_for(prepared, workers) if workers else None
        rows.insert(0, _row(BEFORE, before, exam, before, again))
        first_row = len(rows)
        request = UnlearnRequest(ledger, frozenset(names), federation)
        refused: dict[str, str] = {}
        first: UnlearnRefusedError | None = None
        reaction: Reaction | None = None
        used: dict[str, Mapping[str, object]] = {}
        for name, method in chosen.items():
            say(name, len(rows) - first_row + len(refused), len(chosen))
            try:
                if needs_help(method) and federation is None:
                    raise UnlearnRefusedError(
                        f"{method.name} needs the help of clients, and {folder} is no "
                        "run whose clients could be asked"
                    )
                result = result_of(method, request)
            except UnlearnRefusedError as error:
                refused[name] = str(error)
                first = first or error
                continue
            if reaction is None and isinstance(result, Removal):
                reaction = result.reaction
            used[name] = {**method_settings(method), **result.settings}
            answers = exam.ask(result.model(ledger.final))
            rows.append(
                _row(
                    name,
                    answers,
                    exam,
                    before,
                    again,
                    result.seconds,
                    result.client_calls,
                    result.bytes_read,
                )
            )
        if first is not None and len(refused) == len(chosen):
            raise first
        why = "compared as the row `retrained`" if prepared else "no run to train in"
        refused |= dict.fromkeys(retraining, why)
        keeping = keeping_of(ledger, exam.attackers)
        about = _about(ledger, prepared)
    return Comparison(
        prepared,
        *about,
        names,
        tuple(rows),
        reaction,
        keeping,
        damping,
        refused,
        settings or {},
        tuple(
            text
            for name, method in chosen.items()
            if name not in refused and (text := getattr(method, "caveat", None))
        ),
        used,
        tuple(_asked_names(methods)),
    )


def _about(ledger: LedgerReader, prepared: Prepared | None) -> tuple[str, int, int]:
    """Return what a comparison is about: its subject, its clients, its rounds."""
    name = ledger.settings.federation or ledger.path.absolute().name
    if prepared is None:
        return name, len(ledger.clients()), ledger.num_rounds
    return prepared.config.data.source, len(prepared.clients), prepared.config.rounds


def result_of(method: Method, request: UnlearnRequest) -> UnlearnResult:
    """Return the result of a method; anybody's own method may fail in any way.

    Raises:
        UnlearnRefusedError: If it refuses, fails, or gives no usable model.
    """
    try:
        found = measured(method, request)
        layout, finite = found.params.layout, np.isfinite(found.params.flat).all()
    except FastFedULError:
        raise
    except USERS_OWN as error:
        raise UnlearnRefusedError(
            f"the method {method.name} failed: {one_line(error)}"
        ) from error
    if layout != request.ledger.settings.layout or not finite:
        what = "values that are not finite" if not finite else "other arrays"
        raise UnlearnRefusedError(
            f"the method {method.name} failed: its model has {what}"
        )
    return found


def active_attackers(folder: Path, prepared: Prepared | None) -> tuple[ClientId, ...]:
    """Return the attackers that nobody has forgotten yet; nobody outside a run."""
    if prepared is None:
        return ()
    with LedgerReader(folder) as ledger:
        known = ledger.clients()
    return tuple(
        name
        for name in prepared.attack.attackers
        if name not in known or known[name].state == "active"
    )


def _names(
    folder: Path, prepared: Prepared | None, forget: Sequence[ClientId]
) -> tuple[ClientId, ...]:
    """Return the clients to forget: the clients named, else the attackers."""
    wanted = forget or active_attackers(folder, prepared)
    if not wanted and prepared is None:
        find_ledger(folder)
        raise InvalidInputError("name the clients to forget, as --forget CLIENT")
    if not wanted:
        assert prepared is not None
        attacked = prepared.attack.kind != "none"
        why = "every attacker has gone from" if attacked else "nobody attacks in"
        raise InvalidInputError(
            f"{why} this run; name the clients to forget, as --forget CLIENT"
        )
    with LedgerReader(folder) as ledger:
        names = checked_names(ledger, wanted)
        known = ledger.clients()
        for name in names:
            if known[name].state != "active":
                raise InvalidInputError(
                    f"client {name!r:.80} was forgotten already, so no model remembers "
                    "it; compare before forgetting"
                )
        if prepared is not None:
            require_trained(ledger, prepared)
    return names


def require_trained(ledger: LedgerReader, prepared: Prepared) -> None:
    """Raise unless every round of a run is trained.

    Raises:
        InvalidInputError: If one is not.
    """
    done, rounds = ledger.num_rounds, prepared.config.rounds
    if done < rounds:
        raise InvalidInputError(
            f"only {done} of {rounds} rounds are trained; finish with `fastfedul train "
            "--resume` first"
        )


def look_back(folder: Path, say: Say) -> Comparison:
    """Compare the model of a finished run with one retrained without who has gone.

    The model of a ledger outside a run is measured alone.
    """
    run = run_at(folder)
    prepared = prepare(load_config(run)) if run else None
    with LedgerReader(folder) as ledger, unchanged(ledger):
        if prepared is not None:
            require_trained(ledger, prepared)
        known = ledger.clients()
        gone = tuple(sorted(n for n, entry in known.items() if entry.state != "active"))
        exam = exam_of_run(prepared, gone) if prepared else exam_of(ledger, folder)
        now = exam.ask(ledger.final)
        rows = [_row(NOW, now, exam, now, None)]
        if run and prepared and gone and len(gone) < len(known):
            reference, seconds, calls = retrained_model(
                run, prepared, ledger, gone, say
            )
            again = exam.ask(reference)
            rows = [
                _row(NOW, now, exam, now, again),
                _row(RETRAINED, again, exam, now, again, seconds, calls),
            ]
        keeping = keeping_of(ledger, exam.attackers)
        about = _about(ledger, prepared)
    return Comparison(prepared, *about, gone, tuple(rows), None, keeping, None, {})


@contextmanager
def unchanged(ledger: LedgerReader) -> Iterator[None]:
    """Raise if somebody was forgotten meanwhile.

    Comparing takes long. A snapshot would keep requests and a writer waiting for it.
    """
    before = len(ledger.events())
    changed = FastFedULError(
        f"the ledger at {ledger.path} changed while its methods were compared; "
        "compare again"
    )
    try:
        yield
    except LedgerError:
        # Such as of files that were there when it began.
        if len(ledger.events()) == before:
            raise
        raise changed from None
    if len(ledger.events()) != before:
        raise changed


def find_methods(
    methods: Sequence[str | Method],
    prepared: Prepared | None,
    damping: float | None,
    settings: Settings,
) -> dict[str, Method]:
    """Return methods by name with their settings, also settings of the run.

    A class that is named as `package.module:Class` has the name that the class itself
    has, as in `forget`. Methods of one name are told apart by settings that differ.

    Raises:
        InvalidInputError: If something is no method, or there is a setting that no
            compared method takes.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise InvalidInputError(
            f"methods are a list of names or methods, not {methods!r:.80}"
        )
    if not isinstance(settings, Mapping) or not all(
        isinstance(own, Mapping) for own in settings.values()
    ):
        raise InvalidInputError(
            f"settings are a mapping for each method, not {settings!r:.80}"
        )
    unknown = sorted(set(settings) - set(_asked_names(methods)))
    if unknown:
        raise InvalidInputError(
            f"there are settings for {unknown[0]!r:.40}, which is not compared; add it "
            "to the methods"
        )
    facts = RunFacts(target_label=prepared.attack.target_label if prepared else None)
    made: list[tuple[str | None, Method]] = []
    taken_damping = damping is None
    for method in methods:
        if not isinstance(method, str):
            made.append((None, method))
            continue
        own = dict(settings.get(method, {}))
        if damping is not None and has_setting(method, "damping"):
            if "damping" in own:
                raise InvalidInputError(
                    f"the damping of {method} is given twice; leave out one of them"
                )
            own["damping"] = damping
            taken_damping = True
        name = None if is_own_function(method) else method
        made.append((name, find_method(method, own, facts)))
    found: dict[str, Method] = {}
    taken = {BEFORE, RETRAINED, NOW, *(name for name, _ in made if name is not None)}
    for at, (name, method) in enumerate(made):
        others = [one for i, (_, one) in enumerate(made) if i != at]
        if name is None:
            name = _free_name(_told_apart(method, others), {*taken, *found})
        found[name] = method
    if not taken_damping:
        raise InvalidInputError(
            "damping is a setting of skew scalar, and no method that is compared by "
            "its name takes it; leave it out, or add fast-fedul to the methods"
        )
    return found


def _told_apart(method: Method, others: Sequence[Method]) -> str:
    """Return a method's name, with a setting that no other method of its name has."""
    rivals = [method_settings(one) for one in others if one.name == method.name]
    own = method_settings(method)
    differing = {
        key: value
        for key, value in own.items()
        if value is not None and any(one.get(key) != value for one in rivals)
    }
    alone = [k for k in differing if all(one.get(k) != own[k] for one in rivals)]
    # A number says more than the name of its kind: damping 0.07, and not skew scalar.
    shown = sorted(alone, key=lambda key: isinstance(own[key], str))[:1] or differing
    told = (f"{key.replace('_', ' ')} {_short(own[key])}" for key in shown)
    return ", ".join((method.name, *told))


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value!s:.40}"


def _asked_names(methods: Sequence[str | Method]) -> list[str]:
    """Return the methods by the names under which somebody asked for them."""
    return [m if isinstance(m, str) else require_method(m).name for m in methods]


def _free_name(name: str, taken: Set[str]) -> str:
    """Return a name, or if it is taken the name with a number."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free


def keeping_of(ledger: Ledger, attackers: Sequence[ClientId]) -> Keeping:
    """Return how likely optimal keeping of half the updates keeps each group's."""
    rounds = ledger.rounds()
    size = max((round_.num_updates for round_ in rounds), default=0)
    num_kept = max(1, size // 2)
    view = KeptView(ledger, Keep("optimal", num_kept))
    groups: dict[bool, list[float]] = {True: [], False: []}
    for round_ in rounds:
        for update in view.updates_in(round_.index):
            groups[update.client in attackers].append(update.keep_probability)
    means = {k: float(np.mean(v)) if v else None for k, v in groups.items()}
    return Keeping(num_kept, means[True], means[False])


def _row(
    method: str,
    answers: Answers,
    exam: Exam,
    before: Answers,
    reference: Answers | None,
    seconds: float = 0.0,
    client_calls: int = 0,
    history_bytes: int = 0,
) -> Evaluation:
    return evaluate(
        method,
        answers,
        exam.questions,
        before=before,
        reference=reference,
        seconds=seconds,
        client_calls=client_calls,
        history_bytes=history_bytes,
    )


def retrained_model(
    folder: Path,
    prepared: Prepared,
    ledger: LedgerReader,
    names: Sequence[ClientId],
    say: Say,
    workers: Workers | None = None,
) -> tuple[Model, float, int]:
    """Return the retrained model, its seconds and client calls; kept in the run.

    Args:
        folder: The run.
        prepared: Data and trainer of the run.
        ledger: The ledger of the run.
        names: Clients to leave out.
        say: Told how far it is.
        workers: From `start_workers`; None to start some if they are needed.
    """
    config = prepared.config
    request = UnlearnRequest(ledger, frozenset(names))
    key = digest_of(config.to_toml(), *sorted(request.gone)).hex()[:16]
    path = folder / f"{RETRAINED_MODELS}{key}.safetensors"
    facts = path.with_suffix(".json")
    if path.exists() and facts.exists():
        buffers = frozenset(ledger.initial.buffers)
        # A damaged file is computed again.
        with suppress(FastFedULError, OSError, ValueError, KeyError, TypeError):
            stored = json.loads(read_regular_text(facts))
            model = read_model(path, layout=ledger.settings.layout, buffers=buffers)
            return model, float(stored["seconds"]), int(stored["client_calls"])
    method = Retrain(progress=lambda index: say("retraining", index + 1, config.rounds))
    with start_workers(prepared) if workers is None else nullcontext(workers) as own:
        federation = federation_for(prepared, own)
        done = measured(method, replace(request, federation=federation))
    model = done.model(ledger.initial)
    stored = {
        "seconds": done.seconds,
        "client_calls": done.client_calls,
        "without": sorted(request.gone),
    }
    with model_written(path, model):
        write_whole(facts, json.dumps(stored))
    return model, done.seconds, done.client_calls
