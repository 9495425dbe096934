"""Accuracy of forecasts that were made before their runs were measured."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby

from trainpace.journal.entry import Entry
from trainpace.records import Record

LATELY = 20
"""The number of runs that count as the latest."""


class Score(Record):
    """Errors of `n` forecasts in per cent of the measured step: (forecast - measured) / measured.

    `bias_pct`: the median of the signed errors. `coverage_pct`: the share of measurements inside their forecast's
    interval, over the `n_with_interval` that had one.
    """

    name: str
    n: int
    mean_pct: float | None
    median_pct: float | None
    bias_pct: float | None
    n_with_interval: int
    coverage_pct: float | None


class Point(Record):
    """The mean absolute error in per cent over the last `LATELY` runs up to this one, and over all runs so far."""

    created_at: str
    lately_pct: float
    all_pct: float


class Scores(Record):
    """Scores over all runs, over the last `LATELY`, by device and model, and over time."""

    overall: Score
    lately: Score
    by_device: tuple[Score, ...]
    by_model: tuple[Score, ...]
    over_time: tuple[Point, ...]


def error_pct(entry: Entry) -> float | None:
    """The signed error of the entry's forecast in per cent; None without a forecast or a measured time."""
    if entry.forecast_ms is None or not entry.step_time_ms:
        return None
    return 100 * (entry.forecast_ms - entry.step_time_ms) / entry.step_time_ms


def scores(entries: Iterable[Entry]) -> Scores:
    """Scores of the entries that have both a forecast and a measured time."""
    scored = sorted((e for e in entries if error_pct(e) is not None), key=lambda e: (e.created_at, e.id))
    return Scores(
        overall=score("all", scored), lately=score(f"last {LATELY}", scored[-LATELY:]),
        by_device=_by(scored, lambda entry: entry.device), by_model=_by(scored, lambda entry: entry.model),
        over_time=_over_time(scored),
    )  # fmt: skip


def score(name: str, entries: Sequence[Entry]) -> Score:
    errors = [error for entry in entries if (error := error_pct(entry)) is not None]
    inside = [
        entry.forecast_low_ms <= entry.step_time_ms <= entry.forecast_high_ms
        for entry in entries
        if entry.forecast_low_ms is not None and entry.forecast_high_ms is not None and entry.step_time_ms
    ]
    sizes = [abs(error) for error in errors]
    return Score(
        name=name, n=len(errors), mean_pct=statistics.fmean(sizes) if sizes else None,
        median_pct=statistics.median(sizes) if sizes else None, bias_pct=statistics.median(errors) if errors else None,
        n_with_interval=len(inside), coverage_pct=100 * sum(inside) / len(inside) if inside else None,
    )  # fmt: skip


def _by(entries: Sequence[Entry], key: Callable[[Entry], str]) -> tuple[Score, ...]:
    return tuple(score(name, list(group)) for name, group in groupby(sorted(entries, key=key), key))


def _over_time(entries: Sequence[Entry]) -> tuple[Point, ...]:
    sizes = [abs(error_pct(entry) or 0.0) for entry in entries]
    means = (total / i for i, total in enumerate(accumulate(sizes), 1))
    return tuple(
        Point(created_at=entry.created_at, lately_pct=statistics.fmean(sizes[max(0, i - LATELY) : i]), all_pct=mean)
        for i, (entry, mean) in enumerate(zip(entries, means, strict=True), 1)
    )
