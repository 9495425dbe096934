"""Questions that a page can be asked: its query string as a record.

The whole state of a page is in it, so that an address can be shared; a value that cannot be right is refused in one sentence.
"""

from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, urlencode

import msgspec
from msgspec import Meta

from trainpace.errors import TrainpaceError, nearest_names
from trainpace.execution import Precision
from trainpace.journal import Kind, Outcome
from trainpace.records import Record
from trainpace.verbs.serve import Text

MOST_PARAMETERS = 40
Cursor = Annotated[str, Meta(max_length=1000)]
Id = Annotated[str, Meta(max_length=32)]
Order = Literal["newest", "oldest", "fastest", "slowest", "model", "device"]


class BadQuestion(TrainpaceError):
    """An address that asks for what cannot be: status 400."""


class RunsQuestion(Record):
    """Which runs, in which order. `after`: where the page before ended."""

    model: Text = ""
    device: Text = ""
    precision: Literal["", Precision] = ""
    kind: Literal["", Kind] = ""
    outcome: Literal["", Outcome] = ""
    batch: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    since: Annotated[str, Meta(max_length=40)] = ""
    sweep: Id = ""
    text: Text = ""
    order: Order = "newest"
    after: Cursor = ""


class RunQuestion(Record):
    id: Id


class CompareQuestion(Record):
    a: Id = ""
    b: Id = ""


class SweepsQuestion(Record):
    page: Annotated[int, Meta(ge=1, le=100_000)] = 1


class SweepQuestion(Record):
    id: Id


class ScoreQuestion(Record):
    model: Text = ""
    device: Text = ""


Q = TypeVar("Q", bound=Record)


def read_question(kind: type[Q], query: str) -> Q:
    """The question in a query string; fields left empty, as forms send them, are not asked. Raises BadQuestion."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MOST_PARAMETERS, errors="strict")
    except UnicodeDecodeError:
        raise BadQuestion("the address is not UTF-8.") from None
    except ValueError:
        raise BadQuestion(f"more than {MOST_PARAMETERS} parameters.") from None
    given: dict[str, str] = {}
    fields = kind.__struct_fields__
    for name, value in pairs:
        if name not in fields:
            near = nearest_names(name[:40], fields)
            raise BadQuestion(
                f"this page has no parameter {name[:40]!r}.",
                f"It has {', '.join(fields)}." if not near else f"Nearest: {near[0]}.",
            )
        if name in given:
            raise BadQuestion(f"{name} is given twice.")
        if "\x00" in value:
            raise BadQuestion(f"{name} is not valid text.")
        given[name] = value.strip()
    try:
        return msgspec.convert({k: v for k, v in given.items() if v}, kind, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        choices = [str(c) for c in _choices(get_type_hints(kind).get(name)) if c]
        what = f"it is one of {', '.join(choices)}" if choices else _plain(what)
        sentence = f"{name} = {given.get(name, '')[:60]!r}: {what}" if name else what
        raise BadQuestion(f"{sentence[0].lower()}{sentence[1:]}.".replace("`", "")) from None


def _choices(hint: object) -> list[object]:
    """The values of a Literal, in whatever it stands."""
    if get_origin(hint) is Literal:
        return [c for arg in get_args(hint) for c in (_choices(arg) or [arg])]
    return [c for arg in get_args(hint) for c in _choices(arg)] if hint is not None else []


def _plain(what: str) -> str:
    """An error message of msgspec in plain words."""
    for word, plain in (
        ("Object missing required field", "this page needs the parameter"), ("Expected ", "give "),
        ("`int | null`", "a whole number"), ("`float | null`", "a number"), ("`int`", "a whole number"), ("`float`", "a number"),
        ("`str` of length <=", "a text of length up to"), (" >= ", " from "), (" <= ", " up to "), (" > ", " above "),
    ):  # fmt: skip
        what = what.replace(word, plain)
    return what.partition(", got ")[0]


def query_of(question: Record, **changed: object) -> str:
    """The shortest query string that asks this, with some fields changed."""
    plain = {f.name: f.default for f in msgspec.structs.fields(question)}
    values = {name: getattr(question, name) for name in question.__struct_fields__} | changed
    changes = {
        k: exact(v) if isinstance(v, float) else str(v) for k, v in values.items() if v is not None and v != plain[k]
    }
    return urlencode(changes)


def exact(value: float) -> str:
    """The shortest digits that are read back as this number."""
    return repr(value).removesuffix(".0")
