"""Conversion between the query string of a page and a record.

The query string holds the whole state of a page, so an address can be shared. A bad value gives an
error of one sentence.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, urlencode

import msgspec

from trainpace.core.errors import TrainpaceError, nearest_names
from trainpace.core.records import Record

MOST_PARAMETERS = 40
Q = TypeVar("Q", bound=Record)


class BadQuestion(TrainpaceError):
    """Invalid query string (status 400)."""


def read_question(kind: type[Q], query: str) -> Q:
    """Parse a query string into a record. Ignores empty fields, which forms send.

    Raises:
        BadQuestion: A field is unknown, or its value is invalid.
    """
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, max_num_fields=MOST_PARAMETERS, errors="strict"
        )
    except UnicodeDecodeError:
        raise BadQuestion("The address is not UTF-8.") from None
    except ValueError:
        raise BadQuestion(f"More than {MOST_PARAMETERS} parameters.") from None
    given = {name: value.strip() for name, value in pairs if value.strip()}
    fields = kind.__struct_fields__
    for name, value in pairs:
        if name not in fields:
            near = nearest_names(name[:40], fields)
            raise BadQuestion(
                f"This page has no parameter {name[:40]!r}.",
                f"Nearest: {near[0]}." if near else f"It has {', '.join(fields)}.",
            )
        if "\x00" in value:
            raise BadQuestion(f"{name} is not valid text.")
    if len({name for name, _ in pairs}) < len(pairs):
        raise BadQuestion("A parameter is given twice.")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _bad_value(kind, given, str(error)) from None


def _bad_value(kind: type[Record], given: Mapping[str, str], error: str) -> BadQuestion:
    """Convert an error of msgspec to a sentence."""
    what, _, where = error.partition(" - at `$.")
    name = where.rstrip("`")
    choices = [str(c) for c in _choices(get_type_hints(kind).get(name)) if c]
    what = f"it is one of {', '.join(choices)}" if choices else _plain(what)
    sentence = f"{name} = {given.get(name, '')[:60]!r}: {what}" if name else what
    return BadQuestion(f"{sentence[0].lower()}{sentence[1:]}.".replace("`", ""))


def _choices(hint: object) -> list[object]:
    """Return the values of a Literal inside any type."""
    if get_origin(hint) is Literal:
        return [c for arg in get_args(hint) for c in _choices(arg) or [arg]]
    return [c for arg in get_args(hint) for c in _choices(arg)] if hint is not None else []


def _plain(what: str) -> str:
    for word, plain in (
        ("Object missing required field", "this page needs the parameter"),
        ("Expected ", "give "),
        ("`int | null`", "a whole number"),
        ("`float | null`", "a number"),
        ("`int`", "a whole number"),
        ("`float`", "a number"),
        ("`str` of length <=", "a text of length up to"),
        (" >= ", " from "),
        (" <= ", " up to "),
        (" > ", " above "),
    ):
        what = what.replace(word, plain)
    return what.partition(", got ")[0]


def query_of(question: Record, **changed: object) -> str:
    """Return the shortest query string for a record, with some fields changed."""
    plain = {f.name: f.default for f in msgspec.structs.fields(question)}
    values = msgspec.structs.asdict(question) | changed
    stated = {
        name: value for name, value in values.items() if value is not None and value != plain[name]
    }
    return urlencode(
        {
            name: exact(value) if isinstance(value, float) else value
            for name, value in stated.items()
        }
    )


def exact(value: float) -> str:
    """Return the shortest text that parses to exactly this number."""
    return repr(value).removesuffix(".0")
