"""Whether a killed writer loses anything, and whether a wrong byte is ever believed.

Three things: SIGKILL at random instants of appending and of forgetting with erasure;
random bytes flipped in every file of a ledger; and, because a kill cannot reveal a
missing sync, the order of system calls as `strace` sees it.

    python benchmarks/faults.py [--json] [--kills 200] [--flips 500] [--seed 0]

It exits with status 1 if anything was lost, believed or out of order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fault_flips import Flips, flip_bytes
from benchmarks.fault_kills import Kills, kill_appends, kill_erasures
from benchmarks.fault_order import check_order
from benchmarks.fault_writer import SHOWN
from benchmarks.measuring import machine, progress, work_folder, write_result


def main() -> None:
    """Run the three parts and print what came out."""
    arguments = parse_arguments()
    seed = arguments.seed
    with progress() as display, work_folder(arguments.folder) as folder:
        order = check_order(folder.resolve(), seed)
        appends = kill_appends(
            folder, arguments.kills - arguments.kills // 2, seed, display
        )
        erasures = kill_erasures(folder, arguments.kills // 2, seed, display)
        flips = flip_bytes(folder, arguments.flips, seed, display)
    violations = [*appends.problems, *erasures.problems]
    result = {
        "kills": appends.kills + erasures.kills,
        "lost": len(violations),
        "flips": flips.flips,
        "silent": flips.silent,
        "crashed": flips.crashed,
        "verify_missed": flips.verify_missed,
        "files_destroyed": flips.destroyed,
        "order": order,
        "append": appends.summary(),
        "erase": erasures.summary(),
        "flip": flips.summary(),
        "violations": violations[:SHOWN],
        "machine": machine(),
    }
    write_result(
        result,
        only_json=arguments.json,
        title="Faults: what they did",
        columns=("fault", "number", "of these"),
        rows=table_rows(appends, erasures, flips, order),
    )
    bad = len(violations) + flips.silent + flips.crashed
    bad += flips.verify_missed + flips.destroyed
    sys.exit(1 if bad or order not in ("ok", "no strace") else 0)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kills", type=int, default=200, help="kills in an operation")
    parser.add_argument("--flips", type=int, default=500, help="bytes to flip")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    parser.add_argument("--folder", type=Path, help="where ledgers are put; on a disk")
    return parser.parse_args()


def table_rows(
    appends: Kills, erasures: Kills, flips: Flips, order: str
) -> list[tuple[str, str, str]]:
    """Return the lines of the table."""
    rows = []
    for name, kills in (("append", appends), ("forget and erase", erasures)):
        rows += [
            (f"kills during {name}", str(kills.kills), ""),
            ("", str(kills.unacknowledged), "committed, not yet acknowledged"),
            ("", str(len(kills.problems)), "violations"),
        ]
    rows += [
        ("flipped bytes", str(flips.flips), ""),
        ("", str(flips.detected), "refused by an error"),
        ("", str(flips.harmless), "without effect on any answer"),
        ("", str(flips.silent), "silently wrong"),
        ("", str(flips.crashed), "some other exception"),
        ("", str(flips.verify_missed), "missed by verify"),
        ("", str(flips.destroyed), "made a writer remove files"),
        ("order of system calls", order, ""),
    ]
    return rows


if __name__ == "__main__":
    main()
