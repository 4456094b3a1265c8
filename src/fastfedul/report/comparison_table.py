"""The table of a comparison: for notebooks, for papers, for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastfedul.errors import InvalidInputError, require_extra
from fastfedul.files import write_whole
from fastfedul.limits import Place, path_of
from fastfedul.methods.protocol import Method
from fastfedul.methods.registry import SHOWN_BY_DEFAULT
from fastfedul.notebook import rows_to_html
from fastfedul.records import ClientId
from fastfedul.report.charts import plot_bars
from fastfedul.report.model_rows import (
    COLUMNS,
    ModelMeans,
    ModelRow,
    Spread,
    bars_of,
    flat_row,
    means_of,
    rows_of,
)
from fastfedul.report.wording import NOTHING, shorten, show_bytes, show_seconds
from fastfedul.runs import comparison as one_run
from fastfedul.runs.comparison import Comparison, Say, Settings
from fastfedul.runs.seeds import find_runs, finish_run

if TYPE_CHECKING:
    import polars
    from matplotlib.figure import Figure

_LATEX_SIGNS = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    NOTHING: "--",
    "±": r"$\pm$",
    "°": r"$^\circ$",
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ComparisonTable:
    """Ways to forget beside each other; a notebook shows it as a table.

    Attributes:
        rows: A mapping for each seed and model, with the keys of `compare --json`:
            `before`, `retrained`, then a row for each method.
        forget: Clients that the methods forgot.
        seeds: Seeds of the runs; None for a ledger outside a run.
        refused: Methods that could not be used or failed, and why.
        caveats: Sentences on limits of some of the methods.
        comparison: The whole result on the run itself.
    """

    rows: tuple[ModelRow, ...]
    forget: tuple[ClientId, ...]
    seeds: tuple[int | None, ...]
    refused: Mapping[str, str]
    caveats: tuple[str, ...]
    comparison: Comparison

    @property
    def means(self) -> tuple[ModelMeans, ...]:
        """Means over the seeds, one for each kind of model."""
        return means_of(self.rows)

    def to_frame(self) -> polars.DataFrame:
        """Return the rows as a polars DataFrame, one number or text in each cell.

        Raises:
            InvalidInputError: If polars is not installed.
        """
        with require_extra("report", "a data frame needs polars"):
            import polars
        kinds = {int: polars.Int64, float: polars.Float64, str: polars.String}
        return polars.DataFrame(
            [flat_row(row) for row in self.rows],
            schema={name: kinds[kind] for name, kind in COLUMNS.items()},
        )

    def to_csv(self, path: Path | str | None = None) -> str:
        """Return the rows as CSV, with the columns of the data frame.

        Args:
            path: File to write it to as well.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat_row(row) for row in self.rows)
        return _written(text.getvalue(), path)

    def to_latex(self, path: Path | str | None = None) -> str:
        """Return the table as LaTeX; it needs the package booktabs.

        Args:
            path: File to write it to as well.
        """
        heads, *lines = [_latex_line(cells) for cells in self._cells()]
        form = "l" + "r" * (len(self._cells()[0]) - 1)
        text = "\n".join(
            [
                f"% {self._title()}; {self._legend()}",
                r"% \usepackage{booktabs}",
                rf"\begin{{tabular}}{{{form}}}",
                r"\toprule",
                heads,
                r"\midrule",
                *lines,
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )
        return _written(text + "\n", path)

    def plot(self) -> Figure:
        """Return a figure of accuracy and attack success, a bar for each model.

        The lines at the ends of the bars are 95 % intervals; with several seeds,
        standard deviations.

        Raises:
            InvalidInputError: If matplotlib is not installed.
        """
        return plot_bars(bars_of(self.rows))

    def _repr_html_(self) -> str:
        heads, *lines = self._cells()
        return rows_to_html(self._title(), heads, lines, self._below())

    def __repr__(self) -> str:
        lines = self._cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self._title(), *shown, *self._below()])

    def _title(self) -> str:
        who = ", ".join(shorten(name) for name in self.forget)
        return f"Forgetting {who}" if who else "The model as it is"

    def _legend(self) -> str:
        if len(self.seeds) == 1:
            return "in brackets: 95 % intervals"
        seeds = ", ".join(map(str, self.seeds))
        return f"means ± standard deviations over the seeds {seeds}"

    def _below(self) -> list[str]:
        left_out = [f"left out: {name}: {why}" for name, why in self.refused.items()]
        return [self._legend(), *left_out, *self.caveats]

    def _cells(self) -> list[list[str]]:
        """Return the headings and a line for each kind of model."""
        means = self.means
        attacked = any(m.measures["backdoor"] for m in means)
        columns: dict[str, Callable[[ModelMeans], str]] = {
            "method": self._name,
            "accuracy (%)": lambda m: self._share(m, "main"),
            "attack success (%)": lambda m: self._share(m, "backdoor"),
            "membership AUC": lambda m: _number(m.measures["mia_auc"], ".3f"),
            "distance": lambda m: _number(m.measures["distance"], ".3g"),
            "angle (°)": lambda m: _number(m.measures["angle_degrees"], ".1f"),
            "time": lambda m: _mean(m.measures["seconds"], show_seconds),
            "client calls": lambda m: _number(m.measures["client_calls"], ",.0f"),
            "history read": lambda m: _mean(m.measures["history_bytes"], show_bytes),
        }
        if not attacked:
            del columns["attack success (%)"]
        lines = [[show(m) for show in columns.values()] for m in means]
        return [list(columns), *lines]

    def _name(self, means: ModelMeans) -> str:
        num, total = len(means.seeds), len(self.seeds)
        missing = "" if num == total else f" ({num} of {total} seeds)"
        return shorten(means.method) + missing

    def _share(self, means: ModelMeans, name: str) -> str:
        spread = means.measures[name]
        if spread is None:
            return NOTHING
        shown = f"{100 * spread.mean:.1f}"
        if spread.std is not None:
            return f"{shown} ± {100 * spread.std:.1f}"
        [row] = [r for r in self.rows if r["method"] == means.method]
        interval = row[f"{name}_interval"]
        if interval is None or len(self.seeds) > 1:
            return shown
        return f"{shown} [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def compare(
    run: Place,
    forget: Sequence[ClientId] = (),
    *,
    methods: Sequence[str | Method] = SHOWN_BY_DEFAULT,
    damping: float | None = None,
    settings: Settings | None = None,
    seeds: Sequence[int] = (),
    say: Say = lambda what, done, total: None,
) -> ComparisonTable:
    """Forget clients of a run or ledger in every way asked for; return a table.

    It stays as it is. The table begins with the model before and, for a run, with a
    model that was retrained without the clients. A method that cannot be used here, or
    fails, is left out and named in `refused`; if none is left, that is an error.

    Args:
        run: Folder of a finished run, the summary that `train` returned, or a ledger
            beside which an `EvaluationSource` lies.
        forget: Clients to forget; by default a run's attackers that are still there.
        methods: Names of methods, or methods with their settings.
        damping: Damping of skew scalar, for every named method that takes it, as in
            `forget`; None for the methods' own.
        settings: Settings of methods, by name of the method and of the setting.
        seeds: Seeds whose runs are compared, the run's own among them. Runs that are
            missing are trained beside it, with the same configuration.
        say: Told how far it is.

    Raises:
        InvalidInputError: If the run is not finished, or something is named that there
            is not.
        UnlearnRefusedError: If no method can be used here.
    """
    folder = path_of(run)
    places = find_runs(folder, seeds) if seeds else {}

    def found_on(place: Path, names: Sequence[ClientId], say: Say) -> Comparison:
        return one_run.compare(
            place,
            names,
            methods=methods,
            damping=damping,
            settings=settings,
            say=say,
        )

    # First the run itself, so that a wrong name is told before others are trained.
    own_seed = next((s for s, place in places.items() if place == folder), None)
    own = found_on(folder, forget, say if own_seed is None else _of_seed(say, own_seed))
    if not places:
        return table_of(own)
    rows: dict[int, tuple[ModelRow, ...]] = {}
    refused: dict[int, Mapping[str, str]] = {}
    for seed, place in places.items():
        found = own
        if place != folder:
            told = _of_seed(say, seed)
            finish_run(folder, place, seed, told)
            found = found_on(place, own.forget, told)
        rows[seed], refused[seed] = rows_of(found), found.refused
    return ComparisonTable(
        rows=tuple(row for of_seed in rows.values() for row in of_seed),
        forget=own.forget,
        seeds=tuple(places),
        refused=_refused(refused),
        caveats=own.caveats,
        comparison=own,
    )


def table_of(comparison: Comparison) -> ComparisonTable:
    """Return the table of a comparison on one run."""
    return ComparisonTable(
        rows=rows_of(comparison),
        forget=comparison.forget,
        seeds=(comparison.seed,),
        refused=comparison.refused,
        caveats=comparison.caveats,
        comparison=comparison,
    )


def _of_seed(say: Say, seed: int) -> Say:
    return lambda what, done, total: say(f"seed {seed}: {what}", done, total)


def _refused(by_seed: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """Return why methods were left out; if only for some seeds, for which."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for own in by_seed.values() for name in own):
        seeds = [seed for seed, own in by_seed.items() if name in own]
        which = ", ".join(map(str, seeds))
        prefix = "" if len(seeds) == len(by_seed) else f"with seed {which}: "
        found[name] = prefix + by_seed[seeds[0]][name]
    return found


def _number(spread: Spread | None, form: str) -> str:
    if spread is None:
        return NOTHING
    shown = f"{spread.mean:{form}}"
    # The distance of a model to itself has no spread, and often a count has none.
    return f"{shown} ± {spread.std:{form}}" if spread.std else shown


def _mean(spread: Spread | None, show: Callable[[float], str]) -> str:
    return NOTHING if spread is None else show(spread.mean)


def _latex_line(cells: Sequence[str]) -> str:
    shown = ("".join(_LATEX_SIGNS.get(sign, sign) for sign in c) for c in cells)
    return " & ".join(shown) + r" \\"


def _written(text: str, path: Path | str | None) -> str:
    """Return a text; write it to a file if one is named.

    Raises:
        InvalidInputError: If the file cannot be written.
    """
    if path is not None:
        try:
            write_whole(Path(path), text)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidInputError(f"cannot write {path}: {reason}") from None
    return text
