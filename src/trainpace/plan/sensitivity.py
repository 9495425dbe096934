"""Which number, if it is wrong, changes the choice: every figure that the forecast rests on, moved within its interval."""

from collections.abc import Callable, Iterator

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.hardware import Cluster, Device
from trainpace.plan.changes import Choice, Sensitivity
from trainpace.plan.evaluate import Judge, Setting, evaluate
from trainpace.plan.knobs import differing
from trainpace.plan.search import SearchResult, search_result

CANDIDATES = 48
"""The fastest choices, and the fastest of every value of every knob, that are evaluated again."""
WORTH = 0.005
"""A choice that would lose less than this is as good."""
RATES = (
    "fp32_tflops",
    "fp16_tflops",
    "tf32_tensor_tflops",
    "fp16_tensor_tflops",
    "bf16_tensor_tflops",
    "fp8_tensor_tflops",
)

Perturbed = Callable[[Setting, float], Setting]


def sensitivity(setting: Setting, result: SearchResult, judge: Judge, best: tuple[int, int]) -> tuple[Sensitivity, ...]:
    """Every number with whether the choice changes within its interval, those that change it first."""
    rows = _candidates(result, best)
    space = result.space.rows(rows)
    chosen = result.choice(best)
    position = int(np.flatnonzero(rows == best[0])[0])
    entries = []
    for number, low, high, basis, perturbed in _numbers(setting, judge, chosen, result):
        worst = Sensitivity(number=number, low=low, high=high, basis=basis)
        for factor in (low, high):
            there, paths = perturbed(setting, factor), result.data
            if number == "loader":
                paths = tuple(replace(path, ms_per_sample=path.ms_per_sample * factor) for path in paths)
            worst = _flipped(
                worst, there, search_result(there, space, paths, evaluate(there, space)), (position, best[1])
            )
        entries.append(worst)
    return tuple(sorted(entries, key=lambda s: (s.still_fits, -s.regret)))


def _flipped(so_far: Sensitivity, setting: Setting, there: SearchResult, ours: tuple[int, int]) -> Sensitivity:
    index = there.best()
    if index is None:
        return so_far
    least, mine = there.job_s[index], there.job_s[ours]
    still_fits = bool(np.isfinite(mine))
    regret = float(mine / least - 1) if still_fits else 0.0
    if not so_far.still_fits or (still_fits and regret <= max(WORTH, so_far.regret)):
        return so_far
    other = there.choice(index)
    changed = ", ".join(knob.title(there.choice(ours), other) for knob in differing(there.choice(ours), other))
    return replace(so_far, flips_to=changed, regret=regret, still_fits=still_fits)


def _numbers(
    setting: Setting, judge: Judge, chosen: Choice, result: SearchResult
) -> Iterator[tuple[str, float, float, str, Perturbed]]:
    f = judge.forecast(chosen.execution)
    assert not isinstance(f, str)
    low, high = 0.8, 1.25
    basis = "a fifth either way"
    if f.step is not None and f.step_time_interval_ms is not None:
        interval = f.step_time_interval_ms
        low, high = f.step.total_ms / interval.high, f.step.total_ms / max(interval.low, 1e-9)
        basis = f"the step's 90 % interval ({interval.basis})"
    device, cluster = setting.cluster.device, setting.cluster
    yield "matrix rate", low, high, basis, lambda s, x: _with_device(s, _scaled(s.cluster.device, RATES, x))
    if device.memory_bandwidth_gb_per_s is not None:
        yield (
            "memory bandwidth", 0.9, 1.1, "kernels sustain 74 to 90 % of a datasheet's",
            lambda s, x: _with_device(s, _scaled(s.cluster.device, ("memory_bandwidth_gb_per_s",), x)),
        )  # fmt: skip
    if cluster.devices_per_node > 1:
        yield (
            "links between GPUs", 0.7, 1.3, "what collectives sustain of a datasheet's bandwidth",
            lambda s, x: _with_device(s, _scaled(s.cluster.device, ("link_gb_per_s", "pcie_lanes"), x)),
        )  # fmt: skip
    if cluster.nodes > 1 and cluster.network_gb_per_s_per_device is not None:
        yield "network", 0.5, 1.2, "shared switches seldom give what their ports say", _with_network
    if device.memory_gib is not None:
        yield (
            "memory needed", 0.9, 1.1, "a tenth either way; the forecast of memory has no interval yet",
            lambda s, x: _with_device(s, _scaled(s.cluster.device, ("memory_gib",), 1 / x)),
        )  # fmt: skip
    yield "host", 0.5, 2.0, "hosts differ by a factor of two in launching", lambda s, x: s.with_host_factor(
        s.host_factor * x)  # fmt: skip
    if any(path.ms_per_sample for path in result.data):
        yield "loader", 0.8, 1.25, "a sample's time, as it was measured", lambda s, x: s


def _with_network(setting: Setting, factor: float) -> Setting:
    per_device = setting.cluster.network_gb_per_s_per_device
    assert per_device is not None
    return setting._replace(cluster=replace(setting.cluster, network_gb_per_s_per_device=per_device * factor))


def _with_device(setting: Setting, device: Device) -> Setting:
    cluster: Cluster = replace(setting.cluster, device=device)
    return setting._replace(cluster=cluster)


def _scaled(device: Device, figures: tuple[str, ...], factor: float) -> Device:
    known = {name: figure for name in figures if (figure := getattr(device, name)) is not None}
    return replace(device, **{name: replace(figure, value=figure.value * factor) for name, figure in known.items()})


def _candidates(result: SearchResult, best: tuple[int, int]) -> NDArray[np.int64]:
    """Rows worth evaluating again: the fastest, the fastest of every value, and those that a little more memory would allow."""
    step, least = result.evaluation.step_ms, result.job_s.min(axis=1)
    order = np.argsort(least, kind="stable")
    rows = {best[0], *order[:CANDIDATES].tolist()}
    nearly = np.where(
        np.isfinite(step) & (result.evaluation.needed_gib <= 1.12 * result.room_gib), step, np.inf
    )  # fmt: skip
    rows |= set(np.argsort(nearly, kind="stable")[:CANDIDATES].tolist())
    for column in result.space.columns.values():
        values = np.unique(column)
        if len(values) > 32:
            continue
        for value in values:
            times = np.where(column == value, least, np.inf)
            rows.add(int(np.argmin(times)))
    return np.array(sorted(rows), dtype=np.int64)
