"""The legal executions as one grid (a mesh of devices times batches times everything that is independent of both), the best
of them, and the simplest that is nearly as good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import EXECUTION_FIELDS, Checkpointing, Execution, Precision
from trainpace.core.hardware import Cluster, Device
from trainpace.core.records import Record
from trainpace.forecast import Grid, divisors, doublings
from trainpace.plan.changes import Choice, DataPath
from trainpace.plan.evaluate import (
    Evaluation,
    Setting,
    device_room_gib,
    evaluate,
    job_seconds,
    with_data_ms,
)
from trainpace.plan.knobs import KNOB_NAMES, differing_rows
from trainpace.plan.resolution import told_apart_each
from trainpace.plan.simplicity import DATA_POINTS, OFFLINE_POINTS, points
from trainpace.workload import CONVOLUTION_KINDS, Blocks, Floats, Workload, form_of

MOST_MICRO_BATCHES = 24
"""Micro-batches tried at most, of the divisors of a rank's share; the largest and the present one are among them."""
LEAST_TOKENS_A_RANK = 2048
"""Context parallelism is for long sequences: below this its exchange costs more than it divides."""
LARGEST_VIRTUAL = 8
ROUNDING = 1e-9
GLOBAL_BATCH_FACTORS = (1, 2, 4, 8)
STEPS_DOWN = ("fp32", "torch_fp32", "tf32", "amp_bf16", "amp_fp16")
"""Precisions in which the same weights are trained; storage in 16 bits is never chosen for the user."""
PARALLELISM = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
}
MESH = ("nnodes", "nproc_per_node", "tp", "pp", "cp", "virtual_stages", "ep", "expert_tp")
OTHER = (
    "precision",
    "zero_stage",
    "activation_checkpointing",
    "offload_optimizer",
    "offload_parameters",
    "sequence_parallel",
    "compile",
    "channels_last",
    "reshard_after_forward",
    "async_tensor_parallel",
)
VARIED = (*MESH, "micro_batch", "accumulation", *OTHER, "pipeline_schedule")
"""The fields that differ between the executions of a search."""


class Limit(Record):
    """Executions whose `field` is none of `values` are not looked at, `why`: what the engine lacks, or a settings file cannot
    state. `title` names what is left out."""

    title: str
    field: str
    values: tuple[int | str | bool | None, ...]
    why: str

    def allows(self, grid: Grid) -> NDArray[np.bool_]:
        return np.any([grid.has(self.field, value) for value in self.values], axis=0)


class Freedom(Record):
    """What the search may touch: `keep` names knobs (see KNOB_NAMES) that stay as they are."""

    keep: tuple[str, ...] = ()
    allow_global_batch: bool = False
    allow_fp8: bool = False
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        for name in self.keep:
            if name not in KNOB_NAMES:
                raise TrainpaceError(
                    f"{name!r} is nothing that could be kept.", f"Known: {', '.join(KNOB_NAMES)}."
                )

    def may(self, knob: str) -> bool:
        return knob not in self.keep

    def within(self, grid: Grid) -> tuple[Grid, tuple[Limit, ...]]:
        """The executions of a grid within all limits, and the limits that left any of the others out."""
        cut = []
        for limit in self.limits:
            allowed = limit.allows(grid)
            if not allowed.all():
                grid = grid.at(allowed)
                cut.append(limit)
        return grid, tuple(cut)


# ---- the legal executions


def executions_on(
    cluster: Cluster,
    workload: Workload,
    start: Execution,
    freedom: Freedom,
    global_batch: int | None = None,
) -> Grid:
    """Every legal execution on the cluster or on a part of it, whether it fits or not; the start is among them.

    `global_batch`: samples an update, those of `start` if not given, or a multiple where `freedom` allows it.
    """
    blocks = next(
        (form.blocks for form in workload.forms.values() if form.blocks is not None), None
    )
    batch = global_batch or start.global_batch
    meshes = _meshes(workload, start, cluster, freedom, blocks)
    batched = np.array(
        [(*mesh, *b) for mesh in meshes for b in _batches(start, mesh, freedom, batch)],
        dtype=np.int64,
    )
    if not len(batched):
        raise TrainpaceError(
            f"a global batch of {batch} cannot be divided over any part of these devices.",
            "Give a global batch that is a multiple of the number of GPUs.",
        )
    other = _other(workload, start, cluster.device, freedom, blocks)
    sizes = (*MESH, "micro_batch", "accumulation")
    varied = {
        name: np.repeat(column, len(other)) for name, column in zip(sizes, batched.T, strict=True)
    }
    for name, values in zip(OTHER, zip(*other, strict=True), strict=True):
        varied[name] = np.tile(
            [EXECUTION_FIELDS[name].encode(value) for value in values], len(batched)
        )
    plain = "1f1b" if start.pipeline_schedule == "interleaved" else start.pipeline_schedule
    interleaved, plainly = (
        EXECUTION_FIELDS["pipeline_schedule"].encode(name) for name in ("interleaved", plain)
    )
    varied["pipeline_schedule"] = np.where(varied["virtual_stages"] > 1, interleaved, plainly)
    grid = Grid.vary(start, **varied)
    return grid.at(_legal(grid, start))


def is_legal(execution: Execution, start: Execution) -> bool:
    """Whether the fields of one execution go together as the search from `start` demands."""
    return bool(_legal(Grid.of([execution]), start)[0])


def _legal(grid: Grid, start: Execution) -> NDArray[np.bool_]:
    ranks, stage = grid.data_parallel_size, grid.zero_stage
    # DeepSpeed offloads from one GPU too, by stage 2, under which gradients leave as they come
    legal = (
        (stage == 0)
        | (ranks > 1)
        | (stage == start.zero_stage)
        | (grid.offload_optimizer & (stage == 2))
    )
    legal &= ~grid.offload_optimizer | (stage >= 1) | (ranks == 1)
    legal &= ~grid.offload_parameters | (stage == 3)
    legal &= ~grid.sequence_parallel | (grid.tp > 1)
    # torch splits products to hide their exchange in compiled code, along the sequence
    legal &= ~grid.async_tensor_parallel | (grid.sequence_parallel & grid.compile)
    legal &= (stage == 3) | (grid.reshard_after_forward == start.reshard_after_forward)
    legal &= (grid.virtual_stages == 1) | (grid.accumulation % grid.pp == 0)
    if start.shard_size is not None:
        legal &= ranks % start.shard_size == 0
    return np.asarray(legal)


def _meshes(
    workload: Workload, start: Execution, cluster: Cluster, freedom: Freedom, blocks: Blocks | None
) -> Iterator[tuple[int, ...]]:
    """The fields of MESH."""
    shapes = {(start.nnodes, start.nproc_per_node)}
    if freedom.may("GPUs"):
        most = cluster.devices_per_node
        shapes |= {(n, most) for n in doublings(cluster.nodes)} | {(1, k) for k in doublings(most)}
    layouts: set[tuple[int, ...]] = {
        (start.tp, start.pp, start.cp, start.virtual_stages, start.ep, start.expert_tp or 0)
    }
    if blocks is not None and freedom.may("model parallelism"):
        layouts |= set(_layouts(workload, blocks, max(k for _, k in shapes)))
    for (nodes, processes), layout in product(sorted(shapes), sorted(layouts)):
        tp, pp, cp, _, ep, expert_tp = layout
        whole = ep == 1 or nodes * processes % (pp * ep * (expert_tp or tp)) == 0
        if nodes * processes % (tp * pp * cp) == 0 and whole:
            yield nodes, processes, *layout


def _layouts(
    workload: Workload, blocks: Blocks, devices_per_node: int
) -> Iterator[tuple[int, ...]]:
    """(tp, pp, cp, virtual_stages, ep, expert_tp). Tensor parallelism stays inside a node: its exchange is never hidden;
    experts that are divided over ranks stay whole there, as their products are small already."""
    heads = max(1, blocks.heads)
    groups = blocks.key_value_heads or heads
    tensor = [
        t
        for t in divisors(devices_per_node)
        if heads % t == 0 and (groups % t == 0 or t % groups == 0)
    ]
    context = [1]
    if workload.sequence_length:
        context = [
            c for c in (1, 2, 4, 8) if c == 1 or workload.sequence_length >= c * LEAST_TOKENS_A_RANK
        ]
    for tp, pp, cp in product(tensor, divisors(blocks.count), context):
        for virtual in divisors(blocks.count // pp) if pp > 1 else [1]:
            if virtual <= LARGEST_VIRTUAL:
                for ep in divisors(blocks.experts) if blocks.experts else [1]:
                    yield tp, pp, cp, virtual, ep, int(ep > 1)


def _batches(
    start: Execution, mesh: tuple[int, ...], freedom: Freedom, batch: int
) -> Iterator[tuple[int, int]]:
    nodes, processes, tp, pp, cp, *_ = mesh
    ranks = nodes * processes // (tp * pp * cp)
    for factor in GLOBAL_BATCH_FACTORS if freedom.allow_global_batch else (1,):
        share, rest = divmod(batch * factor, ranks)
        if rest:
            continue
        sizes = divisors(share)
        if not freedom.may("micro-batch"):
            sizes = [size for size in sizes if size == start.micro_batch]
        if len(sizes) > MOST_MICRO_BATCHES:
            spread = {
                sizes[i] for i in np.linspace(0, len(sizes) - 1, MOST_MICRO_BATCHES).astype(int)
            }
            sizes = sorted(spread | ({start.micro_batch} & set(sizes)))
        for size in sizes:
            yield size, share // size


def _other(
    workload: Workload, start: Execution, device: Device, freedom: Freedom, blocks: Blocks | None
) -> list[tuple[Any, ...]]:
    """Values of the fields of OTHER, in all combinations."""

    def options(knob: str, now: Any, others: Iterable[Any]) -> list[Any]:
        return [now, *(v for v in others if v != now)] if freedom.may(knob) else [now]

    convolves = any(
        kind in CONVOLUTION_KINDS
        for form in workload.forms.values()
        for kind in form.operators.kind
    )
    recomputes = blocks is not None and not workload.checkpointed
    recomputed: Sequence[Checkpointing] = ("none", "selective", "full") if recomputes else ()
    offloaded = (start.offload_optimizer, start.offload_parameters)
    combinations = product(
        options("precision", start.precision, precisions(workload, start, freedom, device)),
        options("sharding", start.zero_stage, (0, 1, 2, 3)),
        options("checkpointing", start.activation_checkpointing, recomputed),
        options("offload", offloaded, ((False, False), (True, False), (True, True))),
        options(
            "model parallelism",
            start.sequence_parallel,
            (False, True) if blocks is not None else (),
        ),
        options("compile", start.compile, (True,)),
        options("memory format", start.channels_last, (True,) if convolves else ()),
        options("sharding", start.reshard_after_forward, (True, False)),
        options(
            "model parallelism",
            start.async_tensor_parallel,
            (False, True) if blocks is not None else (),
        ),
    )
    return [(*values[:3], *values[3], *values[4:]) for values in combinations]


def precisions(
    workload: Workload, start: Execution, freedom: Freedom, device: Device
) -> list[Precision]:
    """Steps down from the present precision that the workload was traced for. FP8 only where it is allowed."""
    allowed: list[Precision] = [start.precision]
    if start.precision in STEPS_DOWN:
        first = min(STEPS_DOWN.index(start.precision), STEPS_DOWN.index("amp_bf16"))
        allowed += [p for p in STEPS_DOWN[first:] if p not in allowed]  # type: ignore[misc]
    if freedom.allow_fp8 and "fp8" not in allowed:
        allowed.append("fp8")
    if (
        device.tf32_tensor_tflops is None and start.precision != "tf32"
    ):  # where torch computes it in fp32
        allowed = [p for p in allowed if p != "tf32"]
    return [p for p in allowed if form_of(p) in workload.forms]


# ---- the search


class SearchResult(NamedTuple):
    """All choices: the executions of a grid times data paths.

    job_s: seconds of the whole job, executions x data paths, infinite where a choice cannot be made or does not fit.
    changes: how many knobs each is away from the start; points: how much that asks (`plan.simplicity`). startup_s: what every
    job takes before its first step.
    """

    start: Execution
    grid: Grid
    data: tuple[DataPath, ...]
    evaluation: Evaluation
    room_gib: float
    job_s: Floats
    changes: NDArray[np.int64]
    points: Floats
    startup_s: float

    def choice(self, index: tuple[int, int]) -> Choice:
        return Choice(execution=self.grid.execution(index[0]), data=self.data[index[1]])

    @property
    def fitting(self) -> int:
        return int(np.isfinite(self.job_s).sum())

    def place_of(self, choice: Choice) -> tuple[int, int] | None:
        """Where a choice stands; None where it was not looked at."""
        same = np.all(
            [self.grid.has(field, getattr(choice.execution, field)) for field in VARIED], axis=0
        )
        rows = np.flatnonzero(same)
        return (
            (int(rows[0]), self.data.index(choice.data))
            if len(rows) and choice.data in self.data
            else None
        )

    def best(self, among: NDArray[np.bool_] | None = None) -> tuple[int, int] | None:
        """The fastest choice, of equals the one with fewest changes; None where none can be made. `among`: executions."""
        times = self.job_s if among is None else np.where(among[:, None], self.job_s, np.inf)
        least = times.min(initial=np.inf)
        if not np.isfinite(least):
            return None
        rows, paths = np.nonzero(times <= least)
        pick = np.argmin(self.changes[rows, paths])
        return int(rows[pick]), int(paths[pick])

    def recommended(self, elsewhere: Sequence[SearchResult] = ()) -> tuple[int, int] | None:
        """The simplest choice beside which forecasts tell none that is faster, of equals the fastest; None where there is none.

        elsewhere: the same executions under other circumstances, where it has to be right too; if none is, here counts.
        """
        if self.best() is None:
            return None
        everywhere = [self, *(result for result in elsewhere if result.best() is not None)]
        left = np.isfinite(self.job_s)
        for result in everywhere:
            left &= result.as_fast_as(result.best() or (0, 0))
        while left.any():
            rows, paths = np.nonzero(left)
            pick = np.lexsort(
                (self.job_s[rows, paths], self.changes[rows, paths], self.points[rows, paths])
            )[0]
            picked = int(rows[pick]), int(paths[pick])
            rivals = [
                (result, rival)
                for result in everywhere
                if (rival := result.rival(picked)) is not None
            ]
            if not rivals:
                return picked
            left[picked] = False
            for result, rival in rivals:
                left &= result.as_fast_as(rival)
        return self.recommended() if elsewhere else self.best()

    def rival(self, index: tuple[int, int]) -> tuple[int, int] | None:
        """The choice that is furthest ahead of one beyond what forecasts tell apart; None where none is."""
        beyond = (
            self.job_s[index] / self.job_s
            - 1
            - self._too_little(self.job_s, self.told_apart(index))
        )
        row, path = np.unravel_index(np.argmax(beyond), beyond.shape)
        return (int(row), int(path)) if beyond[row, path] > ROUNDING else None

    def as_fast_as(self, index: tuple[int, int]) -> NDArray[np.bool_]:
        """Which choices forecasts cannot tell from one, or are faster: executions x data paths."""
        job_s = self.job_s[index]
        return np.asarray(
            self.job_s / job_s - 1 <= self._too_little(job_s, self.told_apart(index)) + ROUNDING
        )

    def _too_little(self, job_s: Floats, apart: Floats) -> Floats:
        """By which share another job must be longer than `job_s` to be told from it: its start takes as long."""
        return np.maximum(0.0, 1 - self.startup_s / job_s) * np.expm1(apart)

    def told_apart(self, index: tuple[int, int]) -> Floats:
        """By which logarithm each choice would have to differ from one to be told from it: executions x data paths."""
        row, path = index
        differ = {
            name: flags[:, None]
            for name, flags in differing_rows(self.grid, self.grid.execution(row)).items()
        }
        return told_apart_each(
            differ | {"data": np.array([[other != self.data[path] for other in self.data]])}
        )

    def one_knob_away(self, index: tuple[int, int]) -> dict[str, tuple[int, int]]:
        """By knob, the fastest choice that differs from one in that knob alone."""
        row, path = index
        differ = differing_rows(self.grid, self.grid.execution(row))
        count = np.sum(list(differ.values()), axis=0)
        found = {}
        for name, flags in differ.items():
            times = np.where(flags & (count == 1), self.job_s[:, path], np.inf)
            if np.isfinite(times.min()):
                found[name] = (int(np.argmin(times)), path)
        others = [j for j, other in enumerate(self.data) if other != self.data[path]]
        if others and np.isfinite(self.job_s[row, others]).any():
            found["data"] = (row, min(others, key=lambda j: self.job_s[row, j]))
        return found

    def pareto(self) -> list[tuple[int, int]]:
        """The fastest choice of each number of devices that beats every smaller number."""
        devices = self.grid.world_size
        front: list[tuple[int, int]] = []
        for count in np.unique(devices):
            index = self.best(devices == count)
            if index is not None and (not front or self.job_s[index] < self.job_s[front[-1]]):
                front.append(index)
        return front


def search(
    setting: Setting, start: Execution, grid: Grid, data: tuple[DataPath, ...]
) -> SearchResult:
    """Evaluate all executions of a grid. The first data path is the present one."""
    evaluation = evaluate(setting, grid)
    samples = grid.micro_batch * grid.accumulation
    room = device_room_gib(setting.cluster)
    possible = np.isfinite(evaluation.step_ms) & ~(evaluation.needed_gib > room)
    step_ms = np.stack([with_data_ms(evaluation.step_ms, samples, path) for path in data], axis=-1)
    job_s = np.where(
        possible[:, None], job_seconds(setting, start, grid, evaluation, step_ms), np.inf
    )
    differ = list(differing_rows(grid, start).values())
    other_data = np.array([path != data[0] for path in data], dtype=np.int64)
    turned = np.asarray(np.sum(differ, axis=0, dtype=np.int64))[:, None] + other_data
    asked = points(grid, start, evaluation.needed_gib, room)[:, None] + np.array(
        [_data_points(path, data[0]) for path in data]
    )
    return SearchResult(
        start, grid, data, evaluation, room, job_s, turned, asked, setting.conditions.startup_s
    )


def _data_points(path: DataPath, now: DataPath) -> float:
    return 0.0 if path == now else OFFLINE_POINTS if path.precomputed else DATA_POINTS
