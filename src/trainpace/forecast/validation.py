"""Forecasts of measured runs, each workload traced once, and their errors summed up."""

import hashlib
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

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.outcome import Forecast, Memory
from trainpace.core.records import Record, load
from trainpace.forecast.cases import Case, case_of
from trainpace.forecast.forecaster import Forecaster
from trainpace.forecast.forecasts import ForecastTable
from trainpace.forecast.measured_runs import MeasuredRun
from trainpace.forecast.memory import CONTEXT_GIB, needed_gib, room_gib
from trainpace.forecast.target import FITTED, FittedKernels, Target
from trainpace.workload import ModelSpec, Workload, trace_many

PAGEABLE_COPY_GB_PER_S = 4.0
"""Host to device from pageable memory: the driver copies through a staging buffer at a third of PCIe 3's rate."""

EAGER_CONTEXT_GIB = 1573 / 1024
"""The CUDA context with every kernel on an A100; source: BigScience, train/tr11-176B-ml/chronicles-prequel.md."""
MODELS_PER_PROCESS = 12
TRACE_VERSION = 4
"""Raise when traces change, so that earlier ones are made again."""
T = TypeVar("T")


class Row(Record):
    """One run, measured against forecast. Errors are (forecast - measured) / measured in per cent.

    `unsupported`: the reason why the run has no forecast.
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
    """A row for every run, in order. `traces` is a folder in which traced workloads are kept for the next time.

    `workers` processes trace at a time, with at most a few hundred megabytes each; `progress` hears how many models are traced.
    A table is data: the Python files that its rows name as models are run only where `run_code` says so.
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
            f"its model is code, {run.model_spec or run.model}, which --run-code would run."
        )
    return case


def _or_reason(work: Callable[..., T], *arguments: Any) -> T | str:
    """The result of `work`, or the reason why there is none."""
    try:
        return work(*arguments)
    except TrainpaceError as error:
        return str(error)
    except (
        AssertionError
    ) as error:  # a forecast that contradicts itself is a bug of ours, and costs its row alone
        return f"the forecast failed its own check: {error}"


def case_table(case: Case, workload: Workload, kernels: FittedKernels = FITTED) -> ForecastTable:
    """The forecast of a case under its own conditions and its own software, as a table of one row."""
    copies = PAGEABLE_COPY_GB_PER_S if case.run.host_copy == "yes" else math.inf
    target = Target(case.cluster, kernels, copies, case.software)
    return Forecaster(workload, target).at([case.execution])


def forecast_case(case: Case, workload: Workload, kernels: FittedKernels = FITTED) -> Forecast:
    """The full record of `case_table`'s row."""
    return case_table(case, workload, kernels).forecast(0)


def trace_file(traces: Path, case: Case) -> Path:
    """The file of a case's workload, named by all that it depends on, files and libraries included."""
    spec, form, variant = case.trace_key
    named = ModelSpec.of(spec)
    if named.path and (source := Path(named.path)).is_file():
        spec = named.with_path(hashlib.sha256(source.read_bytes()).hexdigest())
    key = repr((TRACE_VERSION, _versions(), spec, form, tuple(variant)))
    return traces / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


@cache
def _versions() -> tuple[str, ...]:
    """The versions of the libraries that define models: another one may build another model by the same name."""
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
    """Every case's workload by its key, or the reason why there is none."""
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
        tell(f"tracing {len(missing)} models, about a second each; kept in {traces}")
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
    """The row of a run; a text in the place of its case or workload is the reason why there is none."""
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
    memory = stated_peak_gib(case, result.memory) if result.memory else None
    row = replace(row, unsupported=result.reason, forecast_memory_gib=memory, fits=result.fits)
    if result.step is None or result.step_time_interval_ms is None:
        return row
    ms, interval, measured = result.step.total_ms, result.step_time_interval_ms, row.measured_ms
    return replace(
        row,
        forecast_ms=ms,
        low_ms=interval.low,
        high_ms=interval.high,
        error_pct=None if measured is None else 100 * (ms / measured - 1),
        in_interval=None if measured is None else interval.low <= measured <= interval.high,
        memory_error_pct=(
            100 * (memory / run.peak_mem_gib - 1)
            if run.peak_mem_gib and memory is not None
            else None
        ),
        provenance=result.provenance,
        assumed=case.assumed,
    )


def stated_peak_gib(case: Case, memory: Memory) -> float:
    """The peak in GiB that the run's way of measuring would show.

    A monitor (nvidia-smi) shows more than a job needs, in two ways that belong to its software and not to its execution:

    - CUDA before 11.7 loaded every kernel of torch and its libraries with the context (`EAGER_CONTEXT_GIB`); `CONTEXT_GIB`
      holds since kernels are loaded when first used.
    - Under `torch.backends.cudnn.benchmark` convolutions are tried with every algorithm whose workspace fits the memory
      that is still free, "e.g. a few GBs" (aten's Conv_v7.cpp), so that the card fills up, whatever its size: in
      lambda_aggregated SSD300 with 32 images shows 15, 23, 39 and 47 GiB on cards of 16, 24, 40 and 48. What such a run
      needs cannot be read off it.
    """
    if case.peak == "allocated":
        return memory.allocated_gib
    if case.peak == "reserved":
        return memory.reserved_gib
    capacity = case.cluster.device.memory_gib
    if capacity is None:
        return memory.device_gib
    more = EAGER_CONTEXT_GIB - CONTEXT_GIB if case.loads_all_kernels else 0.0
    full = max(float(needed_gib(memory)) + more, room_gib(capacity.value))
    # short of memory, an allocator gives back what it only keeps
    return full if case.run.cudnn_benchmark == "yes" else min(memory.device_gib + more, full)


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
    rows = list(rows)
    errors = [row.error_pct for row in rows if row.error_pct is not None]
    size = [abs(error) for error in errors]
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
        p90=float(np.quantile(size, 0.90)) if size else None,
        p95=float(np.quantile(size, 0.95)) if size else None,
        bias=statistics.median(errors) if errors else None,
        coverage=100 * sum(inside) / len(inside) if inside else None,
        half_width=statistics.median(widths) if widths else None,
        memory_n=len(memory),
        memory_mape=statistics.fmean(memory) if memory else None,
    )


def by(rows: Iterable[Row], key: Callable[[Row], str]) -> list[Summary]:
    """A summary for each value of `key`, in order of name."""
    return [
        summarise(name or "not stated", group)
        for name, group in groupby(sorted(rows, key=key), key)
    ]


def family_of(spec: str) -> str:
    """The family of a model: its name's letters before the first digit, without the trainer's prefix."""
    name = re.split(r"[:/]", spec)[-1].removesuffix(".json")
    name = re.sub(r"^(tf_|gluon_|legacy_|tv_|ig_|ssl_|swsl_|dm_)", "", name)
    return re.split(r"[\d_\-.]", name)[0] or name
