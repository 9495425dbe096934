"""Find published measurements similar to a training, by operators, GPU and execution.

A distance is a sum of weighted differences. A distance of 0 means the same operators on the same
card with the same execution. Runs closer than `NEAR` are evidence for the requested step. Names of
models are not compared.

Shapes: arrays have one value per comparable run. Signatures have shape (runs, numbers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import NUMBER_FORMATS, PRECISIONS, Execution, Precision
from trainpace.core.hardware import Device
from trainpace.core.records import Record
from trainpace.forecast.published import CardFigures, PublicJournal, PublicRun, public_journal
from trainpace.workload import ATTENTION_KINDS, CONV, CONVOLUTION_KINDS, GROUPED, Floats, Workload

NEAR = 1.0
"""Distance from which a run is no longer near.

An example is a run on a GPU of another generation with 2.5 times the peak, in another precision.
"""
MOST = 3
# Weights are chosen by hand, not fitted. A difference is a share, a log ratio, or 0 or 1.
WEIGHTS = {
    "mix": 2.0,  # share of the FLOPs in other classes of operators
    "traffic_mix": 0.5,  # share of the bytes in other classes
    "work": 0.4,  # FLOPs per sample or token
    "traffic": 0.4,  # bytes per sample or token
    "parameters": 0.2,
    "other_samples": 0.4,  # sequences instead of images, or the other way round
    "other_card": 0.15,
    "other_architecture": 0.25,
    "speed": 0.5,  # the mean of the logarithms of peak rate and memory bandwidth
    "batch": 0.2,  # in tokens if samples are sequences
    "length": 0.1,
    "gpus": 0.25,
    "nodes": 0.15,
    "forward_only": 1.5,
    "no_optimizer": 0.1,
    "compiled": 0.2,
    "nhwc": 0.05,
    "keras": 0.2,
    "recomputed": 0.2,
    "precision": 1.0,
    "doubt": 1.0,
}
NUMBER_BYTES = {"fp32": 4.0, "amp": 2.5, "half": 2.0}
"""Bytes per element in each trace form.

Precision has its own weight, so memory traffic is compared in elements.
"""
OTHER_FORMAT, OTHER_STORAGE, OTHER_UNITS = 0.05, 0.15, 0.7
"""Distances between precisions.

OTHER_FORMAT: bf16 to fp16. OTHER_STORAGE: autocast to pure 16-bit. OTHER_UNITS: different matrix
units (16 bits, TF32, fp32, FP8).
"""
DOUBT = {"A": 0.0, "B": 0.01, "C": 0.03}
"""Extra distance by trust level. Among equally near runs, the best documented comes first."""
SAME = 0.02
"""Difference of operator mix or log size below which operators count as the same."""
LIKE = 0.12
SIMILAR_SIZE = 0.1


class Near(Record):
    """Measured run, its distance from the request, and their common and different properties."""

    run: PublicRun
    distance: float
    alike: tuple[str, ...]
    unlike: tuple[str, ...]

    @property
    def is_near(self) -> bool:
        return self.distance < NEAR


class Nearness(Record):
    """Measured runs within `NEAR`, nearest first. `closest` may be farther away.

    `model`, `device` and `batch` describe the request.
    """

    model: str
    device: str
    batch: int
    runs: tuple[Near, ...]
    closest: Near | None


def nearest(
    workload: Workload,
    execution: Execution,
    device: Device,
    most: int = MOST,
    journal: PublicJournal | None = None,
) -> Nearness:
    """Return the measured runs nearest to a workload under an execution on a device.

    `journal` defaults to the packaged runs.
    """
    journal = public_journal() if journal is None else journal
    columns = _packaged() if journal is public_journal() else _Columns(journal)
    found: tuple[Near, ...] = ()
    try:
        asked = np.array([signature_of(workload, execution.precision)])
    except TrainpaceError:  # not traced for this precision, so there is no forecast either
        asked = None
    if asked is not None and columns.runs:
        found = _Differences(columns, asked, workload, execution, device).nearest(most)
    return Nearness(
        model=workload.model,
        device=device.name,
        batch=execution.micro_batch,
        runs=tuple(near for near in found if near.is_near),
        closest=found[0] if found else None,
    )


class _Columns:
    """Comparable runs of a journal as arrays, one element per run."""

    def __init__(self, journal: PublicJournal) -> None:
        pairs = [
            (run, place)
            for run, place in zip(journal.runs, journal.signature_of_run, strict=True)
            if place >= 0 and run.precision in PRECISIONS
        ]
        self.runs, self.cards = [run for run, _ in pairs], journal.cards
        self.places = [place for _, place in pairs]
        signatures = np.array(journal.signatures).reshape(len(journal.signatures), -1)
        self.signatures: Floats = signatures[np.array(self.places, int)]
        cards = {name: i for i, name in enumerate(journal.cards)}
        widths: dict[str, float] = {
            name: NUMBER_BYTES[one.form] for name, one in NUMBER_FORMATS.items()
        }

        def column(value: Callable[[PublicRun], Any], kind: type) -> np.ndarray:
            return np.array([value(run) for run in self.runs], kind)

        self.batch = column(lambda run: max(1, run.micro_batch), float)
        self.gpus = column(lambda run: run.gpus, float)
        self.nodes = column(lambda run: run.nodes, float)
        self.precision = column(lambda run: PRECISIONS.index(run.precision), int)
        self.forward_only = column(lambda run: run.mode == "inference", bool)
        self.no_optimizer = column(lambda run: run.mode == "forward_backward", bool)
        self.compiled = column(lambda run: run.compile in ("compile", "xla"), bool)
        self.nhwc = column(lambda run: run.memory_format == "nhwc", bool)
        self.keras = column(lambda run: run.collection == "profet_aws", bool)
        self.recomputed = column(lambda run: "ac=full" in (run.parallelism or ""), bool)
        self.card = column(lambda run: cards[run.device], int)
        self.doubt = column(lambda run: DOUBT[run.trust], float)
        self.name_length = column(lambda run: len(run.model), int)
        self.number_bytes = column(lambda run: widths[run.precision], float)


@cache
def _packaged() -> _Columns:
    return _Columns(public_journal())


class _Differences:
    """Differences between each comparable run and the request, keyed by the names in WEIGHTS."""

    def __init__(
        self, c: _Columns, asked: Floats, workload: Workload, e: Execution, device: Device
    ) -> None:
        self.c, self.execution, self.asked_length = c, e, workload.sequence_length
        batch, tail = float(e.micro_batch), 2 * CLASSES
        flops, moved = amounts(c.signatures, np.full(len(c.runs), batch))
        own_flops, own_moved = amounts(asked, batch)
        lengths, own_length = c.signatures[:, tail + 2], asked[:, tail + 2]
        both = (lengths > 0) & (own_length > 0)
        length = np.where(both, _log(lengths) - _log(own_length), 0.0)
        # FLOPs and bytes of a pass are compared per sample, or per token.
        passes = np.where(c.forward_only, 1.0, 3.0)
        own_passes = 1.0 if workload.mode == "inference" else 3.0
        width = NUMBER_BYTES[NUMBER_FORMATS[e.precision].form]
        work, traffic = (
            _log(one.sum(axis=1) / passes) - _log(own.sum(axis=1) / own_passes) - length
            for one, own in (
                (flops, own_flops),
                (moved / c.number_bytes[:, None], own_moved / width),
            )
        )
        recomputes = e.activation_checkpointing != "none" or workload.checkpointed
        self.by: dict[str, Floats] = {
            "mix": 0.5 * np.abs(_shares(flops) - _shares(own_flops)).sum(axis=1),
            "traffic_mix": 0.5 * np.abs(_shares(moved) - _shares(own_moved)).sum(axis=1),
            "work": work,
            "traffic": traffic,
            "parameters": _log(c.signatures[:, tail + 1]) - _log(asked[:, tail + 1]),
            "other_samples": (lengths > 0) != (own_length > 0),
            "batch": np.log(c.batch / batch) + length,
            "length": length,
            "gpus": np.log(c.gpus / e.world_size),
            "nodes": np.log(c.nodes / e.nnodes),
            "forward_only": c.forward_only != (workload.mode == "inference"),
            "no_optimizer": c.no_optimizer != (workload.mode == "forward_backward"),
            "compiled": c.compiled != e.compile,
            "nhwc": (c.nhwc != e.channels_last) & (flops[:, :2].sum(axis=1) > 0),
            "keras": c.keras,
            "recomputed": c.recomputed != recomputes,
            "precision": _precision_distances(e.precision)[c.precision],
            "doubt": c.doubt,
            **_card_differences(c, device, e.precision),
        }

    def nearest(self, most: int) -> tuple[Near, ...]:
        c = self.c
        total = np.sum([WEIGHTS[name] * np.abs(value) for name, value in self.by.items()], axis=0)
        # Among equally near runs, prefer the shortest model name. gluon_resnet18_v1b, for example,
        # is also a ResNet-18.
        order = np.lexsort((c.name_length, np.round(total, 6)))
        chosen: dict[tuple[object, ...], Near] = {}
        for i in order[: 40 * most].tolist():
            run = c.runs[i]
            kind = (c.places[i], run.device, run.gpus, run.micro_batch, run.precision)
            if kind not in chosen:
                alike, unlike = self._model_words(i, run), self._execution_words(i, run)
                chosen[kind] = Near(
                    run=run,
                    distance=round(float(total[i]), 3),
                    alike=tuple(alike[0]),
                    unlike=(*alike[1], *unlike),
                )
            if len(chosen) == most:
                break
        return tuple(chosen.values())

    def _model_words(self, i: int, run: PublicRun) -> tuple[list[str], list[str]]:
        """Return (common, different) properties of the model and the card."""
        alike, unlike = [], []
        at = {name: float(value[i]) for name, value in self.by.items()}
        if at["mix"] < SAME and abs(at["work"]) < SAME and abs(at["parameters"]) < SAME:
            alike.append("the same operators")
        elif at["mix"] < LIKE:
            alike.append("operators of the same kinds")
        else:
            unlike.append(f"{100 * at['mix']:.0f}% of the FLOPs in other kinds of operators")
        per = "token" if run.sequence_length and self.asked_length else "sample"
        sizes = {
            f"FLOPs per {per}": at["work"],
            f"bytes per {per}": at["traffic"],
            "parameters": at["parameters"],
        }
        largest = max(sizes, key=lambda name: abs(sizes[name]))
        if abs(sizes[largest]) > SIMILAR_SIZE:
            unlike.append(f"{_times(sizes[largest])} the {largest}")
        if at["other_card"]:
            architecture = self.c.cards[run.device].architecture
            kind = f"another {architecture} card"
            if at["other_architecture"]:
                kind = f"a card of {architecture}"
            faster = f" (about {_times(at['speed'])} as fast)"
            unlike.append(kind + faster * (abs(at["speed"]) >= SIMILAR_SIZE))
        else:
            alike.append("the same card")
        return alike, unlike

    def _execution_words(self, i: int, run: PublicRun) -> list[str]:
        """Return the execution properties that differ."""
        e, c, by, length = self.execution, self.c, self.by, self.asked_length
        forward = "a forward pass alone" if c.forward_only[i] else "training, not a forward pass"
        optimizer = f"{'without' if c.no_optimizer[i] else 'with'} the optimizer"
        samples = ("images", "sequences") if length else ("sequences", "images")
        gpus = f"{run.gpus:,} GPU{'s' * (run.gpus > 1)} instead of {e.world_size:,}"
        words = (
            (by["other_samples"], f"{samples[0]} instead of {samples[1]}"),
            (by["forward_only"], forward),
            (by["no_optimizer"] & ~np.asarray(by["forward_only"], bool), optimizer),
            (
                c.precision != PRECISIONS.index(e.precision),
                f"{run.precision} instead of {e.precision}",
            ),
            (c.batch != e.micro_batch, f"batch {run.micro_batch:,} instead of {e.micro_batch:,}"),
            (
                np.abs(by["length"]) > SAME,
                f"{run.sequence_length or 0:,} tokens per sample instead of {length or 0:,}",
            ),
            (c.gpus != e.world_size, gpus),
            (by["compiled"], "compiled" if c.compiled[i] else "not compiled"),
            (by["nhwc"], "NHWC" if c.nhwc[i] else "NCHW"),
            (by["keras"], "Keras"),
            (by["recomputed"], f"{'' if c.recomputed[i] else 'no '}activations recomputed"),
        )
        return [text for rows, text in words if rows[i]]


def _card_differences(c: _Columns, device: Device, precision: Precision) -> dict[str, Floats]:
    """Return the log speed ratio of each run's GPU, and flags for another GPU or architecture."""
    own = figures_of(device)
    wide = NUMBER_FORMATS[precision].products == "fp32"
    speed = []
    for card in c.cards.values():
        peaks = (card.fp32_tflops, own.fp32_tflops)
        if not wide:
            peaks = (card.half_tflops, own.half_tflops)
        ratios = [peaks, (card.gb_per_s, own.gb_per_s)]
        logs = [math.log(a / b) for a, b in ratios if a > 0 and b > 0]
        speed.append(sum(logs) / len(logs) if logs else 0.0)
    other = [name != device.name for name in c.cards]
    architecture = [card.architecture != own.architecture for card in c.cards.values()]
    return {
        "speed": np.array(speed)[c.card],
        "other_card": np.array(other)[c.card],
        "other_architecture": np.array(architecture)[c.card],
    }


def figures_of(device: Device) -> CardFigures:
    """Return the GPU figures used in distances. Unpublished figures are 0."""

    def largest(*names: str) -> float:
        figures = (getattr(device, name) for name in names)
        return max((figure.value for figure in figures if figure is not None), default=0.0)

    fp32 = largest("fp32_tflops")
    half = largest("fp16_tensor_tflops", "bf16_tensor_tflops", "fp16_tflops")
    return CardFigures(
        device.architecture, fp32, half or fp32, largest("memory_bandwidth_gb_per_s")
    )


def _precision_distances(asked: Precision) -> Floats:
    """Return the distance from the asked precision to each of PRECISIONS."""
    own = NUMBER_FORMATS[asked]
    distances = []
    for name in PRECISIONS:
        other = NUMBER_FORMATS[name]
        if _unit(other.products) != _unit(own.products):
            distances.append(OTHER_UNITS)
            continue
        distance = OTHER_FORMAT * (other.products != own.products)
        distance += OTHER_STORAGE * (other.form != own.form)
        distances.append(distance + OTHER_STORAGE * (other.convolutions != own.convolutions))
    return np.array(distances)


def _unit(products: str) -> str:
    return "16 bits" if products in ("fp16", "bf16") else products


def _shares(amount: Floats) -> Floats:
    whole = amount.sum(axis=1, keepdims=True)
    shares: Floats = np.divide(amount, whole, out=np.zeros_like(amount), where=whole > 0)
    return shares


def _log(value: Floats) -> Floats:
    return np.log(np.maximum(value, 1.0))


def _times(log_ratio: float) -> str:
    """Return a factor in words: twice, half, 2.6 times, 0.3 times."""
    factor = math.exp(log_ratio)
    known = {"2": "twice", "0.5": "half"}
    shown = f"{factor:.2g}" if factor < 100 else f"{factor:,.0f}"
    return known.get(shown, f"{shown} times")


# ---- signatures of workloads

FLOP_CLASSES = ("convolutions", "grouped convolutions", "matmuls", "matmuls of experts")
BYTE_CLASSES = (
    "matrix operators",
    "norms",
    "elementwise operators",
    "pooling",
    "embeddings",
    "the optimizer",
)
_BYTES_OF = {
    "norm": 1,
    "elementwise": 2,
    "copy": 2,
    "fill": 2,
    "softmax": 2,
    "reduction": 2,
    "view": 2,
    "module": 2,
    "pool": 3,
    "embedding": 4,
    "optimizer": 5,
}
"""Index in BYTE_CLASSES by operator kind. All other kinds are matrix operators."""
CLASSES = len(FLOP_CLASSES) + len(BYTE_CLASSES)
DIGITS = 6


def signature_of(workload: Workload, precision: Precision) -> tuple[float, ...]:
    """Summarize the operators of a workload in a few numbers.

    Returns:
        Two coefficients (constant, per sample) for the FLOPs of each of `FLOP_CLASSES` and the
        bytes of each of `BYTE_CLASSES`. The trained parameters, all parameters and the tokens of a
        sample (0 without tokens) follow.

    Raises:
        TrainpaceError: If the workload was not traced for the precision.
    """
    table = workload.form(precision).operators
    kind, function = np.array(table.kind), np.array(table.function)
    convolution = np.isin(kind, CONVOLUTION_KINDS)
    grouped = convolution & (table.dims[:, CONV.groups, 0] > 1)
    product = np.isin(kind, ("gemm", *ATTENTION_KINDS))
    experts = product & (function == GROUPED)
    of_flops = (convolution & ~grouped, grouped, product & ~experts, experts)
    of_bytes = np.array([_BYTES_OF.get(name, 0) for name in table.kind])
    counts = table.count[:, None]
    flops, moved = table.flops * counts, (table.read_bytes + table.written_bytes) * counts
    rows = [flops[chosen].sum(axis=0) for chosen in of_flops]
    rows += [moved[of_bytes == place].sum(axis=0) for place in range(len(BYTE_CLASSES))]
    tail = (workload.trainable_parameters, workload.parameters, workload.sequence_length or 0)
    return tuple(float(f"{value:.{DIGITS}g}") for value in (*np.concatenate(rows).tolist(), *tail))


def amounts(signatures: Floats, batch: Floats | float) -> tuple[Floats, Floats]:
    """Return (FLOPs by class, bytes by class) of one micro-batch of each signature."""
    pairs = signatures[:, : 2 * CLASSES].reshape(-1, CLASSES, 2)
    at = np.maximum(pairs[..., 0] + pairs[..., 1] * np.reshape(batch, (-1, 1)), 0.0)
    return at[:, : len(FLOP_CLASSES)], at[:, len(FLOP_CLASSES) :]


def model_kind(workload: Workload) -> str:
    """Return "convolutions", "transformers", "experts" or "other", by the largest FLOP class."""
    form = next(iter(workload.forms.values()))
    table = form.operators
    [flops], _ = amounts(np.array([signature_of_form(workload)]), 8.0)
    if flops.sum() <= 0:
        return "other"
    if flops[3] > 0.1 * flops.sum():
        return "experts"
    attends = (
        any(kind in ATTENTION_KINDS for kind in table.kind)
        or _softmaxes(table.function, table.count) > 1
    )
    if flops[:2].sum() > 0.5 * flops.sum():
        return "convolutions"
    return "transformers" if attends else "other"


def signature_of_form(workload: Workload) -> tuple[float, ...]:
    """Return the signature of the first form that a workload was traced in."""
    precisions: dict[str, Precision] = {"fp32": "fp32", "amp": "amp_bf16", "half": "bf16"}
    return signature_of(workload, precisions[next(iter(workload.forms))])


def _softmaxes(functions: Sequence[str], counts: Floats) -> int:
    return sum(
        int(count)
        for name, count in zip(functions, counts.tolist(), strict=True)
        if name in ("_softmax", "_safe_softmax")
    )
