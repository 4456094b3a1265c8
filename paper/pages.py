"""`python -m paper.pages`, from the root of the repository: docs/results made anew.

Every page, table and figure there comes from `results/*.jsonl`. Nothing is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fastfedul.errors import FastFedULError
from paper import audits, buffers, missing, server_rules
from paper.board.page import write_page
from paper.cells import CellStore
from paper.experiments import lines_of
from paper.settings import Scale
from paper.short import write_short
from paper.tracing import page as tracing_page
from paper.writing import write

RESULTS = Path("results")
PAGES = Path("docs/results")

_STANDARD = (
    *("edge-case", "pixel", "non-iid", "ablation", "damping", "deviation", "cost"),
    *("sampling", "criteria", "sign", "bound", "lemma"),
)
_DIGITS = ("ablation", "sign", "bound", "lemma", "epochs", "non-iid")
_PAPERS = ("edge-case", "pixel", "ablation", "deviation", "sign", "bound")
PUBLISHED: tuple[tuple[str, Scale, int], ...] = (
    *((name, "standard", 3) for name in _STANDARD),
    *((name, "smoke", 3) for name in _DIGITS),
    *((name, "paper", 1) for name in _PAPERS),
)
"""Published experiments: name, scale and number of seeds.

The pages of scale `standard` stand in the folder itself, all others in a folder with
the name of their scale.
"""


def folder_of(scale: Scale, out: Path) -> Path:
    """Return the folder for the pages of a scale."""
    return out if scale == "standard" else out / scale


def write_pages(results: Path, out: Path) -> Iterator[Path]:
    """Write every published page with its table and figures; yield each file.

    Args:
        results: Folder with the `.jsonl` files.
        out: Folder for the pages.

    Raises:
        FastFedULError: If a result cannot be read or a file cannot be written.
    """
    store = CellStore(results)
    for name, scale, num_seeds in PUBLISHED:
        lines = lines_of(name, scale, num_seeds)
        yield from write(name, scale, lines, store, folder_of(scale, out))
    yield from missing.write_page(PUBLISHED, store, out)
    yield from write_short(store, out / "README.md")
    yield from write_page(results / "board.jsonl", out)
    yield from server_rules.write_page(results / "server-rules.jsonl", out)
    yield from buffers.write_page(results / "buffers.jsonl", out)
    yield from tracing_page.write_page(results, out)
    yield from audits.write_page(results / "audit.jsonl", out)


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
