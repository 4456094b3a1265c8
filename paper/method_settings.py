"""Settings of the methods, in the words of the tables."""

from __future__ import annotations

from collections.abc import Mapping

from fastfedul.methods.protocol import method_settings
from fastfedul.methods.registry import find_method
from paper.cells import BEFORE, RETRAINED, Cell, without_ledger
from paper.experiments import AUTHORS

_WORDS: Mapping[str, Mapping[str, str]] = {
    "federaser": {"interval": "Δt {}", "ratio": "r {}"},
    "fedaccum": {"interval": "Δt {}"},
    "cdp": {"sparsity": "sparsity {}", "rounds": "{} rounds of repair"},
    "pga": {
        "distance_threshold": "threshold {}",
        "epochs": "{} epochs of ascent",
        "post_rounds": "{} rounds of repair",
    },
    "kd": {"epochs": "{} epochs", "lr": "rate {}", "temperature": "temperature {}"},
    "fedrecover": {"correction": "every {}th round exact", "warmup": "first {} exact"},
    AUTHORS: {"alpha": "α {}"},
}
_ALL = "keeps all"


def show_settings(cell: Cell) -> str:
    """Return the settings that decide a method's answer; nothing for a reference."""
    said = []
    if cell.method not in (BEFORE, RETRAINED):
        method = find_method(cell.method, without_ledger(cell.settings))
        said += _own_words(cell.method, method_settings(method))
    recording = cell.run.recording
    if recording.keep_use == "aggregate":
        said = [word for word in said if word != _ALL]
        said.append(f"aggregates {recording.keep}")
    return ", ".join(said)


def _own_words(method: str, used: Mapping[str, object]) -> list[str]:
    if method in _WORDS:
        words = _WORDS[method]
        values = {name: used.get(name) for name in words}
        return [
            words[name].format(f"{value:g}" if isinstance(value, float) else value)
            for name, value in values.items()
            if value is not None
        ]
    said = []
    if used.get("skew") == "scalar":
        said.append(f"damping {used['damping']:g}")
        if used.get("damped") == "alternate":
            said.append("every other round")
    else:
        said.append("no skew" if used.get("skew") == "none" else "skew kronecker")
    said.append(f"keeps {used['keep']}" if "keep" in used else _ALL)
    return said
