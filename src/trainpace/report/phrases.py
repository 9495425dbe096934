"""Figures and pieces of sentences that several reports need; where there is no figure, `none` stands."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from msgspec import structs

from trainpace.core.outcome import Interval
from trainpace.core.records import Record
from trainpace.core.units import format_count, format_duration, format_number, format_usd
from trainpace.job import learning_rate_for_noise_scale, samples_factor, steps_factor

Format = Callable[[float], str]


def number(value: float | None, none: str = "-") -> str:
    return none if value is None else format_number(value)


def duration(seconds: float | None, none: str = "-") -> str:
    return none if seconds is None else format_duration(seconds)


def usd(value: float | None, none: str = "-") -> str:
    return none if value is None else format_usd(value)


def percent(share: float | None, none: str = "-") -> str:
    return none if share is None else f"{100 * share:.0f} %"


def span(low: float, high: float, form: Format = format_number) -> str:
    return f"{form(low)} to {form(high)}"


def interval(i: Interval | None, none: str = "-", form: Format = format_number) -> str:
    return none if i is None else span(i.low, i.high, form)


def bracketed(i: Interval | None, form: Format = format_number, after: str = "") -> str:
    """The interval as " (9 to 11)", to stand after a value; nothing where there is none."""
    return "" if i is None else f" ({interval(i, form=form)}{after})"


def rate_in_words(samples_per_s: float | None, sequence_length: int | None) -> str:
    """Samples a second, and tokens where samples are sequences of them."""
    tokens = (
        ""
        if samples_per_s is None or not sequence_length
        else f" ({format_count(samples_per_s * sequence_length)} tokens/s)"
    )
    return f"{number(samples_per_s)} samples/s{tokens}"


ABOVE_ONE = 1.005
"""From here on an efficiency reads as more than 100 %."""
WHY_ABOVE_ONE = (
    "An efficiency above 100 % is no error: among more devices each holds and updates a smaller"
    " share of the states, which takes less time, and leaves room for larger micro-batches or less"
    " recomputation."
)


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Names as in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def sentence(text: str) -> str:
    """With a capital at its start, and names inside as they are."""
    return text[:1].upper() + text[1:]


def when(created_at: str | None, none: str = "-") -> str:
    return none if created_at is None else created_at[:16].replace("T", " ")


def stated(record: Record, always: Collection[str] = ()) -> list[tuple[str, Any]]:
    """Names and values of the fields that differ from their defaults, and of those `always` shown."""
    plain, values = type(record)(), structs.asdict(record)
    return [
        (name, value)
        for name, value in values.items()
        if name in always or value != getattr(plain, name)
    ]


def devices(n: int, name: str) -> str:
    return name if n == 1 else f"{n} x {name}"


def noise_scale(samples: float, low: float, high: float | None, steps: float, batch: int) -> str:
    """A measured gradient noise scale, with its 90 % interval, as a sentence without its end."""
    end = number(high, "no upper limit")
    return (
        f"Gradient noise scale: {number(samples)} samples (90 %: {number(low)} to {end}), from the"
        f" first {steps:.0f} steps of {batch}; it grows during training"
    )


def to_the_same_loss(old: int, new: int, scale: float) -> str:
    """What global batch `new` needs in place of `old` at a gradient noise scale of `scale` samples."""
    rule = learning_rate_for_noise_scale(old, new, scale)
    return (
        f"Global batch {new:,} needs {steps_factor(scale, old, new):.2f} times the steps and"
        f" {samples_factor(scale, old, new):.2f} times the samples of {old:,}; learning rate x"
        f" {rule.sgd_factor:.2f} with SGD, x {rule.adam_factor:.2f} with Adam."
    )
