"""Forecasts of measured runs, and their errors.

The runs come from a user's table or from the measurements in the package.
"""

import hashlib
import lzma
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device, find_host
from trainpace.core.intake import read_bytes
from trainpace.core.outcome import Forecast, Memory
from trainpace.core.records import Record, decode_array, load
from trainpace.core.software import Software
from trainpace.forecast.forecaster import Forecaster
from trainpace.forecast.forecasts import ForecastTable
from trainpace.forecast.measured_runs import Case, MeasuredRun, case_of
from trainpace.forecast.memory import CONTEXT_GIB, needed_gib, usable_gib
from trainpace.forecast.published import (
    TRACES_FILE,
    PublicRun,
    fingerprint_of_constants,
    public_journal,
)
from trainpace.forecast.target import FITTED, FittedKernels, Target
from trainpace.workload import ModelSpec, Variant, Workload, form_of, trace_many

PAGEABLE_COPY_GB_PER_S = 4.0
"""Host-to-device rate from pageable memory.

The driver copies through a staging buffer, at a third of the rate of PCIe 3.
"""

EAGER_CONTEXT_GIB = 1573 / 1024
"""Memory of a CUDA context with all kernels loaded, on an A100.

Source: BigScience, train/tr11-176B-ml/chronicles-prequel.md.
"""
MODELS_PER_PROCESS = 12
"""Number of models that one worker process traces before it ends."""
TRACE_VERSION = 4
"""Version of the traces. Increase it when traces change, so that old files are not reused."""
T = TypeVar("T")


class Row(Record):
    """Measured and forecast values of one run.

    Errors are (forecast - measured) / measured in percent. If the run has no forecast,
    `unsupported` gives the reason.
    """

    index: int
    file: str
    model: str
    gpu: str
    num_gpus: int
    precision: str
    batch: int
    measured_ms: float | None = None
    forecast_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    error_pct: float | None = None
    in_interval: bool | None = None
    measured_memory_gib: float | None = None
    forecast_memory_gib: float | None = None
    memory_error_pct: float | None = None
    fits: bool | None = None
    provenance: str = ""
    assumed: str = ""
    unsupported: str = ""


def evaluate(
    runs: Sequence[MeasuredRun],
    folder: Path,
    traces: Path,
    tell: Callable[[str], None],
    workers: int = 2,
    progress: Callable[[int, int], None] = lambda done, of: None,
    run_code: bool = False,
) -> list[Row]:
    """Forecast every run and return one row per run, in the same order.

    Args:
        runs: Measured runs.
        folder: Folder with model files.
        traces: Folder for traced workloads. Later calls reuse them.
        tell: Callback for messages about slow work.
        workers: Number of processes that trace at once. Each needs a few hundred megabytes.
        progress: Callback with the number of traced models and the number of all models.
        run_code: True to run Python files that rows name as models. This is off by default, because
            a table is data from others.
    """
    cases = [_or_reason(_case, run, folder, run_code) for run in runs]
    workloads = _workloads(
        [case for case in cases if isinstance(case, Case)], traces, tell, progress, workers
    )
    return [
        _row(run, case, case if isinstance(case, str) else workloads[case.trace_key])
        for run, case in zip(runs, cases, strict=True)
    ]


def _case(run: MeasuredRun, folder: Path, run_code: bool) -> Case:
    case = case_of(run, folder)
    if ModelSpec.of(case.spec).runs_code and not run_code:
        raise TrainpaceError(
            f"its model is code, {run.model_spec or run.model}; --run-code runs it."
        )
    return case


def _or_reason(work: Callable[..., T], *arguments: Any) -> T | str:
    """Return the result of `work`, or the error message if it fails."""
    try:
        return work(*arguments)
    except TrainpaceError as error:
        return str(error)
    except AssertionError as error:  # A bug in one forecast must not lose the other rows.
        return f"the forecast failed its own check: {error}"


def case_table(case: Case, workload: Workload, kernels: FittedKernels = FITTED) -> ForecastTable:
    """Return the forecast of a case with its own cluster and software, as a table of one row."""
    copies = PAGEABLE_COPY_GB_PER_S if case.run.host_copy == "yes" else math.inf
    target = Target(case.cluster, kernels, copies, case.software)
    return Forecaster(workload, target).at([case.execution])


def forecast_case(case: Case, workload: Workload, kernels: FittedKernels = FITTED) -> Forecast:
    """Return the full forecast record of a case."""
    return case_table(case, workload, kernels).forecast(0)


def trace_file(traces: Path, case: Case) -> Path:
    """Return the path of a case's traced workload.

    The name is a hash of everything that changes the trace: model file, form, variant, library
    versions and `TRACE_VERSION`.
    """
    spec, form, variant = case.trace_key
    named = ModelSpec.of(spec)
    if named.path and (source := Path(named.path)).is_file():
        spec = named.with_path(hashlib.sha256(source.read_bytes()).hexdigest())
    key = repr((TRACE_VERSION, _versions(), spec, form, tuple(variant)))
    return traces / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


@cache
def _versions() -> tuple[str, ...]:
    """Return the versions of the model libraries. Another version may build another model."""
    versions = []
    for library in ("torch", "torchvision", "timm", "transformers"):
        try:
            versions.append(version(library))
        except PackageNotFoundError:
            versions.append("")
    return tuple(versions)


def _workloads(
    cases: Sequence[Case],
    traces: Path,
    tell: Callable[[str], None],
    progress: Callable[[int, int], None],
    workers: int,
) -> dict[tuple[object, ...], Workload | str]:
    """Return the workload for each trace key, or the reason if it cannot be traced.

    Missing workloads are traced and saved in `traces`.
    """
    files = {
        case.trace_key: Path(case.spec)
        if ModelSpec.of(case.spec).is_saved
        else trace_file(traces, case)
        for case in cases
    }
    missing = {str(file): key for key, file in files.items() if not file.is_file()}
    reasons: dict[str, str] = {}
    if missing:
        traces.mkdir(parents=True, exist_ok=True)
        tell(f"tracing {len(missing)} models, about a second each; saved in {traces}")
        names = list(missing)
        parts = [
            names[i : i + MODELS_PER_PROCESS] for i in range(0, len(names), MODELS_PER_PROCESS)
        ]
        done = 0
        with ThreadPoolExecutor(workers) as pool:
            for part, failed in zip(
                parts,
                pool.map(lambda part: trace_many({name: missing[name] for name in part}), parts),
                strict=True,
            ):
                reasons |= failed
                done += len(part)
                progress(done, len(missing))
    return {key: reasons.get(str(file)) or _load(file) for key, file in files.items()}


def _load(file: Path) -> Workload | str:
    try:
        return load(file, Workload)
    except TrainpaceError as error:
        return f"{error} Delete the file to trace the model again."


def _row(run: MeasuredRun, case: Case | str, workload: Workload | str) -> Row:
    """Return the row of a run.

    A text as `case` or `workload` is the reason why the run has no forecast.
    """
    row = Row(
        index=run.index,
        file=run.file,
        model=run.model_spec or run.model,
        gpu=run.gpu_canonical or run.gpu,
        num_gpus=int(run.num_gpus or 1),
        precision=run.precision,
        batch=int(run.batch_per_gpu or 0),
        measured_ms=run.step_time_ms if isinstance(case, str) else case.measured_ms,
        measured_memory_gib=run.peak_mem_gib,
    )
    if isinstance(case, str) or isinstance(workload, str):
        return replace(row, unsupported=workload if isinstance(case, Case) else case)
    result = _or_reason(forecast_case, case, workload)
    if isinstance(result, str):
        return replace(row, unsupported=result)
    return _compared(replace(row, assumed=case.assumed), case, result)


def _compared(row: Row, case: Case, result: Forecast) -> Row:
    """Return the row with the forecast and its errors."""
    memory = stated_peak_gib(case, result.memory) if result.memory else None
    row = replace(row, unsupported=result.reason, forecast_memory_gib=memory, fits=result.fits)
    if result.step is None or result.step_time_interval_ms is None:
        return replace(row, assumed="")
    ms, interval, measured = result.step.total_ms, result.step_time_interval_ms, row.measured_ms
    row = replace(
        row,
        forecast_ms=ms,
        low_ms=interval.low,
        high_ms=interval.high,
        provenance=result.provenance,
    )
    if measured is not None:
        inside = interval.low <= measured <= interval.high
        row = replace(row, error_pct=100 * (ms / measured - 1), in_interval=inside)
    if row.measured_memory_gib and memory is not None:
        row = replace(row, memory_error_pct=100 * (memory / row.measured_memory_gib - 1))
    return row


def stated_peak_gib(case: Case, memory: Memory) -> float:
    """Return the peak in GiB that the run's way of measuring would show.

    A monitor such as nvidia-smi can show more memory than the job needs, for two reasons:

    - CUDA before 11.7 loads every kernel of torch and its libraries with the context
      (`EAGER_CONTEXT_GIB`). Later versions load a kernel at its first use (`CONTEXT_GIB`).
    - With `torch.backends.cudnn.benchmark`, cuDNN tries every convolution algorithm whose workspace
      fits the free memory, "e.g. a few GBs" (aten's Conv_v7.cpp). The card fills up, whatever its
      size. For example, SSD300 with 32 images in lambda_aggregated shows 15, 23, 39 and 47 GiB on
      cards of 16, 24, 40 and 48 GiB. Such a peak does not tell how much memory the run needs.
    """
    if case.peak == "allocated":
        return memory.allocated_gib
    if case.peak == "reserved":
        return memory.reserved_gib
    capacity = case.cluster.device.memory_gib
    if capacity is None:
        return memory.device_gib
    more = EAGER_CONTEXT_GIB - CONTEXT_GIB if case.loads_all_kernels else 0.0
    full = max(float(needed_gib(memory)) + more, usable_gib(capacity.value))
    # An allocator that is short of memory releases its cache, so the peak cannot exceed the card.
    return full if case.run.cudnn_benchmark == "yes" else min(memory.device_gib + more, full)


class Summary(Record):
    """Errors of several runs, in percent.

    Attributes:
        name: Name of the group of runs.
        n: Number of runs with a measured and a forecast time.
        unsupported: Number of runs without a forecast.
        mape: Mean absolute error.
        median: Median absolute error. p90 and p95 are its 90% and 95% quantiles.
        bias: Median signed error.
        coverage: Percentage of measured times inside their 90% interval.
        half_width: Median half width of the interval, in percent of the forecast.
        memory_n: Number of runs with a measured memory peak.
        memory_mape: Mean absolute error of the memory peak.
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
    rows = list(rows)
    errors = [row.error_pct for row in rows if row.error_pct is not None]
    sizes = [abs(error) for error in errors]
    inside = [100.0 * row.in_interval for row in rows if row.in_interval is not None]
    half_widths = [
        50 * (row.high_ms - row.low_ms) / row.forecast_ms
        for row in rows
        if row.forecast_ms and row.low_ms is not None and row.high_ms is not None
    ]
    memory = [abs(row.memory_error_pct) for row in rows if row.memory_error_pct is not None]
    return Summary(
        name=name,
        n=len(errors),
        unsupported=sum(bool(row.unsupported) for row in rows),
        mape=_if_any(statistics.fmean, sizes),
        median=_if_any(statistics.median, sizes),
        p90=_if_any(lambda values: float(np.quantile(values, 0.90)), sizes),
        p95=_if_any(lambda values: float(np.quantile(values, 0.95)), sizes),
        bias=_if_any(statistics.median, errors),
        coverage=_if_any(lambda values: sum(values) / len(values), inside),
        half_width=_if_any(statistics.median, half_widths),
        memory_n=len(memory),
        memory_mape=_if_any(statistics.fmean, memory),
    )


def _if_any(statistic: Callable[[list[float]], float], values: list[float]) -> float | None:
    return statistic(values) if values else None


def by(rows: Iterable[Row], key: Callable[[Row], str]) -> list[Summary]:
    """Return one summary for each value of `key`, sorted by value."""
    return [
        summarise(name or "not given", group) for name, group in groupby(sorted(rows, key=key), key)
    ]


def family_of(spec: str) -> str:
    """Return the family of a model, for example "resnet" for "timm:tv_resnet50".

    The family is the name up to the first digit or separator. Prefixes for the origin of the
    weights are removed.
    """
    name = re.split(r"[:/]", spec)[-1].removesuffix(".json")
    name = re.sub(r"^(tf_|gluon_|legacy_|tv_|ig_|ssl_|swsl_|dm_)", "", name)
    return re.split(r"[\d_\-.]", name)[0] or name


# ---- the packaged measurements


class Conditions(Record):
    """Conditions of one run in the package.

    Attributes:
        trace: Key of the run's workload in `PackagedTraces.workloads`.
        execution: Parallelism, batch and other settings.
        device: Name of the GPU.
        network_gb_per_s: Network bandwidth per GPU in one direction.
        host: Name of the CPU, or None if unknown.
        software: Software of the run.
        host_copy: True if each step copies its samples from pageable memory.
    """

    trace: str
    execution: Execution
    device: str
    network_gb_per_s: float | None
    host: str | None
    software: Software
    host_copy: bool

    def case(self) -> Case:
        e = self.execution
        cluster = Cluster(
            device=find_device(self.device),
            devices_per_node=e.nproc_per_node,
            nodes=e.nnodes,
            network_gb_per_s_per_device=self.network_gb_per_s,
            host=None if self.host is None else find_host(self.host),
        )
        return Case(
            run=MeasuredRun(index=0, host_copy="yes" if self.host_copy else ""),
            spec=self.trace,
            form=form_of(e.precision),
            variant=Variant(),
            execution=e,
            cluster=cluster,
            measured_ms=None,
            software=self.software,
        )


class PackagedTraces(Record):
    """Workloads by key, and conditions by run id, for all packaged runs with a workload."""

    workloads: dict[str, Workload]
    conditions: dict[str, Conditions]


class ScoreLine(Record):
    """Errors of a group of runs, separately for runs that are and are not in the fit."""

    name: str
    in_fit: Summary
    not_in_fit: Summary


class Score(Record):
    """Accuracy of the installed version on the measurements in the package.

    Errors are (forecast - measured) / measured in percent. Coverage is the percentage of measured
    times inside their 90% interval.

    Attributes:
        fingerprint: Fingerprint of the installed constants.
        runs: Number of runs with a forecast.
        without_forecast: Number of runs without a forecast.
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
    """Errors of training on one GPU, training on several GPUs, and passes without an update."""
    rows: tuple[PublicRun, ...]
    """Runs with their forecast by the installed version."""


@cache
def packaged_traces() -> PackagedTraces:
    """Read all packaged workloads, which takes a few seconds."""
    text = lzma.decompress(read_bytes(TRACES_FILE))
    return msgspec.json.decode(text, type=PackagedTraces, dec_hook=decode_array)


def forecast_of(conditions: Conditions, workload: Workload) -> Forecast | str:
    """Return the forecast of a run with its own conditions, or the reason why it has none."""
    try:
        return forecast_case(conditions.case(), workload)
    except TrainpaceError as error:
        return str(error)


def with_forecast(run: PublicRun, found: Forecast | str) -> PublicRun:
    """Return `run` with this forecast, or with the reason if there is none."""
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
    """Forecast every packaged run that has a trace, and return the accuracy.

    This takes about half a minute.

    Args:
        progress: Callback with the number of finished runs and the number of all runs.
    """
    journal, traces = public_journal(), packaged_traces()
    able = [run for run in journal.runs if run.id in traces.conditions]
    done: list[PublicRun] = []
    for run in able:
        conditions = traces.conditions[run.id]
        done.append(with_forecast(run, forecast_of(conditions, traces.workloads[conditions.trace])))
        progress(len(done), len(able))
    return score_of((*done, *(run for run in journal.runs if run.id not in traces.conditions)))


def score_of(runs: Sequence[PublicRun]) -> Score:
    """Return the accuracy of the forecasts that are stored in the runs."""
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
    """Return the kind of run: training on one or several GPUs, or passes without an update."""
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
    return summarise(name, [_public_row(index, run) for index, run in enumerate(runs)])


def _public_row(index: int, run: PublicRun) -> Row:
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
