"""Errors summed up: over all runs, and by file, GPU and family of models."""

import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from trainpace.records import Record
from trainpace.validation.evaluate import Row


class Summary(Record):
    """Errors in per cent over `n` runs that could be compared; `unsupported` could not be forecast.

    mape: mean of absolute errors. bias: median of signed ones. coverage: per cent of measurements inside their 90 % interval.
    half_width: median half of the interval's width over the forecast. memory_*: over runs that state a peak.
    """

    name: str
    n: int
    unsupported: int
    mape: float | None
    median: float | None
    p90: float | None
    p95: float | None
    bias: float | None
    coverage: float | None
    half_width: float | None
    memory_n: int
    memory_mape: float | None


def summarise(name: str, rows: Iterable[Row]) -> Summary:
    """One summary. Quantiles are of the sorted errors, without interpolation below 2 runs."""
    rows = list(rows)
    errors = [row.error_pct for row in rows if row.error_pct is not None]
    size = sorted(abs(error) for error in errors)
    inside = [row.in_interval for row in rows if row.in_interval is not None]
    widths = [
        50 * (row.high_ms - row.low_ms) / row.forecast_ms
        for row in rows
        if row.forecast_ms and row.low_ms is not None and row.high_ms is not None
    ]
    memory = [abs(row.memory_error_pct) for row in rows if row.memory_error_pct is not None]
    return Summary(
        name=name,
        n=len(errors),
        unsupported=sum(bool(row.unsupported) for row in rows),
        mape=statistics.fmean(size) if size else None,
        median=statistics.median(size) if size else None,
        p90=_quantile(size, 0.90),
        p95=_quantile(size, 0.95),
        bias=statistics.median(errors) if errors else None,
        coverage=100 * sum(inside) / len(inside) if inside else None,
        half_width=statistics.median(widths) if widths else None,
        memory_n=len(memory),
        memory_mape=statistics.fmean(memory) if memory else None,
    )


def by(rows: Sequence[Row], key: Callable[[Row], str]) -> list[Summary]:
    """A summary for each value of `key`, in order of name."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [summarise(name or "not stated", groups[name]) for name in sorted(groups)]


def family_of(spec: str) -> str:
    """The family of a model: its name's letters before the first digit, without the trainer's prefix."""
    name = re.split(r"[:/]", spec)[-1].removesuffix(".json")
    name = re.sub(r"^(tf_|gluon_|legacy_|tv_|ig_|ssl_|swsl_|dm_)", "", name)
    return re.split(r"[\d_\-.]", name)[0] or name


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
