"""Published measurements that ship with the package, and which of them resemble a training.

fitting/public_journal.py writes `public_runs.json.gz`. SOURCES.md in this folder lists all sources
and their licenses.

`nearest` finds similar runs by operators, GPU and execution. A distance is a sum of weighted
differences. A distance of 0 means the same operators on the same card with the same execution. Runs
closer than `NEAR` are evidence for the requested step. Names of models are not compared.

Shapes: arrays have one value per comparable run. Signatures have shape (runs, numbers).
"""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import NUMBER_FORMATS, PRECISIONS, Execution, Precision
from trainpace.core.hardware import Device
from trainpace.core.intake import read_bytes
from trainpace.core.records import Record
from trainpace.workload import ATTENTION_KINDS, CONV, CONVOLUTION_KINDS, GROUPED, Floats, Workload

FOLDER = Path(__file__).parent
RUNS_FILE, TRACES_FILE = FOLDER / "public_runs.json.gz", FOLDER / "traces.json.xz"


class PublicRun(Record):
    """One published step time, with its source and its forecast by this version.

    Attributes:
        id: Stable id, from the source, the place in the source and the conditions.
        model: Name of the model in the source.
        model_kind: "convolutions", "transformers", "experts" or "other".
        device: Name of the GPU in the catalog.
        gpus: Number of GPUs on all nodes.
        micro_batch: Micro-batch, or 0 if the source gives none.
        date: Date of the measurement or publication, if known.
        trust: Trust level A, B or C, explained in docs/evidence.md.
        forecast_ms: Forecast under the same conditions. low_ms and high_ms are its 90% interval.
        in_fit: True if constants or intervals were fitted on the run. Its error then proves little.
        why_no_forecast: Reason why there is no forecast, or "".
        collection: Name of the collection in docs/evidence.md.
        assumed: Assumptions of the forecast.
    """

    id: str
    model: str
    model_kind: str
    device: str
    gpus: int
    nodes: int
    mode: str
    micro_batch: int
    accumulation: int
    sequence_length: int | None
    image_size: int | None
    precision: str
    compile: str
    optimizer: str | None
    parallelism: str | None
    software: str
    step_time_ms: float
    peak_memory_gib: float | None
    source: str
    url: str
    licence: str
    date: str | None
    trust: str
    notes: str
    forecast_ms: float | None
    low_ms: float | None
    high_ms: float | None
    in_fit: bool
    why_no_forecast: str
    global_batch: int = 0
    memory_format: str = ""
    collection: str = ""
    assumed: str = ""

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second on all GPUs, or None if the source gives no batch."""
        return 1e3 * self.global_batch / self.step_time_ms if self.global_batch else None

    @property
    def error_pct(self) -> float | None:
        """(forecast - measured) / measured in percent."""
        return (
            None if self.forecast_ms is None else 100 * (self.forecast_ms / self.step_time_ms - 1)
        )


class CardFigures(NamedTuple):
    """Figures of a card that determine its distance from other cards."""

    architecture: str
    fp32_tflops: float
    half_tflops: float
    gb_per_s: float


class PublicJournal(Record):
    """All published runs, with data to find similar ones.

    Attributes:
        fingerprint: Fingerprint of the constants with which the runs were forecast.
        runs: The runs.
        signatures: Signatures of the traced workloads (see `signature_of`).
        signature_of_run: Index in `signatures` of each run's workload, or -1.
        cards: Figures of the cards by name.
    """

    fingerprint: str
    runs: tuple[PublicRun, ...]
    signatures: tuple[tuple[float, ...], ...]
    signature_of_run: tuple[int, ...]
    cards: dict[str, CardFigures]

    def __hash__(self) -> int:
        return id(self)


@cache
def public_journal() -> PublicJournal:
    """Read all published runs. This takes about 30 ms the first time."""
    return msgspec.json.decode(gzip.decompress(read_bytes(RUNS_FILE)), type=PublicJournal)


def public_runs() -> tuple[PublicRun, ...]:
    """Return all published runs, sorted by collection, model, card and batch."""
    return public_journal().runs


def fingerprint_of_constants() -> str:
    """Return a hash of the installed constants, intervals and kernel models, as 12 hex digits."""
    digest = hashlib.sha256()
    for file in sorted(FOLDER.rglob("*.json")):
        digest.update(file.relative_to(FOLDER).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


# ---- runs near to a training

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
PRECISION_BYTES: dict[str, float] = {
    name: NUMBER_BYTES[one.form] for name, one in NUMBER_FORMATS.items()
}
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
    runs = _comparable(journal or public_journal())
    found: list[Near] = []
    try:
        asked = np.array([signature_of(workload, execution.precision)])
    except TrainpaceError:  # not traced for this precision, so there is no forecast either
        asked = None
    if asked is not None and runs.runs:
        found = _nearest(runs, asked, workload, execution, device, most)
    return Nearness(
        model=workload.model,
        device=device.name,
        batch=execution.micro_batch,
        runs=tuple(near for near in found if near.is_near),
        closest=found[0] if found else None,
    )


class _Comparable(NamedTuple):
    """Runs with a signature, and their properties as arrays by name."""

    runs: list[PublicRun]
    signatures: Floats
    places: list[int]
    cards: dict[str, CardFigures]
    columns: dict[str, np.ndarray]


@lru_cache(1)
def _comparable(journal: PublicJournal) -> _Comparable:
    pairs = [
        (run, place)
        for run, place in zip(journal.runs, journal.signature_of_run, strict=True)
        if place >= 0 and run.precision in PRECISIONS
    ]
    runs, places = [run for run, _ in pairs], [place for _, place in pairs]
    rows = [_properties(run) for run in runs]
    columns = {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    columns["card"] = np.array([list(journal.cards).index(run.device) for run in runs])
    signatures = np.array(journal.signatures)[places] if places else np.empty((0, 0))
    return _Comparable(runs, signatures, places, journal.cards, columns)


def _properties(run: PublicRun) -> dict[str, Any]:
    return {
        "batch": max(1.0, run.micro_batch),
        "gpus": run.gpus,
        "nodes": run.nodes,
        "precision": PRECISIONS.index(run.precision),
        "forward_only": run.mode == "inference",
        "no_optimizer": run.mode == "forward_backward",
        "compiled": run.compile in ("compile", "xla"),
        "nhwc": run.memory_format == "nhwc",
        "keras": run.collection == "profet_aws",
        "recomputed": "ac=full" in (run.parallelism or ""),
        "doubt": DOUBT[run.trust],
        "name_length": len(run.model),
        "number_bytes": PRECISION_BYTES[run.precision],
    }


def _differences(
    known: _Comparable, asked: Floats, workload: Workload, e: Execution, device: Device
) -> dict[str, Floats]:
    """Return the differences between each run and the request, by the names in WEIGHTS."""
    c, signatures, tail = known.columns, known.signatures, 2 * CLASSES
    infers, batch = workload.mode == "inference", float(e.micro_batch)
    flops, moved = amounts(signatures, c["batch"] * 0 + batch)
    own_flops, own_moved = amounts(asked, batch)
    lengths, own_length = signatures[:, tail + 2], asked[:, tail + 2]
    both = (lengths > 0) & (own_length > 0)
    length = np.where(both, _log(lengths) - _log(own_length), 0.0)
    # FLOPs and bytes of a pass are compared per sample, or per token.
    passes, own_passes = np.where(c["forward_only"], 1.0, 3.0), 1.0 if infers else 3.0
    width = PRECISION_BYTES[e.precision]
    work, traffic = (
        _log(one.sum(axis=1) / passes) - _log(own.sum(axis=1) / own_passes) - length
        for one, own in (
            (flops, own_flops),
            (moved / c["number_bytes"][:, None], own_moved / width),
        )
    )
    recomputes = e.activation_checkpointing != "none" or workload.checkpointed
    return {
        "mix": 0.5 * np.abs(_shares(flops) - _shares(own_flops)).sum(axis=1),
        "traffic_mix": 0.5 * np.abs(_shares(moved) - _shares(own_moved)).sum(axis=1),
        "work": work,
        "traffic": traffic,
        "parameters": _log(signatures[:, tail + 1]) - _log(asked[:, tail + 1]),
        "other_samples": (lengths > 0) != (own_length > 0),
        "batch": np.log(c["batch"] / batch) + length,
        "length": length,
        "gpus": np.log(c["gpus"] / e.world_size),
        "nodes": np.log(c["nodes"] / e.nnodes),
        "forward_only": c["forward_only"] != infers,
        "no_optimizer": c["no_optimizer"] != (workload.mode == "forward_backward"),
        "compiled": c["compiled"] != e.compile,
        "nhwc": (c["nhwc"] != e.channels_last) & (flops[:, :2].sum(axis=1) > 0),
        "keras": c["keras"],
        "recomputed": c["recomputed"] != recomputes,
        "precision": _precision_distances(e.precision)[c["precision"]],
        "doubt": c["doubt"],
        **_card_differences(known, device, e.precision),
    }


def _nearest(
    known: _Comparable,
    asked: Floats,
    workload: Workload,
    execution: Execution,
    device: Device,
    most: int,
) -> list[Near]:
    by = _differences(known, asked, workload, execution, device)
    total = np.sum([WEIGHTS[name] * np.abs(value) for name, value in by.items()], axis=0)
    # Among equally near runs, prefer the shortest model name. gluon_resnet18_v1b, for example, is
    # also a ResNet-18.
    order = np.lexsort((known.columns["name_length"], np.round(total, 6)))
    chosen: dict[tuple[object, ...], Near] = {}
    for i in order[: 40 * most].tolist():
        run = known.runs[i]
        kind = (known.places[i], run.device, run.gpus, run.micro_batch, run.precision)
        if kind not in chosen:
            at = {name: float(value[i]) for name, value in by.items()}
            card = known.cards[run.device]
            alike, unlike = _model_words(at, run, card, workload.sequence_length)
            others = _execution_words(at, run, execution, workload.sequence_length)
            chosen[kind] = Near(
                run=run,
                distance=round(float(total[i]), 3),
                alike=tuple(alike),
                unlike=(*unlike, *others),
            )
        if len(chosen) == most:
            break
    return list(chosen.values())


def _model_words(
    at: dict[str, float], run: PublicRun, card: CardFigures, length: int | None
) -> tuple[list[str], list[str]]:
    """Return (common, different) properties of the model and the card.

    Args:
        at: Differences of the run, by the names in WEIGHTS.
        run: The run.
        card: Figures of its card.
        length: Tokens per sample of the request.
    """
    alike, unlike = [], []
    if max(at["mix"], abs(at["work"]), abs(at["parameters"])) < SAME:
        alike.append("the same operators")
    elif at["mix"] < LIKE:
        alike.append("operators of the same kinds")
    else:
        unlike.append(f"{100 * at['mix']:.0f}% of the FLOPs in other kinds of operators")
    per = "token" if run.sequence_length and length else "sample"
    named = {"work": f"FLOPs per {per}", "traffic": f"bytes per {per}", "parameters": "parameters"}
    largest = max(named, key=lambda name: abs(at[name]))
    if abs(at[largest]) > SIMILAR_SIZE:
        unlike.append(f"{_times(at[largest])} the {named[largest]}")
    if not at["other_card"]:
        return [*alike, "the same card"], unlike
    words = f"another {card.architecture} card"
    if at["other_architecture"]:
        words = f"a card of {card.architecture}"
    if abs(at["speed"]) >= SIMILAR_SIZE:
        words += f" (about {_times(at['speed'])} as fast)"
    return alike, [*unlike, words]


def _execution_words(
    at: dict[str, float], run: PublicRun, e: Execution, length: int | None
) -> Iterator[str]:
    """Yield the execution properties that differ. Arguments are those of `_model_words`."""
    has = _properties(run)
    words = {
        "other_samples": "images instead of sequences" if length else "sequences instead of images",
        "forward_only": ("training, not a forward pass", "a forward pass alone"),
        "no_optimizer": ("with the optimizer", "without the optimizer"),
        "precision": f"{run.precision} instead of {e.precision}",
        "batch": f"batch {run.micro_batch:,} instead of {e.micro_batch:,}",
        "length": f"{run.sequence_length or 0:,} tokens per sample instead of {length or 0:,}",
        "gpus": f"{run.gpus:,} GPU{'s' * (run.gpus > 1)} instead of {e.world_size:,}",
        "compiled": ("not compiled", "compiled"),
        "nhwc": ("NCHW", "NHWC"),
        "keras": "Keras",
        "recomputed": ("no activations recomputed", "activations recomputed"),
    }
    differs = at | {
        "no_optimizer": at["no_optimizer"] and not at["forward_only"],
        "precision": run.precision != e.precision,
        "batch": max(1, run.micro_batch) != e.micro_batch,
        "length": abs(at["length"]) > SAME,
        "gpus": run.gpus != e.world_size,
    }
    for name, text in words.items():
        if differs[name]:
            yield text if isinstance(text, str) else text[has[name]]


def _card_differences(
    known: _Comparable, device: Device, precision: Precision
) -> dict[str, Floats]:
    """Return the log speed ratio of each run's GPU, and flags for another GPU or architecture."""
    own = figures_of(device)
    peak = "fp32_tflops" if NUMBER_FORMATS[precision].products == "fp32" else "half_tflops"
    rows = []
    for name, card in known.cards.items():
        ratios = [(getattr(card, figure), getattr(own, figure)) for figure in (peak, "gb_per_s")]
        logs = [math.log(a / b) for a, b in ratios if a > 0 and b > 0]
        speed = sum(logs) / len(logs) if logs else 0.0
        rows.append((speed, name != device.name, card.architecture != own.architecture))
    speeds, others, architectures = np.array(rows).T[:, known.columns["card"]]
    return {"speed": speeds, "other_card": others, "other_architecture": architectures}


def figures_of(device: Device) -> CardFigures:
    """Return the GPU figures used in distances. Unpublished figures are 0."""
    names = (
        "fp32_tflops",
        "memory_bandwidth_gb_per_s",
        "fp16_tensor_tflops",
        "bf16_tensor_tflops",
        "fp16_tflops",
    )
    figures = (getattr(device, name) for name in names)
    fp32, gb_per_s, *half = (0.0 if figure is None else figure.value for figure in figures)
    return CardFigures(device.architecture, fp32, max(half) or fp32, gb_per_s)


def _precision_distances(asked: Precision) -> Floats:
    """Return the distance from the asked precision to each of PRECISIONS."""
    own = NUMBER_FORMATS[asked]
    units = {"fp16": "16 bits", "bf16": "16 bits"}
    distances = []
    for name in PRECISIONS:
        other = NUMBER_FORMATS[name]
        a, b = other.products, own.products
        distance = OTHER_FORMAT * (a != b) + OTHER_STORAGE * (other.form != own.form)
        distance += OTHER_STORAGE * (other.convolutions != own.convolutions)
        distances.append(distance if units.get(a, a) == units.get(b, b) else OTHER_UNITS)
    return np.array(distances)


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
