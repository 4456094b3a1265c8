"""`fastfedul.compare` from Python: rows, frame, figure, notebook, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("torch", reason="training needs the extra torch")

import fastfedul as ff
from fastfedul.errors import MissingPackageError
from fastfedul.report.model_rows import COLUMNS
from fastfedul.runs.training import RunSummary

EVIL = "<script>alert('&')</script>_50%"


@dataclass(frozen=True)
class Nothing:
    """Leaves the model as it is."""

    name: str = "nothing"
    needs: ClassVar[ff.Needs] = ff.Needs()

    def __call__(self, request: ff.UnlearnRequest) -> ff.UnlearnResult:
        return ff.UnlearnResult(params=request.ledger.final.params, clients=())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    config = ff.RunConfig.from_options(
        clients=3, rounds=3, epochs=1, train_size=200, attack="pixel", workers=1
    )
    return ff.train(config, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def table(run: RunSummary) -> ff.ComparisonTable:
    """With names, methods of our own, two of one name, and a name of a stranger."""
    damped = ff.FastFedUL(skew=ff.Scalar(0.2))
    methods: list[str | ff.Method] = ["fast-fedul", damped, "kd", Nothing(EVIL)]
    return ff.compare(run, forget=["client-0"], methods=methods)


@pytest.fixture(scope="module")
def over_seeds(run: RunSummary) -> ff.ComparisonTable:
    return ff.compare(run.path, methods=["fast-fedul", Nothing()], seeds=[0, 1])


def test_a_run_is_what_train_returned_or_its_path(
    run: RunSummary, table: ff.ComparisonTable
) -> None:
    for look in (ff.trace, ff.contributions, ff.audit):
        with pytest.raises(ff.InvalidInputError, match="a path is text"):
            look(7, "client-0")  # type: ignore[arg-type]
    worth = ff.contributions(run)
    assert {one.client for one in worth.clients} == set(run.clients)
    assert ff.trace(run, backdoor=1).clients
    for place in (run.path, str(run.path)):
        found = ff.compare(place, methods=["fast-fedul"])
        assert found.forget == ("client-0",)
        wanted = [row["main"] for row in table.rows[:3]]
        assert [row["main"] for row in found.rows] == wanted


def test_each_method_has_a_row_also_if_two_have_one_name(
    table: ff.ComparisonTable,
) -> None:
    names = ["before", "retrained", "fast-fedul", "fast-fedul, damping 0.2", EVIL]
    assert [row["method"] for row in table.rows] == names
    assert {row["seed"] for row in table.rows} == {0}
    *_, usual, damped, same = table.rows
    assert damped["settings"]["damping"] == 0.2
    assert usual["distance"] != damped["distance"]
    assert same["main"] == table.rows[0]["main"]
    assert list(table.refused) == ["kd"]


def test_a_frame_has_one_number_in_each_cell(
    table: ff.ComparisonTable, over_seeds: ff.ComparisonTable
) -> None:
    pytest.importorskip("polars", reason="data frames need the extra report")
    frame = table.to_frame()
    assert frame.columns == list(COLUMNS)
    assert frame["method"].to_list() == [row["method"] for row in table.rows]
    assert frame["main_successes"].to_list() == [r["main_count"][0] for r in table.rows]
    assert frame["backdoor_high"].to_list() == [
        row["backdoor_interval"][1] for row in table.rows
    ]
    assert frame["seconds"][0] is None
    assert over_seeds.to_frame()["seed"].to_list() == [0] * 4 + [1] * 4


def test_csv_holds_every_row(table: ff.ComparisonTable, tmp_path: Path) -> None:
    text = table.to_csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text() == text
    lines = list(csv.DictReader(io.StringIO(text)))
    assert list(lines[0]) == list(COLUMNS)
    assert [line["method"] for line in lines] == [r["method"] for r in table.rows]
    assert [float(line["kl"]) for line in lines] == [r["kl"] for r in table.rows]
    with pytest.raises(ff.InvalidInputError, match="cannot write "):
        table.to_csv(tmp_path / "missing" / "rows.csv")


def test_latex_escapes_names(table: ff.ComparisonTable, tmp_path: Path) -> None:
    text = table.to_latex(tmp_path / "table.tex")
    assert (tmp_path / "table.tex").read_text() == text
    evil = r"\textless{}script\textgreater{}alert('\&')"
    assert f"{evil}\\textless{{}}/script\\textgreater{{}}\\_50\\% & " in text
    body = text.partition("\\toprule\n")[2].partition("\\bottomrule")[0]
    lines = [line for line in body.splitlines() if line != "\\midrule"]
    assert len(lines) == 1 + len(table.rows)
    for line in lines:
        assert line.replace(r"\&", "").count("&") == 8
        assert line.endswith(r" \\")


def test_a_notebook_shows_a_table_with_every_text_escaped(
    table: ff.ComparisonTable,
) -> None:
    shown = table._repr_html_()
    tags: list[str] = []
    texts: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.append(tag)

        def handle_data(self, data: str) -> None:
            texts.append(data)

    Reader(convert_charrefs=True).feed(shown)
    assert set(tags) <= {*("table", "caption", "thead", "tbody", "tr", "th", "td", "p")}
    assert EVIL in texts
    assert "Forgetting client-0" in texts
    assert any(text.startswith("left out: kd: ") for text in texts)
    assert tags.count("td") == 9 * len(table.rows)
    stranger = replace(table, forget=("<b>",), refused={"<i>": "<u>"}, caveats=("<s>",))
    assert "<b>" not in stranger._repr_html_()
    for tag in ("<i>", "<u>", "<s>"):
        assert tag not in stranger._repr_html_()


def test_a_console_shows_the_same_numbers(
    table: ff.ComparisonTable, over_seeds: ff.ComparisonTable
) -> None:
    lines = repr(table).splitlines()
    assert lines[0] == "Forgetting client-0"
    [line] = [line for line in lines if line.startswith("retrained")]
    low, high = table.rows[1]["main_interval"]
    main = 100 * table.rows[1]["main"]
    assert f" {main:.1f} [{100 * low:.1f}, {100 * high:.1f}] " in line
    [line] = [li for li in repr(over_seeds).splitlines() if li.startswith("fast-fedul")]
    first, second = (
        100 * r["main"] for r in over_seeds.rows if r["method"] == "fast-fedul"
    )
    std = abs(first - second) / 2**0.5
    assert f" {(first + second) / 2:.1f} ± {std:.1f} " in line


def test_a_figure_has_a_bar_for_each_model_and_shows_itself(
    table: ff.ComparisonTable, over_seeds: ff.ComparisonTable
) -> None:
    pytest.importorskip("matplotlib", reason="charts need the extra report")
    for found in (table, over_seeds):
        figure = found.plot()
        [axes] = figure.axes
        widths = [bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]
        means = found.means
        assert len(widths) == 2 * len(means)
        mains = [m.measures["main"] for m in means]
        assert widths[: len(means)] == [m.mean for m in mains if m]
        # A notebook asks a figure of no window for this.
        png: Callable[[], bytes] = figure._repr_png_  # type: ignore[attr-defined]
        assert png().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("polars", lambda table: table.to_frame()),
        ("matplotlib", lambda table: table.plot()),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str,
    use: Callable[[ff.ComparisonTable], object],
    table: ff.ComparisonTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (package, f"{package}.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError) as caught:
        use(table)
    assert package in str(caught.value)
    assert "pip install 'fastfedul[report]'" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"forget": "client-0"}, r"a list of names is wanted: \['client-0'\]"),
        ({"forget": 3}, "clients are a list of names, not 3"),
        ({"forget": [3]}, "a client name is text, not 3"),
        ({"methods": "fast-fedul"}, "methods are a list .*, not 'fast-fedul'"),
        ({"methods": None}, "methods are a list .*, not None"),
        ({"settings": [1]}, "settings are a mapping for each method"),
        ({"settings": {"fast-fedul": 3}}, "settings are a mapping for each method"),
        ({"settings": {"fast-fedul": {3: 1}}}, "no such setting: 3"),
        ({"seeds": 3}, "seeds are a list of numbers, not 3"),
        ({"seeds": "01"}, "seeds are a list of numbers, not '01'"),
        ({"run": 3}, "a path is text, .* returned, not 3"),
        ({"methods": [Nothing]}, "it is a class; make an object"),
        ({"methods": [3]}, "3 is no method"),
        ({"seeds": [1]}, "has seed 0, which must be among the seeds; choose 0,1"),
        ({"seeds": [0, -1]}, "a seed is a whole number, 0 or more, not -1"),
    ],
)
def test_wrong_arguments_get_one_line(
    options: dict[str, object], reason: str, run: RunSummary
) -> None:
    with pytest.raises(ff.InvalidInputError, match=reason):
        ff.compare(**{"run": run, **options})  # type: ignore[arg-type]
