"""Which server for this job: every offer, alone and joined, with what the whole job takes and costs on it.

The global batch is the same everywhere, so that the training is. On each shape the micro-batch is the fastest that fits, with
accumulation; data parallel where the states fit on every GPU, fully sharded (FSDP) where not. Many offers share a shape
(device, count, nodes, network): each shape is forecast once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution, Precision
from trainpace.forecast import forecast
from trainpace.forecast.job import JobConditions, JobTime, energy_kwh, job_time
from trainpace.forecast.memory import FIT_MARGIN, FRAGMENTATION, fits, step_memory
from trainpace.forecast.sweep import sweep_ms
from trainpace.hardware import Cluster, Device
from trainpace.offers.offer import Offer
from trainpace.offers.transfer import transfer_of
from trainpace.outcome import Forecast, Interval, Memory, StepTime
from trainpace.records import Record
from trainpace.schedule import Schedule, total_steps
from trainpace.units import format_number, hours_from_s
from trainpace.workload import Workload, form_of

MOST_BATCH = 10**7
"""Above this a global batch is a typing mistake."""

Binding = Literal["memory", "batch", "device", "deadline", "budget"]


class Job(Record):
    """What is to be trained, and what is allowed. `schedule` has samples and epochs, or a number of steps.

    precisions: those that may be used; each card takes the fastest that it can compute. most_nodes: joined nodes are tried
    in powers of two up to it. spot: also consider spot prices. data_from: the provider where the data lies.
    """

    schedule: Schedule
    global_batch: int
    precisions: tuple[Precision, ...] = ("amp_bf16", "amp_fp16")
    most_nodes: int = 4
    spot: bool = False
    data_from: str = ""
    deadline_s: float | None = None
    budget_usd: float | None = None
    channels_last: bool = False
    compile: bool = False
    conditions: JobConditions = JobConditions()

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch <= MOST_BATCH:
            raise TrainpaceError(f"global_batch is {self.global_batch}; it must be from 1 to {MOST_BATCH:,}.")
        if self.most_nodes < 1:
            raise TrainpaceError(f"most_nodes is {self.most_nodes}; it must be a whole number from 1.")


class Match(Record):
    """One way to do the job: `nodes` servers of an offer. `usd` is everything: hours, electricity, egress."""

    offer: Offer
    nodes: int
    spot: bool
    forecast: Forecast
    steps: int
    time: JobTime
    hours: Interval
    usd: Interval
    kwh: float | None
    mean_hours: float
    mean_usd: float
    egress_usd: float
    on_front: bool = False

    @property
    def usd_per_step(self) -> float:
        """Dollars of the whole job for each of its steps."""
        return self.mean_usd / self.steps


class Rejected(Record):
    """A shape that cannot do the job, and why. `short_gib`: memory that each of its GPUs lacks."""

    offer: Offer
    nodes: int
    binding: Binding
    reason: str
    short_gib: float | None = None


class Ranking(NamedTuple):
    """The matches that meet deadline and budget, those that do not, and what cannot be done at all."""

    matches: list[Match]
    missed: list[Match]
    rejected: list[Rejected]


def rank(
    workload: Workload,
    offers: Sequence[Offer],
    devices: Mapping[str, Device],
    job: Job,
    by: Literal["usd", "hours"] = "usd",
) -> Ranking:
    """All offers for one job, cheapest or fastest first. `devices` holds the device of every offer by its name."""
    shapes = _Shapes(workload, [devices[name] for name in dict.fromkeys(offer.device for offer in offers)], job)
    found, rejected = [], []
    for offer in offers:
        for nodes in _node_counts(offer, job.most_nodes):
            done = shapes.forecast(devices[offer.device], offer.count, nodes, offer.network_gb_per_s)
            if isinstance(done, Forecast):
                found += [_match(shapes, offer, nodes, spot, done, devices[offer.device], job)
                          for spot in _price_kinds(offer, job.spot)]  # fmt: skip
            else:
                rejected.append(Rejected(offer=offer, nodes=nodes, binding=done[0], reason=done[1], short_gib=done[2]))
    found.sort(key=(lambda m: (m.mean_usd, m.mean_hours)) if by == "usd" else (lambda m: (m.mean_hours, m.mean_usd)))
    meets = [m for m in found if _meets(m, job)]
    return Ranking(_with_front(meets), [m for m in found if not _meets(m, job)], rejected)


def nearest(ranking: Ranking, job: Job) -> tuple[Binding, str, Match | Rejected] | None:
    """Where nothing meets the demands: what binds, by how much, and the choice that comes nearest. None: there was nothing."""
    if ranking.missed:
        close = min(ranking.missed, key=lambda m: _excess(m, job))
        late, over = _late_s(close, job), _over_usd(close, job)
        if late > 0 and (over <= 0 or late / (job.deadline_s or 1) >= over / (job.budget_usd or 1)):
            return "deadline", f"the deadline is missed by {hours_from_s(late):.3g} h", close
        return "budget", f"the budget is exceeded by {over:,.2f} dollars", close
    if not ranking.rejected:
        return None
    short = [r for r in ranking.rejected if r.short_gib is not None]
    if short:
        closest = min(short, key=lambda r: r.short_gib or 0.0)
        return "memory", closest.reason, closest
    return ranking.rejected[0].binding, ranking.rejected[0].reason, ranking.rejected[0]


class _Shapes:
    """Forecasts by shape, each made once; one array of step times a precision chooses their micro-batches."""

    def __init__(self, workload: Workload, devices: Sequence[Device], job: Job) -> None:
        self._workload, self._job = workload, job
        one_rank = Execution(micro_batch=job.global_batch)
        self.steps, samples = total_steps(job.schedule, one_rank), job.schedule.samples_per_epoch
        self.epochs = job.schedule.epochs or (self.steps * job.global_batch / samples if samples else 0.0)
        self._times: dict[tuple[int, bool, int | None, JobConditions], tuple[tuple[JobTime, float | None], ...]] = {}
        self._sizes = divisors(job.global_batch)
        self._column = {size: i for i, size in enumerate(self._sizes)}
        self._row = {device.name: i for i, device in enumerate(devices)}
        self._done: dict[tuple[str, int, int, float | None], Forecast | tuple[Binding, str, float | None]] = {}
        self._ms: dict[Precision, np.ndarray] = {}
        for precision in job.precisions:
            if form_of(precision) in workload.forms:
                run = Execution(precision=precision, channels_last=job.channels_last, compile=job.compile)
                self._ms[precision] = sweep_ms(workload, run, devices, self._sizes)
        if not self._ms:
            workload.form(job.precisions[0])  # raises, and says which forms there are

    def forecast(
        self, device: Device, count: int, nodes: int, network_gb_per_s: float | None
    ) -> Forecast | tuple[Binding, str, float | None]:
        key = (device.name, count, nodes, network_gb_per_s if nodes > 1 else None)
        if key not in self._done:
            self._done[key] = self._one(*key, device)
        return self._done[key]

    def times(
        self, done: Forecast, nodes: int, spot: bool, vcpus: int | None, conditions: JobConditions, device: Device
    ) -> tuple[tuple[JobTime, float | None], ...]:
        """The job's time and energy: as forecast, at the low and at the high end of the step's interval."""
        key = (id(done), spot, vcpus if conditions.samples_per_cpu_s else None, conditions)
        if key not in self._times:
            assert done.step is not None
            assert done.step_time_interval_ms is not None
            interval, total_ms = done.step_time_interval_ms, done.step.total_ms
            form = self._workload.form(done.execution.precision)
            state_bytes = form.memory.parameter_bytes + form.memory.optimizer_bytes
            found = []
            for factor in (1.0, interval.low / total_ms, interval.high / total_ms):
                step = _scaled(done.step, factor)
                time = job_time(
                    self.steps, self.epochs, step, self._job.global_batch, nodes, done.num_devices, state_bytes,
                    conditions, spot, vcpus,
                )  # fmt: skip
                found.append((time, energy_kwh(device, done.num_devices, step, time.total_s)))
            self._times[key] = tuple(found)
        return self._times[key]

    def _one(
        self, name: str, count: int, nodes: int, network: float | None, device: Device
    ) -> Forecast | tuple[Binding, str, float | None]:
        batch, ranks = self._job.global_batch, count * nodes
        if batch % ranks:
            return "batch", f"{batch:,} samples a step cannot be divided over {ranks} GPUs", None
        chosen = self._fastest(device, count, nodes)
        if not isinstance(chosen, Execution):
            return chosen
        cluster = Cluster(
            device=device, devices_per_node=count, nodes=nodes,
            network_gb_per_s_per_device=None if network is None else network / count,
        )  # fmt: skip
        done = forecast(self._workload, chosen, cluster)
        return done if done.step is not None else ("device", done.reason, None)

    def _fastest(self, device: Device, count: int, nodes: int) -> Execution | tuple[Binding, str, float | None]:
        """The fastest precision and micro-batch that fit; plain data parallel before sharding."""
        if device.memory_gib is None:
            return "device", f"{device.name} has no memory size in the catalogue", None
        capacity, share = device.memory_gib.value, self._job.global_batch // (count * nodes)
        sizes = [size for size in self._sizes if share % size == 0]
        least = math.inf
        for zero in (0, 3) if count * nodes > 1 else (0,):
            best, best_ms = None, math.inf
            for precision, table in self._ms.items():
                times = table[self._row[device.name]]
                if np.isnan(times).any():
                    continue
                run = [self._execution(precision, size, share // size, count, nodes, zero) for size in sizes]
                form = self._workload.form(precision)
                while run and not fits(step_memory(form, run[-1], True), capacity):
                    needed = needed_gib(step_memory(form, run.pop(), True))
                    least = min(least, needed)
                for execution in run:
                    ms = execution.accumulation * float(times[self._column[execution.micro_batch]])
                    if ms < best_ms:
                        best, best_ms = execution, ms
            if best is not None:
                return best
        if math.isinf(least):
            wanted = " or ".join(self._ms)
            return "device", f"{device.name} does not compute in {wanted}", None
        return (
            "memory",
            f"needs {format_number(least)} GiB on each GPU even with one sample, {device.name} has {format_number(capacity)}",
            least - capacity,
        )

    def _execution(
        self, precision: Precision, micro: int, accumulation: int, count: int, nodes: int, zero: int
    ) -> Execution:
        return Execution(
            micro_batch=micro, accumulation=accumulation, nnodes=nodes, nproc_per_node=count, precision=precision,
            optimizer=self._workload.optimizer, zero_stage=zero, channels_last=self._job.channels_last,  # type: ignore[arg-type]
            compile=self._job.compile, activation_checkpointing="full" if self._workload.checkpointed else "none",
        )  # fmt: skip


def needed_gib(memory: Memory) -> float:
    """The card on which this would just fit."""
    context = memory.device_gib - memory.reserved_gib
    return (memory.allocated_gib * FRAGMENTATION + context) / FIT_MARGIN


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _match(shapes: _Shapes, offer: Offer, nodes: int, spot: bool, done: Forecast, device: Device, job: Job) -> Match:
    assert done.step_time_interval_ms is not None
    transfer = transfer_of(offer.provider, job.data_from, job.conditions)
    price = offer.spot_price_usd_per_hour if spot else offer.price_usd_per_hour
    assert price is not None
    found = shapes.times(done, nodes, spot, offer.vcpus, transfer.conditions, device)
    hours = [hours_from_s(time.total_s) for time, _ in found]
    usd = [
        price * nodes * hour + offer.electricity_usd_per_kwh * (kwh or 0.0) + transfer.egress_usd
        if math.isfinite(hour) else math.inf
        for hour, (_, kwh) in zip(hours, found, strict=True)
    ]  # fmt: skip
    coverage, basis = done.step_time_interval_ms.coverage, done.step_time_interval_ms.basis
    return Match(
        offer=offer, nodes=nodes, spot=spot, forecast=done, steps=shapes.steps, time=found[0][0], kwh=found[0][1],
        egress_usd=transfer.egress_usd, mean_hours=hours[0], mean_usd=usd[0],
        hours=Interval(low=min(hours[1:]), high=max(hours[1:]), coverage=coverage, basis=basis),
        usd=Interval(low=min(usd[1:]), high=max(usd[1:]), coverage=coverage, basis=basis),
    )  # fmt: skip


def _scaled(step: StepTime, factor: float) -> StepTime:
    return StepTime(**{name: getattr(step, name) * factor for name in step.__struct_fields__})


def _node_counts(offer: Offer, most: int) -> list[int]:
    if not offer.can_join:
        return [1]
    most = min(most, offer.most_nodes or most)
    return sorted({2**k for k in range(most.bit_length()) if 2**k <= most} | {most if offer.most_nodes else 1})


def _price_kinds(offer: Offer, spot: bool) -> list[bool]:
    return [False, True] if spot and offer.spot_price_usd_per_hour is not None else [False]


def _late_s(match: Match, job: Job) -> float:
    return -math.inf if job.deadline_s is None else match.time.total_s - job.deadline_s


def _over_usd(match: Match, job: Job) -> float:
    return -math.inf if job.budget_usd is None else match.mean_usd - job.budget_usd


def _meets(match: Match, job: Job) -> bool:
    return math.isfinite(match.time.total_s) and _late_s(match, job) <= 0 and _over_usd(match, job) <= 0


def _excess(match: Match, job: Job) -> float:
    """The larger of the two misses, each as a share of what was allowed."""
    return max(_late_s(match, job) / (job.deadline_s or 1.0), _over_usd(match, job) / (job.budget_usd or 1.0))


def _with_front(matches: list[Match]) -> list[Match]:
    """Mark those that no other beats in both hours and dollars (the Pareto front)."""
    from msgspec.structs import replace

    best, front = math.inf, set()
    for i in sorted(range(len(matches)), key=lambda i: (matches[i].mean_hours, matches[i].mean_usd)):
        if matches[i].mean_usd < best:
            best = matches[i].mean_usd
            front.add(i)
    return [replace(m, on_front=True) if i in front else m for i, m in enumerate(matches)]
