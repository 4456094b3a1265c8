"""`fastfedul forget`: take clients out of the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastfedul.cli.method_options import (
    AlternateFlag,
    DampingNumber,
    SkewName,
    chosen_skew,
)
from fastfedul.cli.output import (
    JsonFlag,
    err,
    out,
    print_facts,
    print_json,
    show_bytes,
    show_name,
    show_seconds,
    warn,
)
from fastfedul.cli.request import UNSIGNED
from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.forgetting.certificates import (
    certificate_path,
    certificates_folder,
    write_certificates,
)
from fastfedul.forgetting.service import commit, erase, settings_of
from fastfedul.forgetting.signing import SigningKey, find_key
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.protocol import require_known
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.model_files import model_written
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.removal import Removal
from fastfedul.methods.protocol import UnlearnRequest
from fastfedul.params import norm
from fastfedul.records import ClientId, Model
from fastfedul.runs.config import CONFIG, RunConfig, read_options
from fastfedul.runs.model_file import run_model_written

if TYPE_CHECKING:
    from fastfedul.runs.validation import Validation

NOT_A_SAMPLE = (
    "single samples cannot be forgotten: the server only ever saw a client's update as "
    "a whole; forget the client, and let it join again under another name once it has "
    "dropped the samples"
)


def forget_clients(
    path: Annotated[
        Path,
        typer.Argument(help="A ledger, or a run that contains one.", metavar="PATH"),
    ],
    clients: Annotated[
        list[str], typer.Argument(help="Whom to forget.", metavar="CLIENT...")
    ],
    skew: SkewName = None,
    damping: DampingNumber = None,
    alternate: AlternateFlag = False,
    validation: Annotated[
        Path | None,
        typer.Option(
            help="Clean images of your own, an .npz file with images and, if known, "
            "labels: says how the cleaned model does on them. Never use the leaver's "
            "images.",
            metavar="FILE.npz",
        ),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            help="With --validation: write nothing if more than this share is lost.",
            show_default=False,
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="With --validation and a ledger that is in no run: its network, "
            "package.module:function.",
        ),
    ] = None,
    minimum_coverage: Annotated[
        float,
        typer.Option(help="Refuse if less of a client's share in the model was kept."),
    ] = 0.2,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Change nothing in the ledger; --out is still written."
        ),
    ] = False,
    erase_history: Annotated[
        bool,
        typer.Option(
            "--erase/--keep-history",
            help="Also rewrite the history as if the clients had never been there, and "
            "remove their updates from the disk.",
        ),
    ] = False,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Write the cleaned model to this .safetensors file."
        ),
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(help="Not possible; explains why.", hidden=True),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Take clients out of the model, without data, training or their help.

    The cleaned model becomes the ledger's current model, and the clients are refused
    from then on. Their updates stay in the ledger unless you add **--erase**;
    that can also be done later, with the same command. A certificate says what was
    done; **fastfedul verify** checks it.

    Example: `fastfedul forget my-ledger hospital-7 --out clean.safetensors`
    """
    if sample:
        raise InvalidInputError(NOT_A_SAMPLE)
    names = tuple(sorted(set(clients)))
    for option, value in (
        ("--max-drop", max_drop),
        ("--model", network),
    ):
        if value is not None and validation is None:
            raise InvalidInputError(f"{option} needs --validation FILE.npz")
    if not 0 <= (max_drop or 0.0) <= 1:
        raise InvalidInputError(f"--max-drop is a share from 0 to 1, not {max_drop}")
    method = FastFedUL(
        skew=chosen_skew(skew, damping, alternate=alternate),
        minimum_coverage=minimum_coverage,
    )
    key = None if dry_run else find_key()
    opened = LedgerReader(path) if dry_run else DiskLedger(path)
    with opened as ledger:
        _check_place(out_file, ledger.path)
        _check_took_part(ledger, names)
        require_known(ledger, names)
        states = {name: ledger.clients()[name].state for name in names}
        late = [name for name in names if states[name] == "forgotten"]
        if late and not erase_history:
            raise InvalidInputError(
                f"client {late[0]!r:.80} was forgotten before; add --erase to remove "
                "its history too"
            )
        if late and len(late) < len(names):
            raise InvalidInputError(
                f"client {late[0]!r:.80} was forgotten before and others were not; "
                "erase it with a command of its own"
            )
        if late:
            facts = _erase_only(ledger, names, out_file)
        else:
            images = None
            if validation is not None:
                # Needs the extra `torch`, which forgetting otherwise does not.
                from fastfedul.runs.validation import open_validation

                images = open_validation(validation, ledger, path, network)
            checks = _Checks(images, max_drop)
            facts = _forget(ledger, names, method, checks, erase_history, out_file)
        inside = None if dry_run else str(ledger.model_path)
        facts["model"] = str(out_file) if out_file else inside
        facts["certificate"] = None if dry_run else _certify(ledger, key)
    facts["signed"] = key is not None
    facts |= {"erased": erase_history and not dry_run, "dry_run": dry_run}
    if json:
        print_json(facts)
    else:
        _show(facts)


def _check_took_part(ledger: LedgerReader, names: Sequence[ClientId]) -> None:
    """Raise if a client of the run never took part; the nearest name is another's."""
    config = ledger.path.parent / CONFIG
    known = ledger.clients()
    unknown = [name for name in names if name not in known]
    if not unknown or not config.is_file():
        return
    members = RunConfig(**read_options(config)).names
    for name in unknown:
        if name in members:
            raise InvalidInputError(
                f"client {name!r:.80} never took part in a round, so the model has "
                "nothing of it to forget"
            )


def _check_place(out_file: Path | None, ledger: Path) -> None:
    """Raise if the model would be written over what belongs to a ledger or run."""
    if out_file is None:
        return
    place, inside = out_file.resolve(), ledger.resolve()
    run = inside.parent / CONFIG
    of_run = run.is_file() and place.parent == inside.parent and place.exists()
    if place.is_relative_to(inside) or of_run:
        raise InvalidInputError(
            f"--out {out_file} is a place of the run or ledger itself; choose another"
        )
    if out_file.suffix != ".safetensors":
        raise InvalidInputError(
            f"--out {out_file} must end in .safetensors, the format that is written"
        )


@dataclass(frozen=True, slots=True)
class _Checks:
    """What a result must pass before it is written.

    Attributes:
        images: Clean images of the server's own; None for none.
        max_drop: Share of them that may be lost; None for any.
    """

    images: Validation | None
    max_drop: float | None

    def judge(self, before: Model, after: Model) -> dict[str, Any] | None:
        """Return how the cleaned model does on the images.

        Raises:
            UnlearnRefusedError: If it loses too many.
        """
        if self.images is None:
            return None
        found = self.images.judge(before, after)
        if self.max_drop is not None and found.drop > self.max_drop:
            raise UnlearnRefusedError(
                f"the cleaned model loses {found.drop:.1%} of the validation images, "
                f"more than the {self.max_drop:.1%} of --max-drop; nothing was written"
            )
        return asdict(found)


def _forget(
    ledger: LedgerReader,
    names: Sequence[ClientId],
    method: FastFedUL,
    checks: _Checks,
    erase_history: bool,
    out_file: Path | None,
) -> dict[str, Any]:
    with err().status("reading the history"):
        result = method(UnlearnRequest(ledger, frozenset(names)))
        cleaned = Model(result.params, ledger.final.buffers)
        judged = checks.judge(ledger.final, cleaned)
    writing = model_written(out_file, cleaned) if out_file else nullcontext()
    with writing:
        if isinstance(ledger, DiskLedger):
            with (
                run_model_written(ledger.path, cleaned),
                err().status("writing the ledger"),
            ):
                commit(ledger, method, result, erase=erase_history)
    return {**_facts(result), "validation": judged}


def _certify(ledger: LedgerReader, key: SigningKey | None) -> str:
    folder = certificates_folder(ledger.path)
    write_certificates(ledger, folder, key)
    return str(certificate_path(folder, ledger.log()[-1]))


def _erase_only(
    ledger: LedgerReader, names: Sequence[ClientId], out_file: Path | None
) -> dict[str, Any]:
    rounds = {update.round for name in names for update in ledger.updates_of(name)}
    # The model was cleaned when they were forgotten; it is handed out as it is.
    writing = model_written(out_file, ledger.final) if out_file else nullcontext()
    with writing:
        if isinstance(ledger, DiskLedger):
            with err().status("rewriting the history"):
                erase(ledger, names)
    unknown = (
        "coverage",
        "skew",
        "damping",
        "bound",
        "lipschitz",
        "seconds",
        "bytes_read",
        "validation",
    )
    return {
        "clients": list(names),
        "rounds": len(rounds),
        "delta_norm": 0.0,
        "warnings": [],
        **dict.fromkeys(unknown),
    }


def _facts(result: Removal) -> dict[str, Any]:
    seen = result.reaction
    return {
        "clients": list(result.clients),
        "rounds": result.rounds,
        "coverage": result.coverage,
        "coverage_by_client": dict(result.coverage_by_client),
        "damping": None,
        **settings_of(result),
        "removed_by_layer": dict(seen.removed_by_layer) if seen else None,
        "delta_norm": norm(result.delta.flat),
        "standard_error": result.standard_error,
        "bound": result.bound.value,
        "lipschitz": result.bound.lipschitz,
        "lipschitz_source": result.bound.source,
        "seconds": result.seconds,
        "bytes_read": result.bytes_read,
        "warnings": list(result.warnings),
    }


def _show(facts: dict[str, Any]) -> None:
    for text in facts["warnings"]:
        warn(text)
    names = ", ".join(show_name(name) for name in facts["clients"])
    rows = [("rounds taken part in", str(facts["rounds"]))]
    if facts["coverage"] is not None:
        rows += [
            ("kept of their share", f"{facts['coverage']:.1%}"),
            ("skew", _skew(facts)),
            *([("validation", _validation(facts["validation"]))]
              if facts["validation"] else []),
            ("model moved by", f"{facts['delta_norm']:.4g} (Euclidean norm)"),
            ("standard error", _or_none(facts["standard_error"])),
            ("bound of Theorem 1", _or_none(facts["bound"]) + _caveat(facts)),
            ("read", f"{show_bytes(facts['bytes_read'])} in "
                     f"{show_seconds(facts['seconds'])}"),
        ]  # fmt: skip
    rows.append(("model", facts["model"] or "not written"))
    if facts["certificate"]:
        note = "" if facts["signed"] else f" ({UNSIGNED})"
        rows.append(("certificate", facts["certificate"] + note))
    verb = "Would forget" if facts["dry_run"] else "Forgot"
    print_facts(f"{verb} {names}", rows)
    if facts["dry_run"]:
        note = "Dry run: the ledger is unchanged."
    elif facts["erased"]:
        note = "History erased: what this ledger kept of them is gone."
    else:
        note = (
            "History kept: what this ledger keeps of them is still there; "
            "the same command with --erase removes it."
        )
    out().print(note, markup=False)


def _skew(facts: dict[str, Any]) -> str:
    if facts["skew"] == "none":
        return "not taken into account"
    if facts["skew"] == "scalar":
        damping = facts["damping"]
        number = "per round" if isinstance(damping, list) else f"{damping:g}"
        odd = ", every other round" if facts["damped"] == "alternate" else ""
        return f"scalar, damping {number}{odd}"
    used = facts["used"]
    many = f"from {used['updates']} updates of clients that stay" + (
        f", along {used['directions']} directions" if used["updates"] else ""
    )
    return f"{facts['skew']}, {many}"


def _validation(found: dict[str, Any]) -> str:
    low, high = (f"{100 * end:.1f}" for end in found["interval"])
    if found["right_before"] is None:
        return (
            f"{found['changed']} of {found['total']} images change class, "
            f"{found['drop']:.1%} [{low} to {high}]"
        )
    return (
        f"{found['right_before']} of {found['total']} images right before, "
        f"{found['right_after']} after: {100 * found['drop']:.1f} points lost "
        f"[{low} to {high}]"
    )


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _caveat(facts: dict[str, Any]) -> str:
    if facts["bound"] is None:
        return f" ({facts['lipschitz_source']})"
    return (
        f" with K = {facts['lipschitz']:.3g}; loose, and not a guarantee of forgetting"
    )
