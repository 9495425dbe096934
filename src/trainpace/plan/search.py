"""Search over all legal executions: the fastest one, and the simplest one that is nearly as fast.

The search grid combines device meshes, batch sizes and all fields that are independent of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import EXECUTION_FIELDS, Checkpointing, Execution, Precision
from trainpace.core.hardware import Cluster, Device
from trainpace.core.records import Record
from trainpace.forecast import Grid, divisors, doublings, usable
from trainpace.job import DataPath, with_data_ms
from trainpace.plan.changes import NOISE, Choice
from trainpace.plan.evaluate import Evaluation, Problem, device_room_gib, evaluate, job_seconds
from trainpace.plan.settings import SETTING_NAMES, data_points, differing_rows, points, resolutions
from trainpace.workload import CONVOLUTION_KINDS, Blocks, Floats, Workload, form_of

MOST_MICRO_BATCHES = 24
"""Number of evenly spread micro-batch sizes to try. The current size is added.
"""
LEAST_TOKENS_A_RANK = 2048
"""Minimum tokens per rank for context parallelism. Below, it costs more than it saves.
"""
LARGEST_VIRTUAL = 8
ROUNDING = 1e-9
GLOBAL_BATCH_FACTORS = (1, 2, 4, 8)
STEPS_DOWN: tuple[Precision, ...] = ("fp32", "torch_fp32", "tf32", "amp_bf16", "amp_fp16")
"""Precisions with fp32 weights. The search never chooses 16-bit weights for the user."""
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
BATCH = ("micro_batch", "accumulation")


class Limit(Record):
    """A restriction of one field to certain values, imposed by the engine or a settings file.

    `title` names the excluded executions, and `why` gives the reason.
    """

    title: str
    field: str
    values: tuple[int | str | bool | None, ...]
    why: str


class SearchSpace(Record):
    """Search space of a plan. `keep` names settings (see SETTING_NAMES) that must not change."""

    keep: tuple[str, ...] = ()
    allow_global_batch: bool = False
    allow_fp8: bool = False
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        for name in self.keep:
            if name not in SETTING_NAMES:
                known = ", ".join(SETTING_NAMES)
                raise TrainpaceError(f"unknown setting {name!r}.", f"Known: {known}.")

    def may(self, setting: str) -> bool:
        return setting not in self.keep

    def within(self, grid: Grid) -> tuple[Grid, tuple[Limit, ...]]:
        """Return the executions within all limits, and the limits that excluded any."""
        cut = []
        for limit in self.limits:
            allowed = np.any([grid.has(limit.field, value) for value in limit.values], axis=0)
            if not allowed.all():
                grid = grid.at(allowed)
                cut.append(limit)
        return grid, tuple(cut)


# ---- the legal executions


def executions_on(
    cluster: Cluster,
    workload: Workload,
    start: Execution,
    space: SearchSpace,
    global_batch: int | None = None,
) -> Grid:
    """Return every legal execution on the cluster or a part of it, without checking memory.

    `global_batch` is the number of samples per update, by default that of `start`. Multiples are
    tried if the space allows another global batch.
    """
    blocks = workload.blocks
    batch = global_batch or start.global_batch
    meshes = _meshes(workload, start, cluster, space, blocks)
    batched = np.array(
        [(*mesh, *b) for mesh in meshes for b in _batches(start, mesh, space, batch)],
        dtype=np.int64,
    )
    if not len(batched):
        raise TrainpaceError(
            f"a global batch of {batch} cannot be divided over these devices or a part of them.",
            "Give a global batch that is a multiple of the number of GPUs.",
        )
    grid = _grid(start, batched, _other(workload, start, cluster.device, space, blocks))
    return grid.at(usable(grid, start))


def _grid(start: Execution, batched: NDArray[np.int64], other: list[tuple[Any, ...]]) -> Grid:
    """Combine every row of mesh and batch sizes with every combination of the other fields."""
    varied = {
        name: np.repeat(column, len(other))
        for name, column in zip((*MESH, *BATCH), batched.T, strict=True)
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
    return Grid.vary(start, **varied)


def is_legal(execution: Execution, start: Execution) -> bool:
    """Return True if a search from `start` may consider the execution."""
    return bool(usable(Grid.of([execution]), start)[0])


def _meshes(
    workload: Workload,
    start: Execution,
    cluster: Cluster,
    space: SearchSpace,
    blocks: Blocks | None,
) -> Iterator[tuple[int, ...]]:
    """Yield values for the fields in MESH."""
    shapes = {(start.nnodes, start.nproc_per_node)}
    if space.may("GPUs"):
        shapes |= _parts(cluster)
    layouts: set[tuple[int, ...]] = {
        (start.tp, start.pp, start.cp, start.virtual_stages, start.ep, start.expert_tp or 0)
    }
    if blocks is not None and space.may("model parallelism"):
        layouts |= set(_layouts(workload, blocks, max(k for _, k in shapes)))
    for (nodes, processes), layout in product(sorted(shapes), sorted(layouts)):
        tp, pp, cp, _, ep, expert_tp = layout
        world = nodes * processes
        experts = pp * ep * (expert_tp or tp) if ep > 1 else 1
        if world % math.lcm(tp * pp * cp, experts) == 0:
            yield nodes, processes, *layout


def _parts(cluster: Cluster) -> set[tuple[int, int]]:
    """Return the (nodes, GPUs per node) of parts of a cluster, in powers of two."""
    most = cluster.devices_per_node
    return {(n, most) for n in doublings(cluster.nodes)} | {(1, k) for k in doublings(most)}


def _layouts(
    workload: Workload, blocks: Blocks, devices_per_node: int
) -> Iterator[tuple[int, ...]]:
    """Yield (tp, pp, cp, virtual_stages, ep, expert_tp).

    Tensor parallelism stays within a node, because its communication cannot be hidden. With expert
    parallelism, single experts are not split further, because their matmuls are already small.
    """
    for tp, pp, cp in product(
        _tensor_sizes(blocks, devices_per_node),
        divisors(blocks.count),
        _context_sizes(workload.sequence_length or 0),
    ):
        stages = divisors(blocks.count // pp) if pp > 1 else [1]
        virtual_stages = [v for v in stages if v <= LARGEST_VIRTUAL]
        for v, ep in product(virtual_stages, divisors(blocks.experts) if blocks.experts else [1]):
            yield tp, pp, cp, v, ep, int(ep > 1)


def _tensor_sizes(blocks: Blocks, most: int) -> list[int]:
    """Return tensor-parallel sizes that fit the heads. Key-value heads may be replicated."""
    heads = max(1, blocks.heads)
    groups = blocks.key_value_heads or heads
    sizes = [t for t in divisors(most) if heads % t == 0]
    return [t for t in sizes if groups % t == 0 or t % groups == 0]


def _context_sizes(tokens: int) -> list[int]:
    return [1, *(c for c in (2, 4, 8) if tokens >= c * LEAST_TOKENS_A_RANK)]


def _batches(
    start: Execution, mesh: tuple[int, ...], space: SearchSpace, batch: int
) -> Iterator[tuple[int, int]]:
    nodes, processes, tp, pp, cp, *_ = mesh
    ranks = nodes * processes // (tp * pp * cp)
    for factor in GLOBAL_BATCH_FACTORS if space.allow_global_batch else (1,):
        share, rest = divmod(batch * factor, ranks)
        if rest:
            continue
        sizes = divisors(share)
        if not space.may("micro-batch"):
            sizes = [size for size in sizes if size == start.micro_batch]
        for size in _spread(sizes, MOST_MICRO_BATCHES, start.micro_batch):
            yield size, share // size


def _spread(sizes: list[int], most: int, current: int) -> list[int]:
    """Return about `most` evenly spread sizes, plus the current size if it is in `sizes`."""
    if len(sizes) <= most:
        return sizes
    spread = {sizes[i] for i in np.linspace(0, len(sizes) - 1, most).astype(int)}
    return sorted(spread | ({current} & set(sizes)))


def _other(
    workload: Workload, start: Execution, device: Device, space: SearchSpace, blocks: Blocks | None
) -> list[tuple[Any, ...]]:
    """Return all combinations of values for the fields in OTHER."""

    def options(setting: str, now: Any, others: Iterable[Any]) -> list[Any]:
        return [now, *(v for v in others if v != now)] if space.may(setting) else [now]

    convolves = any(
        kind in CONVOLUTION_KINDS
        for form in workload.forms.values()
        for kind in form.operators.kind
    )
    recomputes = blocks is not None and not workload.checkpointed
    recomputed: Sequence[Checkpointing] = ("none", "selective", "full") if recomputes else ()
    offloaded = (start.offload_optimizer, start.offload_parameters)
    combinations = product(
        options("precision", start.precision, precisions(workload, start, space, device)),
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
    workload: Workload, start: Execution, space: SearchSpace, device: Device
) -> list[Precision]:
    """Return the current precision, and lower ones for which the workload was traced.

    FP8 is included only if the space allows it.
    """
    allowed: list[Precision] = [start.precision]
    if start.precision in STEPS_DOWN:
        first = min(STEPS_DOWN.index(start.precision), STEPS_DOWN.index("amp_bf16"))
        allowed += STEPS_DOWN[first:]
    if space.allow_fp8:
        allowed.append("fp8")
    # torch computes TF32 in fp32, and bf16 slowly, on devices without such units.
    slow = {
        "tf32": device.tf32_tensor_tflops is None,
        "amp_bf16": device.bf16_tensor_tflops is None,
    }
    possible = [p for p in allowed if form_of(p) in workload.forms]
    return [p for p in dict.fromkeys(possible) if p == start.precision or not slow.get(p)]


# ---- the search


class SearchResult(NamedTuple):
    """All choices of a search: every execution of the grid with every data path.

    Attributes:
        job_s: Seconds of the whole job, shape (executions, data paths). Infinite if a choice is
            impossible or does not fit.
        changes: Number of settings that differ from the start.
        points: Complexity of each choice for the user; see `points`.
        startup_s: Time of any job before its first step.
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
    def worth_it(self) -> NDArray[np.bool_]:
        """Mask (executions, data paths) of the start and of choices that save at least `NOISE`."""
        start_s = self.job_s[self.changes == 0].min(initial=np.inf)
        longest_s = self.startup_s + (1 - NOISE) * (start_s - self.startup_s)
        return np.asarray((self.changes == 0) | (self.job_s <= longest_s))

    @property
    def fitting(self) -> int:
        return int(np.isfinite(self.job_s).sum())

    def best(self, among: NDArray[np.bool_] | None = None) -> tuple[int, int] | None:
        """Return the index of the fastest choice, or None. Ties go to the fewest changes.

        `among` is a mask over executions.
        """
        times = self.job_s if among is None else np.where(among[:, None], self.job_s, np.inf)
        least = times.min(initial=np.inf)
        if not np.isfinite(least):
            return None
        rows, paths = np.nonzero(times <= least)
        pick = np.argmin(self.changes[rows, paths])
        return int(rows[pick]), int(paths[pick])

    def recommended(self, elsewhere: Sequence[SearchResult] = ()) -> tuple[int, int] | None:
        """Return the simplest choice that forecasts cannot distinguish from the fastest, or None.

        `elsewhere` holds the same executions under other conditions. The choice must be as good
        there too. A choice other than the start saves at least `NOISE`. If no choice is good enough
        everywhere, `elsewhere` is ignored, and in the end the fastest choice is returned.
        """
        if self.best() is None:
            return None
        found = [(result, best) for result in (self, *elsewhere) if (best := result.best())]
        everywhere = [result for result, _ in found]
        left = np.isfinite(self.job_s)
        for result, best in found:
            left &= result.as_fast_as(best) & result.worth_it
        while left.any():
            picked = self._simplest(left)
            rivals = [result.rival(picked) for result in everywhere]
            if not any(rivals):
                return picked
            left[picked] = False
            for result, rival in zip(everywhere, rivals, strict=True):
                left &= True if rival is None else result.as_fast_as(rival)
        return self.recommended() if elsewhere else self.best()

    def _simplest(self, among: NDArray[np.bool_]) -> tuple[int, int]:
        """Return the choice with the fewest points, then fewest changes, then shortest time."""
        rows, paths = np.nonzero(among)
        keys = [values[rows, paths] for values in (self.job_s, self.changes, self.points)]
        pick = np.lexsort(keys)[0]
        return int(rows[pick]), int(paths[pick])

    def rival(self, index: tuple[int, int]) -> tuple[int, int] | None:
        """Return the choice that is faster by the largest distinguishable margin, or None."""
        beyond = (
            self.job_s[index] / self.job_s
            - 1
            - self._least_share(self.job_s, self.resolutions(index))
        )
        row, path = np.unravel_index(np.argmax(beyond), beyond.shape)
        return (int(row), int(path)) if beyond[row, path] > ROUNDING else None

    def as_fast_as(self, index: tuple[int, int]) -> NDArray[np.bool_]:
        """Return a mask (executions, data paths) of choices that are not distinguishably slower."""
        job_s = self.job_s[index]
        return np.asarray(
            self.job_s / job_s - 1 <= self._least_share(job_s, self.resolutions(index)) + ROUNDING
        )

    def _least_share(self, job_s: Floats, apart: Floats) -> Floats:
        """Return the relative slowdown of a job of `job_s` that forecasts can distinguish.

        The job's start does not count, because it takes equally long with each choice.
        """
        return np.maximum(0.0, 1 - self.startup_s / job_s) * np.expm1(apart)

    def resolutions(self, index: tuple[int, int]) -> Floats:
        """Return the smallest log ratio that distinguishes each choice from the one at `index`.

        The shape is (executions, data paths).
        """
        row, path = index
        differ = {
            name: flags[:, None]
            for name, flags in differing_rows(self.grid, self.grid.execution(row)).items()
        }
        return resolutions(
            differ | {"data": np.array([[other != self.data[path] for other in self.data]])}
        )

    def one_setting_away(self, index: tuple[int, int]) -> dict[str, tuple[int, int]]:
        """Return for each setting the fastest choice that differs only in that setting."""
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
        """Return the fastest choice per number of devices, if it beats all smaller numbers."""
        devices = self.grid.world_size
        front: list[tuple[int, int]] = []
        for count in np.unique(devices):
            index = self.best(devices == count)
            if index is not None and (not front or self.job_s[index] < self.job_s[front[-1]]):
                front.append(index)
        return front


def search(
    problem: Problem, start: Execution, grid: Grid, data: tuple[DataPath, ...]
) -> SearchResult:
    """Evaluate all executions of a grid. The first data path is the current one."""
    evaluation = evaluate(problem, grid)
    samples = grid.micro_batch * grid.accumulation
    room = device_room_gib(problem.cluster)
    fits = evaluation.fits | (evaluation.needed_gib <= problem.proven_gib)
    possible = np.isfinite(evaluation.step_ms) & fits
    step_ms = np.stack([with_data_ms(evaluation.step_ms, samples, path) for path in data], axis=-1)
    job_s = np.where(
        possible[:, None], job_seconds(problem, start, grid, evaluation, step_ms), np.inf
    )
    differ = list(differing_rows(grid, start).values())
    other_data = np.array([path != data[0] for path in data], dtype=np.int64)
    changes = np.asarray(np.sum(differ, axis=0, dtype=np.int64))[:, None] + other_data
    asked = points(grid, start)[:, None] + np.array([data_points(path, data[0]) for path in data])
    return SearchResult(
        start, grid, data, evaluation, room, job_s, changes, asked, problem.conditions.startup_s
    )
