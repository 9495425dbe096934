"""Which packaged measurements are near to a training: by what its operators compute, its card and its execution, not by names.

A distance is a sum of differences, each weighted as a factor of a step's time would be: 0 is the same operators on the same card
under the same execution; what lies within `NEAR` tells something of the asked step. A weight is a judgement, not a fit.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import NUMBER_FORMATS, PRECISIONS, Execution, Precision
from trainpace.core.hardware import Device
from trainpace.core.records import Record
from trainpace.forecast.published import CardFigures, PublicJournal, PublicRun, public_journal
from trainpace.forecast.signatures import CLASSES, amounts, signature_of
from trainpace.workload import Floats, Workload

NEAR = 1.0
"""From here on a run is not near: such as another card with 2.5 times the peak of another generation, in another precision."""
MOST = 3
MIX, TRAFFIC_MIX = 2.0, 0.5
"""For all FLOPs, or all bytes, of other classes of operators."""
WORK, TRAFFIC, PARAMETERS = 0.4, 0.4, 0.2
"""For a factor of e in the FLOPs of a sample, in the bytes that its operators move, and in parameters."""
NUMBER_BYTES = {"fp32": 4.0, "amp": 2.5, "half": 2.0}
"""Bytes of a number in the forms of a trace: what precision changes is counted with it alone."""
OTHER_SAMPLES = 0.4
"""For sequences instead of images, or the other way round."""
OTHER_CARD, OTHER_ARCHITECTURE, CARD_SPEED = 0.15, 0.25, 0.5
"""CARD_SPEED: for a factor of e in the mean of peak rate and bandwidth of the memory."""
BATCH, LENGTH, GPUS, NODES = 0.2, 0.1, 0.25, 0.15
"""For a factor of e. Where samples are sequences, a batch is counted in tokens."""
FORWARD_ONLY, NO_OPTIMIZER = 1.5, 0.1
COMPILED, NHWC, KERAS, RECOMPUTED = 0.2, 0.05, 0.2, 0.2
OTHER_FORMAT, OTHER_STORAGE, OTHER_UNITS = 0.05, 0.15, 0.7
"""Of precisions: bf16 for fp16; autocast for 16 bits throughout; other units for products (16 bits, TF32, fp32, FP8)."""
DOUBT = {"A": 0.0, "B": 0.01, "C": 0.03}
"""Among runs that are as near, the better documented comes first."""
SAME = 0.02
"""Differences of mixes, and of the logarithms of sizes, below which operators are called the same."""
LIKE = 0.12
SIMILAR_SIZE = 0.1


class Near(Record):
    """A measured run beside what was asked for. distance: 0 for the same. alike, unlike: what makes it near or far, in words."""

    run: PublicRun
    distance: float
    alike: tuple[str, ...]
    unlike: tuple[str, ...]

    @property
    def is_near(self) -> bool:
        return self.distance < NEAR


class Nearness(Record):
    """The measured runs that are near, the nearest first, three at most; none where not even the first is near. model: what was
    asked for. closest: the nearest of all, near or not; None where nothing can be compared."""

    model: str
    device: str
    batch: int
    runs: tuple[Near, ...]
    closest: Near | None


class _Columns(NamedTuple):
    """All comparable runs: their places in the journal, and what enters distances."""

    place: np.ndarray
    signatures: Floats
    batch: Floats
    gpus: Floats
    nodes: Floats
    precision: np.ndarray
    forward_only: np.ndarray
    no_optimizer: np.ndarray
    compiled: np.ndarray
    nhwc: np.ndarray
    keras: np.ndarray
    recomputed: np.ndarray
    card: np.ndarray
    doubt: Floats
    name_length: np.ndarray
    number_bytes: Floats


def nearest(
    workload: Workload,
    execution: Execution,
    device: Device,
    most: int = MOST,
    journal: PublicJournal | None = None,
) -> Nearness:
    """The measured runs that are nearest to a workload under an execution on a device; of the packaged ones, if no others are
    given."""
    journal = public_journal() if journal is None else journal
    c = _packaged() if journal is public_journal() else _columns(journal)
    nothing = Nearness(
        model=workload.model, device=device.name, batch=execution.micro_batch, runs=(), closest=None
    )
    try:
        asked = np.array([signature_of(workload, execution.precision)])
    except TrainpaceError:  # not traced for this precision, which has no forecast either
        return nothing
    if not len(c.place):
        return nothing
    d = _Differences(c, asked, workload, execution, device, journal)
    total = d.total()
    # of runs that are as near, the shortest name: gluon_resnet18_v1b and ssl_resnet18 are ResNet-18 by other names
    order = np.lexsort((c.name_length, np.round(total, 6)))
    chosen: dict[tuple[object, ...], Near] = {}
    for i in order[: 40 * most].tolist():
        run = journal.runs[c.place[i]]
        kind = (
            journal.signature_of_run[c.place[i]],
            run.device,
            run.gpus,
            run.micro_batch,
            run.precision,
        )
        if kind not in chosen:
            chosen[kind] = Near(run=run, distance=round(float(total[i]), 3), **d.words(i, run))
        if len(chosen) == most:
            break
    runs = tuple(chosen.values())
    return Nearness(
        model=workload.model,
        device=device.name,
        batch=execution.micro_batch,
        runs=tuple(near for near in runs if near.is_near),
        closest=runs[0],
    )


class _Differences:
    """What each comparable run differs in from what is asked for."""

    def __init__(
        self,
        c: _Columns,
        asked: Floats,
        workload: Workload,
        e: Execution,
        device: Device,
        journal: PublicJournal,
    ) -> None:
        self.c, self.asked_execution, self.device, self.journal = c, e, device, journal
        self.asked_length = workload.sequence_length
        batch = float(e.micro_batch)
        flops, moved = amounts(c.signatures, np.full(len(c.place), batch))
        own_flops, own_moved = amounts(asked, batch)
        self.mix = 0.5 * np.abs(_shares(flops) - _shares(own_flops)).sum(axis=1)
        self.traffic_mix = 0.5 * np.abs(_shares(moved) - _shares(own_moved)).sum(axis=1)
        own_length, lengths = asked[:, 2 * CLASSES + 2], c.signatures[:, 2 * CLASSES + 2]
        both = (lengths > 0) & (own_length > 0)
        self.length = np.where(both, _log(lengths) - _log(own_length), 0.0)
        self.other_samples = (lengths > 0) != (own_length > 0)
        # what is compared of two passes: a sample's work, or a token's
        own_passes = 1.0 if workload.mode == "inference" else 3.0
        passes = np.where(c.forward_only, 1.0, 3.0)
        own_width = NUMBER_BYTES[NUMBER_FORMATS[e.precision].form]
        own_moved = own_moved / own_width
        moved = moved / c.number_bytes[:, None]
        self.work, self.traffic = (
            _log(one.sum(axis=1) / passes) - _log(own.sum(axis=1) / own_passes) - self.length
            for one, own in ((flops, own_flops), (moved, own_moved))
        )
        self.parameters = _log(c.signatures[:, 2 * CLASSES + 1]) - _log(asked[:, 2 * CLASSES + 1])
        self.batch = np.log(c.batch / batch) + self.length
        self.gpus, self.nodes = np.log(c.gpus / e.world_size), np.log(c.nodes / e.nnodes)
        self.speed, self.other_card, self.other_architecture = self._cards()
        self.precision = _precision_distances(e.precision)[c.precision]
        self.forward_only = c.forward_only != (workload.mode == "inference")
        self.no_optimizer = c.no_optimizer != (workload.mode == "forward_backward")
        self.compiled = c.compiled != e.compile
        self.nhwc = (c.nhwc != e.channels_last) & (flops[:, :2].sum(axis=1) > 0)
        recomputes = e.activation_checkpointing != "none" or workload.checkpointed
        self.recomputed = c.recomputed != recomputes

    def total(self) -> Floats:
        c = self.c
        model = (
            MIX * self.mix
            + TRAFFIC_MIX * self.traffic_mix
            + WORK * np.abs(self.work)
            + TRAFFIC * np.abs(self.traffic)
            + OTHER_SAMPLES * self.other_samples
            + PARAMETERS * np.abs(self.parameters)
        )
        card = (
            OTHER_CARD * self.other_card
            + OTHER_ARCHITECTURE * self.other_architecture
            + CARD_SPEED * np.abs(self.speed)
        )
        size = (
            BATCH * np.abs(self.batch)
            + LENGTH * np.abs(self.length)
            + GPUS * np.abs(self.gpus)
            + NODES * np.abs(self.nodes)
        )
        flags = (
            FORWARD_ONLY * self.forward_only
            + NO_OPTIMIZER * self.no_optimizer
            + COMPILED * self.compiled
        )
        flags = flags + NHWC * self.nhwc + KERAS * c.keras + RECOMPUTED * self.recomputed
        total: Floats = model + card + size + flags + self.precision + c.doubt
        return total

    def _cards(self) -> tuple[Floats, np.ndarray, np.ndarray]:
        """(logarithm of how much faster each run's card is, whether it is another one, whether of another architecture)."""
        own = figures_of(self.device)
        names = list(self.journal.cards)
        wide = NUMBER_FORMATS[self.asked_execution.precision].products == "fp32"
        speed, other, architecture = [], [], []
        for name in names:
            card = self.journal.cards[name]
            peaks = (
                (card.fp32_tflops, own.fp32_tflops) if wide else (card.half_tflops, own.half_tflops)
            )
            ratios = [peaks, (card.gb_per_s, own.gb_per_s)]
            logs = [math.log(a / b) for a, b in ratios if a > 0 and b > 0]
            speed.append(sum(logs) / len(logs) if logs else 0.0)
            other.append(name != self.device.name)
            architecture.append(card.architecture != own.architecture)
        at = self.c.card
        return np.array(speed)[at], np.array(other)[at], np.array(architecture)[at]

    def words(self, i: int, run: PublicRun) -> dict[str, tuple[str, ...]]:
        """What is alike and what is not: of the model, the card, the execution."""
        alike, unlike = [], []
        e, c = self.asked_execution, self.c
        mix, work, parameters = float(self.mix[i]), float(self.work[i]), float(self.parameters[i])
        if mix < SAME and abs(work) < SAME and abs(parameters) < SAME:
            alike.append("the same operators")
        elif mix < LIKE:
            alike.append("operators of the same kinds")
        else:
            unlike.append(f"{100 * mix:.0f} % of the FLOPs in other kinds of operators")
        of = "token" if run.sequence_length and self.asked_length else "sample"
        sizes = {
            f"FLOPs a {of}": work,
            f"bytes a {of}": float(self.traffic[i]),
            "parameters": parameters,
        }
        largest = max(sizes, key=lambda name: abs(sizes[name]))
        if abs(sizes[largest]) > SIMILAR_SIZE:
            unlike.append(f"{_times(sizes[largest])} the {largest}")
        if not self.other_card[i]:
            alike.append("the same card")
        else:
            architecture = self.journal.cards[run.device].architecture
            kind = (
                f"another {architecture} card"
                if not self.other_architecture[i]
                else f"a card of {architecture}"
            )
            speed = float(self.speed[i])
            unlike.append(
                kind if abs(speed) < SIMILAR_SIZE else f"{kind} (about {_times(speed)} as fast)"
            )
        if self.other_samples[i]:
            unlike.append(
                "images instead of sequences"
                if self.asked_length
                else "sequences instead of images"
            )
        if self.forward_only[i]:
            unlike.append(
                "a forward pass alone"
                if c.forward_only[i]
                else "training, not a forward pass alone"
            )
        elif self.no_optimizer[i]:
            unlike.append("without the optimizer" if c.no_optimizer[i] else "with the optimizer")
        if run.precision != e.precision:
            unlike.append(f"{run.precision} instead of {e.precision}")
        if run.micro_batch != e.micro_batch:
            unlike.append(f"batch {run.micro_batch:,} instead of {e.micro_batch:,}")
        if abs(self.length[i]) > SAME:
            unlike.append(
                f"{run.sequence_length:,} tokens a sample instead of {self.asked_length:,}"
            )
        if run.gpus != e.world_size:
            unlike.append(f"{run.gpus:,} GPU{'s' * (run.gpus > 1)} instead of {e.world_size:,}")
        if self.compiled[i]:
            unlike.append("compiled" if c.compiled[i] else "not compiled")
        if self.nhwc[i]:
            unlike.append("NHWC" if c.nhwc[i] else "NCHW")
        if c.keras[i]:
            unlike.append("Keras")
        if self.recomputed[i]:
            unlike.append(
                "activations recomputed" if c.recomputed[i] else "no activations recomputed"
            )
        return {"alike": tuple(alike), "unlike": tuple(unlike)}


def figures_of(device: Device) -> CardFigures:
    """What enters distances of a card; 0 for figures that nobody published."""

    def largest(*names: str) -> float:
        return max(
            (figure.value for name in names if (figure := getattr(device, name)) is not None),
            default=0.0,
        )

    fp32, half = (
        largest("fp32_tflops"),
        largest("fp16_tensor_tflops", "bf16_tensor_tflops", "fp16_tflops"),
    )
    return CardFigures(
        device.architecture, fp32, half or fp32, largest("memory_bandwidth_gb_per_s")
    )


def _precision_distances(asked: Precision) -> Floats:
    """From the asked precision to each of PRECISIONS."""
    own = NUMBER_FORMATS[asked]
    distances = []
    for name in PRECISIONS:
        other = NUMBER_FORMATS[name]
        same_units = _unit(other.products) == _unit(own.products)
        distance = OTHER_FORMAT * (other.products != own.products) if same_units else OTHER_UNITS
        if other.form != own.form and same_units:
            distance += OTHER_STORAGE
        if other.convolutions != own.convolutions and same_units:
            distance += OTHER_STORAGE
        distances.append(distance)
    return np.array(distances)


def _unit(products: str) -> str:
    return "16 bits" if products in ("fp16", "bf16") else products


@cache
def _packaged() -> _Columns:
    return _columns(public_journal())


def _columns(journal: PublicJournal) -> _Columns:
    at = [
        i
        for i, place in enumerate(journal.signature_of_run)
        if place >= 0 and journal.runs[i].precision in PRECISIONS
    ]
    runs = [journal.runs[i] for i in at]
    widths: dict[str, float] = {
        name: NUMBER_BYTES[one.form] for name, one in NUMBER_FORMATS.items()
    }
    signatures = np.array(journal.signatures).reshape(len(journal.signatures), -1)
    cards, precisions = (
        {name: i for i, name in enumerate(journal.cards)},
        dict[str, int](zip(PRECISIONS, range(len(PRECISIONS)), strict=True)),
    )
    return _Columns(
        place=np.array(at, int),
        signatures=signatures[[journal.signature_of_run[i] for i in at]] if at else signatures[:0],
        batch=np.array([max(1, run.micro_batch) for run in runs], float),
        gpus=np.array([run.gpus for run in runs], float),
        nodes=np.array([run.nodes for run in runs], float),
        precision=np.array([precisions[run.precision] for run in runs], int),
        forward_only=np.array([run.mode == "inference" for run in runs], bool),
        no_optimizer=np.array([run.mode == "forward_backward" for run in runs], bool),
        compiled=np.array([run.compile in ("compile", "xla") for run in runs], bool),
        nhwc=np.array([run.memory_format == "nhwc" for run in runs], bool),
        keras=np.array([run.collection == "profet_aws" for run in runs], bool),
        recomputed=np.array(["ac=full" in (run.parallelism or "") for run in runs], bool),
        card=np.array([cards[run.device] for run in runs], int),
        doubt=np.array([DOUBT[run.trust] for run in runs]),
        name_length=np.array([len(run.model) for run in runs], int),
        number_bytes=np.array([widths[run.precision] for run in runs]),
    )


def _shares(amount: Floats) -> Floats:
    whole = amount.sum(axis=1, keepdims=True)
    shares: Floats = np.divide(amount, whole, out=np.zeros_like(amount), where=whole > 0)
    return shares


def _log(value: Floats) -> Floats:
    return np.log(np.maximum(value, 1.0))


def _times(log_ratio: float) -> str:
    """A factor: twice, half, 2.6 times, 0.3 times."""
    factor = math.exp(log_ratio)
    known = {"2": "twice", "0.5": "half"}
    shown = f"{factor:.2g}" if factor < 100 else f"{factor:,.0f}"
    return known.get(shown, f"{shown} times")
