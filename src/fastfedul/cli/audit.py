"""`fastfedul audit`: is a client really gone from the model?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastfedul.cli.evaluate import show_proportion
from fastfedul.cli.investigation import PageFile, look_into, name_page, warn_of
from fastfedul.cli.method_options import chosen_method, method_options
from fastfedul.cli.options import with_options
from fastfedul.cli.output import (
    JsonFlag,
    out,
    print_json,
    print_table,
    show_name,
)
from fastfedul.cli.stopping import telling_how_to_go_on, this_command

if TYPE_CHECKING:
    from fastfedul.evaluate.lira import Measured
    from fastfedul.investigate.audit.findings import Audit


@with_options(method_options())
def audit_client(
    run: Annotated[
        Path, typer.Argument(help="A run whose rounds are all trained.", metavar="RUN")
    ],
    client: Annotated[str, typer.Argument(help="The client that leaves, or has left.")],
    *,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Minutes after which no further shadow federation begins. The same "
            "command goes on later. [default: as long as it takes]",
            metavar="MINUTES",
            show_default=False,
        ),
    ] = None,
    shadows: Annotated[
        int,
        typer.Option(help="Shadow federations to train, an even number.", metavar="N"),
    ] = 64,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps what was measured. [default: the run]",
            show_default=False,
        ),
    ] = None,
    out_file: PageFile = None,
    json: JsonFlag = False,
    **options: Any,
) -> None:
    """Attack a model that has forgotten a client, and compare with retraining.

    The command trains the run again and again with half of the client's examples,
    forgets the client in each of these shadow federations, and tries to tell which
    examples were there (U-LiRA). It also measures how far the models are from retrained
    ones (KLOM), how fast they learn the client's examples again, and how far two
    retrainings are apart. The run does not change.

    A shadow federation takes as long as two trainings of the run. Save **--json** as a
    file for **fastfedul forget --audit**: the certificate then has its digest.

    Example: `fastfedul audit my-run client-0 --budget 30 --out audit.html`
    """
    from fastfedul.investigate.audit.auditing import audit
    from fastfedul.report.audit_page import render_audit

    with telling_how_to_go_on(lambda: f"stopped; to go on: {this_command()}"):
        found = look_into(
            run,
            out_file,
            lambda say: audit(
                run,
                client,
                [chosen_method(options)],
                shadows=shadows,
                budget=budget,
                work=work,
                say=say,
            ),
            render_audit,
        )
    if json:
        print_json(found.to_json())
    else:
        _show(found, out_file)


def _show(found: Audit, page: Path | None) -> None:
    warn_of(found.notes)
    _show_wholes(found)
    _show_attack(found)
    for title, texts in (
        ("You may conclude", found.may_conclude),
        ("You may not conclude", found.may_not_conclude),
    ):
        out().print(f"{title}:")
        for text in texts:
            out().print(f"- {text}", markup=False, soft_wrap=True)
    name_page(page)


def _show_wholes(found: Audit) -> None:
    from fastfedul.investigate.audit.findings import MEASURES

    attacked = any(row.whole and row.whole.point.backdoor for row in found.rows)
    shown = ("main", *(["backdoor"] if attacked else []), "auc", "kl")
    columns = ["model", *(MEASURES[key] for key in shown), "back after", "differs in"]
    rows = []
    for row in found.rows:
        whole = row.whole
        if whole is None:
            continue
        cells = [row.name, show_proportion(whole.point.main)]
        if attacked:
            backdoor = whole.point.backdoor
            cells.append("-" if backdoor is None else show_proportion(backdoor))
        reached = whole.relearn.reached
        cells += [f"{whole.auc:.3f}", "-" if whole.kl is None else f"{whole.kl:.3f}"]
        cells.append("-" if reached is None else str(reached))
        told = (row.differences or {}).items()
        some = [MEASURES[name] for name, verdict in told if verdict == "some"]
        cells.append(", ".join(some) or "none")
        rows.append(cells)
    print_table(f"The model without {show_name(found.client)}", columns, rows)
    floor = ", ".join(
        f"{MEASURES[name]} {value:.4f}"
        for name, value in found.noise.items()
        if value is not None
    )
    said = f"Noise of four retrainings in other orders of batches: {floor}"
    out().print(said, markup=False, soft_wrap=True)


def _show_attack(found: Audit) -> None:
    rows = []
    for row in found.rows:
        if row.attack is None or row.klom is None:
            continue
        rates = [_measured(own, share=True) for own in row.attack.found.values()]
        far = [f"{own['90 %']:.2f}" for own in row.klom.values()]
        rows.append([row.name, _measured(row.attack.auc), *rates, *far])
    if not rows:
        return
    attack = next(row.attack for row in found.rows if row.attack)
    columns = ["model", "area", *(f"found at {rate}" for rate in attack.found)]
    columns += [f"KLOM {group}" for group in found.examples]
    print_table(
        f"The attack on single examples, {found.shadows} shadow federations",
        columns,
        rows,
    )
    said = "KLOM: 90 % quantiles over examples, in nats; the row retrained is the floor"
    out().print(said, markup=False, soft_wrap=True)


def _measured(own: Measured | None, *, share: bool = False) -> str:
    if own is None:
        return "-"
    low, high = own.interval
    if share:
        return f"{own.value:.1%} [{100 * low:.1f} to {100 * high:.1f}]"
    return f"{own.value:.3f} [{low:.3f} to {high:.3f}]"
