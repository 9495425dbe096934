"""Numbers and sentences that several reports share.

Functions return `none` if there is no value.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from msgspec import structs

from trainpace.core.outcome import Forecast, Interval
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


def percent(share: float | None, none: str = "-", digits: int = 0) -> str:
    return none if share is None else f"{100 * share:.{digits}f}%"


def given(value: object, form: str = "{}") -> str:
    """Format a value, for example with "{:g} GiB". Returns "" if there is no value or it is 0."""
    return form.format(value) if value else ""


def change(ratio: float, digits: int = 0) -> str:
    """Format a ratio as a signed difference: 1.1 becomes "+10%"."""
    return f"{100 * (ratio - 1):+.{digits}f}%"


def span(low: float, high: float, form: Format = format_number) -> str:
    return f"{form(low)} to {form(high)}"


def interval(i: Interval | None, none: str = "-", form: Format = format_number) -> str:
    return none if i is None else span(i.low, i.high, form)


def bracketed(i: Interval | None, form: Format = format_number, before: str = "") -> str:
    """Format the interval as " (9 to 11)", to follow a value."""
    return "" if i is None else f" ({before}{interval(i, form=form)})"


def interval_90(i: Interval | None, form: Format = format_number) -> str:
    """Format the interval as " (90% interval 9 to 11)", to follow a value."""
    return bracketed(i, form, "90% interval ")


def rate_in_words(samples_per_s: float | None, sequence_length: int | None) -> str:
    """Format samples per second. Models of token sequences also get tokens per second."""
    tokens = (
        f" ({format_count(samples_per_s * sequence_length)} tokens/s)"
        if samples_per_s is not None and sequence_length
        else ""
    )
    return f"{number(samples_per_s)} samples/s{tokens}"


ABOVE_ONE = 1.005
"""Efficiency above which it is printed as more than 100%."""
WHY_ABOVE_ONE = (
    "An efficiency above 100% is no error: among more devices each holds and updates a smaller"
    " share of the states, which takes less time and leaves room for larger micro-batches or less"
    " recomputation."
)


def plural(n: float, noun: str) -> str:
    amount = f"{n:,}" if isinstance(n, int) else f"{n:,.6g}"
    return f"{amount} {noun}{'' if n == 1 else 's'}"


def listed(names: Iterable[object], most: int | None = None) -> str:
    """Join names as in a sentence: "a", "a and b", "a, b and c", "a, b and 5 more"."""
    every = [str(name) for name in names]
    if most is not None and len(every) > most:
        every[most:] = [f"{len(every) - most} more"]
    return " and ".join(filter(None, (", ".join(every[:-1]), *every[-1:])))


def sentence(text: str) -> str:
    """Capitalize the first letter of a text. The rest stays as it is."""
    return text[:1].upper() + text[1:]


def when(created_at: str | None, none: str = "-") -> str:
    return none if created_at is None else created_at[:16].replace("T", " ")


def stated(record: Record, always: Collection[str] = ()) -> list[tuple[str, Any]]:
    """Return (name, value) of fields that differ from their default or are listed in `always`."""
    plain, values = type(record)(), structs.asdict(record)
    return [
        (name, value)
        for name, value in values.items()
        if name in always or value != getattr(plain, name)
    ]


def devices(n: int, name: str) -> str:
    return name if n == 1 else f"{n} x {name}"


def fleet(f: Forecast) -> str:
    return devices(f.num_devices, f.device)


def place(f: Forecast) -> str:
    return f"{fleet(f)} at batch {f.execution.micro_batch:,}"


def noise_scale(samples: float, low: float, high: float | None, steps: float, batch: int) -> str:
    """Format a measured gradient noise scale with its 90% interval, without a full stop."""
    end = number(high, "no upper limit")
    return (
        f"Gradient noise scale: {number(samples)} samples (90% interval {number(low)} to {end}),"
        f" from the first {steps:.0f} steps of {batch}; it grows during training"
    )


def to_the_same_loss(old: int, new: int, scale: float) -> str:
    """Compare the steps and samples of batch `new` with batch `old` at noise scale `scale`."""
    rule = learning_rate_for_noise_scale(old, new, scale)
    return (
        f"Global batch {new:,} needs {steps_factor(scale, old, new):.2f} times the steps and"
        f" {samples_factor(scale, old, new):.2f} times the samples of {old:,}; learning rate x"
        f" {rule.sgd_factor:.2f} with SGD, x {rule.adam_factor:.2f} with Adam."
    )


HOST_MATTERS = 0.05
"""Minimum share of a step spent waiting for kernel launches for an assumed host to be mentioned."""


def assumed_hosts(rows: Sequence[Forecast]) -> list[str]:
    """Name the assumed hosts if a step depends on them. The JSON answer names all hosts."""
    hosts = dict.fromkeys(
        f"{f.host} for {f.device}"
        for f in rows
        if f.step and f.host_assumed and f.step.host_overhead_ms > HOST_MATTERS * f.step.total_ms
    )
    if not hosts:
        return []
    return [f"Host CPU not given; assuming {', '.join(hosts)}. Set it with --host."]


def software_lines(rows: Sequence[Forecast]) -> list[str]:
    """Name the software, and options without effect.

    The software is named if it was given, or if attention depends on it.
    """
    idle = [
        f"Without effect: {text}."
        for text in dict.fromkeys(t for f in rows for t in f.software_idle)
    ]
    named = [f for f in rows if f.software and (not f.software_assumed or ", " in f.software)]
    used: dict[str, list[str]] = {}
    for f in {f.device: f for f in named}.values():
        used.setdefault(f.software, []).append(f.device)
    if not used:
        return idle
    software = next(iter(used))
    if len(used) > 1:  # The framework is the same on all devices, but its kernels are not.
        parts = [f"{s.partition(', ')[2]} on {listed(names)}" for s, names in used.items()]
        software = f"{software.partition(', ')[0]}, {'; '.join(parts)}"
    line = f"Software: {software}."
    if any(f.software_assumed for f in named):
        line = (
            f"No software versions given; assuming {software}. Set them with --software,"
            " --attention."
        )
    return [line, *idle]


def trace_notes(rows: Sequence[Forecast]) -> list[str]:
    """Return notes about the trace's assumptions, and about code that it did not follow."""
    return list(dict.fromkeys(note for f in rows for note in f.notes))
