"""Explanation of the best choice: rejected alternatives, reasons and cautions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.core.outcome import CERTAIN, Forecast
from trainpace.core.units import format_count, format_duration, format_number
from trainpace.forecast import Grid, needed_gib
from trainpace.plan.changes import Maybe, Projection, Rejected
from trainpace.plan.evaluate import Evaluator, Problem
from trainpace.plan.search import PARALLELISM, Limit, SearchResult, SearchSpace
from trainpace.plan.settings import data_in_words, differing, gpus_in_words

SAME = 0.002
"""Relative difference below which two forecasts count as equal."""
MOST_MAYBES = 4
WORTH = 0.03
"""Smallest saving that is worth a measurement, as a share of the job."""
HIDDEN = 0.05
"""Share of a step below which gradient communication counts as hidden."""

Index = tuple[int, int]


# ---- alternatives that were not chosen


class _Subject(NamedTuple):
    """Executions that share a property that the best choice lacks.

    `because` precedes the reason if they fit in memory.
    """

    title: str
    executions: NDArray[np.bool_]
    because: str = ""


def rejected(
    problem: Problem,
    result: SearchResult,
    evaluator: Evaluator,
    best: Index,
    space: SearchSpace,
    limits: Sequence[Limit] = (),
) -> tuple[Rejected, ...]:
    """Return every alternative that is not faster, with the time of its best execution.

    Alternatives that were not compared are included with the reason. `limits` are the restrictions
    that excluded executions. Alternatives with a faster forecast are in `worth_measuring` instead.
    """
    chosen = result.choice(best).execution
    subjects = [
        *_value_subjects(result.grid, chosen, _model_states(evaluator, chosen)),
        *_gpu_subjects(problem, result, chosen),
        *_parallelism_subjects(result.grid, chosen),
    ]
    entries = [_weigh(result, best, subject) for subject in subjects if subject.executions.any()]
    entries += _other_data_paths(result, best)
    entries = [entry for entry in entries if entry.why]
    limited = [Rejected(title=x.title, why=f"not compared: {x.why}") for x in limits]
    entries += [*_forbidden(problem, result, chosen, space), *limited]
    if problem.cluster.num_devices > 1 and space.may("model parallelism"):
        entries += _undivided(problem, result.grid, chosen, {limit.field for limit in limits})
    return tuple(entries)


def _forbidden(
    problem: Problem, result: SearchResult, chosen: Execution, space: SearchSpace
) -> Iterator[Rejected]:
    """Yield alternatives that are compared only if a command option allows them."""
    device = problem.cluster.device
    if not space.allow_global_batch:
        why = (
            f"stays {result.start.global_batch:,}, because it changes how the model learns;"
            " --allow-global-batch compares multiples"
        )
        yield Rejected(title="another global batch", why=why)
    if not space.allow_fp8 and device.fp8_tensor_tflops and chosen.precision != "fp8":
        why = "may hurt convergence; --allow-fp8 compares it"
        yield Rejected(title="fp8", why=why)


def _value_subjects(grid: Grid, chosen: Execution, needless: str) -> Iterator[_Subject]:
    """Yield alternative values of fields. `needless` says why more sharding is not needed."""
    for precision in _others(grid, chosen, "precision"):
        yield _Subject(precision, grid.has("precision", precision))
    for stage in _others(grid, chosen, "zero_stage"):
        title = f"ZeRO-{stage}" if stage else "no sharding"
        yield _Subject(title, grid.has("zero_stage", stage), needless * (stage > chosen.zero_stage))
    if chosen.accumulation == 1:
        why = "on one GPU it only splits the same samples; " * (chosen.world_size == 1)
        yield _Subject("accumulation", grid.accumulation > 1, why)
    else:
        yield _Subject("no accumulation", grid.accumulation == 1)
    for kind in _others(grid, chosen, "activation_checkpointing"):
        title = "no recomputation" if kind == "none" else f"{kind} recomputation"
        yield _Subject(title, grid.has("activation_checkpointing", kind))
    for field, on, off in (
        ("offload_optimizer", "offload to the host", "no offload"),
        ("compile", "torch.compile", "no torch.compile"),
        ("channels_last", "channels_last", "contiguous tensors"),
    ):
        if _varies(grid, field):
            value = getattr(chosen, field)
            yield _Subject(off if value else on, getattr(grid, field) != value)


def _gpu_subjects(problem: Problem, result: SearchResult, chosen: Execution) -> Iterator[_Subject]:
    """Yield other cluster sizes: smallest, largest, current, and one or two full nodes."""
    grid, network = result.grid, problem.cluster.network_gb_per_s_per_device
    shapes = sorted({*zip(grid.nnodes.tolist(), grid.nproc_per_node.tolist(), strict=True)})
    now = (result.start.nnodes, result.start.nproc_per_node)
    small = [shape for shape in shapes if shape[0] in (1, 2)][-2:]
    for nodes, gpus in dict.fromkeys((shapes[0], shapes[-1], now, *small)):
        if (nodes, gpus) == (chosen.nnodes, chosen.nproc_per_node):
            continue
        over = ""
        if nodes > 1 and network is not None:
            rate = format_number(network * problem.cluster.devices_per_node)
            over = f"over {rate} GB/s per node: "
        title = gpus_in_words(Execution(nnodes=nodes, nproc_per_node=gpus))
        yield _Subject(title, (grid.nnodes == nodes) & (grid.nproc_per_node == gpus), over)


def _parallelism_subjects(grid: Grid, chosen: Execution) -> Iterator[_Subject]:
    for field, name in PARALLELISM.items():
        without, used = getattr(grid, field) == 1, getattr(chosen, field) > 1
        if _varies(grid, field):
            yield _Subject(f"no {name}", without) if used else _Subject(name, ~without)


def _undivided(
    problem: Problem, grid: Grid, chosen: Execution, limited: Set[str]
) -> Iterator[Rejected]:
    """Yield the kinds of model parallelism that no execution of the search uses."""
    workload, cluster = problem.workload, problem.cluster
    blocks = workload.blocks
    if blocks is None:
        why = "not compared: this workload has no chain of repeated blocks to divide"
        yield Rejected(title="tensor and pipeline parallelism", why=why)
        return
    whys = {
        "tp": f"it stays inside a node, where no number of GPUs divides {blocks.heads} heads",
        "pp": f"no number of these GPUs divides {blocks.count} blocks",
        "cp": f"a sequence of {workload.sequence_length} tokens is too short to be divided",
    }
    if blocks.experts:
        whys["ep"] = f"no number of these GPUs divides {blocks.experts} experts"
    if cluster.devices_per_node == 1:
        whys["tp"] = "it stays inside a node, which has one GPU"
    for field, why in whys.items():
        if getattr(chosen, field) == 1 and not _varies(grid, field) and field not in limited:
            yield Rejected(title=PARALLELISM[field], why=f"not compared: {why}")


def _others(grid: Grid, chosen: Execution, name: str) -> list[Any]:
    """Return the alternative values of a field, sorted."""
    field = EXECUTION_FIELDS[name]
    values = {field.decode(code) for code in np.unique(getattr(grid, name)).tolist()}
    return sorted(values - {getattr(chosen, name)})


def _varies(grid: Grid, name: str) -> bool:
    return len(np.unique(getattr(grid, name))) > 1


def _weigh(result: SearchResult, best: Index, subject: _Subject) -> Rejected:
    index = result.best(subject.executions)
    if index is None:
        return Rejected(title=subject.title, why=_impossible(result, subject))
    why, lost_s = _against(result, best, index)
    why = why or "no gain that forecasts can distinguish" * bool(subject.because)
    return Rejected(title=subject.title, why=f"{subject.because}{why}", lost_s=lost_s)


def _impossible(result: SearchResult, subject: _Subject) -> str:
    """Return the reason why none of the executions is possible."""
    rows, found = np.flatnonzero(subject.executions), result.evaluation
    able = rows[found.reason[rows] == 0]
    if not len(able):
        return found.why_not(rows) or "cannot be forecast"
    if found.fits[able].any():
        return "leaves no full step for the job's samples"
    least = float(found.needed_gib[able].min())
    return (
        f"does not fit: it needs at least {format_number(least)} GiB, and"
        f" {format_number(result.room_gib)} GiB surely fit"
    )


def _against(result: SearchResult, best: Index, other: Index) -> tuple[str, float | None]:
    """Return (comparison with the best, lost seconds). The text is "" if the other is faster."""
    best_s, other_s = float(result.job_s[best]), float(result.job_s[other])
    if not math.isfinite(other_s):
        return "does not fit", None
    lost = other_s - best_s
    if lost < -SAME * best_s:
        return "", lost
    if lost < SAME * best_s:
        return "no gain: the same time", lost
    times = f"{other_s / best_s:.2g} times as long"
    slower = f"{100 * lost / best_s:.2g}% slower" if lost < best_s else times
    return f"{slower} at its best, {format_duration(lost)} more", lost


def _model_states(evaluator: Evaluator, chosen: Execution) -> str:
    """Return the reason why more sharding is not needed, or ""."""
    states = _states_gib(evaluator.forecast(_unsharded(chosen)), fitting=True)
    return (
        ""
        if states is None
        else f"not needed: model states are {format_number(states)} GiB of a device even without"
        " sharding; "
    )


def _other_data_paths(result: SearchResult, best: Index) -> Iterator[Rejected]:
    """Yield the fastest offline data path, or the fastest online one if the best is offline."""
    row, path = best
    offline = result.data[path].precomputed
    others = [j for j, data in enumerate(result.data) if data.precomputed != offline]
    if others:
        index = row, min(others, key=lambda j: result.job_s[row, j])
        why, lost_s = _against(result, best, index)
        title = data_in_words(result.choice(index))
        yield Rejected(title=f"only {title}" if offline else title, why=why, lost_s=lost_s)


def worth_measuring(result: SearchResult, best: Index) -> tuple[Maybe, ...]:
    """Return changes with a faster forecast than the best choice, the largest saving first.

    These are single settings, and the combination in which the fastest choice differs.
    """
    chosen, apart, best_s = result.choice(best), result.resolutions(best), result.job_s[best]
    maybes: dict[Index, Maybe] = {}
    fastest = result.best()
    for index in (*([] if fastest is None else [fastest]), *result.one_setting_away(best).values()):
        saved = float(best_s - result.job_s[index])
        if index in maybes or not saved >= WORTH * best_s:
            continue
        other = result.choice(index)
        settings = differing(chosen, other)
        maybes[index] = Maybe(
            title=", ".join(s.title(chosen, other) for s in settings),
            saved_s=saved,
            told_apart=-math.expm1(-float(apart[index])),
            settings={key: value for s in settings for key, value in s.keys(other).items()},
            fastest=index == fastest,
        )
    return tuple(sorted(maybes.values(), key=lambda maybe: -maybe.saved_s)[:MOST_MAYBES])


# ---- the reason, and what may go wrong


def because(problem: Problem, evaluator: Evaluator, result: SearchResult, best: Index) -> str:
    """Return one sentence with the devices, how they divide the model, and the deciding fact."""
    e = result.choice(best).execution
    parameters = f"{format_count(problem.workload.parameters)} parameters"
    if e.world_size > 1 and e.ranks_per_copy * e.ep == 1:
        reason = _data_parallel(evaluator, e, result.room_gib, parameters)
    elif e.world_size > 1:
        reason = " and ".join(_divided(problem, evaluator, e, parameters))
    elif e.offload_optimizer or e.offload_parameters:
        reason = f"{parameters} do not fit on one GPU, so part of their states stays on the host"
    else:
        reason = f"one GPU holds all of {parameters}, so there is nothing to divide"
    if e.activation_checkpointing != "none":
        reason += "; activations are recomputed, " + _recomputation(evaluator, e)
    return f"{_devices(problem, e)}: {reason}."


def cautions(chosen: Projection) -> tuple[str, ...]:
    """Return possible problems of the recommended choice."""
    found, e = [], chosen.choice.execution
    if chosen.fit_probability is not None and chosen.fit_probability < CERTAIN:
        found.append(
            f"it fits in memory with a probability of {chosen.fit_probability:.0%}: watch the first"
            " steps"
        )
    if e.pp > 1:
        found.append(
            "a pipeline needs a model that can be split into stages, and an engine that runs them"
            " (torchtitan, Megatron)"
        )
    elif e.tp > 1 or e.cp > 1 or e.ep > 1:
        found.append(
            "the model's code, or its engine, has to divide the layers (DTensor, Megatron)"
        )
    return tuple(found)


def _devices(problem: Problem, e: Execution) -> str:
    device, network = problem.cluster.device, problem.cluster.network_gb_per_s_per_device
    count = "one" if e.world_size == 1 else str(e.world_size)
    link = " over PCIe" if device.link_gb_per_s is None else " with NVLink"
    over = f" on {e.nnodes} nodes" if e.nnodes > 1 and network is not None else ""
    return f"{count} x {device.name}{link * (e.nproc_per_node > 1)}{over}"


def _data_parallel(evaluator: Evaluator, e: Execution, room_gib: float, parameters: str) -> str:
    f = evaluator.forecast(e)
    assert f is not None
    assert f.step is not None
    states, room = _states_gib(f), format_number(room_gib)
    if e.zero_stage == 0:
        waits = f.step.communication_ms / f.step.total_ms
        hidden = "gradients are reduced during the backward pass"
        exposed = f"exposed communication of gradients takes {waits:.0%} of a step"
        return (
            f"plain DDP is right for {parameters}: states take {format_number(states or 0.0)} of"
            f" {room} GiB, and {exposed if waits > HIDDEN else hidden}"
        )
    name = f"ZeRO-{e.zero_stage}" if e.zero_stage < 3 else "full sharding (FSDP, ZeRO-3)"
    whole = _states_gib(evaluator.forecast(_unsharded(e)))
    if whole is None or states is None:
        return f"{name} for {parameters}, which do not fit on one GPU"
    return (
        f"{name}, because the states of {parameters} take {format_number(whole)} of {room} GiB on"
        f" every GPU without sharding, and {format_number(states)} GiB with it"
    )


def _divided(
    problem: Problem, evaluator: Evaluator, e: Execution, parameters: str
) -> Iterator[str]:
    if e.tp > 1:
        yield f"tensor parallelism over {e.tp} GPUs of a node, which have the fastest links"
    if e.ep > 1:
        yield f"experts divided over {e.ep} GPUs"
    if e.cp > 1:
        tokens = problem.workload.sequence_length or 0
        yield f"the sequence of {tokens:,} tokens divided over {e.cp} GPUs"
    if e.pp > 1:
        yield f"a pipeline of {e.pp} stages, which communicates least between nodes"
    states = format_number(_states_gib(evaluator.forecast(e)) or 0.0)
    name = "FSDP" if e.zero_stage == 3 else f"ZeRO-{e.zero_stage}"
    sharded = f" with {name} over the rest" if e.zero_stage else ""
    yield f"{states} GiB of states per GPU of {parameters}{sharded}"


def _recomputation(evaluator: Evaluator, e: Execution) -> str:
    kept = evaluator.forecast(replace(e, activation_checkpointing="none"))
    if kept is None or kept.memory is None:
        return "to save memory"
    return f"because storing all would need {format_number(float(needed_gib(kept.memory)))} GiB"


def _unsharded(e: Execution) -> Execution:
    return replace(
        e,
        zero_stage=0,
        shard_size=None,
        reshard_after_forward=True,
        offload_optimizer=False,
        offload_parameters=False,
    )


def _states_gib(f: Forecast | None, fitting: bool = False) -> float | None:
    """Return the GiB of parameters, gradients and optimizer states per device. None if unknown."""
    if f is None or f.memory is None or (fitting and not f.fits):
        return None
    return f.memory.parameters_gib + f.memory.gradients_gib + f.memory.optimizer_states_gib
