"""Pieces of sentences that several reports need."""

from collections.abc import Callable

from trainpace.outcome import Interval
from trainpace.units import format_number

Format = Callable[[float], str]


def number(value: float | None, none: str = "-") -> str:
    return none if value is None else format_number(value)


def span(low: float, high: float, form: Format = format_number) -> str:
    return f"{form(low)} to {form(high)}"


def interval(i: Interval | None, none: str = "-", form: Format = format_number) -> str:
    return none if i is None else span(i.low, i.high, form)


def bracketed(i: Interval | None, form: Format = format_number, after: str = "") -> str:
    """ " (9 to 11)", to stand after a value; nothing where there is no interval."""
    return "" if i is None else f" ({interval(i, form=form)}{after})"


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def devices(n: int, name: str) -> str:
    return name if n == 1 else f"{n} x {name}"
