"""Audits how far a client is gone from a run's model, beside retraining without it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.evaluate.comparison import BEFORE, RETRAINED, ask
from fastfedul.evaluate.klom import klom, klom_quantiles
from fastfedul.evaluate.lira import LEAST_SHADOWS, attack_rates, lira_scores
from fastfedul.federation.workers.pool import Workers
from fastfedul.investigate.audit.findings import Audit, Row, conclusions, difference
from fastfedul.investigate.audit.kept import LEAVER, Kept
from fastfedul.investigate.audit.shadows import Shadows, recorded
from fastfedul.investigate.audit.whole import (
    Whole,
    WholeFederation,
    gaps,
    noise_of,
    retrained_again,
)
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.schema import digest_of
from fastfedul.limits import Place, path_of, require_number
from fastfedul.methods.protocol import Method, UnlearnRequest, method_settings
from fastfedul.methods.registry import DEFAULT_METHOD
from fastfedul.params import Array
from fastfedul.records import ClientId, Model
from fastfedul.runs.afterwards import point_of
from fastfedul.runs.comparison import (
    Say,
    Settings,
    find_methods,
    require_trained,
    result_of,
    retrained_model,
    unchanged,
)
from fastfedul.runs.evaluation_source import run_at
from fastfedul.runs.exam import questions_of
from fastfedul.runs.preparation import Prepared, federation_for, prepare, start_workers
from fastfedul.runs.training import load_config

SHADOWS = 64
"""Shadow federations of an audit."""

FOLDER = "audit-"
"""Beginning of the names of the folders in a run that keep what audits measured."""

_AGAIN = tuple(f"retrained, order {number}" for number in (2, 3, 4))
"""Retrainings with batches in other orders. A single one may lie close by chance."""

_FORMAT = 1
_LEAST_EXAMPLES = 4


def audit(
    folder: Place,
    client: ClientId,
    methods: Sequence[str | Method] = (DEFAULT_METHOD,),
    *,
    settings: Settings | None = None,
    shadows: int = SHADOWS,
    budget: float | None = None,
    work: Place | None = None,
    say: Say = lambda what, done, total: None,
) -> Audit:
    """Return how far a client is gone from the model of a run; the run is unchanged.

    Where the client is still in the model, each method forgets it on a copy. Where it
    has gone, the audit looks at the model that the run has now.

    Args:
        folder: A run whose rounds are all trained, also as `train` returned it.
        client: The client.
        methods: Names of methods, or methods with their settings.
        settings: Settings of methods, by name of the method and of the setting.
        shadows: Shadow federations to train, in pairs.
        budget: Minutes after which no further shadow federation begins; None for as
            long as it takes. The same call goes on later.
        work: Folder that keeps what was measured; None for one in the run.
        say: Told how far it is.

    Raises:
        InvalidInputError: If there is no such run or client, or too little to audit.
        UnlearnRefusedError: If no method can be used here.
    """
    path = run_at(path_of(folder))
    if path is None:
        raise InvalidInputError(
            f"{folder} is no run, and an audit trains the clients of a run again"
        )
    require_number(
        "number of shadow federations", shadows, least=LEAST_SHADOWS, whole=True
    )
    require_number("budget in minutes", budget, above=0, unset=True)
    if shadows % 2:
        raise InvalidInputError(
            f"shadow federations come in pairs, and {shadows} is odd; choose "
            f"{shadows + 1}"
        )
    until = None if budget is None else time.monotonic() + 60 * budget
    prepared = prepare(load_config(path))
    with LedgerReader(path) as ledger, unchanged(ledger):
        require_trained(ledger, prepared)
        plan = _plan(prepared, ledger, client, methods, settings or {})
        kept = Kept(
            _work_folder(path, work, prepared, plan.shadows),
            {name: len(own.labels) for name, own in plan.shadows.examples.items()},
        )
        wholes, refused, by_backdoor = _wholes(path, plan, kept, ledger, say)
        done = _do_shadows(plan, kept, shadows, until, refused, say)
        return _audit(plan, kept, wholes, refused, by_backdoor, ledger, done, shadows)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is audited.

    Attributes:
        prepared: Data and trainer of the run.
        shadows: The shadow federations.
        methods: Methods by name.
        gone: Whether the client has gone already.
    """

    prepared: Prepared
    shadows: Shadows
    methods: Mapping[str, Method]
    gone: bool

    @property
    def client(self) -> ClientId:
        """The client."""
        return self.shadows.client

    def kind(self, name: str) -> str:
        """Return the name under which results of a method are kept, with settings."""
        if name not in self.methods:
            return name
        method = self.methods[name]
        settings = json.dumps(method_settings(method), sort_keys=True, default=str)
        return f"{method.name} {settings}"


def _plan(
    prepared: Prepared,
    ledger: LedgerReader,
    client: ClientId,
    methods: Sequence[str | Method],
    settings: Settings,
) -> _Plan:
    known = ledger.clients()
    if client not in prepared.names or client not in known:
        why = "never took part in" if client in prepared.names else "is not in"
        raise InvalidInputError(
            f"client {client!r:.80} {why} this run; `fastfedul ledger clients` lists "
            "the clients"
        )
    absent = {n for n, own in known.items() if own.state != "active"} - {client}
    if not set(prepared.names) - absent - {client}:
        raise InvalidInputError("nobody stays, so there is nothing to compare with")
    chosen = {
        name: method
        for name, method in find_methods(methods, prepared, None, settings).items()
        # Retraining stands beside every method anyway.
        if not getattr(method, "is_retraining", False)
    }
    if not chosen:
        raise InvalidInputError(
            "name a method other than retraining, which stands beside every method"
        )
    gone = known[client].state != "active"
    if gone and len(chosen) > 1:
        raise InvalidInputError(
            f"client {client!r:.80} was forgotten already, so only the model of one "
            "method is there; name the method that forgot it"
        )
    plan = Shadows(prepared, client, frozenset(absent))
    if plan.leaver.num_examples < _LEAST_EXAMPLES:
        raise InvalidInputError(
            f"client {client!r:.80} has {plan.leaver.num_examples} examples; an audit "
            f"needs {_LEAST_EXAMPLES} or more"
        )
    return _Plan(prepared, plan, chosen, gone)


def _work_folder(
    path: Path, work: Place | None, prepared: Prepared, plan: Shadows
) -> Path:
    """Return the folder for a run and a client; another run has another folder."""
    config = prepared.config.with_options(workers=None)
    # How the run itself forgets has no part in a shadow federation.
    config = config.with_options(forget=())
    own = plan.leaver
    data = own.images.tobytes(), own.labels.tobytes()
    names = plan.client, *sorted(plan.absent)
    key = digest_of(_FORMAT, config.to_toml(), *data, *names)
    place = path if work is None else path_of(work)
    return place / f"{FOLDER}{key.hex()[:16]}"


def _wholes(
    path: Path, plan: _Plan, kept: Kept, ledger: LedgerReader, say: Say
) -> tuple[dict[str, Whole], dict[str, str], bool]:
    """Return what models of the whole federation do, who refused, and by what.

    The last is whether relearning is judged by the backdoor.
    """
    prepared, gone = plan.prepared, plan.shadows.absent | {plan.client}
    # What the ledger holds has a part in it, so a change makes other files.
    at = f" at {ledger.chain.hex()}"
    names = [BEFORE, RETRAINED, *_AGAIN, *plan.methods]
    questions = questions_of(prepared, [plan.client])
    predict = prepared.trainer.predict
    found: dict[str, Whole] = {}
    refused: dict[str, str] = {}
    with start_workers(prepared) as workers:
        reference, _, _ = retrained_model(
            path, prepared, ledger, [plan.client], say, workers
        )
        before = _model_before(plan, workers, ledger)
        federation = WholeFederation(
            prepared,
            workers,
            plan.client,
            plan.shadows.absent,
            questions,
            prepared.config.rounds,
            ask(predict, reference, questions),
            point_of(ask(predict, before, questions), questions),
        )
        for place, name in enumerate(names):
            say(f"the whole federation: {name}", place, len(names))
            kind = plan.kind(name) + at
            whole = kept.whole(kind)
            if whole is None:
                seconds = None
                if name == BEFORE:
                    model = before
                elif name == RETRAINED:
                    model = reference
                elif name in _AGAIN:
                    model = retrained_again(prepared, gone, _AGAIN.index(name))
                else:
                    try:
                        model, seconds = _cleaned(plan, name, workers, ledger)
                    except UnlearnRefusedError as error:
                        refused[name] = str(error)
                        if len(refused) == len(plan.methods):
                            raise
                        continue
                whole = federation.check(model, seconds)
                kept.keep_whole(kind, whole)
            found[name] = whole
    return found, refused, federation.by_backdoor


def _model_before(plan: _Plan, workers: Workers, ledger: LedgerReader) -> Model:
    """Return the model that remembers: the run's, or trained again."""
    if not plan.gone:
        return ledger.final
    with recorded(plan.prepared, workers, plan.shadows.absent) as again:
        return again.final


def _cleaned(
    plan: _Plan, name: str, workers: Workers, ledger: LedgerReader
) -> tuple[Model, float | None]:
    """Return the model without the client, and the time of the method."""
    if plan.gone:
        return ledger.final, None
    request = UnlearnRequest(
        ledger, frozenset([plan.client]), federation_for(plan.prepared, workers)
    )
    result = result_of(plan.methods[name], request)
    return result.model(ledger.final), result.seconds


def _do_shadows(
    plan: _Plan,
    kept: Kept,
    wanted: int,
    until: float | None,
    refused: dict[str, str],
    say: Say,
) -> int:
    """Return how many shadow federations are done, from the first one on.

    A shadow federation does not begin if the last one took longer than the time left.
    """

    def missing_in(number: int) -> list[str]:
        names = (BEFORE, RETRAINED, *(n for n in plan.methods if n not in refused))
        return [n for n in names if kept.margins(number, plan.kind(n)) is None]

    before = sum(not missing_in(number) for number in range(wanted))
    stage = "shadow federations" + (f", {before} kept from before" if before else "")
    if before:
        say(stage, before, wanted)
    longest = 0.0
    for number in range(wanted):
        missing = missing_in(number)
        if not missing:
            continue
        started = time.monotonic()
        if until is not None and started + longest > until:
            return number
        methods = {n: m for n, m in plan.methods.items() if n not in refused}
        for name, own in plan.shadows.measured(number, methods, missing, refused):
            kept.keep_margins(number, plan.kind(name), own)
        longest = max(longest, time.monotonic() - started)
        say(stage, number + 1, wanted)
    return wanted


def _audit(
    plan: _Plan,
    kept: Kept,
    wholes: Mapping[str, Whole],
    refused: Mapping[str, str],
    by_backdoor: bool,
    ledger: LedgerReader,
    done: int,
    wanted: int,
) -> Audit:
    noise = noise_of([wholes[name] for name in (RETRAINED, *_AGAIN)])
    rows = []
    for name in (BEFORE, RETRAINED, *plan.methods):
        settings = method_settings(plan.methods[name]) if name in plan.methods else {}
        row = Row(name, settings, refused.get(name))
        if name in wholes:
            apart = gaps(wholes[name], wholes[RETRAINED])
            told = {key: difference(gap, noise[key]) for key, gap in apart.items()}
            row = replace(row, whole=wholes[name], gaps=apart, differences=told)
        rows.append(row)
    paired = done - done % 2
    if paired >= LEAST_SHADOWS:
        rows = _with_shadows(plan, kept, rows, paired)
    may, may_not = conclusions(tuple(rows), paired, by_backdoor=by_backdoor)
    notes = []
    if done < wanted:
        half = (
            "" if done == paired else "; the last one waits for the other of its pair"
        )
        notes.append(
            f"{done} of {wanted} shadow federations are done{half}; the same command "
            "goes on"
        )
    if plan.gone:
        notes.append(
            f"{plan.client} has gone already: the model that the run has now is "
            "measured, and the shadow federations forget by the method that you name"
        )
    if plan.prepared.config.forget_plan:
        notes.append(
            "the run forgot clients while it trained; shadow federations leave others "
            "out from the start and forget this client at the end"
        )
    return Audit(
        client=plan.client,
        ledger=ledger.ledger_id,
        chain=ledger.chain.hex(),
        gone_before=tuple(sorted(plan.shadows.absent)),
        rounds=ledger.num_rounds,
        shadows=paired,
        shadows_wanted=wanted,
        examples=dict(kept.sizes),
        by_backdoor=by_backdoor,
        rows=tuple(rows),
        noise=noise,
        may_conclude=tuple(may),
        may_not_conclude=tuple(may_not),
        notes=tuple(notes),
    )


def _with_shadows(plan: _Plan, kept: Kept, rows: Sequence[Row], done: int) -> list[Row]:
    """Return the rows with attack and KLOM; KLOM of `retrained` is the floor."""
    members = np.array([plan.shadows.members(number) for number in range(done)])
    stacks: dict[str, dict[str, Array]] = {}
    for row in rows:
        if row.refused is not None:
            continue
        own = [kept.margins(number, plan.kind(row.name)) for number in range(done)]
        stacks[row.name] = {
            group: np.array([one[group] for one in own if one is not None])
            for group in kept.sizes
        }
    rates = attack_rates(
        {name: lira_scores(own[LEAVER], members) for name, own in stacks.items()},
        RETRAINED,
    )
    reference = stacks[RETRAINED]

    def far(own: Mapping[str, Array]) -> dict[str, dict[str, float]]:
        return {
            group: klom_quantiles(
                klom(*_two_sides(own[group], reference[group], group, members))
            )
            for group in kept.sizes
        }

    return [
        replace(row, attack=rates[row.name], klom=far(stacks[row.name]))
        if row.name in stacks
        else row
        for row in rows
    ]


def _two_sides(
    own: Array, reference: Array, group: str, members: Array
) -> tuple[Array, Array]:
    """Return margins from one half of the shadows, the reference's from the other.

    For one of the client's examples, the first half are the shadows that had it.
    """
    if group != LEAVER:
        return own[::2], reference[1::2]
    first = members[::2]
    return (
        np.where(first, own[::2], own[1::2]),
        np.where(first, reference[1::2], reference[::2]),
    )
