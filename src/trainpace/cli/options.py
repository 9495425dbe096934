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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise TrainpaceError(f"{text!r} is not a number.") from None


def within(name: str, least: float, most: float, parse: Callable[[str], Any] = _number, hint: str = "") -> _Parsed:
    """Numbers from `least` to `most`; `least` just above 0 reads as "above 0"."""
    start = "above 0" if least == ABOVE_0 else f"from {least:,.12g}"

    def checked(text: str) -> Any:
        value = parse(text)
        if not least <= value <= most:  # as NaN is not either
            raise TrainpaceError(f"{text} cannot be right: give a number {start}, up to {most:,.12g}.", hint)
        return value

    return _Parsed(name, checked)


ABOVE_0 = 5e-324
DURATION = _Parsed("duration", parse_duration_s)
COUNT = _Parsed("count", parse_count)
USD = _Parsed("dollars", parse_usd)
RATIO = _Parsed("speed-up", parse_ratio)
MOST_DEVICES = 1_000_000
ABOVE_0_S = within("duration", ABOVE_0, 1e12, parse_duration_s)
DEVICES = within("count", 1, MOST_DEVICES, parse_count)
AT_LEAST_1 = within("count", 1, 1e18, parse_count)
EPOCHS = within("epochs", ABOVE_0, 1e9)
GB_PER_S = within("GB/s", 1e-6, 1e6, hint="In gigabytes a second: 400 Gbit/s is 50.")
SAMPLE_BYTES = within("bytes", 0, 1e15, parse_count)
NETWORK_HELP = "A node's network bandwidth in one direction, in gigabytes: 400 Gbit/s is 50; 1 GbE is 0.125."


def check_fleet(num_gpus: int, nodes: int, network_gb_per_s: float | None, measured: bool = False) -> None:
    """Refuse a fleet that nobody has, and several nodes without a network between them (`measured`: by a profile)."""
    if num_gpus * nodes > MOST_DEVICES:
        raise click.UsageError(
            f"--num-gpus {num_gpus:,} x --nodes {nodes:,} cannot be right: up to {MOST_DEVICES:,} GPUs in all."
        )
    if nodes > 1 and network_gb_per_s is None and not measured:
        raise click.UsageError(
            f"{nodes} nodes need the network between them: add --network GB/S (1 Gbit/s Ethernet is 0.125)."
        )


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
