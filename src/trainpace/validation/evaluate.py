"""Forecast every case, tracing each workload once; what cannot be forecast is a row with its reason."""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec.structs import replace

from trainpace import records
from trainpace.errors import TrainpaceError
from trainpace.forecast import FittedKernels, Forecaster, KernelConstants, Target, fitted_constants
from trainpace.outcome import Forecast
from trainpace.records import Record
from trainpace.trace import is_saved, trace_many
from trainpace.validation.conditions import Case, case_of
from trainpace.validation.peaks import stated_peak_gib
from trainpace.validation.runs import Run
from trainpace.workload import Workload

PAGEABLE_COPY_GB_PER_S = 4.0
"""Host to device from pageable memory: the driver copies through a staging buffer at a third of PCIe 3's rate."""

MODELS_PER_PROCESS = 12
TRACE_VERSION = 3
"""Raise when traces change, so that earlier ones are made again."""
Tell = Callable[[str], None]


class Row(Record):
    """One run: measured against forecast, or why not. Errors are (forecast - measured) / measured in per cent."""

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
    runs: Sequence[Run],
    folder: Path,
    traces: Path,
    tell: Tell,
    workers: int = 2,
    constants: KernelConstants | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Row]:
    """A row for every run, in order. `traces` is a folder in which traced workloads are kept for the next time.

    `workers` processes trace at a time, with at most a few hundred megabytes each; `progress` hears how many models are traced.
    """
    cases: dict[int, Case] = {}
    refused: dict[int, str] = {}
    for run in runs:
        try:
            cases[run.index] = case_of(run, folder)
        except TrainpaceError as error:
            refused[run.index] = str(error)
    workloads = _workloads(list(cases.values()), traces, tell, progress, workers)
    rows = []
    for run in runs:
        case = cases.get(run.index)
        if case is None:
            rows.append(_row(run, None, refused[run.index]))
            continue
        workload = workloads[case.trace_key]
        if isinstance(workload, str):
            rows.append(_row(run, case, workload))
            continue
        try:
            result = forecast_case(case, workload, constants)
        except TrainpaceError as error:  # sizes that only the model tells to be impossible
            rows.append(_row(run, case, str(error)))
            continue
        except AssertionError as error:  # a forecast that contradicts itself is a bug of ours, and costs its row alone
            rows.append(_row(run, case, f"the forecast failed its own check: {error}"))
            continue
        rows.append(_row(run, case, result.reason, result))
    return rows


def forecast_case(case: Case, workload: Workload, constants: KernelConstants | None = None) -> Forecast:
    """The forecast of a case under its own conditions, its host's software included."""
    c = constants or fitted_constants()
    factor = {"": 1.0, "old_torch": c.host_old_torch, "tensorflow": c.host_tensorflow}[case.host]
    if case.attention == "native":
        constants = replace(c, attention_hopper=1.0)
    elif case.attention == "flash1":
        share = c.attention_first
        constants = replace(c, attention=c.attention * share, attention_backward=c.attention_backward * share)
    copies = PAGEABLE_COPY_GB_PER_S if case.run.host_copy == "yes" else math.inf
    target = Target(case.cluster, FittedKernels(constants, factor), copies)
    return Forecaster(workload, target).forecast(case.execution)


def trace_file(traces: Path, case: Case) -> Path:
    """The file of a case's workload, named by all that it depends on, files and libraries included."""
    spec, form, variant = case.trace_key
    kind, _, name = spec.rpartition(":")
    source = Path(kind) if kind.endswith(".py") else Path(name)
    if kind == "transformers" or kind.endswith(".py"):
        digest = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else ""
        spec = f"{kind if kind == 'transformers' else source.name}:{name if kind != 'transformers' else source.name}:{digest}"
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
    cases: Sequence[Case], traces: Path, tell: Tell, progress: Callable[[int, int], None], workers: int
) -> dict[tuple[object, ...], Workload | str]:
    """Every case's workload by its key, or the reason why there is none."""
    files = {case.trace_key: Path(case.spec) if is_saved(case.spec) else trace_file(traces, case) for case in cases}
    missing = {str(file): key for key, file in files.items() if not file.is_file()}
    reasons: dict[str, str] = {}
    if missing:
        traces.mkdir(parents=True, exist_ok=True)
        tell(f"tracing {len(missing)} models, about a second each; kept in {traces}")
        names = list(missing)
        parts = [names[i : i + MODELS_PER_PROCESS] for i in range(0, len(names), MODELS_PER_PROCESS)]
        done = 0
        with ThreadPoolExecutor(workers) as pool:
            for part, failed in zip(
                parts, pool.map(lambda part: trace_many({name: missing[name] for name in part}), parts), strict=True
            ):
                reasons |= failed
                done += len(part)
                progress(done, len(missing))
    return {key: reasons.get(str(file)) or _load(file) for key, file in files.items()}


def _load(file: Path) -> Workload | str:
    try:
        return records.load(file, Workload)
    except TrainpaceError as error:
        return f"{error} Delete the file to trace the model again."


def _row(run: Run, case: Case | None, reason: str, result: Forecast | None = None) -> Row:
    row = Row(
        index=run.index,
        file=run.file,
        model=run.model_spec or run.model,
        gpu=run.gpu_canonical or run.gpu,
        num_gpus=int(run.num_gpus or 1),
        precision=run.precision,
        batch=int(run.batch_per_gpu or 0),
        measured_ms=case.measured_ms if case else run.step_time_ms,
        measured_memory_gib=run.peak_mem_gib,
        unsupported=reason,
    )
    if case is None or result is None:
        return row
    memory = None
    if result.memory is not None:
        memory = stated_peak_gib(case, result.memory)
    row = replace(row, forecast_memory_gib=memory, fits=result.fits)
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
        memory_error_pct=100 * (memory / run.peak_mem_gib - 1) if run.peak_mem_gib and memory is not None else None,
        provenance=result.provenance,
        assumed=case.assumed,
    )
