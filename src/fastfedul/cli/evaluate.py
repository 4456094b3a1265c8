"""`fastfedul evaluate`: how good the model of a run is now."""

from __future__ import annotations

from fastfedul.cli.options import RunPath
from fastfedul.cli.output import JsonFlag, print_facts, print_json
from fastfedul.evaluate.intervals import Proportion


def evaluate_run(
    path: RunPath,
    json: JsonFlag = False,
) -> None:
    """Measure the current model of a run or ledger: accuracy, and attack success.

    The accuracy is the share of right answers on clean test images. The attack success
    is measured on images that nobody trained on; none belongs to the attackers' class.
    Intervals are 95 % Wilson intervals. The last line is for a smaller
    ledger: **--keep optimal:N** keeps N updates of each round, here half of them, and
    the line has the chances that an attacker's update or another's is among them.

    For a ledger outside a run, `LEDGER.federation.toml` names the network and the test
    examples; `Recorded(..., evaluate=...)` writes this file.
    """
    from fastfedul.ledger.reader import LedgerReader
    from fastfedul.runs.comparison import keeping_of
    from fastfedul.runs.exam import exam_of

    with LedgerReader(path) as ledger:
        exam = exam_of(ledger, path)
        model, rounds = ledger.final, ledger.num_rounds
        keeping = keeping_of(ledger, exam.attackers)
        states = {name: entry.state for name, entry in ledger.clients().items()}
    main, backdoor = exam.score(model)
    run = exam.prepared
    if json:
        print_json(
            {
                "main": main.value,
                "main_count": [main.successes, main.total],
                "main_interval": main.interval,
                "backdoor": backdoor.value if backdoor else None,
                "backdoor_count": _count(backdoor),
                "backdoor_interval": backdoor.interval if backdoor else None,
                "rounds": rounds,
                "clients": list(run.names if run else states),
                "attackers": list(exam.attackers),
                "keeping": {
                    "budget": keeping.num_kept,
                    "attackers": keeping.attackers,
                    "others": keeping.others,
                },
                "forgotten": [name for name, s in states.items() if s != "active"],
            }
        )
        return
    facts = [
        ("rounds", f"{rounds} of {run.config.rounds}" if run else str(rounds)),
        ("accuracy", show_proportion(main)),
    ]
    if backdoor:
        facts.append(("attack success", show_proportion(backdoor)))
        facts.append(("attackers", ", ".join(exam.attackers)))
    if keeping.attackers is not None and keeping.others is not None:
        facts.append(
            (
                "with --keep",
                f"optimal:{keeping.num_kept} would keep an attacker's update with "
                f"probability {keeping.attackers:.2f}, another's with "
                f"{keeping.others:.2f}",
            )
        )
    print_facts(f"{'Run' if run else 'Ledger'} {path}", facts)


def show_proportion(proportion: Proportion | None) -> str:
    """Return a proportion with its count and interval.

    >>> show_proportion(Proportion(9, 10))
    '90.0% (9 of 10; 59.6% to 98.2%)'
    """
    if proportion is None or proportion.value is None or proportion.interval is None:
        return "-"
    low, high = proportion.interval
    return (
        f"{proportion.value:.1%} ({proportion.successes} of {proportion.total}; "
        f"{low:.1%} to {high:.1%})"
    )


def _count(proportion: Proportion | None) -> list[int] | None:
    return [proportion.successes, proportion.total] if proportion else None
