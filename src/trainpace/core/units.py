"""Parse and format numbers with units.

In trainpace's code, the name of a number ends in its unit: ``_s``, ``_ms``, ``_gib`` (2**30 bytes),
``_gb`` (1e9 bytes), ``_usd``. Only this module converts between text and such numbers.
"""

import math
import re

from trainpace.core.errors import TrainpaceError

BYTES_PER_GIB = 2**30

_SECONDS = {
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "m": 60.0,
    "min": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "h": 3600.0,
    "hr": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "days": 86400.0,
    "w": 604800.0,
    "week": 604800.0,
    "weeks": 604800.0,
}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_NUMBER = r"[+-]?(?:\d+(?:[_,]\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_DAYS_PER_YEAR = 365.25


def hours_from_s(seconds: float) -> float:
    return seconds / 3600.0


def gib_from_bytes(count: float) -> float:
    return count / BYTES_PER_GIB


def parse_duration_s(text: str) -> float:
    """Parse a duration and return it in seconds.

    Examples: ``90s``, ``1.5h``, ``210ms``, ``2h30m``, ``1 day 4 h``, ``1:30:00`` (h:m:s).

    Raises:
        TrainpaceError: If the text is not a duration. A number without a unit is rejected, because
            90 could mean seconds or milliseconds.
    """
    clock = re.fullmatch(r"\s*(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)\s*", text)
    seconds = _clock_s(clock) if clock else _sum_of_parts_s(text)
    return _finite(seconds, text, "a duration")


def _clock_s(clock: re.Match[str]) -> float:
    """Return the seconds of a match with the groups days, hours, minutes and seconds."""
    sizes = (86400.0, 3600.0, 60.0, 1.0)
    return sum(s * int(part or 0) for s, part in zip(sizes, clock.groups(), strict=True))


def _sum_of_parts_s(text: str) -> float:
    parts = re.findall(rf"({_NUMBER})\s*([a-zA-Zµ]+)", text)
    rest = re.sub(rf"{_NUMBER}\s*[a-zA-Zµ]+", "", text).strip(" ,")
    if not parts or rest or any(unit.casefold() not in _SECONDS for _, unit in parts):
        raise TrainpaceError(
            f"{text!r} is not a duration.",
            "Write a number and a unit, such as 210ms, 90s, 1.5h or 2h30m.",
        )
    signed = [number for number, _ in parts if number.startswith(("+", "-"))]
    if len(parts) > 1 and signed:
        raise TrainpaceError(f"{text!r} is not a duration.", "A sign is only allowed at the start.")
    return sum(float(number.replace(",", "")) * _SECONDS[unit.casefold()] for number, unit in parts)


def parse_count(text: str) -> int:
    """Parse a whole number, such as ``1281167``, ``1_281_167``, ``1.28M`` or ``7B``."""
    value, unit = _amount(
        text, "[kmgbtKMGBT]?", "a count", "Write a number such as 50000, 1.28M or 7B."
    )
    value = _finite(value * _COUNTS[unit], text, "a count")
    if abs(value - round(value)) > 1e-6 * max(1.0, value):
        raise TrainpaceError(f"{text!r} is not a whole number.")
    return round(value)


def parse_usd(text: str) -> float:
    """Parse an amount in US dollars, such as ``500``, ``$500``, ``500usd`` or ``1.2k``."""
    bare = re.sub(r"^\s*\$|\s*(?:usd|\$)\s*$", "", text, flags=re.IGNORECASE)
    what = "an amount in US dollars"
    value, unit = _amount(bare, "[kKmM]?", what, "Write it as 500, $500 or 500usd.", text)
    return _finite(value * _COUNTS[unit], text, what)


def parse_ratio(text: str) -> float:
    """Parse a speed-up, the ratio of old to new time. ``3.63x`` and ``363%`` both give 3.63.

    100% means as fast as before.
    """
    value, unit = _amount(
        text, "%|x|×", "a speed-up", "Write it as 3.63x, or as 363% of the old speed."
    )
    if not value > 0:
        raise TrainpaceError(f"a speed-up is {text!r}; it must be above 0.")
    return _finite(value / (100.0 if unit == "%" else 1.0), text, "a speed-up")


def format_duration(seconds: float) -> str:
    """Format a duration with at most two units, such as ``1 h 12 min``.

    Durations above a year also get years: ``713 days (1.95 years)``. Above ten, only years.
    """
    if not math.isfinite(seconds):
        return "forever"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"
    if seconds < 1.0:
        return f"{format_number(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    if seconds < 3599.5:
        return _two_units(round(seconds), 60, "min", "s")
    if seconds < 2 * 86400 - 30:
        return _two_units(round(seconds / 60), 60, "h", "min")
    return _format_days(seconds)


def _format_days(seconds: float) -> str:
    days = seconds / 86400
    if days < 10:
        return _two_units(round(seconds / 3600), 24, "days", "h")
    if days < _DAYS_PER_YEAR:
        return f"{days:.3g} days"
    years = days / _DAYS_PER_YEAR
    if years >= 10:
        return f"{format_number(years)} years"
    return f"{days:,.0f} days ({years:.3g} years)"


def format_number(value: float) -> str:
    """Format a number with three significant digits. Only tiny numbers get an exponent."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def format_count(value: float) -> str:
    """Format a count, as ``1,281,167`` up to ten million and as ``6.74 B`` above."""
    for limit, size, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e7, 1e6, "M")):
        if abs(value) >= limit:
            scaled = value / size
            return f"{scaled:,.3g} {suffix}" if scaled < 1000 else f"{scaled:,.0f} {suffix}"
    return f"{value:,.0f}"


def format_usd(value: float) -> str:
    """Format US dollars.

    Amounts below $100 have cents. Amounts below a cent have three significant digits.
    """
    if 0 < abs(value) < 0.01:
        return f"${format_number(value)}"
    return f"${value:,.2f}" if abs(value) < 99.995 else f"${value:,.0f}"


def _two_units(count: int, per_large: int, large: str, small: str) -> str:
    whole, part = divmod(count, per_large)
    return f"{whole} {large} {part} {small}" if part else f"{whole} {large}"


def _amount(text: str, units: str, what: str, example: str, written: str = "") -> tuple[float, str]:
    """Split a text into its number and its unit in lower case.

    Args:
        text: The text.
        units: Regular expression of the possible units.
        what: Word for the quantity, for errors.
        example: Valid text, for errors.
        written: Whole text for errors, if `text` is a part of it.
    """
    match = re.fullmatch(rf"\s*({_NUMBER})\s*({units})\s*", text)
    if not match:
        raise TrainpaceError(f"{(written or text)!r} is not {what}.", example)
    return float(match.group(1).replace(",", "")), match.group(2).casefold()


def _finite(value: float, text: str, what: str) -> float:
    if value < 0:
        raise TrainpaceError(f"{text!r} is negative; {what} must be 0 or more.")
    if not math.isfinite(value):
        raise TrainpaceError(f"{text!r} is too large for {what}.")
    return value
