"""Measured runs as one long operator table, so that all of them are evaluated in a few array
expressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from fitting.prepare import CONFIGURATIONS, FILES, prepared_case
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Precision
from trainpace.core.hardware import Device
from trainpace.core.records import load
from trainpace.forecast import PAGEABLE_COPY_GB_PER_S, Case, Implementation, read_runs, trace_file
from trainpace.forecast.constants import NO_CARDS, CardConstants, KernelConstants
from trainpace.forecast.fusion import Fused, fused
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.matmul import MatmulModel, MatmulTimes
from trainpace.forecast.rates import Rates, sustained_rates
from trainpace.forecast.software import as_run
from trainpace.forecast.target import Target, fitted_host_us, together_ms, with_inductor
from trainpace.workload import GEMM, MATRIX_KINDS, PHASES, Operators, Workload

COLUMNS = (
    "kind",
    "function",
    "half",
    "count",
    "launches",
    "flops",
    "read_bytes",
    "written_bytes",
    "dims",
    "phase",
)

THINNING = 3
COMPILED = ("fused_traffic", "fused_launches", "joined")
"""What torch.compile leaves of every row (`trainpace.forecast.fusion.Fused`), as columns."""
SLOW_HOSTS = ("host_old_torch", "host_tensorflow")
"""What `Software.slow_host` may say, in the order of precedence."""

Pair = tuple[Case, Workload]


def read_pairs(data: Path, traces: Path, timed: bool = True) -> list[Pair]:
    """Every measured run that has a traced workload (`trainpace validate` leaves the traces) and,
    if `timed`, a time.
    """
    pairs, loaded = [], {}
    every = [run for name in FILES for run in read_runs(data / name)]
    for index, run in enumerate(every):
        run = replace(run, index=index)
        try:
            case = prepared_case(run, data.resolve(), traces / CONFIGURATIONS)
        except TrainpaceError:
            continue
        file = trace_file(traces, case)
        if (timed and case.measured_ms is None) or not file.is_file():
            continue
        if file not in loaded:
            loaded[file] = load(file, Workload)
        pairs.append((case, loaded[file]))
    return pairs


def usable(pairs: Sequence[Pair]) -> list[Pair]:
    """The runs to fit on:

    a third of the thousands of forward passes decides the same constants in a third of the time.
    """
    chosen = [pair for pair in pairs if is_usable(pair[0])]
    return [
        pair
        for pair in chosen
        if pair[0].run.file != "timm_inference" or pair[0].run.index % THINNING == 0
    ]


def is_usable(case: Case) -> bool:
    """Is the run what its spec says, and on one card or with communication that hides?

    languini's compiled steps decide the two constants of torch before 2.2 (`compile_old_*`) and
    nothing else: in a fit of all constants they doubled `compile_host` for everybody.
    """
    e = case.execution
    if case.run.file == "languini_throughput" and e.compile:
        return False
    alone = e.world_size == 1 or (e.zero_stage == 3 and e.nnodes == 1)
    alone = alone and e.activation_checkpointing != "selective"  # which the trace does not hold
    return is_same_model(case) and alone and e.tp * e.pp * e.cp == 1


def is_same_model(case: Case) -> bool:
    """Is the measured model the one that its spec builds today?

    Keras' AlexNet is another network; timm maps ig_resnext101_32x32d to a smaller model, and its
    TResNets had other normalisations.
    """
    name = case.spec.rpartition(":")[2]
    return not (
        (case.software.framework == "tensorflow" and name == "alexnet")
        or name == "ig_resnext101_32x32d"
        or name.startswith("tresnet")
    )


class Columns(SimpleNamespace):
    """Columns of an operator table, as a kernel table reads them, without the checks of a
    workload's.
    """

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def is_matrix(self) -> np.ndarray:
        return np.isin(self.kind, list(MATRIX_KINDS))


RATE_CONSTANTS = frozenset(
    (
        "fp8 kepler kepler_traffic pre_volta"
        " consumer_boost consumer_products tensor_feeding watts_floor watts_plain watts_tensor"
    ).split()
)
"""Constants that enter the rates of a device alone."""
SAME_RATE = 1e-6
"""Rates that differ by less are the same."""


class Chunk(NamedTuple):
    """Rows of a table that run on one device in one precision.

    `table` holds those that differ, row i at `place[i]`.
    """

    rows: np.ndarray
    place: np.ndarray
    counts: np.ndarray
    device: Device
    precision: Precision
    table: KernelTable
    channels_last: np.ndarray
    compiled: bool
    attention: Implementation | None
    has_old_inductor: bool
    model: MatmulModel | None
    products: list[MatmulTimes]
    """Those of `table`, the same with all constants, once they are known."""

    def rates(self, c: KernelConstants) -> Rates:
        needs_half = self.precision not in ("fp32", "tf32")
        rates = sustained_rates(
            self.device, self.precision, True, needs_half, c, self.model, self.attention
        )
        assert not isinstance(rates, str), rates
        return rates

    def device_s(self, c: KernelConstants, cards: CardConstants) -> np.ndarray:
        c = cards.of(with_inductor(c, self.compiled and self.has_old_inductor), self.device)
        rates = self.rates(c)
        if not self.products:
            self.products.append(self.table.matmul_times(np.asarray(1.0), rates, self.model))
        times = self.table.times(
            np.asarray(1.0), rates, c, self.channels_last, self.compiled, self.products[0]
        )
        return np.asarray(times.device_s[self.place] * self.counts)

    def depends(
        self, old: KernelConstants, new: KernelConstants, name: str, cards: CardConstants
    ) -> bool:
        """Whether its times can differ between constants that differ in `name`."""
        if name in RATE_CONSTANTS:
            before, after = self.rates(old), self.rates(new)
            shared = [
                name for name in Rates._fields if not isinstance(getattr(before, name), tuple)
            ]
            pairs = [(float(getattr(before, name)), float(getattr(after, name))) for name in shared]
            return any(abs(b - a) > SAME_RATE * abs(a) for a, b in pairs)
        if name.startswith("compile_") and not self.compiled:
            return False
        if name.startswith("compile_old_") and not self.has_old_inductor:
            return False
        return bool(
            getattr(cards.of(old, self.device), name) != getattr(cards.of(new, self.device), name)
        )


def _at(column: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """A column of coefficients over the batch as one of numbers; other columns as they are."""
    if column.ndim < 2:
        return column
    slopes = batch.reshape((-1,) + (1,) * (column.ndim - 2))
    fixed = np.zeros(column.shape)
    fixed[..., 0] = column[..., 0] + column[..., 1] * slopes
    return fixed


def _distinct(
    columns: dict[str, np.ndarray],
    batch: np.ndarray,
    flags: tuple[np.ndarray, ...],
    rows: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(rows that differ in more than their count, the place of every row among them)."""
    numbers = [
        _at(columns[name][rows], batch[rows])[..., 0].reshape(len(rows), -1)
        for name in ("dims", "flops", "read_bytes", "written_bytes")
    ]
    calls = np.unique(
        np.char.add(columns["kind"][rows], columns["function"][rows]), return_inverse=True
    )[1]
    rest = [
        calls,
        columns["half"][rows],
        columns["launches"][rows],
        *(flag[rows] for flag in flags),
    ]
    rest += [columns[name][rows] for name in COMPILED if name in columns]
    of_weight = columns["dims"][rows, GEMM.batch, 1] == 0
    table = np.column_stack([*numbers, *rest, of_weight]).astype(float)
    as_bytes = np.ascontiguousarray(table).view(np.dtype((np.void, table.shape[1] * 8))).ravel()
    _, first, place = np.unique(as_bytes, return_index=True, return_inverse=True)
    return rows[first], place


def _compiled_to(pairs: Sequence[Pair], tables: Sequence[Operators]) -> dict[str, np.ndarray]:
    """What torch.compile leaves of the rows of all runs, each in the order of its own table; all of those that it spares."""
    known: dict[int, Fused] = {}
    parts = []
    for (case, _), operators in zip(pairs, tables, strict=True):
        if not case.execution.compile:
            ones = np.ones(len(operators))
            parts.append(Fused(ones, ones, np.zeros(len(operators), bool)))
            continue
        if id(operators) not in known:
            known[id(operators)] = fused(operators)
        parts.append(known[id(operators)])
    return dict(zip(COMPILED, map(np.concatenate, zip(*parts, strict=True)), strict=True))


class RunTable:
    """Rows of all runs, one below the other."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        cards: CardConstants = NO_CARDS,
        products: MatmulModel | None = None,
    ) -> None:
        self.pairs, self.products = pairs, products
        tables = [
            as_run(workload, case.software.rewrites).forms[case.form].operators
            for case, workload in pairs
        ]
        lengths = [len(table) for table in tables]
        self.columns = {
            name: np.concatenate([np.asarray(getattr(t, name)) for t in tables]) for name in COLUMNS
        }
        self.columns |= _compiled_to(pairs, tables)
        self.run = np.repeat(np.arange(len(pairs)), lengths)
        self.batch = np.array([float(case.execution.micro_batch) for case, _ in pairs])[self.run]
        self.channels_last = np.array([case.execution.channels_last for case, _ in pairs])[self.run]
        self.compiled = np.array([case.execution.compile for case, _ in pairs])[self.run]
        self.phase = np.array([PHASES.index(p) for p in self.columns["phase"]])
        self.measured_ms = np.array([case.measured_ms or np.nan for case, _ in pairs])
        self.file = np.array([case.run.file for case, _ in pairs])
        self.device = np.array([case.cluster.device.name for case, _ in pairs])
        old_inductor = np.array(
            [case.execution.compile and case.software.has_old_inductor for case, _ in pairs]
        )
        self.old_inductor = old_inductor[self.run] & (self.columns["phase"] != "optimizer")
        keys = [
            (
                case.cluster.device.name,
                case.execution.precision,
                case.implementation,
                "old" if old else "",
            )
            for (case, _), old in zip(pairs, old_inductor, strict=True)
        ]
        self.devices: dict[tuple[str, ...], Device] = {
            key: case.cluster.device for key, (case, _) in zip(keys, pairs, strict=True)
        }
        order = {key: i for i, key in enumerate(self.devices)}
        self.device_row = np.array([order[key] for key in keys])[self.run]
        self.repeats = np.array(
            [
                [c.execution.accumulation] * 2
                + [1 / (c.execution.world_size if c.execution.zero_stage else 1)]
                for c, _ in pairs
            ]
        )
        self.copy_ms = np.array(
            [
                1e3
                * w.sample_bytes
                * c.execution.micro_batch
                / (PAGEABLE_COPY_GB_PER_S * 1e9)
                * (c.run.host_copy == "yes")
                for c, w in pairs
            ]
        )
        self.host = np.array([case.software.slow_host for case, _ in pairs])
        self.cpu_factor = np.array([Target(case.cluster).host_factor for case, _ in pairs])
        self.operators = cast(Any, Columns(**self.columns))
        self.cards = cards
        self._host: tuple[tuple[float, ...], np.ndarray] | None = None

    def subset(self, rows: np.ndarray) -> RunTable:
        """Some rows only, for the times of one class of operators."""
        part: Any = RunTable.__new__(RunTable)
        part.columns = {name: column[rows] for name, column in self.columns.items()}
        for name in ("batch", "channels_last", "compiled", "device_row"):
            setattr(part, name, getattr(self, name)[rows])
        part.devices, part.cards, part.products = self.devices, self.cards, self.products
        result: RunTable = part
        return result

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The rows of one device, precision and compilation together: small enough for a
        processor's cache, and of one set of rates.
        """
        group = 2 * self.device_row + self.compiled
        order = np.argsort(group, kind="stable")
        _, starts = np.unique(group[order], return_index=True)
        made = []
        keys = list(self.devices)
        for rows in np.split(order, starts[1:]):
            if not len(rows):
                continue
            key = keys[self.device_row[rows[0]]]
            unique, place = _distinct(self.columns, self.batch, (self.channels_last,), rows)
            columns = {
                name: _at(column[unique], self.batch[unique])
                for name, column in self.columns.items()
            }
            # of weights' products, which 8 bits cast, the batch is no size
            columns["dims"][:, GEMM.batch, 1] = np.where(
                self.columns["dims"][unique, GEMM.batch, 1] == 0, 0.0, 1e-300
            )
            columns["count"] = np.ones(len(unique))
            of_rows = (
                Fused(*(columns[name] for name in COMPILED)) if COMPILED[0] in columns else None
            )
            table = KernelTable(cast(Any, Columns(**columns)), of_rows)
            flags = (self.channels_last[unique], bool(self.compiled[rows[0]]))
            attention = cast(Implementation | None, key[2] if len(key) > 2 else None)
            counts = self.columns["count"][rows].astype(float)
            card = self.devices[key], cast(Precision, key[1])
            made.append(
                Chunk(
                    rows,
                    place,
                    counts,
                    *card,
                    table,
                    *flags,
                    attention,
                    "old" in key[3:],
                    self.products,
                    [],
                )
            )
        return made

    def device_s(self, c: KernelConstants, cards: CardConstants | None = None) -> np.ndarray:
        """Seconds of every row on its device, with the table's constants of cards where no others
        are given.
        """
        seconds = np.zeros(len(self.batch))
        for chunk in self.chunks:
            seconds[chunk.rows] = chunk.device_s(c, self.cards if cards is None else cards)
        return seconds

    def changed(self, c: KernelConstants, name: str, value: float) -> tuple[np.ndarray, np.ndarray]:
        """(rows, seconds) of the chunks that another value of one constant can change."""
        other = replace(c, **{name: value})
        chunks = [chunk for chunk in self.chunks if chunk.depends(c, other, name, self.cards)]
        if not chunks:
            return np.zeros(0, int), np.zeros(0)
        seconds = [chunk.device_s(other, self.cards) for chunk in chunks]
        return np.concatenate([chunk.rows for chunk in chunks]), np.concatenate(seconds)

    def host_ms(self, c: KernelConstants) -> np.ndarray:
        """The host's time, runs x phases; the last is kept, as most constants do not enter it."""
        key = tuple(
            getattr(c, name) for name in KernelConstants.__struct_fields__ if "host" in name
        )
        if self._host is None or self._host[0] != key:
            compiled_to = Fused(*(self.columns[name] for name in COMPILED))
            host_ms = fitted_host_us(self.operators, c, compiled_to, self.compiled) * 1e-3
            host_ms = np.where(self.old_inductor, c.compile_old_host * host_ms, host_ms)
            self._host = key, self.by_phase(host_ms) * self.host_factor(c)[:, None]
        return self._host[1]

    def host_factor(self, c: KernelConstants) -> np.ndarray:
        """How much slower the run's software and CPU launch than today's torch on the host that the
        constants stand for.
        """
        slow = [self.host == name for name in SLOW_HOSTS]
        return np.select(slow, [getattr(c, name) for name in SLOW_HOSTS], 1.0) * self.cpu_factor

    def by_phase(self, per_row: np.ndarray) -> np.ndarray:
        """Sums, runs x phases."""
        places = self.run * len(PHASES) + self.phase
        return np.bincount(places, per_row, minlength=len(self.pairs) * len(PHASES)).reshape(
            -1, len(PHASES)
        )

    def step_ms(self, device_ms: np.ndarray, c: KernelConstants) -> np.ndarray:
        """Steps from device times (runs x phases), as `forecast.step` assembles them, communication
        left out.
        """
        together = together_ms(device_ms, self.host_ms(c))
        start = c.host_step_us * 1e-3 * self.host_factor(c)
        total: np.ndarray = (
            (together * self.repeats).sum(axis=1) + start + self.copy_ms * self.repeats[:, 0]
        )
        return total
