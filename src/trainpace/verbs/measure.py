"""`measure`: time real steps of one or several models on this machine."""

from __future__ import annotations

import subprocess
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, Device, find_device
from trainpace.core.outcome import FailedProbe, Forecast, Jump, Measurement
from trainpace.core.records import Record, common_fields
from trainpace.core.units import format_duration
from trainpace.measure import SuiteItem, SweepAnalysis, SweepPlan, analyse, run_sweep, suite
from trainpace.verbs.places import (
    JournalPlace,
    KeepIdentity,
    detected,
    device_of,
    known_of,
    opened_journal,
    own_devices,
    target_here,
)
from trainpace.verbs.request import (
    BATCHES,
    COUNT,
    DURATION,
    Argument,
    Field,
    Misuse,
    Progress,
    Request,
    Rows,
)
from trainpace.verbs.traced import (
    PRECISION_HELP,
    ChannelsLast,
    ImageSize,
    Optimizer,
    SequenceLength,
)
from trainpace.verbs.training import default_precision, default_precisions
from trainpace.workload import ModelSpec, Variant, form_of

if TYPE_CHECKING:
    from trainpace.forecast import Forecaster
    from trainpace.journal import Journal, RecordedSweep
    from trainpace.measure import Conditions


DEFAULT_BATCHES = (8, 16, 32)
LARGEST_SEARCHED = 65536
Precision = Literal["fp32", "torch_fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16"]


class MeasureRequest(Request):
    """A model, its batch sizes, and how to measure its steps.

    `command` is stored in the journal; "" means none.
    """

    requires = "model|suite"
    groups = (
        "Model: optimizer sequence_length precision compile suite; "
        "Batch: batch until_oom; "
        "GPUs: device; "
        "Goal and limits: seconds repeats noise_scale fresh"
    )

    model: Annotated[str | None, Argument("The model, as in trainpace forecast.")] = None
    batch: Annotated[
        tuple[int, ...] | None,
        Field("Batch sizes: 32, or 1,2,4, or 1:70, or 8:64:8.  [default: 8,16,32]", BATCHES),
    ] = None
    every: Annotated[
        bool, Field("Measure every size of a long range, not only the most informative ones.")
    ] = False
    repeats: Annotated[
        int | None, Field("Probes of each size.  [default: 2; 3 for one or two sizes]", COUNT)
    ] = None
    until_oom: Annotated[
        bool, Field("Find the largest batch that fits (up to the largest of `batch`).")
    ] = False
    precision: Annotated[Precision | None, Field(PRECISION_HELP)] = None
    optimizer: Optimizer = None
    accumulate: Annotated[int, Field("Micro-batches per update.", COUNT)] = 1
    device: Annotated[
        str,
        Field(
            "Device to train on: cpu, cuda (also for ROCm), xpu, mps, or another that torch knows.",
            metavar="KIND",
        ),
    ] = "cpu"
    sequence_length: SequenceLength = None
    image_size: ImageSize = None
    channels_last: ChannelsLast = False
    compile: Annotated[bool, Field("Under torch.compile.")] = False
    seconds: Annotated[float, Field("Training time of a probe.", DURATION)] = 2.0
    timeout: Annotated[float, Field("Give up on a probe after this.", DURATION)] = 600.0
    memory_limit: Annotated[
        float | None, Field("Memory limit of a probe on the CPU.", metavar="GIB")
    ] = None
    noise_scale: Annotated[
        bool,
        Field("Also measure the gradient noise scale of FILE.py:FUNCTION at the largest batch."),
    ] = False
    no_forecast: Annotated[bool, Field("Do not show a forecast beside the measurements.")] = False
    journal: JournalPlace = None
    no_journal: Annotated[
        bool, Field("Save nothing in the journal; an interrupted sweep is then lost.")
    ] = False
    fresh: Annotated[bool, Field("Start again instead of resuming an interrupted sweep.")] = False
    notes: Annotated[str, Field("A note stored with the runs.")] = ""
    keep_identity: KeepIdentity = False
    command: str = ""


class MeasuredSweep(Record, Rows[Measurement]):
    """Measurements over batch sizes. Iterates over `measurements`, in order of batch size.

    Attributes:
        failed: Batch sizes that could not be measured, with the reason.
        analysis: Medians, jumps, the best batch, and the largest that fits.
        forecasts: Forecasts for this machine by batch size.
        causes: Jumps of the forecast, with their causes.
        sweep: Id of the sweep in the journal.
    """

    measurements: tuple[Measurement, ...]
    failed: tuple[FailedProbe, ...]
    analysis: SweepAnalysis
    forecasts: dict[int, Forecast]
    causes: tuple[Jump, ...] = ()
    sweep: str | None = None

    @property
    def rows(self) -> tuple[Measurement, ...]:  # type: ignore[override]
        return self.measurements

    @property
    def jumps(self) -> tuple[Jump, ...]:
        """Jumps of the measured step time, as in `Forecasts`.

        Each has the forecast's cause and the next measured size that is as good. `excess_ms` is
        negative if the step gets faster.
        """
        curve, best = self.analysis.curve, self.analysis.best
        fitted_ms = dict(zip(curve.batches, curve.fitted_ms, strict=True))
        pairs = zip(best.before_jumps, best.after_jumps, strict=True)
        good = {before.batch: behind.batch for before, behind in pairs if behind is not None}
        found = []
        for jump in curve.jumps:
            cause = jump.cause_among(self.causes)
            found.append(
                Jump(
                    before=jump.before,
                    batch=jump.after,
                    before_ms=fitted_ms[jump.before],
                    after_ms=fitted_ms[jump.after],
                    excess_ms=jump.size_ms,
                    causes=cause.causes if cause else (),
                    mechanism=cause.mechanism if cause else "",
                    next_good=good.get(jump.before),
                )
            )
        return tuple(found)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dict per batch size with the statistics of all its probes and its forecast."""
        rows = []
        for point in self.analysis.points:
            forecast = self.forecasts.get(point.batch)
            step = None if forecast is None else forecast.step
            row = {**msgspec.to_builtins(point), "samples_per_second": point.samples_per_second}
            interval = row.pop("interval_ms")
            row |= {"step_ms_low": interval["low"], "step_ms_high": interval["high"]}
            rows.append({**row, "forecast_ms": None if step is None else step.total_ms})
        return rows


def run(request: MeasureRequest, progress: Progress) -> MeasuredSweep:
    """Measure the request's model. Raises UserCodeError if nothing could be measured."""
    assert request.model is not None
    if request.noise_scale and not ModelSpec.of(request.model).runs_code:
        raise Misuse(
            "`noise_scale` needs real samples, and those of this model are random.",
            "Give FILE.py:FUNCTION.",
        )
    request, device = prepared(request, progress)
    with opened_journal(request.journal, request.no_journal) as journal:
        return sweep_of(request, device, journal, progress)


def sweep_of(
    request: MeasureRequest, device: str, journal: Journal | None, progress: Progress
) -> MeasuredSweep:
    """Measure one model on a device. Raises UserCodeError if nothing could be measured."""
    r, conditions = request, _conditions(request, device)
    plan = _plan(r)
    forecaster = None if r.no_forecast else _forecaster(conditions, device, journal, progress)
    optimizer = forecaster.workload.optimizer if forecaster else ""
    execution = conditions.execution(plan.batches[0], optimizer)
    causes = _forecast_jumps(forecaster, plan, execution)
    recorded = _record(r, conditions, plan, device, journal, forecaster, causes, progress)
    measured, failed = _separated(recorded)
    if r.noise_scale:
        from trainpace.measure import measure_noise_scale

        largest = measured[-1].execution.micro_batch
        progress.note(f"gathering gradients at batch {largest}")
        measured[-1] = replace(measured[-1], noise_scale=measure_noise_scale(conditions, largest))
    analysis = analyse(recorded.outcomes, () if r.batch is None else plan.batches)
    forecasts: list[Forecast] = []
    if forecaster is not None:
        from trainpace.forecast import Grid

        sizes = [point.batch for point in analysis.points]
        forecasts = forecaster.at(Grid.vary(execution, micro_batch=sizes)).forecasts()
    return MeasuredSweep(
        measurements=tuple(measured),
        failed=tuple(failed),
        analysis=analysis,
        forecasts={f.execution.micro_batch: f for f in forecasts if f.step is not None},
        causes=causes,
        sweep=recorded.id or None,
    )


def _separated(recorded: RecordedSweep) -> tuple[list[Measurement], list[FailedProbe]]:
    """Return (measurements, failures) in order of batch size.

    Raises:
        UserCodeError: Nothing could be measured.
    """
    measured = [o for o in recorded.outcomes if isinstance(o, Measurement)]
    failed = [o for o in recorded.outcomes if isinstance(o, FailedProbe)]
    if not measured:
        reasons = [f"batch {probe.execution.micro_batch}: {probe.reason}" for probe in failed[:3]]
        raise UserCodeError(f"Nothing could be measured ({'; '.join(reasons)}).")
    return sorted(measured, key=lambda m: m.execution.micro_batch), failed


def _plan(r: MeasureRequest) -> SweepPlan:
    batches = r.batch or ((LARGEST_SEARCHED,) if r.until_oom else DEFAULT_BATCHES)
    return SweepPlan(
        batches=batches,
        repeats=r.repeats or (2 if len(batches) > 2 else 3),
        every=r.every,
        until_oom=r.until_oom,
        also_batches=r.batch is not None,
    )


def prepared(request: MeasureRequest, progress: Progress) -> tuple[MeasureRequest, str]:
    """Return the request as this machine runs it, and the name of the device to measure on.

    On a CPU, a search for the largest batch gets a memory limit. Beyond it, the operating system
    would kill other programs.
    """
    machine = detected(progress)
    device, memory_gib = (
        device_of(request.device, machine),
        machine.memory_limit_gib or machine.memory_gib,
    )
    if (
        request.until_oom
        and request.device == "cpu"
        and request.memory_limit is None
        and memory_gib is not None
    ):
        limit_gib = round(0.7 * memory_gib, 1)
        progress.note(f"probes are limited to {limit_gib:.1f} GiB; --memory-limit changes that")
        request = replace(request, memory_limit=limit_gib)
    return request, device


def _conditions(r: MeasureRequest, device: str) -> Conditions:
    from trainpace.measure import Conditions

    assert r.model is not None
    precision = r.precision or _default_precision(r.model, r.device, device)
    return Conditions(
        **common_fields(replace(r, precision=precision), Conditions),
        accumulation=r.accumulate,
        timeout_s=r.timeout,
        memory_limit_gib=r.memory_limit,
    )


def _default_precision(model: str, kind: str, device: str) -> Any:
    """Return the precision of a script that sets none.

    If the catalogue does not know the card, torch tells whether it has TF32.
    """
    try:
        known = (
            find_device(device, own_devices(None))
            if kind != "cpu"
            else Device(name=device, kind="cpu")
        )
    except TrainpaceError:
        return next(iter(default_precisions(model)), "torch_fp32")
    return default_precision(model, known)


def _forecaster(
    c: Conditions, device: str, journal: Journal | None, progress: Progress
) -> Forecaster | None:
    """Return a forecaster for this machine. If there is none, note the reason and return None."""
    from trainpace.forecast import Forecaster, Target
    from trainpace.workload import load_workload

    try:
        if c.device == "cpu":
            target = target_here(progress)
            if target is None:
                raise TrainpaceError("Run trainpace calibrate first.")
        else:
            target = Target(Cluster(device=find_device(device, own_devices(None))))
        variant = Variant(c.optimizer, c.sequence_length, c.image_size, cpu=c.device == "cpu")
        with progress.work(f"tracing {c.model}") as work:
            work.to(0)
            workload = load_workload(c.model, (form_of(c.precision),), variant, c.timeout_s)
        known = known_of(workload, journal, c.sequence_length, c.image_size)
        return Forecaster(workload, target, knowledge=known)
    except TrainpaceError as error:
        progress.note(f"note: measurements are shown without a forecast: {error}")
        return None


def _forecast_jumps(
    forecaster: Forecaster | None, plan: SweepPlan, execution: Execution
) -> tuple[Jump, ...]:
    """Return the jumps of the forecast. The sweep probes both sides of each jump first."""
    if forecaster is None or not plan.adaptive or forecaster.target.kernels.traces_cpu:
        return ()
    return forecaster.jumps(execution, plan.batches)


def _record(
    request: MeasureRequest,
    conditions: Conditions,
    plan: SweepPlan,
    device: str,
    journal: Journal | None,
    forecaster: Forecaster | None,
    causes: tuple[Jump, ...],
    progress: Progress,
) -> RecordedSweep:
    from trainpace.journal import Circumstances, RecordedSweep, record_sweep
    from trainpace.measure import most_probes

    hints = [jump.batch for jump in causes]
    most = most_probes(len(plan.batches)) if plan.adaptive else len(plan.batches) * plan.repeats
    with progress.work(
        f"measuring {conditions.model}", None if plan.until_oom else most, "probes at most"
    ) as work:
        tell = lambda batch, finished: work.to(finished, words=f"batch {batch}")  # noqa: E731
        if journal is None:
            return RecordedSweep(
                "", run_sweep(conditions, plan, device, lambda _: None, (), hints, tell), 0
            )
        circumstances = Circumstances(
            device=device,
            command=request.command,
            commit=_commit(),
            notes=request.notes,
            versions=f"torch {version('torch')}, trainpace {version('trainpace')}",
            keep_identity=request.keep_identity,
        )
        try:
            recorded = record_sweep(
                journal, conditions, plan, circumstances, forecaster, hints, tell, request.fresh
            )
        except KeyboardInterrupt:
            work.say(
                "\nStopped. What was measured is in the journal; the same command takes it up"
                " again."
            )
            raise
    if recorded.resumed:
        progress.note(
            f"Resumed {recorded.resumed} probes from an interrupted run of the same sweep."
        )
    return recorded


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


class SuiteRequest(MeasureRequest):
    """Request to measure one model or a suite."""

    suite: Annotated[
        str | None,
        Field(
            "Measure a list of models: classic, small, or a FILE.toml.",
            metavar="NAME",
            excludes="model",
            overrides="batch",
        ),
    ] = None


class MeasuredSuite(Record):
    """Number of models, of successfully measured ones, and this machine's device."""

    models: int
    measured: int
    device: str


def check_suite(request: SuiteRequest) -> None:
    if request.noise_scale and request.suite:
        raise Misuse(
            "`noise_scale` measures one model, not a suite. Leave out `suite` or `noise_scale`."
        )


def run_suite(request: SuiteRequest, progress: Progress) -> MeasuredSuite:
    """Measure every model into the journal. Failures are reported and skipped."""
    assert request.suite is not None
    items = suite(request.suite)
    limited, device = prepared(request, progress)
    failed, begin = 0, time.monotonic()
    with opened_journal(request.journal, request.no_journal) as journal:
        for i, item in enumerate(items):
            left_s = (time.monotonic() - begin) / max(i, 1) * (len(items) - i)
            left = f", about {format_duration(left_s)} left" if i else ""
            progress.note(f"{item.spec} ({i + 1} of {len(items)}{left})")
            try:
                best = sweep_of(_one(item, limited), device, journal, progress).analysis.best.best
                progress.note(
                    f"  best batch {best.batch}: {best.measured_samples_per_second:.4g} samples/s"
                )
            except TrainpaceError as error:
                failed += 1
                progress.note(f"  skipped: {error}")
    return MeasuredSuite(models=len(items), measured=len(items) - failed, device=device)


def _one(item: SuiteItem, request: MeasureRequest) -> MeasureRequest:
    common = {name: getattr(request, name) for name in MeasureRequest.__struct_fields__}
    return MeasureRequest(
        **common
        | {
            "model": item.spec,
            "batch": request.batch or item.batches,
            "precision": item.precision,
            "optimizer": item.optimizer or request.optimizer,
            "sequence_length": item.sequence_length or request.sequence_length,
        }
    )
