"""Option types: numbers as people write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from trainpace.errors import TrainpaceError
from trainpace.records import read_bytes
from trainpace.units import parse_count, parse_duration_s, parse_ratio, parse_usd

LARGEST_BATCH = 10**9
MOST_BATCHES = 10_000


class _Parsed(click.ParamType):
    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except TrainpaceError as error:
            self.fail(str(error), param, ctx)


DURATION = _Parsed("duration", parse_duration_s)
COUNT = _Parsed("count", parse_count)
USD = _Parsed("dollars", parse_usd)
RATIO = _Parsed("speed-up", parse_ratio)


def parse_batches(text: str) -> list[int]:
    """``32``, ``1,2,4,8``, ``1:70`` (every size) or ``8:64:8`` (every eighth)."""
    sizes: list[int] = []
    for part in text.split(","):
        ends = [parse_count(end) for end in part.split(":")]
        if len(ends) > 3 or min(ends) < 1 or max(ends) > LARGEST_BATCH or ends[0] > ends[min(1, len(ends) - 1)]:
            raise TrainpaceError(f"{text!r} is not a batch size.", "Write 32, or 1,2,4,8, or 1:70, or 8:64:8.")
        first, last, step = (*ends, ends[0], 1)[:3] if len(ends) == 1 else (*ends, 1)[:3]
        if (last - first) // step + len(sizes) > MOST_BATCHES:
            raise TrainpaceError(
                f"{text!r} names more than {MOST_BATCHES} batch sizes.", "Give a step, as in 1:4096:64."
            )
        sizes += range(first, last + 1, step)
    return sorted(set(sizes))


BATCHES = _Parsed("batches", parse_batches)
MOST_WORKERS = 256


def parse_workers(text: str) -> list[int]:
    """``4``, ``0,2,4`` or ``0:4`` (0 to 4)."""
    counts: set[int] = set()
    for part in text.split(","):
        ends = [parse_count(end) for end in part.split(":")]
        if len(ends) > 2 or ends[0] > ends[-1] or ends[-1] > MOST_WORKERS:
            raise TrainpaceError(
                f"{text!r} is no number of workers.", f"Write 4, or 0,2,4, or 0:4; up to {MOST_WORKERS}."
            )
        counts |= set(range(ends[0], ends[-1] + 1))
    return sorted(counts)


WORKERS = _Parsed("workers", parse_workers)


def echo_json(value: Any) -> None:
    """Print JSON for a program to read."""
    click.echo(json.dumps(value, indent=1, allow_nan=False))


def read_text(path: str) -> str:
    """A text file in UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise TrainpaceError(f"{path} is not a text file in UTF-8.") from None
