"""The configuration of a run: every option with its default, its limits and its help.

The command line, the TOML file of a run and Python code read the same fields. In
Python and in TOML the options stand in parts (`data`, `local`, ...). On the command
line they are flat: `--attack-scale` is the field `scale` of the part `attack`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fastfedul.data.attacks.backdoor import Attack, Kind, parse_attackers
from fastfedul.data.partition import Partition, client_name
from fastfedul.data.sources import DEFAULT, find_source, is_path
from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import MEAN, named_rule
from fastfedul.federation.rounds import Schedule, Weighting
from fastfedul.federation.server_optimizers import DEFAULTS as OPTIMIZERS
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.federation.trainer import AUTO, LocalTraining
from fastfedul.files import read_regular_text, write_whole
from fastfedul.forgetting.folder import RUN_CONFIG as CONFIG
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.settings import check_federation
from fastfedul.methods.fast_fedul.skews import Kronecker
from fastfedul.methods.protocol import Method, method_settings
from fastfedul.methods.registry import DEFAULT_METHOD, find_method
from fastfedul.records import ClientId, KeepUse, StorageDtype
from fastfedul.runs import help_texts
from fastfedul.runs.options import (
    Option,
    Options,
    flag_of,
    flatten_options,
    nest_options,
    option_fields,
)

__all__ = ["CONFIG", "RunConfig", "findable", "parse_bytes"]

NUM_CLIENTS = 10
"""How many clients share data that nobody owns yet, unless the options say it."""

_OF_OPTIMIZER = "usual for the optimizer"

_BEGIN, _END = "# fastfedul run", "# end of the configuration"
_UNITS = {
    **{"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40},
}


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return a validator that refuses a text that cannot be parsed."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


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


def _to_text(value: object) -> object:
    """Return a whole number as text: `attackers = 2` and `"2"` mean the same."""
    return str(value) if type(value) is int else value


def _check_source(text: str) -> None:
    """Raise if no data set has this name; a path may name a file to come."""
    if not is_path(text):
        find_source(text)


_SourceText = Annotated[str, _parsed_by(_check_source)]
_PartitionText = Annotated[str, _parsed_by(Partition.parse)]
_KeepText = Annotated[str, _parsed_by(Keep.parse)]
_AggregationText = Annotated[str, _parsed_by(lambda name: named_rule(name, {}))]
_FederationText = Annotated[str, _parsed_by(check_federation)]
_BytesText = Annotated[str, _parsed_by(parse_bytes)]


class DataOptions(Options):
    """The examples, and how the clients share them."""

    main_field = "source"

    source: Annotated[_SourceText, Option(name="data", metavar="NAME|FILE")] = Field(
        default=DEFAULT, description="Data set, or an .npz file of your own."
    )
    train_size: Annotated[int | None, Option(unset="all")] = Field(
        default=None, ge=1, description="Use so many training examples."
    )
    clients: Annotated[
        int | None, Option(unset=f"{NUM_CLIENTS}, or as in the file")
    ] = Field(default=None, ge=1, description="How many clients.")
    partition: Annotated[
        _PartitionText | None,
        Option(metavar="SPLIT", unset="iid, or as in the file"),
    ] = Field(
        default=None,
        description="How the clients share the examples: iid, dirichlet:B, level:R or "
        "ratio:R.",
    )
    server_images: int = Field(
        default=0,
        ge=0,
        description="Clean examples set aside for the server before splitting.",
    )

    @property
    def names(self) -> tuple[ClientId, ...] | None:
        """Names of all clients; None if only the data file can say it."""
        if self.clients is None and self.partition is None and is_path(self.source):
            return None
        return name_clients(self.clients)

    @property
    def split(self) -> Partition:
        """How the examples are split among the clients."""
        return Partition.parse(self.partition or "iid")


class ScheduleOptions(Options):
    """Participants of a round, and their shares."""

    per_round: Annotated[int | None, Option(unset="all")] = Field(
        default=None, ge=1, description="Draw so many clients for each round."
    )
    weighting: Weighting = Field(
        default="size", description="Whether a client with more examples counts more."
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Probability that a client misses a round."
    )


class LocalOptions(Options):
    """How a client trains in a round."""

    epochs: int = Field(
        default=2,
        ge=1,
        description="How often a client goes through its examples in a round.",
    )
    batch_size: int = Field(default=32, ge=1, description="Examples of a step.")
    lr: float = Field(
        default=0.05, gt=0, description="Learning rate of the clients' SGD."
    )
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="Momentum of the clients' SGD."
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="Weight decay of the clients' SGD."
    )

    @property
    def training(self) -> LocalTraining:
        """The local training as a trainer gets it."""
        return LocalTraining(**dict(self))


class ServerOptions(Options):
    """How the server turns the mean of a round into its step."""

    main_field = "optimizer"

    optimizer: Annotated[
        str | None,
        Option(name="server_optimizer", metavar="OPTIMIZER", unset="add the mean"),
    ] = Field(
        default=None,
        description="Server optimizer: momentum, nesterov, adam, yogi or adagrad.",
    )
    lr: Annotated[float | None, Option(name="server_lr", unset=_OF_OPTIMIZER)] = Field(
        default=None, description="Learning rate of the server."
    )
    momentum: Annotated[
        float | None, Option(name="server_momentum", unset=_OF_OPTIMIZER)
    ] = Field(default=None, description="Momentum of momentum and nesterov.")
    beta1: Annotated[float | None, Option(name="server_beta1", unset=_OF_OPTIMIZER)] = (
        Field(default=None, description="Decay of the first moment of adam and yogi.")
    )
    beta2: Annotated[float | None, Option(name="server_beta2", unset=_OF_OPTIMIZER)] = (
        Field(default=None, description="Decay of the second moment of adam and yogi.")
    )
    tau: Annotated[float | None, Option(name="server_tau", unset=_OF_OPTIMIZER)] = (
        Field(
            default=None,
            description="Smallest divisor of adam, yogi and adagrad.",
        )
    )

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        self.make_optimizer()
        return self

    def make_optimizer(self) -> ServerOptimizer | None:
        """Return the server optimizer; None if the server adds the mean."""
        settings = {k: v for k, v in self if k != "optimizer" and v is not None}
        if self.optimizer is not None:
            return ServerOptimizer.make(self.optimizer, **settings)
        for name in settings:
            raise InvalidInputError(
                f"--server-{name} needs a server optimizer; add --server-optimizer "
                f"{', '.join(OPTIMIZERS)}"
            )
        return None


class AttackOptions(Options):
    """The attack and the attackers."""

    main_field = "kind"

    kind: Annotated[Kind, Option(name="attack", metavar="KIND")] = Field(
        default="none",
        description="Attack: none, pixel, edge-case or label-flip.",
    )
    attackers: Annotated[
        str | None,
        BeforeValidator(_to_text),
        Option(metavar="COUNT|NAMES", unset="1"),
    ] = Field(default=None, description="How many attack, or their names with commas.")
    poison_ratio: Annotated[float | None, Option(unset="usual for the attack")] = Field(
        default=None, gt=0, le=1, description="Share of poison."
    )
    target_label: Annotated[int | None, Option(unset="usual for the attack")] = Field(
        default=None, ge=0, description="Class the attackers want."
    )
    scale: Annotated[float, Option(name="attack_scale")] = Field(
        default=1.0, gt=0, description="Attackers multiply their updates by this."
    )

    @model_validator(mode="after")
    def _check_used(self) -> Self:
        """Raise if an option describes an attack and no attack is chosen."""
        for option, place in option_fields(type(self)).items():
            given = getattr(self, place.name) != place.field.default
            if given and self.kind == "none":
                raise InvalidInputError(
                    f"{flag_of(option)} needs an attack; add --attack pixel, "
                    "edge-case or label-flip"
                )
        return self

    def of_clients(self, names: Sequence[ClientId]) -> Attack:
        """Return the attack, with the attackers chosen from these clients."""
        several = "1" if self.attackers is None else self.attackers
        wanted = "0" if self.kind == "none" else several
        return Attack(
            kind=self.kind,
            attackers=parse_attackers(wanted, names),
            poison_ratio=self.poison_ratio,
            target_label=self.target_label,
            scale=self.scale,
        )


class RecordingOptions(Options):
    """How the ledger keeps each round."""

    keep: Annotated[_KeepText, Option(metavar="KEEP")] = Field(
        default="all",
        description="Updates the ledger keeps of a round: all, optimal:M, top:M or "
        "uniform:M; or sums: one sum per client and some differences of two, which "
        "stays small however long it trains; or sums:K, where only clients of K rounds "
        "or more have a sum.",
    )
    keep_use: KeepUse = Field(
        default="store", description="Whether updates that are not kept count."
    )
    dtype: Annotated[StorageDtype, Option(metavar="DTYPE")] = Field(
        default="float32",
        description="How the ledger stores updates: float32, bfloat16, float16, int8.",
    )
    budget: Annotated[
        _BytesText | None, Option(metavar="BYTES", unset="any number", later=True)
    ] = Field(
        default=None,
        description="Bytes the ledger may take, such as 500MB or 10GB. When a round "
        "would exceed them, the ledger gives up the oldest and smallest updates, or "
        "the sums of the clients that contributed least.",
    )
    arrays: Annotated[
        str | None, Option(metavar="ADDRESS", unset="the run's folder")
    ] = Field(
        default=None,
        description="Where the ledger's array files lie, such as s3://bucket/prefix.",
    )
    federation: Annotated[
        _FederationText | None, Option(metavar="NAME", unset="no name")
    ] = Field(
        default=None,
        description="Name of the federation, which its certificates state.",
    )

    @model_validator(mode="after")
    def _check_keeping(self) -> Self:
        Keep.parse(self.keep, use=self.keep_use)
        return self

    @property
    def budget_bytes(self) -> int | None:
        """Bytes the ledger may take."""
        return None if self.budget is None else parse_bytes(self.budget)


class ForgettingOptions(Options):
    """Clients that the run forgets while it trains, and the method."""

    forget: Annotated[tuple[str, ...], Option(metavar="CLIENT@ROUNDS", later=True)] = (
        Field(
            default=(),
            strict=False,
            description="Forget a client once so many rounds are trained, 1 or more, "
            "and train on without it. Can be repeated.",
        )
    )
    method: Annotated[str, Option(metavar="METHOD", later=True)] = Field(
        default=DEFAULT_METHOD, description=help_texts.METHOD_OR_OWN
    )
    skew: Annotated[
        str | None, Option(metavar="SKEW", unset=help_texts.SKEW_DEFAULT, later=True)
    ] = Field(default=None, description=help_texts.SKEW)
    damping: Annotated[
        float | None, Option(unset=help_texts.DAMPING_DEFAULT, later=True)
    ] = Field(default=None, description=help_texts.DAMPING)
    erase: Annotated[bool, Option(flags=help_texts.ERASE_FLAGS, later=True)] = Field(
        default=True, description=help_texts.ERASE
    )
    settings: Annotated[
        dict[str, bool | int | float | str],
        Option(name="set", metavar=help_texts.SETTING_FORM, later=True),
    ] = Field(default={}, description=help_texts.SETTING)

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        self.make_method()
        return self

    def make_method(self) -> Method:
        """Return the method with its settings."""
        given = {"skew": self.skew, "damping": self.damping}
        named = {name: value for name, value in given.items() if value is not None}
        return find_method(self.method, {**named, **self.settings})

    def plan(self, num_rounds: int) -> dict[ClientId, int]:
        """Return before which round each client is to be forgotten."""
        found: dict[ClientId, int] = {}
        for text in self.forget:
            client, _, number = text.rpartition("@")
            if not client or not number.isdecimal():
                raise InvalidInputError(
                    f"cannot read --forget {text!r:.80}; write CLIENT@ROUNDS, such as "
                    f"{client_name(0)}@{max(1, num_rounds // 2)}"
                )
            if not 1 <= int(number) <= num_rounds:
                raise InvalidInputError(
                    f"--forget {text}: a client can be forgotten after 1 to "
                    f"{num_rounds} rounds"
                )
            if client in found:
                raise InvalidInputError(f"--forget names {client} twice; name it once")
            found[client] = int(number)
        return found


_LOCAL_PANEL = "Local training"


class RunConfig(Options):
    """Configuration of a run; by default ten clients learn digits in seconds.

    A part with one main field may be given as that field alone:
    `RunConfig(data="digits", attack="pixel")`.

    >>> RunConfig(attack="pixel", rounds=5).attack.kind
    'pixel'
    >>> RunConfig.from_options(attack="pixel", lr=0.1).local.lr
    0.1
    """

    data: DataOptions = Field(default=DataOptions(), title="Data and clients")
    rounds: Annotated[int, Option(panel="Rounds", later=True)] = Field(
        default=20, ge=1, description="How many rounds the whole run has."
    )
    schedule: ScheduleOptions = Field(default=ScheduleOptions(), title="Rounds")
    aggregation: Annotated[_AggregationText, Option(metavar="RULE", panel="Rounds")] = (
        Field(
            default=MEAN,
            description="How a round's updates become one step: mean, median, "
            "trimmed-mean:FRACTION, krum:ATTACKERS, multi-krum:ATTACKERS:CHOSEN or "
            "bulyan:ATTACKERS.",
        )
    )
    local: LocalOptions = Field(default=LocalOptions(), title=_LOCAL_PANEL)
    server: ServerOptions = Field(default=ServerOptions(), title="Server")
    model: Annotated[str, Option(metavar="MODEL", panel=_LOCAL_PANEL)] = Field(
        default=AUTO,
        description="Network: auto, digits-cnn, mnist-cnn, cifar-cnn, or "
        "package.module:function, a function of the shape of an image (height, width, "
        "channels) and the number of classes.",
    )
    trainer: Annotated[str, Option(metavar="TRAINER", panel=_LOCAL_PANEL)] = Field(
        default="torch",
        description="Trainer that an installed package offers, or "
        "package.module:function, a function of shape, num_classes, model and local "
        "that makes one.",
    )
    attack: AttackOptions = Field(default=AttackOptions(), title="Attack")
    recording: RecordingOptions = Field(default=RecordingOptions(), title="Recording")
    forgetting: ForgettingOptions = Field(
        default=ForgettingOptions(), title="Forgetting while it trains"
    )
    seed: int = Field(default=0, ge=0, description="Seed of everything.")
    workers: Annotated[int | None, Option(unset="as many as pay", later=True)] = Field(
        default=None, ge=1, description="Processes; the result is the same."
    )

    # Also for type checkers: a part may be given as text or as a mapping.
    def __init__(self, /, **options: Any) -> None:
        super().__init__(**options)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.forgetting.plan(self.rounds)
        skew = method_settings(self.forgetting.make_method()).get("skew")
        if self.keep_policy.history == "sums" and skew not in (None, Kronecker.name):
            raise InvalidInputError(
                f"skew {skew} needs rounds, and --keep sums keeps none; choose another "
                "--keep, or leave the method and the skew at their defaults"
            )
        self._check_aggregation()
        if self.keep_policy.history == "sums" and self.server.optimizer is not None:
            raise InvalidInputError(
                f"--server-optimizer {self.server.optimizer} is replayed from the mean "
                "of every round, and --keep sums keeps none; choose another --keep"
            )
        if self.data.names is not None:
            self.check_clients(self.data.names)
        return self

    def _check_aggregation(self) -> None:
        """Raise if the ledger would not keep what replaying the rule needs."""
        own = self.recording
        whole = own.keep == "all" and own.keep_use == "store" and own.budget is None
        if self.aggregation != MEAN and not whole:
            raise InvalidInputError(
                f"--aggregation {self.aggregation} is replayed from every update of a "
                "round; leave --keep, --keep-use and --budget at their defaults"
            )
        if self.aggregation != MEAN and self.server.optimizer is not None:
            raise InvalidInputError(
                f"--server-optimizer {self.server.optimizer} needs the mean of the "
                f"updates, not --aggregation {self.aggregation}; leave one of them out"
            )

    def check_clients(self, names: Sequence[ClientId]) -> None:
        """Raise if an option does not fit the clients of the run.

        Raises:
            InvalidInputError: If a round draws more clients than there are, or an
                option names an unknown client.
        """
        per_round, count = self.schedule.per_round, len(names)
        if per_round is not None and per_round > count:
            raise InvalidInputError(
                f"--per-round is {per_round} but there are {count} clients; choose 1 "
                f"to {count}"
            )
        rule = named_rule(self.aggregation, {})
        drawn = per_round or count
        if rule is not None and drawn < rule.least:
            raise InvalidInputError(
                f"--aggregation {self.aggregation} needs {rule.least} clients a round, "
                f"and there are {drawn}; choose more clients or another aggregation"
            )
        self.attack.of_clients(names)
        planned = self.forgetting.plan(self.rounds)
        for client in planned:
            if client not in names:
                raise InvalidInputError(
                    f"--forget {client}@{planned[client]}: there is no client "
                    f"{client!r:.80}; they are {names[0]} to {names[-1]}"
                )
        if len(planned) == count:
            raise InvalidInputError(
                "--forget names all clients, and nobody would be left to train with; "
                "leave out one of them"
            )

    @property
    def round_schedule(self) -> Schedule:
        """Participants of a round, as the federation reads them."""
        return Schedule(seed=self.seed, **dict(self.schedule))

    @property
    def keep_policy(self) -> Keep:
        """Policy by which the ledger keeps updates."""
        use = self.recording.keep_use
        return Keep.parse(self.recording.keep, use=use, seed=self.seed)

    @property
    def forget_plan(self) -> dict[ClientId, int]:
        """Before which round each client is to be forgotten."""
        return self.forgetting.plan(self.rounds)

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any] | None = None, /, **more: Any
    ) -> Self:
        """Return the configuration with options by their flat names.

        Args:
            options: Values by name, such as `{"attack_scale": 2.0}`.
            more: Further options; they win.

        Raises:
            InvalidInputError: If no option has that name, or a value is wrong.
        """
        return cls(**nest_options(cls, {**(options or {}), **more}))

    def to_options(self) -> dict[str, Any]:
        """Return every option by its flat name, also options that are None."""
        found = {}
        for option, place in option_fields(type(self)).items():
            part = getattr(self, place.part) if place.part else self
            found[option] = getattr(part, place.name)
        return found

    def with_options(self, **changes: Any) -> Self:
        """Return the configuration with some options changed, by their flat names."""
        return self.from_options(self.to_options(), **changes)

    def to_toml(self) -> str:
        """Return the configuration as TOML; options that are None are left out."""
        values = self.model_dump(mode="json", exclude_none=True)
        # These names are the method's own, so they keep their underscores.
        settings = values["forgetting"].pop("settings")
        values = _dashed(values)
        if settings:
            values["forgetting"]["settings"] = settings
        return f"{_BEGIN}\n{tomli_w.dumps(values)}\n{_END}\n"

    def save(self, path: Path) -> None:
        """Write the configuration to a file, whole or not at all."""
        write_whole(path, self.to_toml())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the configuration that `save` wrote to a file.

        Raises:
            InvalidInputError: If the file cannot be read, was cut, or is wrong.
        """
        options = read_options(path)
        if not read_regular_text(path).endswith(f"{_END}\n"):
            raise InvalidInputError(
                f"{path} is damaged: its end is missing; restore it from a backup"
            )
        try:
            return cls.from_options(options)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from None


def read_options(path: Path) -> dict[str, Any]:
    """Return the options that a TOML file sets, by their flat names.

    Raises:
        InvalidInputError: If the file cannot be read or has an unknown key.
    """
    try:
        found = tomllib.loads(read_regular_text(path))
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is not valid TOML: {error}") from None
    try:
        return flatten_options(RunConfig, found)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def findable(data: str) -> str:
    """Return a name as it is, and a path so that it holds in any working folder."""
    return str(Path(data).expanduser().absolute()) if is_path(data) else data


def name_clients(count: int | None) -> tuple[ClientId, ...]:
    """Return the names of so many clients; None for the usual number."""
    return tuple(client_name(number) for number in range(count or NUM_CLIENTS))


def _dashed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.replace("_", "-"): _dashed(item) for key, item in value.items()}
    return value
