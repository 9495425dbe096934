"""Requests of verbs, with units, ranges and relations of their fields; and progress reporting.

A request is a frozen record. Every field has a type, a unit, a default and a line of help:

    class GpusRequest(Request):
        name: Annotated[str | None, Argument("One device.")] = None
        num_gpus: Annotated[int, Field("GPUs per node.", DEVICES)] = 1

`fields_of(GpusRequest)` defines a verb's command line options, Python keywords, web form and
reference page. A bool is a flag, a Literal is a choice, and a tuple is an option that can be
repeated. Messages name a field in backquotes (`num_gpus`). Each interface replaces it with its own
spelling.
"""

import os
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from trainpace.core.errors import TrainpaceError, UnknownName, nearest_names
from trainpace.core.records import Record, Table
from trainpace.core.units import (
    format_duration,
    hours_from_s,
    parse_count,
    parse_duration_s,
    parse_ratio,
    parse_usd,
)

MOST_BATCHES = 10_000
MOST_NAMED = 3
"""Limit for alternatives of a condition in help. Longer conditions appear only in error messages.
"""
MOST_DEVICES = 1_000_000
ABOVE_0 = 5e-324

T = TypeVar("T")
R = TypeVar("R", bound="Request")


class Group(StrEnum):
    """Option groups of `--help`, in order. Options without a group appear only in `--help-all`."""

    MODEL = "Model"
    GPUS = "GPUs"
    NOW = "How it trains now"
    BATCH = "Batch"
    PARALLEL = "Parallelism and memory"
    LENGTH = "Training length"
    CHOICE = "Goal and limits"
    OPTIONS = "Options"
    OUTPUT = "Output"


class Request(Record):
    """Base class of all requests.

    `requires` lists conditions that every request must meet, in the format of `Field.needs`.
    `groups` lists the fields under each heading of `--help`, as in "GPUs: gpu nodes; Batch: batch".
    Fields that few people need are under none.
    """

    requires: ClassVar[str] = ""
    groups: ClassVar[str] = ""

    def __post_init__(self) -> None:
        kind = type(self)
        check_relations(fields_of(kind), lambda name: getattr(self, name), kind.requires)


class Rows(Table, Generic[T]):
    """Base class of answers that are sequences of rows."""

    __slots__ = ()
    rows: tuple[T, ...]

    def __iter__(self) -> Iterator[T]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> T:
        return self.rows[i]

    def to_dicts(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(row) for row in self.rows]


class Misuse(TrainpaceError):
    """A request that contradicts itself, for example by two fields that exclude each other."""


@dataclass(frozen=True)
class Unit:
    """Unit of a field: conversion between text and value.

    Attributes:
        parse: Converts text to a value. Raises TrainpaceError for a bad value.
        show: Converts a value to text.
        suffix: Unit of a bare number in Python.
        is_list: True if one text gives a whole tuple, such as the batch sizes 1:70.
    """

    name: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    suffix: str = ""
    is_list: bool = False

    def read(self, value: Any) -> Any:
        """Convert text, a number or (for a list unit) several numbers to a value."""
        if self.is_list and isinstance(value, Iterable) and not isinstance(value, str):
            return self.parse(",".join(str(one) for one in value))
        if isinstance(value, str | os.PathLike):
            return self.parse(os.fspath(value))
        return self.parse(f"{value!r}{self.suffix}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise TrainpaceError(f"{text!r} is not a number.") from None


def _shown_s(seconds: float) -> str:
    """Return a duration as options accept it. Two days and more are in hours, as days round."""
    if seconds >= 2 * 86400:
        return f"{hours_from_s(seconds):.12g}h"
    return format_duration(seconds).replace(" ", "")


def _shown_number(number: float) -> str:
    return format(Decimal(repr(number)), "f").removesuffix(
        ".0"
    )  # Decimal's "f" format has no exponent.


def within(
    name: str, least: float, most: float, parse: Callable[[str], Any] = _number, hint: str = ""
) -> Unit:
    """Return a unit for numbers from `least` to `most`. ABOVE_0 is shown as "above 0"."""
    start = "above 0" if least == ABOVE_0 else f"from {least:,.12g}"

    def checked(text: str) -> Any:
        value = parse(text)
        if not least <= value <= most:  # This form also rejects NaN.
            raise TrainpaceError(
                f"{text} is out of range: give a number {start}, up to {most:,.12g}.", hint
            )
        return value

    if parse is parse_duration_s:
        return Unit(name, checked, _shown_s, suffix="s")
    return Unit(name, checked, _shown_number)


def _list_of(name: str, one: str, least: int, most: int, hint: str) -> Unit:
    """Return a unit for lists.

    Formats: ``32``, ``1,2,4,8``, ``1:70`` (every number) or ``8:64:8`` (every eighth).
    """

    def parse(text: str) -> tuple[int, ...]:
        numbers: set[int] = set()
        for part in text.split(","):
            ends = [parse_count(end) for end in part.split(":")]
            first, last, step = (*ends, ends[0], 1)[:3] if len(ends) == 1 else (*ends, 1)[:3]
            if len(ends) > 3 or not least <= first <= last <= most or not 1 <= step <= most:
                raise TrainpaceError(f"{text!r} is not a {one}.", hint)
            if (last - first) // step + len(numbers) > MOST_BATCHES:
                raise TrainpaceError(
                    f"{text!r} names more than {MOST_BATCHES} {one}s.",
                    "Give a step, as in 1:4096:64.",
                )
            numbers |= set(range(first, last + 1, step))
        return tuple(sorted(numbers))

    return Unit(name, parse, lambda numbers: ",".join(map(str, numbers)), is_list=True)


def _path(name: str, *checks: tuple[Callable[[str], bool], str]) -> Unit:
    """Return a unit for paths. Each check has the error message for paths that fail it."""

    def parse(path: str) -> str:
        for is_right, problem in checks:
            if not is_right(path):
                raise TrainpaceError(problem.format(path=path))
        return path

    return Unit(name, parse)


DURATION = Unit("duration", parse_duration_s, _shown_s, suffix="s")
COUNT = Unit("count", parse_count)
USD = Unit("dollars", parse_usd)
RATIO = Unit("speed-up", parse_ratio, suffix="x")
ABOVE_0_S = within("duration", ABOVE_0, 1e12, parse_duration_s)
DEVICES = within("count", 1, MOST_DEVICES, parse_count)
AT_LEAST_1 = within("count", 1, 1e18, parse_count)
EPOCHS = within("epochs", ABOVE_0, 1e9)
MILLISECONDS = within("milliseconds", 0, 1e12)
LOAD = within("load", 1, 1e6)
BYTES = within("bytes", 0, 1e15, parse_count)
RATE = within("rate", 1e-6, 1e9)
GB_PER_S = within("GB/s", 1e-6, 1e6, hint="In gigabytes per second: 400 Gbit/s is 50.")
BATCHES = _list_of("batches", "batch size", 1, 10**9, "Write 32, or 1,2,4,8, or 1:70, or 8:64:8.")
LENGTHS = _list_of(
    "lengths", "sequence length", 1, 10**9, "Write 4096, or 1024,4096,16384, or 1024:8192:1024."
)
WORKERS = _list_of("workers", "number of workers", 0, 256, "Write 4, or 0,2,4, or 0:4; up to 256.")
NEW_FILE = _path(
    "file",
    (lambda path: Path(path).resolve().parent.is_dir(), "The folder of {path} does not exist."),
    (
        lambda path: not os.path.exists(path) or os.path.isfile(path),
        "{path} is not a regular file.",
    ),
)
EXISTING_FILE = _path(
    "file",
    (os.path.exists, "File {path!r} does not exist."),
    (lambda path: not os.path.isdir(path), "File {path!r} is a directory."),
)
EXISTING_FOLDER = _path("directory", (os.path.isdir, "Directory {path!r} does not exist."))


@dataclass(frozen=True)
class Field:
    """Metadata of a field for the interfaces, in addition to its type and default.

    Attributes:
        help: A line of help. It may end with "  [default: ...]".
        option: Option name on the command line if it differs from the field's name, such as "from".
        alone: Value of the option if it is given without a value.
        needs: Conditions that must hold if this field is given, separated by spaces.
            "samples|tokens" requires one of the two fields, and "zero=3" requires that `zero` is 3.
            Alternatives that a request does not have are ignored.
        excludes: Fields that cannot be given together with this one, separated by spaces.
        sets: Fields of records that this field sets, separated by spaces, for their errors.
        overrides: Fields that the command line may combine with this one. If only one of them is on
            the command line, it replaces the other's default from the project file.
    """

    help: str
    unit: Unit | None = None
    metavar: str | None = None
    option: str = ""
    alone: Any = None
    show_default: bool = True
    needs: str = ""
    excludes: str = ""
    overrides: str = ""
    sets: str = ""


@dataclass(frozen=True)
class Argument(Field):
    """A positional argument.

    If `rest` is True, it takes all remaining arguments, such as another command.
    """

    rest: bool = False


@dataclass(frozen=True)
class ResolvedField:
    """A field of a request with its name, plain type and `Field`.

    `choices` are the values of a Literal. `several` is True if the option can be repeated.
    """

    name: str
    kind: Any
    default: Any
    about: Field
    choices: tuple[str, ...]
    several: bool
    group: str = ""

    @property
    def required(self) -> bool:
        return self.default is msgspec.NODEFAULT

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def option(self) -> str:
        return (self.about.option or self.name).replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default as text, or "" if none is shown."""
        if (
            self.default in (None, "", ())
            or self.default is False
            or self.required
            or not self.about.show_default
        ):
            return ""
        unit = self.about.unit
        return (
            unit.show(self.default)
            if unit
            else ", ".join(self.default)
            if self.several
            else str(self.default)
        )

    def help(self, fields: Mapping[str, "ResolvedField"]) -> str:
        """Return the help text, including relations to other fields of the same request."""
        text, bracket, default = self.about.help.partition("  [")
        needs = [in_words(n, fields) for n in self.about.needs.split() if n.count("|") < MOST_NAMED]
        relations = [f"Without a value: {self.about.alone}."] if self.about.alone else []
        relations += [f"Needs {need}." for need in needs if need]
        relations += [
            f"Not with `{other}`." for other in self.about.excludes.split() if other in fields
        ]
        return " ".join((text, *relations)) + bracket + default

    def is_given(self, value: Any) -> bool:
        return value is not None and value != self.default

    def read_one(self, value: Any) -> Any:
        """Check and convert one value. Raises TrainpaceError if it is invalid."""
        if self.is_flag != isinstance(value, bool):
            need = (
                f"{value!r} is not True or False."
                if self.is_flag
                else f"Takes a value, not {value}."
            )
            raise TrainpaceError(need)
        if self.about.unit is not None:
            return self.about.unit.read(value)
        if self.choices:
            return self._choice(value)
        if self.kind in (int, float):
            try:
                return self.kind(value)
            except (TypeError, ValueError, OverflowError):
                number = "a whole number" if self.kind is int else "a number"
                raise TrainpaceError(f"{value!r} is not {number}.") from None
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    def _choice(self, value: Any) -> Any:
        if str(value) not in self.choices:
            near = nearest_names(str(value), self.choices, limit=3)
            hint = f"Nearest: {', '.join(near)}." if near else ""
            raise TrainpaceError(f"{value!r} is not one of {', '.join(self.choices)}.", hint)
        return get_args(self.kind)[self.choices.index(str(value))]

    def read(self, value: Any) -> Any:
        """Convert a value from Python code.

        None selects the default. A single value is accepted in place of a tuple.
        """
        if value is None or (value is False and not self.is_flag):
            return None if self.required else self.default
        if value is True and self.about.alone is not None:
            return self.about.alone
        if not self.several:
            return self.read_one(value)
        one = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
        return tuple(self.read_one(v) for v in ([value] if one else value))


@cache
def fields_of(request: type[Request]) -> dict[str, ResolvedField]:
    """Return the fields of a request by name, its own before those of its base classes.

    Skips attributes without a `Field`.
    """
    hints = get_type_hints(request, include_extras=True)
    groups = {
        name: Group(heading)
        for kind in reversed(request.__mro__)
        for heading, _, names in (
            g.partition(": ") for g in vars(kind).get("groups", "").split("; ")
        )
        for name in names.split()
    }
    declared = {
        name: i
        for i, kind in reversed([*enumerate(request.__mro__)])
        for name in vars(kind).get("__annotations__", ())
    }
    infos = sorted(msgspec.structs.fields(request), key=lambda info: declared[info.name])
    return {
        info.name: _resolved(info, hints[info.name], about, groups.get(info.name, ""))
        for info in infos
        for about in getattr(hints[info.name], "__metadata__", ())
        if isinstance(about, Field)
    }


def _resolved(info: Any, hint: Any, about: Field, group: str) -> ResolvedField:
    kind = _without_none(hint)
    several = get_origin(kind) is tuple and not (about.unit and about.unit.is_list)
    if several:
        kind = _without_none(get_args(kind)[0])
    choices = tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
    return ResolvedField(info.name, kind, info.default, about, choices, several, group)


def _holds(
    condition: str, fields: Mapping[str, ResolvedField], value_of: Callable[[str], Any]
) -> bool:
    """Return True if any alternative of a condition holds, or if the request has no such field."""
    known = False
    for alternative in condition.split("|"):
        name, _, wanted = alternative.partition("=")
        if name not in fields:
            continue
        known, value = True, value_of(name)
        values = value if isinstance(value, tuple | list) else (value,)
        if fields[name].is_given(value) and (not wanted or wanted in map(str, values)):
            return True
    return not known


def in_words(condition: str, names: Collection[str]) -> str:
    """Format a condition as text, such as "`samples` or `tokens`".

    Skips alternatives that are not in `names`.
    """
    parts = [alternative.partition("=") for alternative in condition.split("|")]
    *others, last = [f"`{n}` {wanted}".strip() for n, _, wanted in parts if n in names] or [""]
    return f"{', '.join(others)} or {last}" if others else last


def check_relations(
    fields: Mapping[str, ResolvedField], value_of: Callable[[str], Any], requires: str = ""
) -> None:
    """Raise Misuse for the first violated relation between fields.

    Relations are `requires`, `Field.needs` and `Field.excludes`.
    """
    for condition in requires.split():
        if not _holds(condition, fields, value_of):
            raise Misuse(f"Give {in_words(condition, fields)}.")
    given = {name: f.about for name, f in fields.items() if f.is_given(value_of(name))}
    for name, about in given.items():
        for other in about.excludes.split():
            if other in given:
                raise Misuse(f"`{name}` cannot be combined with `{other}`.", "Leave one out.")
        for condition in about.needs.split():
            if not _holds(condition, fields, value_of):
                raise Misuse(f"`{name}` needs {in_words(condition, fields)}.")


def rivals_of(fields: Mapping[str, ResolvedField], given: Iterable[str]) -> set[str]:
    """Return the fields that exclude or override a given field, or that a given field does."""
    given, rivals = set(given), set()
    for name, field in fields.items():
        others = {*field.about.excludes.split(), *field.about.overrides.split()}
        if name in given:
            rivals |= others
        if others & given:
            rivals.add(name)
    return rivals


def inapplicable(
    fields: Mapping[str, ResolvedField], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> set[str]:
    """Return the names of project defaults that do not apply to this call.

    A default is dropped if a given field excludes or overrides it, or if a field that it needs has
    no value.
    """
    dropped = rivals_of(fields, given) & defaults.keys()
    while True:
        values = {**{n: v for n, v in defaults.items() if n not in dropped}, **given}

        def value_of(name: str, values: Mapping[str, Any] = values) -> Any:
            return values.get(name, fields[name].default)

        unmet = {
            name
            for name in values.keys() - given.keys()
            if not all(_holds(need, fields, value_of) for need in fields[name].about.needs.split())
        }
        if not unmet:
            return dropped
        dropped |= unmet


def request_of(kind: type[R], given: Mapping[str, Any]) -> R:
    """Create a request from text or plain values by field name.

    Raises:
        UnknownName: The verb has no such field.
        TrainpaceError: A value is missing or invalid.
    """
    fields = fields_of(kind)
    values = {}
    for name in given:
        if name not in fields:
            raise UnknownName("option", name, fields, f"All: {', '.join(fields)}.")
    for name, value in given.items():
        try:
            values[name] = fields[name].read(value)
        except TrainpaceError as error:
            error.message = f"`{name}`: {error.message}"
            raise
    for name, field in fields.items():
        if field.required and values.get(name) is None:
            raise Misuse(f"`{name}` is missing.", field.about.help)
    return kind(**values)


def _without_none(hint: Any) -> Any:
    """Remove None and Annotated from a type."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        rest = [arg for arg in get_args(hint) if arg is not type(None)]
        return _without_none(rest[0])
    return hint


class Work(Protocol):
    """Display of how far long work is."""

    def to(
        self, done: float, total: float | None = None, words: str = "", new: float | None = None
    ) -> None:
        """Report how much of `total` is done.

        Args:
            done: Amount done so far.
            total: Whole amount, if known.
            words: Name of the current item.
            new: Part of `done` that this run did; by default all of it.
        """
        return

    def say(self, line: str) -> None:
        """Print a line that stays on the screen."""
        return


class Progress(Protocol):
    """Receiver of a verb's notes and progress."""

    def note(self, text: str) -> None:
        """Print a note. It is not part of the answer."""
        return

    def work(
        self, what: str, total: float | None = None, unit: str = ""
    ) -> AbstractContextManager[Work]:
        """Start long work, as in `with progress.work("tracing") as work:`."""
        return nullcontext(_Unseen())


class _Unseen(Work):
    pass


class Silent(Progress):
    """Receiver that prints nothing."""


def forwarded(
    asked: Request | None,
    into: type[Request],
    but: Collection[str] = (),
    beside: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Return options of another verb: `beside`, then a request's given values.

    Covers the fields that both requests have, except those in `but`. Values that the other verb
    would refuse beside the rest are left out.
    """
    there = fields_of(into)
    own = {name: value for name, value in beside.items() if value}
    carried = {n: v for n, v in _given(asked, {*but, *beside}) if n in there}
    dropped = inapplicable(there, own, carried)
    values = {**own, **{n: v for n, v in carried.items() if n not in dropped}}
    return [word for name, value in values.items() for word in as_typed(there[name], value)]


def not_forwarded(
    asked: Request | None, into: type[Request], but: Collection[str] = ()
) -> list[str]:
    """Return the given fields of a request that are not options of another verb.

    Skips fields in `but`.
    """
    there = fields_of(into)
    return [name for name, _ in _given(asked, but) if name not in there]


def as_typed(field: ResolvedField, value: Any) -> list[str]:
    """Format an option with its value as on a command line. A tuple repeats the option."""
    option = f"--{field.option}"
    if field.is_flag:
        return [option] if value else []
    values = value if field.several and isinstance(value, tuple) else [value]
    return [word for one in values for word in (option, _typed_value(field, one))]


def _typed_value(field: ResolvedField, value: Any) -> str:
    unit = field.about.unit
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if unit is not None and unit.is_list:  # The other verb has one value where this has several.
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    suffix = "" if unit is None else unit.suffix
    shown = [] if unit is None else [unit.show(value)]
    spellings = [*shown, f"{value:.12g}{suffix}", f"{value!r}{suffix}"]
    return next(text for text in spellings if field.read_one(text) == value)


def _given(asked: Request | None, but: Collection[str]) -> list[tuple[str, Any]]:
    if asked is None:
        return []
    fields = fields_of(type(asked)).items()
    values = ((name, field, getattr(asked, name)) for name, field in fields if name not in but)
    return [
        (name, value)
        for name, field, value in values
        if field.is_given(value) and not isinstance(field.about, Argument)
    ]
