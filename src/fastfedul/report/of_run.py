"""Turns a comparison into the page people look at."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fastfedul.evaluate.comparison import BEFORE, NOW, RETRAINED, Evaluation
from fastfedul.ledger.reader import LedgerReader
from fastfedul.methods.registry import SHOWN_BY_DEFAULT
from fastfedul.report.content import (
    Contributions,
    ExampleImages,
    Report,
    RoundPoint,
    Row,
)
from fastfedul.runs import metrics_file
from fastfedul.runs.comparison import Comparison
from fastfedul.runs.config import RunConfig
from fastfedul.runs.options import OptionField, flag_of, option_fields

_EXAMPLES = 8


def row_of(evaluation: Evaluation) -> Row:
    """Return an evaluation as a row of a report."""
    main, backdoor = evaluation.main, evaluation.backdoor
    assert main.value is not None
    assert main.interval is not None
    near = evaluation.closeness
    return Row(
        method=evaluation.method,
        main=main.value,
        main_count=(main.successes, main.total),
        main_interval=main.interval,
        backdoor=backdoor.value if backdoor else None,
        backdoor_count=(backdoor.successes, backdoor.total) if backdoor else None,
        backdoor_interval=backdoor.interval if backdoor else None,
        mia_auc=evaluation.membership.auc if evaluation.membership else None,
        distance=near.distance if near else None,
        angle_degrees=near.angle_degrees if near else None,
        seconds=None if evaluation.method in (BEFORE, NOW) else evaluation.seconds,
        client_calls=evaluation.client_calls,
        history_bytes=evaluation.history_bytes,
    )


def report_of(folder: Path, comparison: Comparison) -> Report:
    """Return the report of a run and its comparison."""
    prepared = comparison.prepared
    with LedgerReader(folder) as ledger, ledger.snapshot():
        contributions = _contributions(ledger)
        gone = {
            name: entry.forgotten_at or 0
            for name, entry in ledger.clients().items()
            if entry.state != "active"
        }
    # The compared models forget their clients after the last round.
    forgotten = {**dict.fromkeys(comparison.forget, comparison.rounds), **gone}
    points = metrics_file.read(metrics_file.metrics_of(folder)).values()
    seen = comparison.reaction
    return Report(
        title=_title(comparison),
        summary=_summary(comparison),
        rows=tuple(row_of(row) for row in comparison.rows),
        rounds=tuple(
            RoundPoint(point.round + 1, point.main, point.backdoor)
            for point in points
            if point.main is not None
        ),
        forgotten=tuple((after, name) for name, after in forgotten.items()),
        unit_angles=_unit_angles(comparison),
        removed_by_layer=seen.removed_by_layer if seen else (),
        contributions=contributions,
        examples=_examples(comparison),
        settings=_settings(prepared.config) if prepared else _kept(folder),
        commands=_commands(folder, comparison),
        notes=_notes(comparison),
    )


def _settings(config: RunConfig) -> dict[str, object]:
    """Return the options of a run."""
    fields = option_fields(type(config)).values()
    options = zip(config.to_options().items(), fields, strict=True)
    return {
        flag_of(option): _setting_text(place, value)
        for (option, value), place in options
    }


def _kept(folder: Path) -> dict[str, object]:
    """Return what a ledger outside a run tells of its training."""
    with LedgerReader(folder) as ledger:
        own = ledger.settings
        return {
            "rounds": ledger.num_rounds,
            "parameters": own.layout.size,
            "aggregation": own.aggregation,
            "server": str(own.optimizer or "adds the aggregate"),
            "keeps": own.history,
            "stored as": own.update_dtype,
        }


def _setting_text(place: OptionField, value: object) -> object:
    """Return the value of an option; for no value, the words of the help."""
    if value is None:
        return place.shown.unset
    if isinstance(value, tuple):
        return ", ".join(value) or "nobody"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={json.dumps(v)}" for k, v in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value


def _title(comparison: Comparison) -> str:
    names, data = ", ".join(comparison.forget), comparison.subject
    if comparison.rows[0].method != NOW:
        return f"Forgetting {names} from a model of {data}"
    return f"A model of {data}" + (f" without {names}" if names else "")


def _summary(comparison: Comparison) -> tuple[str, ...]:
    prepared, who = comparison.prepared, ", ".join(comparison.forget)
    first = (
        f"{comparison.num_clients} clients trained one model together over "
        f"{comparison.rounds} rounds."
    )
    attack = prepared.attack if prepared else None
    if attack is not None and attack.kind == "none":
        return (first, f"{who} was honest and leaves.") if who else (first,)
    methods = _methods(comparison)
    if not who:
        then = "Nobody was forgotten."
    elif comparison.rows[0].method == NOW:
        then = f"{who} was forgotten, and the model is shown as it is now."
    elif methods and set(methods) <= set(SHOWN_BY_DEFAULT):
        then = f"The server then forgot {who} from its records alone."
    else:
        then = f"Then {who} was forgotten, in every way that the table shows."
    if attack is None:
        return first, then
    bad = ", ".join(attack.attackers)
    return (
        first,
        f"{bad} attacked it ({attack.kind}): attacked images are to be taken for class "
        f"{attack.target_label}. {then}",
    )


def _methods(comparison: Comparison) -> tuple[str, ...]:
    """Return the methods that were asked for, methods with a row first."""
    ran = [row.method for row in comparison.rows]
    models = (BEFORE, RETRAINED, NOW)
    return (*(n for n in ran if n not in models), *comparison.refused)


def _notes(comparison: Comparison) -> tuple[str, ...]:
    notes = []
    keeping = comparison.keeping
    if keeping.attackers is not None and keeping.others is not None:
        notes.append(
            f"If only {keeping.num_kept} updates a round were kept, optimal keeping "
            "would keep an attacker's update with probability "
            f"{keeping.attackers:.2f} and another client's with {keeping.others:.2f}; "
            "the paper's Lemma 3 says that the attacker's is kept more often."
        )
    if comparison.prepared is None:
        notes.append(
            "The server cannot retrain, because the clients have the data. So the page "
            "does not show how near forgetting comes to retraining."
        )
    else:
        notes.append(
            "Membership inference compares the loss on the forgotten clients' own "
            "training images, poisoned ones included, with that on test images; "
            "compare the methods with the retrained model rather than with 0.5."
        )
    notes += comparison.caveats
    notes += [f"Left out: {n}: {why}" for n, why in comparison.refused.items()]
    return tuple(notes)


def _unit_angles(comparison: Comparison) -> Mapping[str, np.ndarray]:
    found = {}
    for row in comparison.rows:
        if row.method == RETRAINED or row.closeness is None:
            continue
        angles = np.array(row.closeness.unit_angles or ())
        angles = angles[~np.isnan(angles)]
        if len(angles):
            found[row.method] = angles
    return found


def _contributions(ledger: LedgerReader) -> Contributions:
    names = tuple(ledger.clients())
    values = np.full((len(names), ledger.num_rounds), np.nan)
    for row, name in enumerate(names):
        for update in ledger.updates_of(name):
            if not math.isnan(update.norm):
                values[row, update.round] = update.share * update.norm
    return Contributions(names, values)


def _examples(comparison: Comparison) -> ExampleImages | None:
    prepared = comparison.prepared
    if prepared is None:
        return None
    attacked = prepared.attack.kind != "none" and len(prepared.backdoor.labels)
    if not attacked or not prepared.dataset.is_images:
        return None
    images = prepared.backdoor.images[:_EXAMPLES]
    target = prepared.attack.target_label
    return ExampleImages(images, tuple(f"to be taken for {target}" for _ in images))


def _commands(folder: Path, comparison: Comparison) -> tuple[str, ...]:
    """Return the commands that make the page again; empty if there are none."""
    if not comparison.methods:
        return ()
    forget = "".join(f" --forget {shlex.quote(name)}" for name in comparison.forget)
    damping = comparison.damping
    methods = shlex.quote(",".join(comparison.methods))
    damped = "" if damping is None else f" --damping {float(damping)!r}"
    options = f"{forget} --methods {methods}{damped}{_set_options(comparison)}"
    if comparison.prepared is None:
        return (f"fastfedul compare {shlex.quote(folder.name)}{options}",)
    toml = comparison.prepared.config.to_toml()
    settings = "".join(f"\n{line}" for line in toml.splitlines()[1:])
    return (
        f"cat > run.toml <<'END'{settings}\nEND",
        "fastfedul train RUN --config run.toml",
        f"fastfedul compare RUN{options}",
    )


def _set_options(comparison: Comparison) -> str:
    """Return the settings that methods were given, as `--set` takes them."""
    found = (
        f"{method}.{name}={json.dumps(value)}"
        for method, own in comparison.settings.items()
        for name, value in own.items()
    )
    return "".join(f" --set {shlex.quote(text)}" for text in found)
