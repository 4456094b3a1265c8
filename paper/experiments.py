"""The paper's tables and figures, and further ones, as lists of cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastfedul.errors import InvalidInputError
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from paper.cells import BEFORE, RETRAINED, Cell, Kind
from paper.settings import Scale, Setting, data_sets, setting_of

ATTACKS = ("edge-case", "pixel")
HALF = "half of the clients a round"
PAPERS_BUDGET = "optimal:5"
ERASER = "federaser, every 2nd round"
AUTHORS = "paper.authors:AuthorsFormula"
DAMPINGS = (0.01, 0.03, 0.05, 0.07, 0.09, 0.11)
ALPHAS = (0.05, 0.07, 0.1)
"""The ends of the paper's range of alpha, and the value of its authors' code."""
RATIOS = (2, 3, 4)
"""The paper's levels of skewed data."""
EPOCHS = (1, 2, 5, 10, 20)
AGGREGATED = {"keep": PAPERS_BUDGET, "keep_use": "aggregate"}
"""Options of Algorithm 1 as printed: the server aggregates the updates it keeps."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a table: one method on one setting, over all seeds.

    Attributes:
        data: Data set, by the paper's name where it has one.
        attack: The attack.
        label: Name of the method in the table.
        cells: A cell per seed.
        partition: How the data are split, or another option that tables differ in.
        parameter: Parameter that a figure varies: level, damping, budget or epochs.
        size: Number of the model's parameters.
    """

    data: str
    attack: str
    label: str
    cells: tuple[Cell, ...]
    partition: str = "iid"
    parameter: float | None = None
    size: int = 0


@dataclass(frozen=True, slots=True)
class Method:
    """A method as a table shows it.

    Attributes:
        label: Name in the table.
        name: Name by which the method is found.
        settings: The method's settings where they are not the usual ones.
        run: Options of the run where they are not the usual ones.
    """

    label: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


REFERENCES = (Method(BEFORE, BEFORE), Method(RETRAINED, RETRAINED))
BEFORE_LINE = REFERENCES[0]
RIVALS = tuple(
    Method(name, name)
    for name in ("federaser", "fedaccum", "cdp", "pga", "kd", "fedrecover")
)
PAPER = Method("fast-fedul-paper", "fast-fedul-paper", {"keep": PAPERS_BUDGET})
PAPER_ALL = Method("fast-fedul-paper, all kept", PAPER.name)
NO_SKEW = Method("fast-fedul-2, all kept", "fast-fedul-2")
VARIANTS = (
    Method("fast-fedul-1", PAPER.name, {"keep": "uniform:5"}),
    Method("fast-fedul-2", "fast-fedul-2", {"keep": PAPERS_BUDGET}),
    Method("fast-fedul-3", "fast-fedul-3", {"keep": PAPERS_BUDGET}),
)
ALL_KEPT = (PAPER_ALL, NO_SKEW, Method("fast-fedul-3, all kept", "fast-fedul-3"))
PAPER_USUAL = Method(
    "fast-fedul-paper, all kept, damping 0.07", PAPER.name, {"damping": 0.07}
)
DEFAULT = Method("fast-fedul", "fast-fedul")
"""The method of `forget` with nothing set, on a ledger that kept everything."""
SAMPLED_RUN = tuple(
    Method(f"{method.label}, 5 aggregated", method.name, method.settings, AGGREGATED)
    for method in (*REFERENCES, Method(PAPER.name, PAPER.name), DEFAULT)
)
"""Lines on a run that aggregated a sample of the updates, with weights 1/p."""

MAIN = (*REFERENCES, *RIVALS, PAPER, PAPER_ALL)


def lines_of(name: str, scale: Scale, num_seeds: int) -> list[Line]:
    """Return the lines of one of the paper's tables or figures."""
    if name not in EXPERIMENTS:
        choices = ", ".join((*EXPERIMENTS, "all"))
        raise InvalidInputError(f"unknown name {name!r:.40}; choose {choices}")
    if num_seeds < 1:
        raise InvalidInputError(f"{num_seeds} seeds; choose 1 or more")
    return EXPERIMENTS[name](scale, num_seeds)


def _main_table(attack: str) -> Callable[[Scale, int], list[Line]]:
    def lines(scale: Scale, num_seeds: int) -> list[Line]:
        return [
            _line(scale, attack, method, num_seeds, data=data)
            for data in data_sets(scale)
            for method in (*MAIN, *_unchosen(scale, data), DEFAULT, *SAMPLED_RUN)
        ]

    return lines


def _unchosen(scale: Scale, data: str) -> tuple[Method, ...]:
    """Return the paper's damping where another one was chosen."""
    return (PAPER_USUAL,) if PAPER.name in setting_of(scale, data).methods else ()


def _non_iid(scale: Scale, num_seeds: int) -> list[Line]:
    """Return Dirichlet splits by ratio, then the fixed grading of classes."""
    methods = (*REFERENCES, *RIVALS, PAPER, PAPER_ALL, DEFAULT)
    levels = RATIOS[-1:] if scale == "smoke" else RATIOS
    splits = [
        ("iid", 1),
        *((f"ratio:{ratio}", ratio) for ratio in RATIOS),
        *((f"level:{level}", level) for level in levels),
    ]
    return [
        _line(
            scale,
            attack,
            method,
            num_seeds,
            partition=partition,
            parameter=level,
        )
        for attack in ATTACKS
        for partition, level in splits
        for method in methods
    ]


def _ablation(scale: Scale, num_seeds: int) -> list[Line]:
    methods = (*REFERENCES, PAPER, *VARIANTS, *ALL_KEPT, DEFAULT, *SAMPLED_RUN)
    return _on_first(scale, num_seeds, methods)


def _sign(scale: Scale, num_seeds: int) -> list[Line]:
    """Return lines with the paper's sign, with the other one, and the public code."""
    methods = [*REFERENCES, NO_SKEW]
    for alpha in ALPHAS:
        ours, printed = {"damping": alpha}, {"damping": -alpha}
        methods += [
            Method(f"(1 + α), α {alpha:g}", PAPER.name, printed),
            Method(f"(1 − α), α {alpha:g}", PAPER.name, ours),
            Method(f"authors' code, α {alpha:g}", AUTHORS, {"alpha": alpha}),
        ]
    return _on_first(scale, num_seeds, (*methods, DEFAULT))


def _bound(scale: Scale, num_seeds: int) -> list[Line]:
    damped = map(_damped, ALPHAS)
    return _on_first(scale, num_seeds, (BEFORE_LINE, NO_SKEW, *damped, DEFAULT))


def _damped(damping: float) -> Method:
    return Method(f"damping {damping:g}", PAPER.name, {"damping": damping})


def _lemma(scale: Scale, num_seeds: int) -> list[Line]:
    keeping = Method(PAPERS_BUDGET, BEFORE, {"keep": PAPERS_BUDGET})
    return [
        _line(scale, attack, keeping, num_seeds, data=data, kind="keeping")
        for data in data_sets(scale)
        for attack in ATTACKS
    ]


def _epochs(scale: Scale, num_seeds: int) -> list[Line]:
    """Return lines that differ in the local epochs of a round."""
    return [
        _line(
            scale,
            attack,
            replace(method, run={"epochs": epochs, "rounds": 20}),
            num_seeds,
            table=f"{epochs} local epochs",
            parameter=epochs,
        )
        for attack in ATTACKS
        for epochs in EPOCHS
        for method in (*REFERENCES, NO_SKEW, PAPER_ALL, DEFAULT)
    ]


def _damping(scale: Scale, num_seeds: int) -> list[Line]:
    found = []
    dampings = DAMPINGS[::3] if scale == "smoke" else DAMPINGS
    for attack in ATTACKS:
        for damping in dampings:
            method = _damped(damping)
            found.append(
                _line(
                    scale,
                    attack,
                    method,
                    num_seeds,
                    parameter=damping,
                    kind="iterations",
                )
            )
        found.append(_line(scale, attack, DEFAULT, num_seeds))
    return found


def _deviation(scale: Scale, num_seeds: int) -> list[Line]:
    return _on_first(scale, num_seeds, (*REFERENCES, PAPER_ALL, NO_SKEW, DEFAULT))


def _cost(scale: Scale, num_seeds: int) -> list[Line]:
    return [
        line
        for attack in ATTACKS
        for line in _main_table(attack)(scale, num_seeds)
        if not line.label.startswith(BEFORE)
    ]


def _criteria(scale: Scale, num_seeds: int) -> list[Line]:
    methods = (*REFERENCES, *RIVALS, PAPER_ALL, NO_SKEW, DEFAULT)
    half = [
        _line(scale, attack, method, num_seeds, half=True)
        for attack in ATTACKS
        for method in methods
    ]
    return _on_first(scale, num_seeds, methods) + half


def _sampling(scale: Scale, num_seeds: int) -> list[Line]:
    budgets = (2, 5) if scale == "smoke" else (1, 2, 3, 5, 7, 9)
    found = _on_first(scale, num_seeds, (*REFERENCES, PAPER_ALL, DEFAULT))
    for attack in ATTACKS:
        for policy in ("optimal", "uniform", "top"):
            for budget in budgets:
                keep = f"{policy}:{budget}"
                method = Method(keep, PAPER.name, {"keep": keep})
                found.append(
                    _line(
                        scale,
                        attack,
                        method,
                        num_seeds,
                        parameter=budget,
                    )
                )
    return found


def _history(scale: Scale, num_seeds: int) -> list[Line]:
    """Return lines that differ in the updates that the server keeps."""
    small = scale == "smoke"
    budgets = (None, 5) if small else (None, 7, 5, 3)
    dtypes = ("float32", "int8") if small else STORAGE_DTYPES
    rivals = (Method(ERASER, "federaser", {"interval": 2}), Method("kd", "kd"))
    found = _on_first(scale, num_seeds, (*REFERENCES, *rivals))
    for attack in ATTACKS:
        for name in (PAPER.name, DEFAULT.name):
            for dtype in dtypes:
                for budget in budgets:
                    settings: dict[str, Any] = {}
                    if dtype != "float32":
                        settings["store"] = dtype
                    if budget:
                        settings["keep"] = f"optimal:{budget}"
                    method = Method(f"{name}, {dtype}", name, settings)
                    found.append(
                        _line(scale, attack, method, num_seeds, parameter=budget)
                    )
        for dtype in dtypes:
            settings = {"history": "sums", "store": dtype}
            label = f"{DEFAULT.label}, sums, {dtype}"
            method = Method(label, DEFAULT.name, settings)
            found.append(_line(scale, attack, method, num_seeds))
    return found


EXPERIMENTS: dict[str, Callable[[Scale, int], list[Line]]] = {
    "edge-case": _main_table("edge-case"),
    "pixel": _main_table("pixel"),
    "non-iid": _non_iid,
    "ablation": _ablation,
    "damping": _damping,
    "deviation": _deviation,
    "cost": _cost,
    "sampling": _sampling,
    "criteria": _criteria,
    "sign": _sign,
    "bound": _bound,
    "lemma": _lemma,
    "epochs": _epochs,
    "history": _history,
}
"""Name to a function of scale and number of seeds."""


def _on_first(scale: Scale, num_seeds: int, methods: Sequence[Method]) -> list[Line]:
    return [
        _line(scale, attack, method, num_seeds)
        for attack in ATTACKS
        for method in methods
    ]


def _line(
    scale: Scale,
    attack: str,
    method: Method,
    num_seeds: int,
    *,
    data: str | None = None,
    partition: str = "iid",
    parameter: float | None = None,
    kind: Kind = "model",
    half: bool = False,
    table: str | None = None,
) -> Line:
    """Return a line; on the first data set of the scale if none is named."""
    data = data or data_sets(scale)[0]
    setting: Setting = setting_of(scale, data)
    split = HALF if half else table or partition
    cells = tuple(
        Cell(
            setting.config(attack, seed, partition, half=half, **method.run),
            method.name,
            _settings(setting, method, seed),
            kind,
        )
        for seed in range(num_seeds)
    )
    return Line(data, attack, method.label, cells, split, parameter, setting.size)


def _settings(setting: Setting, method: Method, seed: int) -> dict[str, Any]:
    """Return a method's settings; a draw of kept updates has the seed of the run."""
    found = {**setting.methods.get(method.name, {}), **method.settings}
    if "keep" in found:
        found["keep_seed"] = seed
    return found
