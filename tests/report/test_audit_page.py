"""The page of an audit: hostile names, and an audit without shadow federations."""

from __future__ import annotations

import json

import pytest

from fastfedul import strict_json
from fastfedul.evaluate.intervals import Proportion
from fastfedul.evaluate.lira import Attacked, Measured
from fastfedul.forgetting.audits import AuditFile, content_digest
from fastfedul.investigate.audit.findings import Audit, Row
from fastfedul.investigate.audit.whole import Course, Whole
from fastfedul.report.audit_page import render_audit
from fastfedul.runs.afterwards import Point

pytest.importorskip("matplotlib", reason="needs the extra report")

HOSTILE = "<script>alert(1)</script>"


def made_up(*, shadows: int, attacked: bool) -> Audit:
    """Return an audit of a client with a hostile name."""
    backdoor = Proportion(3, 100) if attacked else None
    points = tuple(Point(at, Proportion(90, 100), backdoor, 0.5) for at in range(3))
    whole = Whole(points[0], 0.5, None, Course(points, None), Course(points, None), 0.1)
    own = Measured(0.02, (0.01, 0.03), 0.01, (0.0, 0.02))
    attack = Attacked(own, {"1 %": own, "0.1 %": None}, 4160, shadows)
    groups = {name: {"50 %": 0.1} for name in ("leaver", "others", "test")}
    found = (attack, groups) if shadows else (None, None)
    none = dict.fromkeys(("main", "backdoor", "auc", "kl"))
    rows = [
        Row(name, {}, None, whole, none, none, *found)
        for name in ("before", "retrained", HOSTILE)
    ]
    rows.append(Row("refuses", {}, refused=HOSTILE))
    return Audit(
        client=HOSTILE,
        ledger="0" * 32,
        chain="0" * 64,
        gone_before=(),
        rounds=3,
        shadows=shadows,
        shadows_wanted=64,
        examples={"leaver": 60, "others": 180, "test": 360},
        by_backdoor=attacked,
        rows=tuple(rows),
        noise={**none, "main": 0.01},
        may_conclude=(HOSTILE,),
        may_not_conclude=("anything",),
        notes=(HOSTILE,),
    )


@pytest.mark.parametrize("shadows", [0, 64])
@pytest.mark.parametrize("attacked", [False, True])
def test_the_page_escapes_names_and_shows_what_is_there(
    shadows: int, attacked: bool
) -> None:
    audit = made_up(shadows=shadows, attacked=attacked)
    page = render_audit(HOSTILE, audit)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert ("Can single examples be told?" in page) == bool(shadows)
    assert ("Attack success" in page) == attacked
    assert page.count("<svg") == 2
    told = strict_json.parse(json.dumps(audit.to_json()))
    assert told["kind"] == "fastfedul audit v1"
    assert AuditFile.model_validate(told).digest == content_digest(told)
