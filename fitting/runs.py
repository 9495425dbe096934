"""Measured runs as one long operator table, so that all of them are evaluated in a few array expressions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from fitting.prepare import CONFIGURATIONS, FILES, prepared_case
from trainpace.errors import TrainpaceError
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.kernels import KernelTable, KernelTimes
from trainpace.forecast.rates import sustained_rates
from trainpace.forecast.target import fitted_host_us, together_ms
from trainpace.hardware import Device
from trainpace.records import load
from trainpace.validation import PAGEABLE_COPY_GB_PER_S, Case, read_runs, trace_file
from trainpace.workload import PHASES, Workload

COLUMNS = ("kind", "function", "half", "count", "launches", "flops", "read_bytes", "written_bytes", "dims", "phase")

THINNING = 3

Pair = tuple[Case, Workload]


def read_pairs(data: Path, traces: Path, timed: bool = True) -> list[Pair]:
    """Every measured run that has a traced workload (`trainpace validate` leaves the traces) and, if `timed`, a time."""
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
    """The runs to fit on: a third of the thousands of forward passes decides the same constants in a third of the time."""
    chosen = [pair for pair in pairs if is_usable(pair[0])]
    return [pair for pair in chosen if pair[0].run.file != "timm_inference" or pair[0].run.index % THINNING == 0]


def is_usable(case: Case) -> bool:
    """Is the run what its spec says, and on one card or with communication that hides?"""
    e = case.execution
    alone = e.world_size == 1 or (e.zero_stage == 3 and e.nnodes == 1)
    alone = alone and e.activation_checkpointing != "selective"  # which the trace does not hold
    return is_same_model(case) and alone and e.tp * e.pp * e.cp == 1


def is_same_model(case: Case) -> bool:
    """Is the measured model the one that its spec builds today?

    Keras' AlexNet is another network; timm maps ig_resnext101_32x32d to a smaller model, and its TResNets had other
    normalisations.
    """
    name = case.spec.rpartition(":")[2]
    return not (
        (case.host == "tensorflow" and name == "alexnet")
        or name == "ig_resnext101_32x32d"
        or name.startswith("tresnet")
    )


def gathered(figures: Sequence[Any], rows: np.ndarray) -> Any:
    """Named tuples of numbers, one for each device, as one whose numbers are arrays with a place for each row."""
    if isinstance(figures[0], tuple):
        return type(figures[0])(*(gathered(field, rows) for field in zip(*figures, strict=True)))
    return np.array([float(figure) for figure in figures])[rows]


class RunTable:
    """Rows of all runs, one below the other."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        tables = [workload.forms[case.form].operators for case, workload in pairs]
        lengths = [len(table) for table in tables]
        self.columns = {name: np.concatenate([np.asarray(getattr(t, name)) for t in tables]) for name in COLUMNS}
        self.run = np.repeat(np.arange(len(pairs)), lengths)
        self.batch = np.array([float(case.execution.micro_batch) for case, _ in pairs])[self.run]
        self.channels_last = np.array([case.execution.channels_last for case, _ in pairs])[self.run]
        self.compiled = np.array([case.execution.compile for case, _ in pairs])[self.run]
        self.phase = np.array([PHASES.index(p) for p in self.columns["phase"]])
        self.measured_ms = np.array([case.measured_ms or np.nan for case, _ in pairs])
        self.file = np.array([case.run.file for case, _ in pairs])
        self.device = np.array([case.cluster.device.name for case, _ in pairs])
        keys = [(case.cluster.device.name, case.execution.precision, case.implementation) for case, _ in pairs]
        cards = (case.cluster.device for case, _ in pairs)
        self.devices: dict[tuple[Any, ...], Device] = dict(zip(keys, cards, strict=True))
        order = {key: i for i, key in enumerate(self.devices)}
        self.device_row = np.array([order[key] for key in keys])[self.run]
        self.repeats = np.array([[c.execution.accumulation] * 2 + [1 / (c.execution.world_size if c.execution.zero_stage else 1)]
                                 for c, _ in pairs])  # fmt: skip
        self.copy_ms = np.array([
            1e3 * w.sample_bytes * c.execution.micro_batch / (PAGEABLE_COPY_GB_PER_S * 1e9) * (c.run.host_copy == "yes")
            for c, w in pairs
        ])  # fmt: skip
        self.host = np.array([case.host for case, _ in pairs])
        self.is_compiled = np.array([case.execution.compile for case, _ in pairs])
        self.operators = cast(Any, SimpleNamespace(**self.columns))
        self.table = KernelTable(self.operators)

    def subset(self, rows: np.ndarray) -> RunTable:
        """Some rows only, for the times of one class of operators."""
        part: Any = RunTable.__new__(RunTable)
        part.columns = {name: column[rows] for name, column in self.columns.items()}
        part.table = KernelTable(SimpleNamespace(**part.columns))  # type: ignore[arg-type]
        for name in ("batch", "channels_last", "compiled", "device_row"):
            setattr(part, name, getattr(self, name)[rows])
        part.devices = self.devices
        result: RunTable = part
        return result

    def times(self, c: KernelConstants) -> KernelTimes:
        """Kernel times of every row."""
        every = []
        for (_, precision, *attention), device in self.devices.items():
            rates = sustained_rates(device, precision, True, precision not in ("fp32", "tf32"), c, *attention)
            assert not isinstance(rates, str), rates
            every.append(rates)
        return self.table.times(self.batch, gathered(every, self.device_row), c, self.channels_last, self.compiled)

    def host_ms(self, c: KernelConstants) -> np.ndarray:
        """The host's time, runs x phases."""
        return self.by_phase(fitted_host_us(self.operators, c) * 1e-3) * self.host_factor(c)[:, None]

    def host_factor(self, c: KernelConstants) -> np.ndarray:
        """How much slower the run's software launches."""
        software = [self.host == "old_torch", self.host == "tensorflow", self.is_compiled]
        return np.select(software, [c.host_old_torch, c.host_tensorflow, c.compile_host], 1.0)

    def by_phase(self, per_row: np.ndarray) -> np.ndarray:
        """Sums, runs x phases."""
        places = self.run * len(PHASES) + self.phase
        return np.bincount(places, per_row, minlength=len(self.pairs) * len(PHASES)).reshape(-1, len(PHASES))

    def step_ms(self, device_ms: np.ndarray, c: KernelConstants) -> np.ndarray:
        """Steps from device times (runs x phases), as `forecast.step` assembles them, communication left out."""
        together = together_ms(device_ms, self.host_ms(c))
        start = c.host_step_us * 1e-3 * self.host_factor(c)
        total: np.ndarray = (together * self.repeats).sum(axis=1) + start + self.copy_ms * self.repeats[:, 0]
        return total
