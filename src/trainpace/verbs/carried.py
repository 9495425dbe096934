"""The conditions of a request as options of another verb, for a command that goes on from its answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trainpace.verbs.request import Argument, Request, ResolvedField, fields_of


def carried(asked: Request | None, into: type[Request], but: Collection[str] = ()) -> list[str]:
    """The options that say of `into` what `asked` says, of the fields that both have: not those as by default, nor in `but`."""
    there = fields_of(into)
    return [
        word
        for name, value in _stated(asked, but)
        if name in there
        for word in as_typed(there[name], value)
    ]


def lost(asked: Request | None, into: type[Request], but: Collection[str] = ()) -> list[str]:
    """The fields of `asked`, stated and not in `but`, that `into` has no option for."""
    there = fields_of(into)
    return [name for name, _ in _stated(asked, but) if name not in there]


def as_typed(field: ResolvedField, value: Any) -> list[str]:
    """An option with its value; several where it is given several times."""
    option = f"--{field.option}"
    if field.is_flag:
        return [option] if value else []
    one_by_one = field.several if isinstance(value, tuple) else False
    return [
        word for one in (value if one_by_one else [value]) for word in (option, _text(field, one))
    ]


def _text(field: ResolvedField, value: Any) -> str:
    unit = field.about.unit
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    suffix = "" if unit is None else unit.suffix
    spellings = ([] if unit is None else [unit.show(value)]) + [
        f"{value:.12g}{suffix}",
        f"{value!r}{suffix}",
    ]
    return next(text for text in spellings if field.read_one(text) == value)


def _stated(asked: Request | None, but: Collection[str]) -> list[tuple[str, Any]]:
    if asked is None:
        return []
    fields = fields_of(type(asked))
    values = (
        (name, field, getattr(asked, name)) for name, field in fields.items() if name not in but
    )
    return [
        (name, value)
        for name, field, value in values
        if not isinstance(field.about, Argument) and value != field.default and value is not None
    ]
