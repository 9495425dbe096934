"""How well the installed version forecasts the packaged measurements: computed anew from packaged traces, without torch."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.intake import read_bytes
from trainpace.core.outcome import Forecast
from trainpace.core.records import Record, decode_array
from trainpace.forecast.fingerprint import fingerprint_of_constants
from trainpace.forecast.public_conditions import Conditions
from trainpace.forecast.published import TRACES_FILE, PublicRun, public_journal
from trainpace.forecast.validation import Row, Summary, forecast_case, summarise
from trainpace.workload import Workload


class PackagedTraces(Record):
    """Workloads by key, and the conditions of each run that has one, by its id."""

    workloads: dict[str, Workload]
    conditions: dict[str, Conditions]


class ScoreLine(Record):
    """Errors over some runs, those that constants were fitted on and the others apart."""

    name: str
    in_fit: Summary
    not_in_fit: Summary


class Score(Record):
    """The accuracy of the installed version on the packaged measurements. Errors are (forecast - measured) / measured in per
    cent, coverage is per cent of the measured times inside of their 90 % interval.

    fingerprint: of the installed constants. runs: forecast. without_forecast: runs that cannot be.
    """

    fingerprint: str
    runs: int
    without_forecast: int
    overall: Summary
    in_fit: Summary
    not_in_fit: Summary
    by_card: tuple[ScoreLine, ...]
    by_model_kind: tuple[ScoreLine, ...]
    by_source: tuple[ScoreLine, ...]
    by_way: tuple[ScoreLine, ...]
    """Trainings on one GPU, on several, and passes without an update."""
    rows: tuple[PublicRun, ...]
    """Every run with its forecast of the installed version."""


@cache
def packaged_traces() -> PackagedTraces:
    """All packaged workloads, which takes some seconds."""
    text = lzma.decompress(read_bytes(TRACES_FILE))
    return msgspec.json.decode(text, type=PackagedTraces, dec_hook=decode_array)


def forecast_of(conditions: Conditions, workload: Workload) -> Forecast | str:
    """The forecast of a run under its own conditions, or why there is none."""
    try:
        return forecast_case(conditions.case(), workload)
    except TrainpaceError as error:
        return str(error)


def with_forecast(run: PublicRun, found: Forecast | str) -> PublicRun:
    """`run` with this forecast, or with the reason why there is none."""
    if isinstance(found, str) or found.step is None or found.step_time_interval_ms is None:
        why = found if isinstance(found, str) else found.reason
        return replace(run, forecast_ms=None, low_ms=None, high_ms=None, why_no_forecast=why)
    ends = found.step_time_interval_ms
    return replace(
        run,
        forecast_ms=_rounded(found.step.total_ms),
        low_ms=_rounded(ends.low),
        high_ms=_rounded(ends.high),
        why_no_forecast="",
    )


def score(progress: Callable[[int, int], None] = lambda done, of: None) -> Score:
    """Forecast every packaged run that has a trace anew, which takes about half a minute. `progress` hears how far it is."""
    journal, traces = public_journal(), packaged_traces()
    able = [run for run in journal.runs if run.id in traces.conditions]
    done: list[PublicRun] = []
    for run in able:
        conditions = traces.conditions[run.id]
        done.append(with_forecast(run, forecast_of(conditions, traces.workloads[conditions.trace])))
        progress(len(done), len(able))
    return score_of((*done, *(run for run in journal.runs if run.id not in traces.conditions)))


def score_of(runs: Sequence[PublicRun]) -> Score:
    """The accuracy of the forecasts that runs have: packaged ones, or those of `score`."""
    timed = [run for run in runs if run.forecast_ms is not None]
    return Score(
        fingerprint=fingerprint_of_constants(),
        runs=len(timed),
        without_forecast=len(runs) - len(timed),
        overall=_summary("all", timed),
        in_fit=_summary("in the fit", (run for run in timed if run.in_fit)),
        not_in_fit=_summary("not in the fit", (run for run in timed if not run.in_fit)),
        by_card=_lines(timed, lambda run: run.device),
        by_model_kind=_lines(timed, lambda run: run.model_kind),
        by_source=_lines(timed, lambda run: run.source),
        by_way=_lines(timed, way_of),
        rows=tuple(timed),
    )


def way_of(run: PublicRun) -> str:
    """What was run, as far as forecasts of it differ."""
    if run.mode != "train":
        return "forward passes" if run.mode == "inference" else "forward and backward passes"
    return "training on one GPU" if run.gpus == 1 else "training on several GPUs"


def _lines(runs: Iterable[PublicRun], name_of: Callable[[PublicRun], str]) -> tuple[ScoreLine, ...]:
    groups: dict[str, list[PublicRun]] = {}
    for run in runs:
        groups.setdefault(name_of(run), []).append(run)
    return tuple(
        ScoreLine(
            name=name,
            in_fit=_summary(name, (run for run in groups[name] if run.in_fit)),
            not_in_fit=_summary(name, (run for run in groups[name] if not run.in_fit)),
        )
        for name in sorted(groups)
    )


def _summary(name: str, runs: Iterable[PublicRun]) -> Summary:
    return summarise(name, [_row(index, run) for index, run in enumerate(runs)])


def _row(index: int, run: PublicRun) -> Row:
    assert run.forecast_ms is not None
    assert run.low_ms is not None
    assert run.high_ms is not None
    return Row(
        index=index,
        file=run.collection,
        model=run.model,
        gpu=run.device,
        num_gpus=run.gpus,
        precision=run.precision,
        batch=run.micro_batch,
        measured_ms=run.step_time_ms,
        forecast_ms=run.forecast_ms,
        low_ms=run.low_ms,
        high_ms=run.high_ms,
        error_pct=run.error_pct,
        in_interval=run.low_ms <= run.step_time_ms <= run.high_ms,
    )


def _rounded(ms: float) -> float:
    return float(f"{ms:.5g}")
