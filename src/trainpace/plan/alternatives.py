"""What stands beside the choice: whatever was looked at and not chosen, with the reason; and which number, if it is wrong,
changes the choice."""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.core.hardware import Device
from trainpace.core.units import format_duration, format_number
from trainpace.forecast import Grid
from trainpace.plan.changes import Choice, Maybe, Rejected, Sensitivity
from trainpace.plan.evaluate import Judge, Setting
from trainpace.plan.knobs import data_in_words, differing, fleet_in_words
from trainpace.plan.search import PARALLELISM, VARIED, Freedom, Limit, SearchResult, search

SAME = 0.002
"""Two forecasts nearer than this are the same."""
CANDIDATES = 48
"""The fastest choices, and the fastest of every value of every knob, that are evaluated again."""

# ---- what was not chosen


class _Subject(NamedTuple):
    """Executions that have something which the best has not; `because` goes before the reason where they fit."""

    title: str
    executions: NDArray[np.bool_]
    because: str = ""


def rejected(
    setting: Setting,
    result: SearchResult,
    judge: Judge,
    best: tuple[int, int],
    freedom: Freedom,
    cut: Sequence[Limit] = (),
) -> tuple[Rejected, ...]:
    """Every value of every knob that the best does not have, with what the best that has it would take; and what was not looked
    at, with the reason. `cut`: the limits that left executions out. What is forecast to be faster is `worth_measuring`.
    """
    chosen = result.choice(best).execution
    subjects = _subjects(setting, result, judge, chosen)
    entries = [
        _weigh(result, judge, best, subject) for subject in subjects if subject.executions.any()
    ]
    entries += _other_data_paths(result, judge, best)
    entries = [entry for entry in entries if entry.why]
    if not freedom.allow_global_batch:
        entries.append(
            Rejected(
                title="another global batch",
                why=(
                    f"stays {result.start.global_batch:,}, because it changes"
                    " how the model learns; --allow-global-batch looks at multiples"
                ),
            )
        )
    if (
        not freedom.allow_fp8
        and setting.cluster.device.fp8_tensor_tflops is not None
        and chosen.precision != "fp8"
    ):
        entries.append(Rejected(title="fp8", why="may hurt convergence; --allow-fp8 looks at it"))
    entries += [Rejected(title=limit.title, why=f"not looked at: {limit.why}") for limit in cut]
    if setting.cluster.num_devices > 1 and freedom.may("model parallelism"):
        entries += _undivided(setting, result.grid, chosen, {limit.field for limit in cut})
    return tuple(entries)


def _undivided(
    setting: Setting, grid: Grid, chosen: Execution, limited: Set[str]
) -> Iterator[Rejected]:
    """Ways to divide a model over several GPUs that the search had nothing to look at for."""
    workload, cluster = setting.workload, setting.cluster
    blocks = next(
        (form.blocks for form in workload.forms.values() if form.blocks is not None), None
    )
    if blocks is None:
        why = "not looked at: this workload has no chain of alike blocks to divide"
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
            yield Rejected(title=PARALLELISM[field], why=f"not looked at: {why}")


def _subjects(
    setting: Setting, result: SearchResult, judge: Judge, chosen: Execution
) -> Iterator[_Subject]:
    grid = result.grid
    for precision in _others(grid, chosen, "precision"):
        yield _Subject(precision, grid.has("precision", precision))
    needless = _model_states(judge, chosen)
    for stage in _others(grid, chosen, "zero_stage"):
        title = f"ZeRO-{stage}" if stage else "no sharding"
        yield _Subject(title, grid.has("zero_stage", stage), needless * (stage > chosen.zero_stage))
    if chosen.accumulation == 1:
        where = (
            "on one GPU it only runs the same samples in pieces; " if chosen.world_size == 1 else ""
        )
        yield _Subject("accumulation", grid.accumulation > 1, where)
    else:
        yield _Subject("no accumulation", grid.accumulation == 1)
    shapes = sorted({*zip(grid.nnodes.tolist(), grid.nproc_per_node.tolist(), strict=True)})
    now = (result.start.nnodes, result.start.nproc_per_node)
    for nodes, gpus in dict.fromkeys(
        (shapes[0], shapes[-1], now, *[s for s in shapes if s[0] in (1, 2)][-2:])
    ):
        if (nodes, gpus) != (chosen.nnodes, chosen.nproc_per_node):
            network = setting.cluster.network_gb_per_s_per_device
            over = ""
            if nodes > 1 and network is not None:
                over = (
                    f"over {format_number(network * setting.cluster.devices_per_node)} GB/s a"
                    " node: "
                )
            title = fleet_in_words(Execution(nnodes=nodes, nproc_per_node=gpus))
            yield _Subject(title, (grid.nnodes == nodes) & (grid.nproc_per_node == gpus), over)
    for field, name in PARALLELISM.items():
        if _varies(grid, field):
            without = getattr(grid, field) == 1
            yield (
                _Subject(name, ~without)
                if getattr(chosen, field) == 1
                else _Subject(f"no {name}", without)
            )
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


def _others(grid: Grid, chosen: Execution, name: str) -> list[Any]:
    """The other values of a field in the order of the alphabet or of their size."""
    field = EXECUTION_FIELDS[name]
    return sorted(
        {field.decode(code) for code in np.unique(getattr(grid, name)).tolist()}
        - {getattr(chosen, name)}
    )


def _varies(grid: Grid, name: str) -> bool:
    return len(np.unique(getattr(grid, name))) > 1


def _weigh(
    result: SearchResult, judge: Judge, best: tuple[int, int], subject: _Subject
) -> Rejected:
    index = result.best(subject.executions)
    if index is not None:
        why, lost_s = _against(result, judge, best, index)
        why = why or ("no gain that forecasts can tell" if subject.because else "")
        return Rejected(title=subject.title, why=f"{subject.because}{why}", lost_s=lost_s)
    rows = np.flatnonzero(subject.executions)
    able = rows[result.evaluation.reason[rows] == 0]
    if not len(able):
        return Rejected(
            title=subject.title, why=result.evaluation.why_not(rows) or "cannot be forecast"
        )
    least = float(result.evaluation.needed_gib[able].min())
    if least <= result.room_gib:
        return Rejected(title=subject.title, why="leaves no whole step for the job's samples")
    return Rejected(
        title=subject.title,
        why=(
            f"does not fit: it needs {format_number(least)} GiB at least, and"
            f" {format_number(result.room_gib)} can be used"
        ),
    )


def _against(
    result: SearchResult, judge: Judge, best: tuple[int, int], other: tuple[int, int]
) -> tuple[str, float | None]:
    """(how the other choice compares with the best, seconds of the job that it loses); no words where it is forecast to be
    faster."""
    choice = result.choice(other)
    if not np.isfinite(result.job_s[other]):
        return "does not fit", None
    best_s, other_s = judge.job_s(result.choice(best)), judge.job_s(choice)
    lost = other_s - best_s
    if lost < -SAME * best_s:
        return "", lost
    if lost < SAME * best_s:
        return "no gain: the same time", lost
    slower = (
        f"{100 * lost / best_s:.2g} % slower"
        if lost < best_s
        else f"{other_s / best_s:.2g} times as long"
    )
    return f"{slower} at its best, {format_duration(lost)} more", lost


MOST_MAYBES = 4
WORTH = 0.01
"""Share of the job below which a saving that forecasts cannot tell is not worth a measurement either."""


def worth_measuring(result: SearchResult, judge: Judge, best: tuple[int, int]) -> tuple[Maybe, ...]:
    """What is forecast to be faster than the best, one knob at a time and all that the fastest has; what saves most first."""
    chosen, apart = result.choice(best), result.told_apart(best)
    best_s = judge.job_s(chosen)
    maybes: dict[tuple[int, int], Maybe] = {}

    def consider(index: tuple[int, int], fastest: bool) -> None:
        other = result.choice(index)
        saved = best_s - judge.job_s(other)
        if index not in maybes and saved >= WORTH * best_s:
            knobs = differing(chosen, other)
            settings = {key: value for knob in knobs for key, value in knob.settings(other).items()}
            title = ", ".join(knob.title(chosen, other) for knob in knobs)
            share = -math.expm1(-float(apart[index]))
            maybes[index] = Maybe(
                title=title, saved_s=saved, told_apart=share, settings=settings, fastest=fastest
            )

    fastest = result.best()
    if fastest is not None:
        consider(fastest, True)
    for index in result.one_knob_away(best).values():
        consider(index, False)
    every = sorted(maybes.values(), key=lambda maybe: -maybe.saved_s)
    return tuple(every[:MOST_MAYBES])


def _model_states(judge: Judge, chosen: Execution) -> str:
    """Why more sharding is not needed: what parameters, gradients and optimizer states take on one device without any."""
    f = judge.forecast(
        replace(chosen, zero_stage=0, offload_optimizer=False, offload_parameters=False)
    )
    if isinstance(f, str) or f.memory is None or not f.fits:
        return ""
    states = f.memory.parameters_gib + f.memory.gradients_gib + f.memory.optimizer_states_gib
    return (
        f"not needed: model states are {format_number(states)} GiB of a device even without"
        " sharding; "
    )


def _other_data_paths(
    result: SearchResult, judge: Judge, best: tuple[int, int]
) -> Iterator[Rejected]:
    """The fastest of those that are prepared offline, or of those that are not: whichever the best is not."""
    others = [
        j
        for j, path in enumerate(result.data)
        if path.precomputed != result.data[best[1]].precomputed
    ]
    if others:
        index = (best[0], min(others, key=lambda j: result.job_s[best[0], j]))
        why, lost_s = _against(result, judge, best, index)
        title = data_in_words(result.choice(index))
        yield Rejected(
            title=title if result.data[index[1]].precomputed else f"only {title}",
            why=why,
            lost_s=lost_s,
        )


# ---- which number decides

RATES = (
    "fp32_tflops",
    "fp16_tflops",
    "tf32_tensor_tflops",
    "fp16_tensor_tflops",
    "bf16_tensor_tflops",
    "fp8_tensor_tflops",
)


class _Figure(NamedTuple):
    """A number that the forecast rests on, the factors between which it may be wrong, and the setting where it is."""

    number: str
    low: float
    high: float
    basis: str
    perturbed: Callable[[float], Setting]


def sensitivity(
    setting: Setting, result: SearchResult, judge: Judge, best: tuple[int, int]
) -> tuple[Sensitivity, ...]:
    """Every number with whether the choice changes within its interval, those that change it first."""
    rows = _candidates(result, best)
    grid, here = result.grid.at(rows), (int(np.flatnonzero(rows == best[0])[0]), best[1])
    entries = []
    for figure in _figures(setting, judge, result.choice(best), result):
        worst = Sensitivity(
            number=figure.number, low=figure.low, high=figure.high, basis=figure.basis
        )
        for factor in (figure.low, figure.high):
            paths = result.data
            if figure.number == "loader":
                paths = tuple(
                    replace(path, ms_per_sample=path.ms_per_sample * factor) for path in paths
                )
            worst = _flipped(
                worst, search(figure.perturbed(factor), result.start, grid, paths), here
            )
        entries.append(worst)
    return tuple(sorted(entries, key=lambda s: (s.still_fits, -s.regret)))


def _flipped(so_far: Sensitivity, there: SearchResult, ours: tuple[int, int]) -> Sensitivity:
    fastest, index = there.best(), there.recommended()
    if fastest is None or index is None:
        return so_far
    least, mine = there.job_s[fastest], there.job_s[ours]
    still_fits = bool(np.isfinite(mine))
    regret = float(mine / least - 1) if still_fits else 0.0
    holds = still_fits and bool(there.as_fast_as(fastest)[ours])
    if not so_far.still_fits or (still_fits and (holds or regret <= so_far.regret)):
        return so_far
    other = there.choice(index)
    changed = ", ".join(
        knob.title(there.choice(ours), other) for knob in differing(there.choice(ours), other)
    )
    return replace(so_far, flips_to=changed, regret=regret, still_fits=still_fits)


def _figures(
    setting: Setting, judge: Judge, chosen: Choice, result: SearchResult
) -> Iterator[_Figure]:
    f = judge.forecast(chosen.execution)
    assert not isinstance(f, str)
    device, cluster = setting.cluster.device, setting.cluster

    def with_device(device: Device) -> Setting:
        return setting._replace(cluster=replace(cluster, device=device))

    low, high = 0.8, 1.25
    basis = "a fifth either way"
    if f.step is not None and f.step_time_interval_ms is not None:
        interval = f.step_time_interval_ms
        low, high = f.step.total_ms / interval.high, f.step.total_ms / max(interval.low, 1e-9)
        basis = f"the step's 90 % interval ({interval.basis})"
    yield _Figure("matrix rate", low, high, basis, lambda x: with_device(_scaled(device, RATES, x)))
    if device.memory_bandwidth_gb_per_s is not None:
        yield _Figure(
            "memory bandwidth",
            0.9,
            1.1,
            "kernels sustain 74 to 90 % of a datasheet's",
            lambda x: with_device(_scaled(device, ("memory_bandwidth_gb_per_s",), x)),
        )
    if cluster.devices_per_node > 1:
        yield _Figure(
            "links between GPUs",
            0.7,
            1.3,
            "what collectives sustain of a datasheet's bandwidth",
            lambda x: with_device(_scaled(device, ("link_gb_per_s", "pcie_lanes"), x)),
        )
    network = cluster.network_gb_per_s_per_device
    if cluster.nodes > 1 and network is not None:
        yield _Figure(
            "network",
            0.5,
            1.2,
            "shared switches seldom give what their ports say",
            lambda x: setting._replace(
                cluster=replace(cluster, network_gb_per_s_per_device=network * x)
            ),
        )
    if device.memory_gib is not None:
        yield _Figure(
            "memory needed",
            0.9,
            1.1,
            "a tenth either way; the forecast of memory has no interval yet",
            lambda x: with_device(_scaled(device, ("memory_gib",), 1 / x)),
        )
    yield _Figure(
        "host",
        0.5,
        2.0,
        "hosts differ by a factor of two in launching",
        lambda x: setting.with_host_factor(setting.host_factor * x),
    )
    if any(path.ms_per_sample for path in result.data):
        yield _Figure("loader", 0.8, 1.25, "a sample's time, as it was measured", lambda x: setting)


def _scaled(device: Device, figures: tuple[str, ...], factor: float) -> Device:
    given = {name: figure for name in figures if (figure := getattr(device, name)) is not None}
    return replace(
        device,
        **{name: replace(figure, value=figure.value * factor) for name, figure in given.items()},
    )


def _candidates(result: SearchResult, best: tuple[int, int]) -> NDArray[np.int64]:
    """Positions of executions worth evaluating again: the fastest, the fastest of every value, and those that would fit
    with a little more memory."""
    step, least = result.evaluation.step_ms, result.job_s.min(axis=1)
    order = np.argsort(least, kind="stable")
    rows = {best[0], *order[:CANDIDATES].tolist()}
    nearly = np.where(
        np.isfinite(step) & (result.evaluation.needed_gib <= 1.12 * result.room_gib), step, np.inf
    )
    rows |= set(np.argsort(nearly, kind="stable")[:CANDIDATES].tolist())
    for column in (getattr(result.grid, name) for name in VARIED):
        values = np.unique(column)
        if len(values) <= 32:
            rows |= {int(np.argmin(np.where(column == value, least, np.inf))) for value in values}
    return np.array(sorted(rows), dtype=np.int64)
