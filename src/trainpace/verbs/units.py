"""The units of requests: numbers as people write them, and the ranges that they can be right in."""

import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from trainpace.errors import TrainpaceError
from trainpace.units import format_duration, parse_count, parse_duration_s, parse_ratio, parse_usd
from trainpace.verbs.request import Unit

MOST_BATCHES = 10_000
MOST_DEVICES = 1_000_000
ABOVE_0 = 5e-324


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise TrainpaceError(f"{text!r} is not a number.") from None


def _shown_s(seconds: float) -> str:
    return format_duration(seconds).replace(" ", "")


def _shown_number(number: float) -> str:
    return format(Decimal(repr(number)), "f").removesuffix(".0")  # no exponent


def within(name: str, least: float, most: float, parse: Callable[[str], Any] = _number, hint: str = "") -> Unit:
    """Numbers from `least` to `most`; `least` just above 0 reads as "above 0"."""
    start = "above 0" if least == ABOVE_0 else f"from {least:,.12g}"

    def checked(text: str) -> Any:
        value = parse(text)
        if not least <= value <= most:  # as NaN is not either
            raise TrainpaceError(f"{text} cannot be right: give a number {start}, up to {most:,.12g}.", hint)
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
                    f"{text!r} names more than {MOST_BATCHES} batch sizes.", "Give a step, as in 1:4096:64."
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
GB_PER_S = within("GB/s", 1e-6, 1e6, hint="In gigabytes a second: 400 Gbit/s is 50.")
BATCHES = _list_of("batches", "batch size", 1, 10**9, "Write 32, or 1,2,4,8, or 1:70, or 8:64:8.")
WORKERS = _list_of("workers", "number of workers", 0, 256, "Write 4, or 0,2,4, or 0:4; up to 256.")
NEW_FILE = _path("file", (lambda path: Path(path).resolve().parent.is_dir(), "the folder of {path} does not exist."))
EXISTING_FILE = _path(
    "file",
    (os.path.exists, "File {path!r} does not exist."),
    (lambda path: not os.path.isdir(path), "File {path!r} is a directory."),
)
EXISTING_FOLDER = _path("directory", (os.path.isdir, "Directory {path!r} does not exist."))
