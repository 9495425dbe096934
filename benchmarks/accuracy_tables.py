"""Tables of held-out forecasts: by collection, by card and kind of model, by software and precision, and the worst."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainpace.core.hardware import Device
from trainpace.forecast import Case

GENERATIONS = (
    "Blackwell",
    "Hopper",
    "Ada",
    "Ampere",
    "Turing",
    "Volta",
    "Pascal",
    "Maxwell",
    "Kepler",
    "CDNA",
)
"""The newest first, as a reader looks for a card; others come after them by name."""
KINDS = (
    "images, training",
    "images, forward",
    "language, training",
    "language, forward",
    "images, Keras",
)
PRECISIONS = {
    "fp32": "32 bits",
    "tf32": "TF32",
    "amp_fp16": "16 bits, mixed",
    "amp_bf16": "16 bits, mixed",
    "fp16": "16 bits throughout",
    "bf16": "16 bits throughout",
    "fp8": "FP8",
}
SIZES = ("One GPU", "Several GPUs in one node", "Several nodes")
LEFT_OUT = {"device": "card out", "family": "family out"}

IN_ONE_NODE = "all, 2 to 16 GPUs in one node"
GOALS = {
    ("neusight_labels, NVIDIA, forward_backward", "device"): ("NeuSight 7.3, roofline 32", "5"),
    ("neusight_labels, NVIDIA, inference", "device"): ("NeuSight 9.7", "6"),
    ("timm_train_rtx3090", "family"): ("roofline 27", "7"),
    ("timm_train_rtx3090", "device"): ("-", "12"),
    ("lambda_aggregated, 1 GPU", "device"): ("Habitat 5 to 1760", "10"),
    ("profet_aws", "device"): ("-", "15"),
    ("ryujaehun_pytorch_gpu_benchmark, 1 GPU", "device"): ("-", "15"),
    (IN_ONE_NODE, "device"): ("-", "12"),
    (IN_ONE_NODE, "family"): ("-", "12"),
}


class Judged(NamedTuple):
    """A measured run, its forecast and the ends of its interval; nan where no other fold says how wide that is."""

    case: Case
    forecast_ms: float
    low_ms: float
    high_ms: float

    @property
    def measured_ms(self) -> float:
        assert self.case.measured_ms is not None
        return self.case.measured_ms


class Errors(NamedTuple):
    """Of forecasts, in per cent of the measured time. bias: the median with its sign. inside: how many of the measured times lie
    in their interval; half_width: the median of half of it, of the forecast. Both nan where no run has an interval."""

    n: int
    mean: float
    median: float
    p95: float
    bias: float
    inside: float
    half_width: float


def errors_of(rows: Sequence[Judged]) -> Errors:
    """What at least one row has in errors."""
    measured, forecast, low, high = np.array(
        [(row.measured_ms, row.forecast_ms, row.low_ms, row.high_ms) for row in rows]
    ).T
    error = 100 * (forecast / measured - 1)
    size = np.abs(error)
    known = ~np.isnan(low)
    inside = 100 * ((low <= measured) & (measured <= high))[known].mean() if known.any() else np.nan
    half_width = np.median(50 * ((high - low) / forecast)[known]) if known.any() else np.nan
    figures = (
        size.mean(),
        np.median(size),
        np.quantile(size, 0.95),
        np.median(error),
        inside,
        half_width,
    )
    return Errors(len(rows), *map(float, figures))


def kind_of(case: Case) -> str:
    """One of KINDS: what a user would say that they run."""
    if case.software.framework == "tensorflow":
        return "images, Keras"
    what = "language" if case.spec.startswith("transformers:") else "images"
    return f"{what}, {'forward' if case.variant.mode == 'inference' else 'training'}"


def size_of(case: Case) -> str:
    """One of SIZES."""
    if case.execution.nnodes > 1:
        return SIZES[2]
    return SIZES[case.execution.world_size > 1]


def software_of(case: Case) -> str:
    """What ran the step. Megatron's own kernels stand apart: they join what torch.compile would, whichever torch runs them."""
    if case.software.framework != "torch":
        return {"tensorflow": "TensorFlow, Keras", "jax": "JAX"}[case.software.framework]
    if case.execution.compile:
        megatron = "Megatron" in case.run.framework or "NeMo" in case.run.framework
        return "Megatron, NeMo" if megatron else "torch.compile"
    return "torch before 2.0" if case.software.is_before_fusion else "torch 2.0 and later"


def generation_rank(device: Device) -> tuple[int, str]:
    """A key that sorts cards by generation, the newest first."""
    known = device.architecture in GENERATIONS
    return (
        GENERATIONS.index(device.architecture) if known else len(GENERATIONS)
    ), device.architecture


def groups_of(case: Case) -> Iterable[str]:
    """The lines of the table that a run counts in."""
    run, e = case.run, case.execution
    if run.file == "neusight_labels":
        yield f"{run.file}, {'NVIDIA' if case.cluster.device.vendor == 'NVIDIA' else 'AMD'}, {run.mode}"
    elif run.file in ("lambda_aggregated", "ryujaehun_pytorch_gpu_benchmark"):
        yield f"{run.file}, {'1 GPU' if e.world_size == 1 else 'several GPUs'}"
    else:
        yield run.file
    if e.nnodes == 1 and 2 <= e.world_size <= 16:
        yield IN_ONE_NODE


def by_collection(judged: Mapping[str, Sequence[Judged]]) -> list[str]:
    """A line for each collection of runs and what was left out."""
    lines = [
        "| runs | left out | n | mean | median | 95th | bias | in 90 % interval | half width | peers, mean | to reach |"
    ]
    lines += ["|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for kind in LEFT_OUT:
        groups: dict[str, list[Judged]] = {}
        for row in judged[kind]:
            for name in groups_of(row.case):
                groups.setdefault(name, []).append(row)
        for name in sorted(groups):
            e = errors_of(groups[name])
            peers, goal = GOALS.get((name, kind), ("-", "-"))
            lines.append(
                f"| {name} | {kind} | {e.n} | {' | '.join(map(figure, e[1:]))} | {peers} | {goal} |"
            )
    return lines


def by_card(rows: Mapping[str, Sequence[Judged]], size: str) -> list[str]:
    """A table for one of SIZES; `rows` has those with the card out ("device") and with the family out ("family"). Empty where no
    row is of that size. The last lines are of all cards together."""
    chosen = {
        left_out: [row for row in rows[left_out] if size_of(row.case) == size]
        for left_out in LEFT_OUT
    }
    lines: dict[tuple[object, ...], tuple[str, dict[str, list[Judged]]]] = {}
    for left_out, judged in chosen.items():
        for row in judged:
            device, kind = row.case.cluster.device, kind_of(row.case)
            key = (*generation_rank(device), device.name, KINDS.index(kind))
            of_card = lines.setdefault(key, (f"{device.name} | {kind}", {}))
            of_all = lines.setdefault(
                (len(GENERATIONS) + 1, "", "", KINDS.index(kind)), (f"*all* | {kind}", {})
            )
            for _, found in (of_card, of_all):
                found.setdefault(left_out, []).append(row)
    return _side_by_side("card | model", [lines[key] for key in sorted(lines)])


def by_software(rows: Mapping[str, Sequence[Judged]]) -> list[str]:
    """A table by software, then by precision."""
    kinds: tuple[Callable[[Case], str], ...] = (
        software_of,
        lambda case: PRECISIONS[case.execution.precision],
    )
    lines = []
    for group_of in kinds:
        found: dict[str, dict[str, list[Judged]]] = {}
        for left_out in LEFT_OUT:
            for row in rows[left_out]:
                found.setdefault(group_of(row.case), {}).setdefault(left_out, []).append(row)
        lines += sorted(found.items())
    return _side_by_side("runs", lines)


def _side_by_side(
    first: str, lines: Sequence[tuple[str, Mapping[str, Sequence[Judged]]]]
) -> list[str]:
    """A Markdown table with the errors with the card out and with the family out beside each other."""
    if not lines:
        return []
    columns = ("n", "mean", "median", "bias", "inside")
    heads = [
        f"{words}: n" if column == "n" else column
        for words in LEFT_OUT.values()
        for column in columns
    ]
    table = [
        f"| {first} | {' | '.join(heads)} |",
        "|---" * (first.count("|") + 1) + "|" + "--:|" * len(heads),
    ]
    for name, found in lines:
        cells = [cell for left_out in LEFT_OUT for cell in _cells(found.get(left_out, ()))]
        table.append(f"| {name} | {' | '.join(cells)} |")
    return table


def _cells(rows: Sequence[Judged]) -> list[str]:
    if not rows:
        return [""] * 5
    e = errors_of(rows)
    return [str(e.n), f"{e.mean:.1f}", f"{e.median:.1f}", f"{e.bias:+.1f}", figure(e.inside, 0)]


def figure(value: float, digits: int = 1) -> str:
    """A number of a table, a dash for none."""
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def worst(rows: Sequence[Judged]) -> list[str]:
    """The ten worst runs of every collection."""
    lines = [
        "| collection | model | card | precision | batch | measured ms | forecast ms | error |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    for file in sorted({row.case.run.file for row in rows}):
        mine = [row for row in rows if row.case.run.file == file]
        mine.sort(key=lambda row: -abs(math.log(row.forecast_ms / row.measured_ms)))
        for row in mine[:10]:
            case = row.case
            e, gpu = case.execution, case.cluster.device.name
            gpu = gpu if e.world_size == 1 else f"{e.world_size} x {gpu}"
            model = case.run.model_spec.rpartition("/")[2]
            error = 100 * (row.forecast_ms / row.measured_ms - 1)
            lines.append(
                f"| {file} | {model} | {gpu} | {e.precision} | {e.micro_batch}"
                f" | {row.measured_ms:.0f} | {row.forecast_ms:.0f} | {error:+.0f} % |"
            )
    return lines
