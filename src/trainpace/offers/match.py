"""Rank rental servers for a job by its total time and cost, on one node or several.

The global batch is the same on every server, so the training is too. The search tries all
micro-batches with gradient accumulation under DDP, ZeRO-1, and FSDP over a node or over all GPUs.
It picks the fastest execution that fits.

Many offers have the same shape (device, count, nodes, network, host). Each shape is forecast once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution, Form, Precision
from trainpace.core.hardware import Cluster, Device, catalogue, find_host
from trainpace.core.outcome import Forecast, Interval, JobTime
from trainpace.core.records import Record
from trainpace.core.software import TODAY, Software
from trainpace.core.units import format_duration, format_number, format_usd, hours_from_s
from trainpace.forecast import (
    Forecaster,
    Grid,
    Knowledge,
    Target,
    divisors,
    host_of,
    needed_gib,
    room_gib,
)
from trainpace.job import (
    ASSUMED,
    DataPath,
    JobConditions,
    Schedule,
    Training,
    job_ranges,
    power_w,
    state_bytes,
    training_of,
    with_host_work,
)
from trainpace.offers.offer import Offer, transfer_of
from trainpace.plan import resolution
from trainpace.workload import Workload, form_of

MOST_BATCH = 10**7
"""Largest global batch. Larger values are rejected as typing errors."""

NEARLY = math.expm1(resolution(("sharding",)))
"""Relative difference in step time below which the simpler sharding wins.

Forecasts cannot resolve smaller differences. The order is DDP, ZeRO-1, FSDP.
"""

Counts = NDArray[np.int64]
HostWorkOn = Callable[[float | None, float], DataPath]
"""Function of a rank's cores (None if unknown) and the single-thread rating of its host's CPU."""
Binding = Literal["memory", "batch", "device", "deadline", "budget", "failures"]


class Job(Record):
    """The training and its limits.

    Attributes:
        schedule: Samples and epochs, or a number of steps.
        precisions: Allowed precisions. Each GPU uses its fastest. By default, torch's default for
            fp32 models on that GPU.
        most_nodes: Largest number of nodes. Powers of two are tried.
        spot: Also consider spot prices.
        data_from: The provider that stores the data.
        checkpointing: Recompute all activations, for workloads with blocks. Otherwise they are
            recomputed where the training does not fit without.
    """

    schedule: Schedule
    global_batch: int
    precisions: tuple[Precision, ...] = ()
    most_nodes: int = 4
    spot: bool = False
    data_from: str = ""
    deadline_s: float | None = None
    budget_usd: float | None = None
    channels_last: bool = False
    compile: bool = False
    checkpointing: bool = False
    clip_gradients: bool = False
    software: Software = TODAY
    conditions: JobConditions = ASSUMED

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch <= MOST_BATCH:
            raise TrainpaceError(
                f"`global_batch` is {self.global_batch}; it must be from 1 to {MOST_BATCH:,}."
            )
        if self.most_nodes < 1:
            raise TrainpaceError(
                f"`most_nodes` is {self.most_nodes}; it must be a whole number from 1."
            )


class Match(Record):
    """One way to do the job: `nodes` servers of an offer. `usd` includes electricity and egress."""

    offer: Offer
    nodes: int
    spot: bool
    forecast: Forecast
    time: JobTime
    hours: Interval
    usd: Interval
    egress_usd: float
    on_front: bool = False

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars per hour of all servers."""
        price = self.offer.price(self.spot)
        return None if price is None else price * self.nodes

    @property
    def mean_hours(self) -> float:
        """Expected total time in hours."""
        return self.time.hours

    @property
    def mean_usd(self) -> float:
        """Expected total cost in dollars."""
        assert self.time.usd is not None
        return self.time.usd


class Rejected(Record):
    """Servers that cannot run the job, with the reason.

    Attributes:
        short_gib: Missing memory per GPU in GiB, or None if memory is not the reason.
    """

    offer: Offer
    nodes: int
    binding: Binding
    reason: str
    short_gib: float | None = None


class Closest(NamedTuple):
    """The server that comes closest to all limits, the limit that it misses, and a message."""

    binding: Binding
    reason: str
    choice: Match | Rejected


class Ranking(NamedTuple):
    """Matches within all limits, matches beyond a limit, and shapes that cannot run the job."""

    matches: list[Match]
    missed: list[Match]
    rejected: list[Rejected]


def rank(
    workload: Workload,
    offers: Sequence[Offer],
    devices: Mapping[str, Device],
    job: Job,
    by: Literal["usd", "hours"] = "usd",
    knowledge: Knowledge | None = None,
    host_work: HostWorkOn | None = None,
) -> Ranking:
    """Rank all offers for one job, the cheapest or the fastest first.

    Args:
        workload: The traced model.
        offers: The servers.
        devices: Map from device name to device.
        job: The training and its limits.
        by: Sort key: total cost ("usd") or total time ("hours").
        knowledge: Measured runs that correct the forecasts.
        host_work: The host's work beside the forecast steps, if it is known.
    """
    shapes = _Shapes(workload, job, devices, knowledge)
    able: list[_Servers] = []
    rejected = []
    # Sorting by device means that the kernels of each device are evaluated once.
    for offer in sorted(offers, key=lambda offer: offer.device):
        ways = (False, True) if job.spot and offer.spot_price_usd_per_hour is not None else (False,)
        for nodes in _node_counts(offer, job.most_nodes):
            shape = shapes.at(offer, nodes)
            if isinstance(shape, _Refusal):
                rejected.append(Rejected(offer=offer, nodes=nodes, **shape._asdict()))
                continue
            able += [_Servers(offer, nodes, spot, shape) for spot in ways]
    order = ("mean_usd", "mean_hours") if by == "usd" else ("mean_hours", "mean_usd")
    matches = sorted(_matches(able, job, host_work), key=attrgetter(*order))
    met: list[Match] = []
    missed: list[Match] = []
    for match in matches:
        (met if _meets(match, job) else missed).append(match)
    return Ranking(with_front(met), missed, rejected)


def _excesses(match: Match, job: Job) -> dict[Binding, float]:
    """Return by how much a match exceeds each limit, relative to the limit."""
    limits: dict[Binding, tuple[float, float | None]] = {
        "deadline": (match.time.total_s, job.deadline_s),
        "budget": (match.mean_usd, job.budget_usd),
    }
    return {
        name: (value - limit) / (limit or 1.0)
        for name, (value, limit) in limits.items()
        if limit is not None
    }


def _meets(match: Match, job: Job) -> bool:
    return math.isfinite(match.time.total_s) and max(_excesses(match, job).values(), default=0) <= 0


def nearest(ranking: Ranking, job: Job) -> Closest | None:
    """Return the choice that misses the limits by the least, with the limit that it misses.

    Call it if `ranking.matches` is empty. None if nothing was missed or rejected.
    """
    if ranking.missed:
        return _nearest_match(ranking.missed, job)
    if not ranking.rejected:
        return None
    closest = min(ranking.rejected, key=_short_gib)
    return Closest(closest.binding, closest.reason, closest)


def _nearest_match(missed: Sequence[Match], job: Job) -> Closest:
    able = [m for m in missed if math.isfinite(m.time.total_s)]
    if not able:
        reason = _too_many_failures(missed[0], job.conditions)
        return Closest("failures", reason, missed[0])
    close = min(able, key=lambda m: max(_excesses(m, job).values()))
    excesses = _excesses(close, job)
    if max(excesses, key=excesses.__getitem__) == "deadline":
        allowed = job.deadline_s or 0.0
        late = format_duration(close.time.total_s - allowed)
        reason = f"the deadline of {format_duration(allowed)} is missed by {late}"
        return Closest("deadline", reason, close)
    budget = job.budget_usd or 0.0
    over = format_usd(close.mean_usd - budget)
    reason = f"the budget of {format_usd(budget)} is exceeded by {over}"
    return Closest("budget", reason, close)


def near_misses(ranking: Ranking, job: Job) -> tuple[Match | None, Match | None]:
    """Return the cheapest match within the deadline and the fastest within the budget.

    Both come from the matches that miss one of the two limits. Either may be None.
    """
    in_time = [m for m in ranking.missed if _excesses(m, job)["deadline"] <= 0]
    affordable = [m for m in ranking.missed if _excesses(m, job)["budget"] <= 0]
    cheapest = min(in_time, key=lambda m: m.mean_usd, default=None)
    return cheapest, min(affordable, key=lambda m: m.mean_hours, default=None)


class _Refusal(NamedTuple):
    """Limit that rules out a shape, with the reason and the missing GiB."""

    binding: Binding
    reason: str
    short_gib: float | None = None


def _short_gib(refused: Rejected | _Refusal) -> float:
    return math.inf if refused.short_gib is None else refused.short_gib


class _Shape(NamedTuple):
    """Forecast of the chosen execution on a server configuration, and its training without prices.

    The execution has the simplest sharding that is nearly as fast as the fastest. `points` is the
    single-thread rating of the host CPU.
    """

    forecast: Forecast
    training: Training
    points: float


class _Servers(NamedTuple):
    offer: Offer
    nodes: int
    spot: bool
    shape: _Shape


class _Shapes:
    """Cache of the fastest execution per server configuration."""

    def __init__(
        self,
        workload: Workload,
        job: Job,
        devices: Mapping[str, Device],
        knowledge: Knowledge | None,
    ) -> None:
        self._workload, self._job, self._devices = workload, job, devices
        sizes, only = divisors(job.global_batch), workload.only_batch
        if only is not None and only not in sizes:
            raise TrainpaceError(
                f"{workload.only_batch_in_words}, and {job.global_batch:,} samples per step are"
                " not a multiple of it.",
                f"Use a multiple: --global-batch {only}.",
            )
        self._sizes = np.array(sizes if only is None else [only])
        self._traced = [
            precision for precision in job.precisions if form_of(precision) in workload.forms
        ]
        if not self._traced:
            workload.form(
                job.precisions[0] if job.precisions else "fp32"
            )  # raises, and names the traced forms
        self._done: dict[tuple[str, int, int, float | None, str], _Shape | _Refusal] = {}
        self._grids: dict[tuple[int, int, Execution], Grid] = {}
        # The device is a placeholder; `on` replaces it.
        anywhere = Target(Cluster(device=catalogue()[0]), software=job.software)
        self._forecaster = Forecaster(workload, anywhere, knowledge=knowledge)
        self._precisions: dict[str, list[Precision] | str] = {}

    def at(self, offer: Offer, nodes: int) -> _Shape | _Refusal:
        """Return the fastest execution on servers of an offer, or the reason if none can run."""
        network = offer.network_gb_per_s if nodes > 1 else None
        key = (offer.device, offer.count, nodes, network, offer.host)
        if key not in self._done:
            self._done[key] = self._one(*key)
        return self._done[key]

    def _one(
        self, name: str, count: int, nodes: int, network: float | None, host: str
    ) -> _Shape | _Refusal:
        batch, ranks, device = self._job.global_batch, count * nodes, self._devices[name]
        if batch % ranks:
            reason = f"{batch:,} samples per step cannot be divided over {ranks} GPUs"
            return _Refusal("batch", reason)
        if device.memory_gib is None:
            return _Refusal("device", f"{name} has no memory size in the catalogue")
        cluster = Cluster(
            device=device,
            devices_per_node=count,
            nodes=nodes,
            network_gb_per_s_per_device=None if network is None else network / count,
            host=find_host(host) if host else None,
        )
        if name not in self._precisions:
            self._precisions[name] = self._computed_in(device)
        precisions = self._precisions[name]
        if isinstance(precisions, str):
            return _Refusal("device", precisions)
        share = batch // ranks
        sizes = self._sizes[share % self._sizes == 0]
        if not sizes.size:
            words = self._workload.only_batch_in_words
            return _Refusal("batch", f"{words}, and {ranks} GPUs would get {share:,} samples each")
        refused: list[_Refusal] = []
        for precision in precisions:
            for base in self._bases(precision):
                fastest = self._fastest(cluster, base, sizes, share)
                if isinstance(fastest, Forecast):
                    return self._shape(fastest, cluster)
                refused.append(fastest)
        return min(refused, key=_short_gib)

    def _shape(self, fastest: Forecast, cluster: Cluster) -> _Shape:
        assert fastest.step is not None
        job, states = self._job, state_bytes(self._workload, fastest.execution)
        power = power_w(cluster.device, cluster.num_devices, fastest.step)
        training = training_of(job.schedule, fastest.execution, job.conditions, states, power)
        return _Shape(fastest, training, host_of(cluster).points)

    def _computed_in(self, device: Device) -> list[Precision] | str:
        """Return the precisions that a device supports, the fastest first.

        If several take equally long, only the first is returned. If the device supports none,
        return the reason instead.
        """
        fastest: dict[tuple[Form, float], Precision] = {}
        reason = ""
        for precision in self._traced or (device.torch_precision,):
            # All micro-batches are forecast at once, because other shapes of the device need them.
            forecaster = self._forecaster.on(Cluster(device=device))
            alone = forecaster.at(
                Grid.vary(next(self._bases(precision)), micro_batch=self._sizes.tolist())
            )
            if alone.timed[-1]:
                computing_ms = sum(
                    alone.parts[name][-1] for name in ("forward_ms", "backward_ms", "optimizer_ms")
                )
                fastest.setdefault((form_of(precision), float(computing_ms)), precision)
            reason = reason or alone.reason(len(alone) - 1)
        return [fastest[key] for key in sorted(fastest, key=lambda key: key[1])] or reason.rstrip(
            "."
        )

    def _fastest(
        self, cluster: Cluster, base: Execution, sizes: Counts, share: int
    ) -> Forecast | _Refusal:
        """Return the simplest execution that fits and is nearly as fast as the fastest.

        If no execution fits, return the reason instead.
        """
        key = (cluster.devices_per_node, cluster.nodes, base)
        if key not in self._grids:
            self._grids[key] = _grid(cluster, base, sizes, share)
        forecasts = self._forecaster.on(cluster).at(self._grids[key])
        if forecasts.why.any():
            return _Refusal("device", forecasts.reasons[int(forecasts.why.max())].rstrip("."))
        assert cluster.device.memory_gib is not None
        capacity, feasible = cluster.device.memory_gib.value, forecasts.feasible
        if not feasible.any():
            # Memory of the smallest GPU on which an execution would fit.
            room = room_gib(1.0, forecasts.grid.compile)
            least = float((needed_gib(forecasts.memory) / room).min())
            needs = f"needs {format_number(least)} GiB per GPU even with the smallest micro-batch"
            return _Refusal(
                "memory",
                f"{needs}, {cluster.device.name} has {format_number(capacity)}",
                least - capacity,
            )
        by_sharding = np.where(feasible, forecasts.step_ms, math.inf).reshape(-1, len(sizes))
        near = by_sharding.min(axis=1) <= by_sharding.min() * (1 + NEARLY)
        # argmax returns the first True, which is the simplest sharding.
        simplest = int(np.argmax(near))
        return forecasts.brief(simplest * len(sizes) + int(np.argmin(by_sharding[simplest])))

    def _bases(self, precision: Precision) -> Iterator[Execution]:
        """Yield the execution on one device, and then with recomputed activations.

        The second one is left out if the first recomputes, or if the model has no blocks.
        """
        recomputed, software = (
            self._workload.checkpointed or self._job.checkpointing,
            self._job.software,
        )
        base = Execution(
            precision=precision,
            optimizer=self._workload.optimizer,
            channels_last=self._job.channels_last or software.channels_last,
            compile=self._job.compile or software.compiles,
            activation_checkpointing="full" if recomputed else "none",
            clip_gradients=self._job.clip_gradients,
        )
        yield base
        if not recomputed and self._workload.form(precision).blocks is not None:
            yield replace(base, activation_checkpointing="full")


def _matches(able: Sequence[_Servers], job: Job, host_work: HostWorkOn | None) -> list[Match]:
    """Return the total hours and cost of the job on each server that can run it."""
    jobs = []
    forecasts: list[Forecast] = []
    for offer, _, spot, (forecast, training, points) in able:
        if host_work is not None:
            cores = None if offer.vcpus is None else offer.vcpus / offer.count
            forecast = with_host_work(forecast, host_work(cores, points))
        forecasts.append(forecast)
        price = offer.price(spot)
        assert forecast.step is not None
        assert forecast.step_time_interval_ms is not None
        assert price is not None
        conditions = replace(
            transfer_of(offer.provider, job.data_from, job.conditions),
            spot=spot,
            price_usd_per_device_hour=price / offer.count,
            electricity_usd_per_kwh=offer.electricity_usd_per_kwh,
        )
        priced = training._replace(conditions=conditions)
        jobs.append((priced, forecast.step, forecast.step_time_interval_ms))
    matches = []
    for servers, forecast, one, (time, seconds, usd) in zip(
        able, forecasts, jobs, job_ranges(jobs), strict=True
    ):
        assert usd is not None
        low, high = hours_from_s(seconds.low), hours_from_s(seconds.high)
        matches.append(
            Match(
                offer=servers.offer,
                nodes=servers.nodes,
                spot=servers.spot,
                forecast=forecast,
                time=time,
                usd=usd,
                hours=replace(seconds, low=low, high=high),
                egress_usd=one[0].conditions.egress_usd,
            )
        )
    return matches


def _too_many_failures(match: Match, conditions: JobConditions) -> str:
    causes = []
    if conditions.device_mtbf_h is not None:
        causes.append(
            f"each of its GPUs fails every {format_duration(3600 * conditions.device_mtbf_h)}"
            " (--mtbf)"
        )
    if match.spot:
        every = format_duration(3600 * conditions.preemption_mean_h)
        causes.append(f"each spot server is preempted every {every} (--preempted-every)")
    restart = format_duration(conditions.restart_s)
    return (
        f"failures come faster than the job can progress: {' and '.join(causes)}, and a restart"
        f" takes {restart}"
    )


def _grid(cluster: Cluster, base: Execution, sizes: Counts, share: int) -> Grid:
    """Return a grid of all shardings, simplest first, with all micro-batches in `sizes`.

    `share` is the number of samples per GPU and step. Each micro-batch divides it.
    """
    shardings = [(0, 0)]  # (ZeRO stage, number of GPUs that share the sharded states, 0 for all)
    if cluster.num_devices > 1:
        within = (
            [(3, cluster.devices_per_node)]
            if cluster.nodes > 1 and cluster.devices_per_node > 1
            else []
        )
        shardings += [(1, 0), *within, (3, 0)]
    stages, shard_sizes = np.repeat(shardings, len(sizes), axis=0).T
    return Grid.vary(
        base,
        micro_batch=np.tile(sizes, len(shardings)),
        accumulation=np.tile(share // sizes, len(shardings)),
        zero_stage=stages,
        shard_size=shard_sizes,
        nnodes=cluster.nodes,
        nproc_per_node=cluster.devices_per_node,
    )


def _node_counts(offer: Offer, most: int) -> list[int]:
    if offer.network_gb_per_s is None:
        return [1]
    most = min(most, offer.most_nodes or most)
    return sorted(
        {2**k for k in range(most.bit_length()) if 2**k <= most} | {most if offer.most_nodes else 1}
    )


def cheapest_offer(offers: Sequence[Offer], device: str, gpus: int, nodes: int) -> Offer | None:
    """Return the cheapest on-demand server with at least `gpus` GPUs, or None.

    The price covers the whole server.

    Args:
        offers: The servers.
        device: Name of the GPU in the hardware catalogue.
        gpus: Least number of GPUs per server.
        nodes: Number of servers. Above 1, the offer needs a network to that many nodes.
    """
    able = [
        offer
        for offer in offers
        if offer.device == device
        and offer.count >= gpus
        and offer.price_usd_per_hour > 0
        and (nodes == 1 or offer.network_gb_per_s is not None)
        and nodes <= (offer.most_nodes or nodes)
    ]
    return min(able, key=lambda offer: offer.price_usd_per_hour, default=None)


def with_front(matches: list[Match]) -> list[Match]:
    """Mark the matches on the Pareto front.

    A match is on the front if no other match is better in both hours and dollars.
    """
    least_usd, front = math.inf, set()
    for match in sorted(matches, key=attrgetter("mean_hours", "mean_usd")):
        if match.mean_usd < least_usd:
            least_usd = match.mean_usd
            front.add(id(match))
    return [replace(match, on_front=id(match) in front) for match in matches]


Z_90, Z_ONE_SIDED = 1.645, 1.282
"""Standard normal quantiles: half-width of a two-sided 90% interval, and the one-sided 90% point.
"""
KNEE_GAIN = 0.1
"""Least depth of a knee below the straight line between the ends of the front.

Both axes are logarithmic and scaled to 0 to 1.
"""


class Pick(Record):
    """A recommended server, compared with the next cheaper pick.

    Attributes:
        hours_less: Hours saved against the next cheaper pick. None for the cheapest.
        usd_more: Additional cost against the next cheaper pick. None for the cheapest.
        as_fast: A cheaper server that is as fast within the forecasts' error, or None.
    """

    name: Literal["cheapest", "knee", "fastest"]
    match: Match
    hours_less: float | None = None
    usd_more: float | None = None
    as_fast: Match | None = None

    @property
    def hour_less_usd(self) -> float | None:
        """Price of each saved hour, or None if no hours are saved."""
        return (
            self.usd_more / self.hours_less
            if self.usd_more is not None and self.hours_less
            else None
        )


def picks(matches: Sequence[Match]) -> tuple[Pick, ...]:
    """Return the recommended servers, the cheapest first.

    There are fewer than three if one server is two of them, or if the front has no knee.
    """
    able = [m for m in matches if math.isfinite(m.mean_hours) and math.isfinite(m.mean_usd)]
    front = sorted((m for m in able if m.on_front), key=lambda m: m.mean_hours)
    if not able:
        return ()
    middle = knee(front)
    made = [Pick(name="cheapest", match=front[-1])]
    if middle is not None:
        made.append(_pick("knee", middle, made[-1].match))
    if len(front) > 1:
        fastest = _pick("fastest", front[0], made[-1].match)
        made.append(replace(fastest, as_fast=_as_fast(front[0], front)))
    return tuple(made)


def _pick(name: Literal["knee", "fastest"], match: Match, before: Match) -> Pick:
    return Pick(
        name=name,
        match=match,
        hours_less=before.mean_hours - match.mean_hours,
        usd_more=match.mean_usd - before.mean_usd,
    )


def knee(front: Sequence[Match]) -> Match | None:
    """Return the knee of a front, or None if the front is nearly straight.

    The knee is the match farthest below the straight line between the ends. Both axes are
    logarithmic and scaled to 0 to 1 (Satopää et al. 2011, Kneedle).

    Args:
        front: Matches of the Pareto front, sorted by hours.
    """
    if len(front) < 3:
        return None
    hours, usd = (
        [math.log(max(value, 1e-12)) for value in values]
        for values in ([m.mean_hours for m in front], [m.mean_usd for m in front])
    )
    wide, high = hours[-1] - hours[0], usd[0] - usd[-1]
    if wide <= 0 or high <= 0:
        return None
    below = [
        1 - (h - hours[0]) / wide - (u - usd[-1]) / high for h, u in zip(hours, usd, strict=True)
    ]
    best = max(range(len(front)), key=below.__getitem__)
    return front[best] if below[best] >= KNEE_GAIN else None


def _as_fast(match: Match, front: Sequence[Match]) -> Match | None:
    """Return the cheapest match that has at least a 10% chance of being faster than `match`.

    The forecasts of two servers have independent errors. None if no match is likely enough.
    """
    others = [m for m in front if m is not match and _behind(m, match) < Z_ONE_SIDED]
    return min(others, key=lambda m: m.mean_usd, default=None)


def _behind(slower: Match, faster: Match) -> float:
    """Return how much slower a match is, in standard deviations of the difference."""
    deviation = math.hypot(
        *(
            math.log(max(m.hours.high, 1e-12) / max(m.hours.low, 1e-12)) / (2 * Z_90)
            for m in (slower, faster)
        )
    )
    return math.log(slower.mean_hours / faster.mean_hours) / max(deviation, 1e-9)
