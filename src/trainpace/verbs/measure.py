"""`measure`: real steps of a model on this machine."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, Device, find_device
from trainpace.core.outcome import FailedProbe, Forecast, Jump, Measurement
from trainpace.core.records import Record
from trainpace.measure import SweepAnalysis, SweepPlan, analyse, run_sweep
from trainpace.verbs.places import (
    JournalPlace,
    KeepIdentity,
    detected,
    device_of,
    known_of,
    opened_journal,
    own_devices,
    profile_here,
)
from trainpace.verbs.request import (
    BATCHES,
    COUNT,
    DURATION,
    Argument,
    Field,
    Group,
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
from trainpace.verbs.training import default_precision
from trainpace.workload import ModelSpec, Variant, form_of, stored_precision

if TYPE_CHECKING:
    from trainpace.forecast import Forecaster
    from trainpace.journal import Journal, RecordedSweep
    from trainpace.measure import Conditions

DEFAULT_BATCHES = (8, 16, 32)
LARGEST_SEARCHED = 65536
Precision = Literal["fp32", "torch_fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16"]


class MeasureRequest(Request):
    """A model, the batch sizes, and how its steps are measured. `command` is stored in the journal; "" for none."""

    requires = ("model|suite",)

    model: Annotated[str | None, Argument("The model, as in trainpace forecast.")] = None
    batch: Annotated[
        tuple[int, ...] | None,
        Field(
            "Batch sizes: 32, or 1,2,4, or 1:70, or 8:64:8.  [default: 8,16,32]",
            BATCHES,
            group=Group.BATCH,
        ),
    ] = None
    every: Annotated[
        bool, Field("Measure every size of a long range, not only the most informative ones.")
    ] = False
    repeats: Annotated[
        int | None,
        Field(
            "Probes of each size.  [default: 2; 3 for one or two sizes]", COUNT, group=Group.CHOICE
        ),
    ] = None
    until_oom: Annotated[
        bool,
        Field(
            "Find the largest batch that fits (up to the largest of `batch`).", group=Group.BATCH
        ),
    ] = False
    precision: Annotated[Precision | None, Field(PRECISION_HELP, group=Group.MODEL)] = None
    optimizer: Optimizer = None
    accumulate: Annotated[int, Field("Micro-batches per update.", COUNT)] = 1
    device: Annotated[
        str,
        Field(
            "Device to train on: cpu, cuda (also for ROCm), xpu, mps, or another that torch knows.",
            metavar="KIND",
            group=Group.GPUS,
        ),
    ] = "cpu"
    sequence_length: SequenceLength = None
    image_size: ImageSize = None
    channels_last: ChannelsLast = False
    compile: Annotated[bool, Field("Under torch.compile.", group=Group.MODEL)] = False
    seconds: Annotated[float, Field("Training time of a probe.", DURATION, group=Group.CHOICE)] = (
        2.0
    )
    timeout: Annotated[float, Field("Give up on a probe after this.", DURATION)] = 600.0
    memory_limit: Annotated[
        float | None, Field("Memory limit of a probe on the CPU.", metavar="GIB")
    ] = None
    noise_scale: Annotated[
        bool,
        Field(
            "Also measure the gradient noise scale of FILE.py:FUNCTION at the largest batch.",
            group=Group.CHOICE,
        ),
    ] = False
    no_forecast: Annotated[bool, Field("Do not show a forecast beside the measurements.")] = False
    journal: JournalPlace = None
    no_journal: Annotated[
        bool, Field("Save nothing in the journal; an interrupted sweep is then lost.")
    ] = False
    fresh: Annotated[
        bool, Field("Start again instead of resuming an interrupted sweep.", group=Group.CHOICE)
    ] = False
    notes: Annotated[str, Field("A note stored with the runs.")] = ""
    keep_identity: KeepIdentity = False
    command: str = ""


class MeasuredSweep(Record, Rows[Measurement]):
    """What was measured over batch sizes. Iterates over `measurements`, which are in order of batch size.

    `failed`: batch sizes that could not be measured, and why. `analysis`: medians, jumps, the best batch, the largest that fits.
    `forecasts`: those made for this machine, by batch size; `causes`: where they jump. `sweep`: its id in the journal.
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
        """Where the measured step jumps, as `Forecasts` has it: with the forecast's cause, and the next measured size that does
        as well. `excess_ms` is below 0 where the step falls."""
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
        """A row a batch size, over all its probes, with what was forecast for it."""
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
    """Raises UserCodeError where nothing could be measured."""
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
    """Measure one model on a device. Raises UserCodeError where nothing could be measured."""
    from trainpace.measure import measure_noise_scale

    r, conditions = request, _conditions(request, device)
    batches = r.batch or ((LARGEST_SEARCHED,) if r.until_oom else DEFAULT_BATCHES)
    plan = SweepPlan(
        batches=batches,
        repeats=r.repeats or (2 if len(batches) > 2 else 3),
        every=r.every,
        until_oom=r.until_oom,
        also_batches=r.batch is not None,
    )
    forecaster = None if request.no_forecast else _forecaster(conditions, device, journal, progress)
    execution = conditions.execution(
        plan.batches[0], "" if forecaster is None else forecaster.workload.optimizer
    )
    causes = () if forecaster is None else _forecast_jumps(forecaster, plan, execution)
    recorded = _record(request, conditions, plan, device, journal, forecaster, causes, progress)
    measured = sorted(
        (o for o in recorded.outcomes if isinstance(o, Measurement)),
        key=lambda m: m.execution.micro_batch,
    )
    failed = tuple(o for o in recorded.outcomes if isinstance(o, FailedProbe))
    if not measured:
        reasons = [f"batch {probe.execution.micro_batch}: {probe.reason}" for probe in failed]
        raise UserCodeError(f"nothing could be measured ({'; '.join(reasons[:3])}).")
    if request.noise_scale:
        largest = measured[-1].execution.micro_batch
        progress.note(f"gathering gradients at batch {largest}")
        measured[-1] = replace(measured[-1], noise_scale=measure_noise_scale(conditions, largest))
    analysis = analyse(recorded.outcomes, () if r.batch is None else batches)
    forecasts: dict[int, Forecast] = {}
    if forecaster is not None:
        at_points = forecaster.over_batches(
            execution, [point.batch for point in analysis.points]
        ).forecasts()
        forecasts = {
            forecast.execution.micro_batch: forecast
            for forecast in at_points
            if forecast.step is not None
        }
    return MeasuredSweep(
        measurements=tuple(measured),
        failed=failed,
        analysis=analysis,
        forecasts=forecasts,
        causes=causes,
        sweep=recorded.id or None,
    )


def prepared(request: MeasureRequest, progress: Progress) -> tuple[MeasureRequest, str]:
    """The request as this machine carries it out, and the name of the device that is measured on.

    A search for the largest batch on a CPU gets a memory limit: beyond it the system would end other programs.
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
        progress.note(f"a probe may take {limit_gib:.1f} GiB, unless a memory limit is given")
        request = replace(request, memory_limit=limit_gib)
    return request, device


def _conditions(r: MeasureRequest, device: str) -> Conditions:
    from trainpace.measure import Conditions

    assert r.model is not None
    precision = r.precision or _default_precision(r.model, r.device, device)
    return Conditions(
        model=r.model,
        device=r.device,
        precision=precision,
        optimizer=r.optimizer,
        accumulation=r.accumulate,
        sequence_length=r.sequence_length,
        image_size=r.image_size,
        channels_last=r.channels_last,
        compile=r.compile,
        seconds=r.seconds,
        timeout_s=r.timeout,
        memory_limit_gib=r.memory_limit,
    )


def _default_precision(model: str, kind: str, device: str) -> Any:
    """As of a script that says nothing of number formats. torch knows which cards have TF32, where the catalogue does not."""
    try:
        known = find_device(device, own_devices(None)) if kind != "cpu" else Device(name=device)
    except TrainpaceError:
        return stored_precision(model) or "torch_fp32"
    return default_precision(model, known)


def _forecaster(
    c: Conditions, device: str, journal: Journal | None, progress: Progress
) -> Forecaster | None:
    """What is forecast on this machine; None, with a note on why, where it cannot be."""
    from trainpace.forecast import CalibratedKernels, Forecaster, Target
    from trainpace.workload import load_workload

    try:
        if c.device == "cpu":
            profile = profile_here(progress)
            if profile is None:
                raise TrainpaceError("trainpace calibrate first.")
            target = Target(Cluster(device=profile.device), CalibratedKernels(profile.kernels))
        else:
            target = Target(Cluster(device=find_device(device, own_devices(None))))
        variant = Variant(c.optimizer, c.sequence_length, c.image_size, cpu=c.device == "cpu")
        with progress.work(f"tracing {c.model}") as work:
            work.to(0)
            workload = load_workload(c.model, (form_of(c.precision),), variant, c.timeout_s)
        known = known_of(workload, journal, c.sequence_length, c.image_size)
        return Forecaster(workload, target, knowledge=known)
    except TrainpaceError as error:
        progress.note(f"note: no forecast beside the measurements: {error}")
        return None


def _forecast_jumps(
    forecaster: Forecaster, plan: SweepPlan, execution: Execution
) -> tuple[Jump, ...]:
    """Where the forecast has its jumps: probes on both sides of them tell soonest whether they are there."""
    if not plan.adaptive or forecaster.target.kernels.traces_cpu:
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
            f"{recorded.resumed} probes were there from an interrupted run of the same sweep."
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
