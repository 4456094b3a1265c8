"""Every option of a run, with its default; kept as TOML beside the run."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fastfedul.data.attacks.backdoor import Attack, parse_attackers
from fastfedul.data.partition import Partition, client_name
from fastfedul.errors import InvalidInputError
from fastfedul.federation.rounds import Schedule
from fastfedul.federation.trainer import LocalTraining
from fastfedul.files import write_whole
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from fastfedul.records import ClientId

CONFIG = "config.toml"
"""The file of a run that has its options."""

LAST_OPTION = "forget"
"""Is always written, after all others: without it a file was cut."""
_PARTS = (
    *("local", "schedule", "split", "policy", "budget_bytes", "poisoning"),
    "forgetting",
)
_ATTACK_OPTIONS = ("attackers", "poison_ratio", "target_label", "attack_scale")
_UNITS = {
    **{"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run does; with nothing set, ten clients learn digits in seconds.

    Attributes:
        data: Name of a data set, or path of an `.npz` file.
        train_size: How many training images to use; None for all.
        clients: How many clients there are, called `client-0`, `client-1`, ...
        per_round: How many are drawn for a round; None for all.
        rounds: How many rounds the whole run has.
        epochs: How often a client goes through its images in a round.
        batch_size: Images of a step.
        lr: Learning rate.
        momentum: That of the clients' SGD.
        weight_decay: That of the clients' SGD.
        partition: `iid`, `dirichlet:B` or `level:R`.
        attack: `none`, `pixel`, `edge-case` or `label-flip`.
        attackers: How many, or names with commas; None for one if there is an attack.
        poison_ratio: Share of poisoned images; None for the usual one of the attack.
        target_label: Class the attackers want; None for the usual one of the attack.
        attack_scale: What attackers multiply their updates by.
        weighting: `size` or `equal`.
        dropout: Probability that a client misses a round.
        server_images: Clean images set aside for the server before splitting.
        keep: Which updates the ledger keeps: `all`, `optimal:M`, `top:M`, `uniform:M`;
            or `sums`: a sum per client and a few differences of two clients.
        keep_use: `store`: everybody counts; `aggregate`: only what is kept.
        store: How the ledger stores updates, or those differences.
        budget: Bytes the ledger may take, such as `10GB`; None for any number.
        model: `auto`, a built-in network, or `package.module:function`.
        seed: Seed of everything.
        workers: Processes; None for as many as pay. The results do not depend on it.
        forget: `CLIENT@ROUND`: forget the client before that round starts.
    """

    data: str = "digits"
    train_size: int | None = None
    clients: int = 10
    per_round: int | None = None
    rounds: int = 20
    epochs: int = 2
    batch_size: int = 32
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    partition: str = "iid"
    attack: str = "none"
    attackers: str | None = None
    poison_ratio: float | None = None
    target_label: int | None = None
    attack_scale: float = 1.0
    weighting: str = "size"
    dropout: float = 0.0
    server_images: int = 0
    keep: str = "all"
    keep_use: str = "store"
    store: str = "float32"
    budget: str | None = None
    model: str = "auto"
    seed: int = 0
    workers: int | None = None
    forget: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("clients", "rounds", "train_size", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise InvalidInputError(f"--{option} is {value}; choose 1 or more")
        if self.seed < 0:
            raise InvalidInputError(f"--seed is {self.seed}; choose 0 or more")
        if self.per_round is not None and self.per_round > self.clients:
            raise InvalidInputError(
                f"--per-round is {self.per_round} but there are {self.clients} clients;"
                f" choose 1 to {self.clients}"
            )
        if self.store not in STORAGE_DTYPES:
            raise InvalidInputError(
                f"--store is {self.store!r}; choose {', '.join(STORAGE_DTYPES)}"
            )
        self._check_attack()
        for part in _PARTS:
            getattr(self, part)

    def _check_attack(self) -> None:
        """Raise if something is said about an attack that there is not."""
        for field in fields(self):
            about_it = field.name in _ATTACK_OPTIONS
            given = about_it and getattr(self, field.name) != field.default
            if given and self.attack == "none":
                raise InvalidInputError(
                    f"--{field.name.replace('_', '-')} needs an attack; add --attack "
                    "pixel, edge-case or label-flip"
                )

    @property
    def names(self) -> tuple[ClientId, ...]:
        """Names of all clients."""
        return tuple(client_name(number) for number in range(self.clients))

    @property
    def local(self) -> LocalTraining:
        """How a client trains."""
        return LocalTraining(
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    @property
    def schedule(self) -> Schedule:
        """Who takes part in a round."""
        return Schedule(
            seed=self.seed,
            per_round=self.per_round,
            dropout=self.dropout,
            weighting=self.weighting,  # type: ignore[arg-type]
        )

    @property
    def split(self) -> Partition:
        """How the images are split among the clients."""
        return Partition.parse(self.partition)

    @property
    def policy(self) -> Keep:
        """Which updates the ledger keeps."""
        use: Any = self.keep_use
        return Keep.parse(self.keep, use=use, seed=self.seed)

    @property
    def budget_bytes(self) -> int | None:
        """Bytes the ledger may take."""
        return None if self.budget is None else parse_bytes(self.budget)

    @property
    def poisoning(self) -> Attack:
        """What the attackers do."""
        kind: Any = self.attack
        several = "1" if self.attackers is None else self.attackers
        wanted = "0" if kind == "none" else several
        return Attack(
            kind=kind,
            attackers=parse_attackers(wanted, self.names),
            poison_ratio=self.poison_ratio,
            target_label=self.target_label,
            scale=self.attack_scale,
        )

    @property
    def forgetting(self) -> dict[ClientId, int]:
        """Before which round each client is to be forgotten."""
        found: dict[ClientId, int] = {}
        for text in self.forget:
            client, _, number = text.rpartition("@")
            if number.isdecimal() and client and client not in self.names:
                raise InvalidInputError(
                    f"--forget {text!r}: there is no client {client!r}; they are "
                    f"{self.names[0]} to {self.names[-1]}"
                )
            if client not in self.names or not number.isdecimal():
                raise InvalidInputError(
                    f"cannot read --forget {text!r}; write CLIENT@ROUND, such as "
                    f"{self.names[0]}@{max(1, self.rounds // 2)}"
                )
            if not 1 <= int(number) <= self.rounds:
                raise InvalidInputError(
                    f"--forget {text}: a client can be forgotten before round 1 to "
                    f"{self.rounds}"
                )
            if client in found:
                raise InvalidInputError(f"--forget names {client} twice; name it once")
            found[client] = int(number)
        if len(found) == self.clients:
            raise InvalidInputError(
                "--forget names all clients, and nobody would be left to train with"
            )
        return found

    def to_toml(self) -> str:
        """Return the options as TOML; those that are None are left out."""
        lines = ["# fastfedul run"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                lines.append(f"{field.name.replace('_', '-')} = {_toml_value(value)}")
        return "\n".join(lines) + "\n"

    def save(self, path: Path) -> None:
        """Write the options to a file, whole or not at all."""
        write_whole(path, self.to_toml())


def read_options(path: Path) -> dict[str, Any]:
    """Return the options that a TOML file sets, checked for names and types.

    Raises:
        InvalidInputError: If the file cannot be read or sets something unknown.
    """
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is not valid TOML: {error}") from None
    return dict(_checked(found, path))


def parse_bytes(text: str) -> int:
    """Return a number of bytes written with or without a unit.

    >>> parse_bytes("10GB"), parse_bytes("1.5 MiB"), parse_bytes("4096")
    (10000000000, 1572864, 4096)
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].lower() not in _UNITS or len(text) > 40:
        raise InvalidInputError(
            f"cannot read the budget {text!r:.40}; write 500MB, 10GB or 2GiB"
        )
    value = int(float(found[1]) * _UNITS[found[2].lower()])
    if not 1 <= value < 2**63:
        choose = "more" if value < 1 else "less"
        raise InvalidInputError(f"the budget is {text!r:.40}; choose {choose}")
    return value


def findable(data: str) -> str:
    """Return a name as it is, and a path so that it holds in any working folder."""
    if data.endswith(".npz") or "/" in data:
        return str(Path(data).expanduser().absolute())
    return data


def _checked(found: Mapping[str, Any], path: Path) -> list[tuple[str, Any]]:
    types = get_type_hints(RunConfig)
    checked = []
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            raise InvalidInputError(f"{path}: there is no option {key!r}{hint}")
        allowed = get_args(types[name]) or (types[name],)
        if name == "forget":
            ok = isinstance(value, list) and all(isinstance(v, str) for v in value)
            value = tuple(value) if ok else value
        elif float in allowed and type(value) is int:
            ok, value = True, float(value)
        elif name == "attackers" and type(value) is int:
            ok, value = True, str(value)
        else:
            ok = type(value) in allowed
        if not ok:
            wanted = "a list of text" if name == "forget" else _wanted(allowed)
            raise InvalidInputError(f"{path}: {key} is {value!r}, not {wanted}")
        checked.append((name, value))
    return checked


def _wanted(allowed: tuple[Any, ...]) -> str:
    words = {int: "a whole number", float: "a number", str: "text"}
    return next(words[kind] for kind in allowed if kind in words)


def _toml_value(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
