"""`python -m paper.pages`, from the root of the repository: docs/results made anew.

Every page, table and figure there comes from `results/*.jsonl`. Nothing is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fastfedul.errors import FastFedULError
from paper import server_rules
from paper.board.page import write_page
from paper.cells import CellStore
from paper.experiments import EXPERIMENTS, lines_of
from paper.writing import write

RESULTS = Path("results")
PAGES = Path("docs/results")

_ONE_SEED = ("non-iid", "criteria")
_NOT_PUBLISHED = ("history",)
"""Experiments whose cells are not all there."""
SEEDS = {
    name: 1 if name in _ONE_SEED else 3
    for name in EXPERIMENTS
    if name not in _NOT_PUBLISHED
}
"""Seeds of each published experiment of the paper."""


def write_pages(results: Path, out: Path) -> Iterator[Path]:
    """Write every published page with its table and figures; yield each file.

    Args:
        results: Folder with the `.jsonl` files.
        out: Folder for the pages.

    Raises:
        FastFedULError: If a result cannot be read or a file cannot be written.
    """
    store = CellStore(results)
    for name, num_seeds in SEEDS.items():
        lines = lines_of(name, "standard", num_seeds)
        yield from write(name, "standard", lines, store, out)
    yield from write_page(results / "board.jsonl", out)
    yield from server_rules.write_page(results / "server-rules.jsonl", out)


def main() -> int:
    """Write the repository's own pages; return the exit code."""
    try:
        for path in write_pages(RESULTS, PAGES):
            print(path)
    except FastFedULError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
