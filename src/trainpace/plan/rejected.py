"""What was looked at and not chosen, and why: the best that has it, laid beside the best."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.execution import Execution
from trainpace.plan.changes import Rejected
from trainpace.plan.evaluate import Judge, Setting
from trainpace.plan.knobs import data_in_words, fleet_in_words
from trainpace.plan.search import SearchResult
from trainpace.plan.space import Freedom
from trainpace.units import format_duration, format_number

SAME = 0.002
"""Two forecasts nearer than this are the same."""


class _Subject(NamedTuple):
    """Rows that have something which the best has not; `because` goes before the reason where they fit."""

    title: str
    rows: NDArray[np.bool_]
    because: str = ""


def rejected(
    setting: Setting, result: SearchResult, judge: Judge, best: tuple[int, int], freedom: Freedom
) -> tuple[Rejected, ...]:
    """Every value of every knob that the best does not have, with what the best that has it would take."""
    chosen = result.choice(best).execution
    entries = [
        _weigh(result, judge, best, subject)
        for subject in _subjects(setting, result, judge, chosen)
        if subject.rows.any()
    ]
    entries += _other_data_paths(result, judge, best)
    if not freedom.allow_global_batch:
        entries.append(Rejected(title="another global batch", why=f"stays {result.space.base.global_batch:,}, because it changes"
                             " how the model learns; --allow-global-batch looks at multiples"))  # fmt: skip
    if not freedom.allow_fp8 and setting.cluster.device.fp8_tensor_tflops is not None and chosen.precision != "fp8":
        entries.append(Rejected(title="fp8", why="its risk to convergence is yours to take: --allow-fp8"))
    if setting.cluster.num_devices > 1 and "tp" not in _varying(result) and freedom.may("model parallelism"):
        why = "not looked at: this workload has no chain of alike blocks to divide"
        entries.append(Rejected(title="tensor and pipeline parallelism", why=why))
    return tuple(entries)


def _subjects(setting: Setting, result: SearchResult, judge: Judge, chosen: Execution) -> Iterator[_Subject]:
    c, varying = result.space.columns, _varying(result)
    needless = _model_states(judge, chosen)
    for precision in _others(c["precision"], chosen.precision):
        yield _Subject(precision, c["precision"] == precision)
    for stage in _others(c["zero_stage"], chosen.zero_stage):
        yield _Subject(
            f"ZeRO-{stage}" if stage else "no sharding",
            c["zero_stage"] == stage,
            needless * (stage > chosen.zero_stage),
        )
    if chosen.accumulation == 1:
        where = "on one GPU it only runs the same samples in pieces; " if chosen.world_size == 1 else ""
        yield _Subject("accumulation", c["accumulation"] > 1, where)
    else:
        yield _Subject("no accumulation", c["accumulation"] == 1)
    shapes = sorted(set(zip(c["nnodes"].tolist(), c["nproc_per_node"].tolist(), strict=True)))
    now = (result.space.base.nnodes, result.space.base.nproc_per_node)
    for shape in dict.fromkeys((shapes[0], shapes[-1], now, *[s for s in shapes if s[0] in (1, 2)][-2:])):
        if shape != (chosen.nnodes, chosen.nproc_per_node):
            network = setting.cluster.network_gb_per_s_per_device
            over = ""
            if shape[0] > 1 and network is not None:
                over = f"over {format_number(network * setting.cluster.devices_per_node)} GB/s a node: "
            some = Execution(nnodes=shape[0], nproc_per_node=shape[1])
            yield _Subject(fleet_in_words(some), (c["nnodes"] == shape[0]) & (c["nproc_per_node"] == shape[1]), over)
    for field, name in (("tp", "tensor parallelism"), ("pp", "pipeline parallelism"), ("cp", "context parallelism")):
        if field in varying and getattr(chosen, field) == 1:
            yield _Subject(name, c[field] > 1)
        elif field in varying:
            yield _Subject(f"no {name}", c[field] == 1)
    for kind in _others(c["activation_checkpointing"], chosen.activation_checkpointing):
        yield _Subject(f"{kind} recomputation" if kind != "none" else "no recomputation",
                       c["activation_checkpointing"] == kind)  # fmt: skip
    for field, on, off in (
        ("offload_optimizer", "offload to the host", "no offload"), ("compile", "torch.compile", "no torch.compile"),
        ("channels_last", "channels_last", "contiguous tensors"),
    ):  # fmt: skip
        if field in varying:
            value = getattr(chosen, field)
            yield _Subject(off if value else on, c[field] != value)


def _weigh(result: SearchResult, judge: Judge, best: tuple[int, int], subject: _Subject) -> Rejected:
    index = result.best(subject.rows)
    if index is not None:
        why, lost_s = _against(result, judge, best, index)
        return Rejected(title=subject.title, why=f"{subject.because}{why}", lost_s=lost_s)
    rows = np.flatnonzero(subject.rows)
    able = rows[np.isfinite(result.evaluation.step_ms[rows])]
    if not len(able):
        return Rejected(title=subject.title, why=result.evaluation.why_not(rows) or "cannot be forecast")
    least = float(result.evaluation.needed_gib[able].min())
    if least <= result.room_gib:
        return Rejected(title=subject.title, why="leaves no whole step for the job's samples")
    return Rejected(
        title=subject.title,
        why=f"does not fit: it needs {format_number(least)} GiB at least, and {format_number(result.room_gib)} can be used",
    )


def _against(
    result: SearchResult, judge: Judge, best: tuple[int, int], other: tuple[int, int]
) -> tuple[str, float | None]:
    """(how the other choice compares with the best, seconds of the job that it loses)."""
    choice = result.choice(other)
    if not np.isfinite(result.job_s[other]):
        return "does not fit", None
    best_s, other_s = judge.job_s(result.choice(best)), judge.job_s(choice)
    lost = other_s - best_s
    if lost < SAME * best_s:
        return "gains nothing: the same time", lost
    slower = f"{100 * lost / best_s:.2g} % slower" if lost < best_s else f"{other_s / best_s:.2g} times as long"
    return f"{slower} at its best, {format_duration(lost)} more", lost


def _model_states(judge: Judge, chosen: Execution) -> str:
    """Why more sharding is not needed: what parameters, gradients and optimizer states take on one device without any."""
    f = judge.forecast(replace(chosen, zero_stage=0, offload_optimizer=False, offload_parameters=False))
    if isinstance(f, str) or f.memory is None or not f.fits:
        return ""
    states = f.memory.parameters_gib + f.memory.gradients_gib + f.memory.optimizer_states_gib
    return f"not needed: model states are {format_number(states)} GiB of a device even without sharding; "


def _others(column: NDArray[Any], chosen: object) -> list[Any]:
    return [value for value in np.unique(column).tolist() if value != chosen]


def _varying(result: SearchResult) -> set[str]:
    return {name for name, column in result.space.columns.items() if len(np.unique(column)) > 1}


def _other_data_paths(result: SearchResult, judge: Judge, best: tuple[int, int]) -> Iterator[Rejected]:
    """The fastest of those that are prepared offline, or of those that are not: whichever the best is not."""
    others = [j for j, path in enumerate(result.data) if path.precomputed != result.data[best[1]].precomputed]
    if others:
        index = (best[0], min(others, key=lambda j: result.job_s[best[0], j]))
        why, lost_s = _against(result, judge, best, index)
        title = data_in_words(result.choice(index))
        yield Rejected(title=title if result.data[index[1]].precomputed else f"only {title}", why=why, lost_s=lost_s)
