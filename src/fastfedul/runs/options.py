"""Options as fields of pydantic models: nested in Python and TOML, flat in a command.

Each default, type, limit and help text is written once, in the field. This module
turns nested options into flat options and back, and a wrong value into one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from fastfedul.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How the command line shows a field, beside the field's own description.

    Attributes:
        name: Name of the option, if the field's name alone does not say it.
        metavar: Word for the value in the help.
        unset: Words for the default in the help, if the default is None.
        flags: Both names of an option that is on or off.
        panel: Where the help shows the option; None for the panel of the part.
        later: Whether a run that is resumed may change the option.
    """

    name: str | None = None
    metavar: str | None = None
    unset: str = ""
    flags: str | None = None
    panel: str | None = None
    later: bool = False


class Options(BaseModel):
    """Options that belong together; a wrong one is refused in one line.

    Attributes:
        main_field: The field that a text alone stands for; None if there is none.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )
    main_field: ClassVar[str | None] = None

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidInputError(_explain(type(self), error)) from None

    @model_validator(mode="before")
    @classmethod
    def _from_main_field(cls, value: Any) -> Any:
        """Return a text that stands for a whole part as the part's main field."""
        if cls.main_field is not None and isinstance(value, str):
            return {cls.main_field: value}
        return value


class OptionField(NamedTuple):
    """Where an option stands.

    Attributes:
        part: Name of the part that has the field; None if it is in no part.
        name: Name of the field.
        field: Its type, default, limits and description.
        shown: How the command line shows it.
        panel: Where the help shows it; None for the first panel.
    """

    part: str | None
    name: str
    field: FieldInfo
    shown: Option
    panel: str | None


def option_fields(options: type[BaseModel]) -> dict[str, OptionField]:
    """Return the fields of nested options by the flat names of the options."""
    return dict(_fields_of(options, None, None))


def _fields_of(
    options: type[BaseModel], part: str | None, panel: str | None
) -> Iterator[tuple[str, OptionField]]:
    for name, field in options.model_fields.items():
        inner = _part_of(field)
        if inner is not None:
            yield from _fields_of(inner, name, field.title)
            continue
        shown = _shown(field)
        place = OptionField(part, name, field, shown, shown.panel or panel)
        yield shown.name or name, place


def _part_of(field: FieldInfo) -> type[Options] | None:
    """Return the options of which a field is a part; None if it is a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Options) else None


def _shown(field: FieldInfo) -> Option:
    return next((one for one in field.metadata if isinstance(one, Option)), Option())


def nest_options(options: type[Options], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat options as the arguments that the nested ones take.

    Raises:
        InvalidInputError: If no option has that name.
    """
    known = option_fields(options)
    nested: dict[str, Any] = {}
    for option, value in flat.items():
        if option not in known:
            raise InvalidInputError(_no_option(option, known))
        place = known[option]
        table = nested.setdefault(place.part, {}) if place.part else nested
        table[place.name] = value
    return nested


def flatten_options(
    options: type[Options], nested: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a nested table by their flat names, values unchecked.

    Names may be written with dashes or underscores.

    Raises:
        InvalidInputError: If no option has that name.
    """
    names = {
        (place.part, place.name): option
        for option, place in option_fields(options).items()
    }
    found = {}
    for key, value in nested.items():
        name = _plain(key)
        field = options.model_fields.get(name)
        part = _part_of(field) if field else None
        if field is None:
            raise InvalidInputError(
                _no_option(key, options.model_fields, options=options)
            )
        if part is None:
            found[names[None, name]] = value
            continue
        whole = part.main_field is not None and isinstance(value, str)
        table = {part.main_field: value} if whole else value
        if not isinstance(table, dict):
            raise InvalidInputError(f"{key} is {value!r:.40}, not a table")
        for inner, inner_value in table.items():
            place = (name, _plain(inner))
            if place not in names:
                raise InvalidInputError(
                    _no_option(inner, part.model_fields, within=key, options=options)
                )
            found[names[place]] = inner_value
    return found


def flag_of(option: str) -> str:
    """Return an option as the command line writes it.

    >>> flag_of("per_round")
    '--per-round'
    """
    return f"--{option.replace('_', '-')}"


def plain_type(kind: Any) -> Any:
    """Return the type of a value that may also be None, without its validators.

    >>> plain_type(int | None), plain_type(float)
    (<class 'int'>, <class 'float'>)
    """
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _plain(key: str) -> str:
    return key.replace("-", "_")


def _no_option(
    name: str,
    known: Iterable[str],
    *,
    within: str = "",
    options: type[BaseModel] | None = None,
) -> str:
    """Return that an option is unknown, and the right place or the nearest name."""
    here = f" in [{within}]" if within else ""
    place = option_fields(options).get(_plain(name)) if options else None
    if place is not None:
        key = place.name.replace("_", "-")
        where = f"to [{place.part}]" if place.part else "to no part"
        return f"there is no option {name!r:.40}{here}: {key} belongs {where}"
    near = difflib.get_close_matches(_plain(name), list(known), n=1)
    hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
    return f"there is no option {name!r:.40}{here}{hint}"


_WANTED = {
    **{"int": "a whole number", "float": "a number", "string": "text"},
    **{"bool": "true or false", "tuple": "a list of text", "dict": "a table"},
    **{"model": "a table"},
}
"""Expected values by the kind of pydantic's error, or by the kind's beginning."""


def _explain(options: type[BaseModel], error: ValidationError) -> str:
    """Return the first thing that is wrong, in one line that names the option."""
    found = error.errors(include_url=False, include_context=False)[0]
    kind, (name, *deeper) = found["type"], map(str, found["loc"])
    while deeper and name in options.model_fields:
        part = _part_of(options.model_fields[name])
        if part is None:
            break
        options, (name, *deeper) = part, deeper
    if kind == "extra_forbidden":
        place = option_fields(options).get(name)
        if place is not None and hasattr(options, "from_options"):
            own = options.__name__
            return (
                f"{own} takes {name!r:.40} within a part: "
                f"{own}({place.part}={{{place.name!r}: ...}}), or by its flat name: "
                f"{own}.from_options({name}=...)"
            )
        return _no_option(name, options.model_fields, options=options)
    field, value = options.model_fields[name], found["input"]
    said = f"{value:g}" if isinstance(value, float) else f"{value!r:.40}"
    told = f"{flag_of(_shown(field).name or name)} is {said}"
    if kind == "literal_error":
        *most, last = get_args(plain_type(field.annotation))
        return f"{told}; choose {', '.join(most)} or {last}"
    limits = _limits(field)
    if limits and kind.startswith(("greater", "less", "finite")):
        return f"{told}; choose {limits}"
    wanted = next((_WANTED[k] for k in _WANTED if kind.startswith(k)), None)
    return f"{told}, not {wanted}" if wanted else f"{told}: {found['msg']}"


def _limits(field: FieldInfo) -> str:
    """Return which numbers a field takes, in words."""
    words = []
    for one in field.metadata:
        match one:
            case Ge(ge=least):
                words.append(f"{least} or more")
            case Gt(gt=bottom):
                words.append(f"a number above {bottom}")
            case Le(le=most):
                words.append(f"up to {most}")
            case Lt(lt=top):
                words.append(f"below {top}")
    return " and ".join(words)
