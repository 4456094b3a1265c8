"""Forgetting with batch normalisation: cases, and the page."""

from __future__ import annotations

from typing import Any

from paper.buffers import NETWORK, all_cases, page_text


def line(main: float, kept: float, backdoor: float | None) -> dict[str, Any]:
    """Return a result whose retrained model has 90 % and a backdoor of 1 %."""
    wanted = None if backdoor is None else 0.01
    values = {"before": 0.95, "kept": kept, "forgotten": main, "retrained": 0.9}
    leaver = "honest" if backdoor is None else "pixel"
    return {
        **{"split": "iid", "leaver": leaver, "main": values},
        "backdoor": dict.fromkeys(values, backdoor) | {"retrained": wanted},
    }


def test_every_case_has_a_network_with_batch_norm_and_a_name_of_its_own() -> None:
    cases = all_cases()
    assert len({case.key for case in cases}) == len(cases) == 20
    for case in cases:
        assert case.config.model == NETWORK
        assert case.config.seed == case.seed


def test_the_page_has_the_gaps_with_and_without_the_leavers_buffers() -> None:
    text = page_text([line(0.88, 0.86, 0.03), line(0.91, 0.9, 0.02)])
    [kept] = [r for r in text.splitlines() if "buffers as they were" in r]
    [new] = [r for r in text.splitlines() if "the others' buffers" in r]
    assert "| 2 | -2.00 | 2.00 | -4.00 | +1.50 | 1.50 | +2.00 |" in kept
    assert "| 2 | -0.50 | 1.50 | -2.00 | +1.50 | 1.50 | +2.00 |" in new
    assert "| none | none | none |" in page_text([line(0.9, 0.9, None)])
    assert "have not been done" in page_text([])
