"""What a verb is given: a request, with the units and ranges of its values, and somebody to tell how far it has come.

A request is a frozen record, whose every field has a type, a unit, a default and a line of help.

    class GpusRequest(Request):
        name: Annotated[str | None, Argument("One device.")] = None
        num_gpus: Annotated[int, Field("GPUs of a node.", DEVICES)] = 1

The command line's options, the keywords in Python, the form of a page and the reference page of a verb are all derived from
`fields_of(GpusRequest)`. A bool is a flag, a Literal a choice, a tuple an option that may be given several times. Messages name
a field in backquotes (`num_gpus`), which every face shows in its own spelling.
"""

import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
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
    parse_count,
    parse_duration_s,
    parse_ratio,
    parse_usd,
)

MOST_BATCHES = 10_000
MOST_DEVICES = 1_000_000
ABOVE_0 = 5e-324

T = TypeVar("T")
R = TypeVar("R", bound="Request")


class Request(Record):
    """The base of every verb's request."""


class Rows(Table, Generic[T]):
    """An answer that is the sequence of its `rows`."""

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
    """A request that cannot be meant so, such as two fields that exclude each other."""


@dataclass(frozen=True)
class Unit:
    """How a value is written as text. `parse` raises TrainpaceError; `suffix` is what a bare number stands for in Python.

    A list unit (`is_list`) reads a whole tuple from one text, such as the batch sizes 1:70.
    """

    name: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    suffix: str = ""
    is_list: bool = False

    def read(self, value: Any) -> Any:
        """The value of text, of a number, or, of a list unit, of some numbers."""
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
    return format_duration(seconds).replace(" ", "")


def _shown_number(number: float) -> str:
    return format(Decimal(repr(number)), "f").removesuffix(".0")  # no exponent


def within(
    name: str, least: float, most: float, parse: Callable[[str], Any] = _number, hint: str = ""
) -> Unit:
    """Numbers from `least` to `most`; `least` just above 0 reads as "above 0"."""
    start = "above 0" if least == ABOVE_0 else f"from {least:,.12g}"

    def checked(text: str) -> Any:
        value = parse(text)
        if not least <= value <= most:  # as NaN is not either
            raise TrainpaceError(
                f"{text} cannot be right: give a number {start}, up to {most:,.12g}.", hint
            )
        return value

    if parse is parse_duration_s:
        return Unit(name, checked, _shown_s, suffix="s")
    return Unit(name, checked, _shown_number)


def _list_of(name: str, one: str, least: int, most: int, hint: str) -> Unit:
    """Whole numbers: ``32``, ``1,2,4,8``, ``1:70`` (every one) or ``8:64:8`` (every eighth)."""

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
    """A path that fulfils every check; each has the problem of one that does not."""

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
GB_PER_S = within("GB/s", 1e-6, 1e6, hint="In gigabytes a second: 400 Gbit/s is 50.")
BATCHES = _list_of("batches", "batch size", 1, 10**9, "Write 32, or 1,2,4,8, or 1:70, or 8:64:8.")
LENGTHS = _list_of(
    "lengths", "sequence length", 1, 10**9, "Write 4096, or 1024,4096,16384, or 1024:8192:1024."
)
WORKERS = _list_of("workers", "number of workers", 0, 256, "Write 4, or 0,2,4, or 0:4; up to 256.")
NEW_FILE = _path(
    "file",
    (lambda path: Path(path).resolve().parent.is_dir(), "the folder of {path} does not exist."),
    (lambda path: not os.path.exists(path) or os.path.isfile(path), "{path} is no regular file."),
)
EXISTING_FILE = _path(
    "file",
    (os.path.exists, "File {path!r} does not exist."),
    (lambda path: not os.path.isdir(path), "File {path!r} is a directory."),
)
EXISTING_FOLDER = _path("directory", (os.path.isdir, "Directory {path!r} does not exist."))


@dataclass(frozen=True)
class Field:
    """What a face has to know about a field besides its type and default.

    option: the word of the command line where it is not the field's name, such as "from". alone: the value where the option is
    given without one. sets: the field of `Execution` that it sets.
    """

    help: str
    unit: Unit | None = None
    metavar: str | None = None
    option: str = ""
    alone: Any = None
    show_default: bool = True
    sets: str = ""


@dataclass(frozen=True)
class Argument(Field):
    """A field that the command line takes by its position. `rest`: with all that follows on the line, as another command's."""

    rest: bool = False


@dataclass(frozen=True)
class ResolvedField:
    """A field of a request, resolved: its name, its plain type, and what its `Field` says.

    choices: the values of a Literal, else none. several: a tuple of values, each given on its own. required: without a default.
    """

    name: str
    kind: Any
    default: Any
    about: Field
    choices: tuple[str, ...]
    several: bool

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
        """The default as a person writes it; empty where there is none to show."""
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

    def read_one(self, value: Any) -> Any:
        """One value, checked and converted. Raises TrainpaceError for what it cannot be."""
        if isinstance(value, bool):
            raise TrainpaceError(f"it takes a value, not {value}.")
        if self.about.unit is not None:
            return self.about.unit.read(value)
        if self.choices:
            if str(value) not in self.choices:
                near = nearest_names(str(value), self.choices, limit=3)
                hint = f"Nearest: {', '.join(near)}." if near else ""
                raise TrainpaceError(f"{value!r} is not one of {', '.join(self.choices)}.", hint)
            return get_args(self.kind)[self.choices.index(str(value))]
        if self.kind in (int, float):
            try:
                return self.kind(value)
            except (TypeError, ValueError, OverflowError):
                number = "a whole number" if self.kind is int else "a number"
                raise TrainpaceError(f"{value!r} is not {number}.") from None
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    def read(self, value: Any) -> Any:
        """A value as a Python program gives it: None is the default, a single value may stand for a tuple of one."""
        if value is None or (value is False and not self.is_flag):
            return None if self.required else self.default
        if self.is_flag:
            if not isinstance(value, bool):
                raise TrainpaceError(f"{value!r} is neither True nor False.")
            return value
        if value is True and self.about.alone is not None:
            return self.about.alone
        if not self.several:
            return self.read_one(value)
        one = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
        return tuple(self.read_one(v) for v in ([value] if one else value))


@cache
def fields_of(request: type[Request]) -> dict[str, ResolvedField]:
    """The fields of a request by name, its own before those of its bases. Those without a `Field` are set by faces alone, and
    left out."""
    hints = get_type_hints(request, include_extras=True)
    resolved = {}
    declared = {
        name: i
        for i, kind in reversed([*enumerate(request.__mro__)])
        for name in vars(kind).get("__annotations__", ())
    }
    for info in sorted(msgspec.structs.fields(request), key=lambda info: declared[info.name]):
        hint = hints[info.name]
        about = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Field)), None)
        if about is None:
            continue
        kind = _without_none(hint)
        several = get_origin(kind) is tuple and not (about.unit and about.unit.is_list)
        if several:
            kind = _without_none(get_args(kind)[0])
        choices = tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
        resolved[info.name] = ResolvedField(info.name, kind, info.default, about, choices, several)
    return resolved


def request_of(kind: type[R], given: Mapping[str, Any]) -> R:
    """A request from what a Python program or a page gives: text or plain values by the names of its fields.

    Raises UnknownName for a field that the verb does not have, and TrainpaceError, naming the field, for a value that it cannot
    take or one that is missing.
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
    """The type under Annotated and beside None."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        rest = [arg for arg in get_args(hint) if arg is not type(None)]
        return _without_none(rest[0])
    return hint


class Work(Protocol):
    def to(
        self, done: float, total: float | None = None, words: str = "", new: float | None = None
    ) -> None:
        """Say how much is done of `total`, and `new`, how much of that by this run (all unless said). `words`: what is on now."""

    def say(self, line: str) -> None:
        """Give a line that stays."""


class Progress(Protocol):
    """Where a verb's remarks go."""

    def note(self, text: str) -> None:
        """Give a remark that stays, beside the answer."""

    def work(
        self, what: str, total: float | None = None, unit: str = "", seconds: float | None = None
    ) -> AbstractContextManager[Work]:
        """Begin long work: `with progress.work("tracing") as work:`. `seconds`: work that is known to take so long."""


class Silent:
    """A `Progress`, and its `Work`, that tell nobody."""

    def note(self, text: str) -> None:
        pass

    @contextmanager
    def work(
        self, what: str, total: float | None = None, unit: str = "", seconds: float | None = None
    ) -> Iterator[Work]:
        yield self

    def to(
        self, done: float, total: float | None = None, words: str = "", new: float | None = None
    ) -> None:
        pass

    def say(self, line: str) -> None:
        pass
