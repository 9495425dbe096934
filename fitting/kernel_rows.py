"""Measured kernels as one operator table, each the sum of some of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fitting.calls import Measured
from fitting.families import family_of
from fitting.runs import RunTable
from trainpace.core.hardware import find_device
from trainpace.forecast.constants import NO_CARDS
from trainpace.workload import MOST_SIZES

BY_ROW = ("batch", "compiled", "channels_last", "device_row")
BY_KERNEL = ("device", "measured_ms", "floor_ms", "operator", "source", "family")


class KernelRows(RunTable):
    """Measured kernels. By kernel: `measured_ms`, `floor_ms` that its timing adds, its `device`,
    `operator`, `family` and
    `source`; by row of the table: `kernel`, the one that it is part of.
    """

    kernel: np.ndarray
    floor_ms: np.ndarray
    operator: np.ndarray
    family: np.ndarray
    source: np.ndarray

    def by_kernel(self, per_row: np.ndarray) -> np.ndarray:
        """Sums over the rows of each kernel."""
        return np.bincount(self.kernel, per_row, minlength=len(self.measured_ms))

    def select(self, chosen: np.ndarray) -> KernelRows:
        """Some of the kernels, by a mask."""
        rows = np.flatnonzero(chosen[self.kernel])
        part = KernelRows.__new__(KernelRows)
        part.columns = {name: column[rows] for name, column in self.columns.items()}
        for name in BY_ROW:
            setattr(part, name, getattr(self, name)[rows])
        for name in BY_KERNEL:
            setattr(part, name, getattr(self, name)[chosen])
        part.kernel = (np.cumsum(chosen) - 1)[self.kernel[rows]]
        kept = np.unique(part.device_row)
        keys = list(self.devices)
        part.devices = {keys[i]: self.devices[keys[i]] for i in kept}
        part.device_row = np.searchsorted(kept, part.device_row)
        part.cards, part.products = self.cards, self.products
        return part

    def weights(self) -> np.ndarray:
        """Weights that sum to 1:

        every card has the same in every family, and every family the same.
        """
        groups = np.unique(
            np.char.add(np.char.add(self.family, "|"), self.device), return_inverse=True
        )[1]
        each = 1.0 / np.bincount(groups)[groups]
        families = np.unique(self.family, return_inverse=True)[1]
        each = each / np.bincount(families, each)[families]
        return np.asarray(each / each.sum())


def kernel_rows(measured: Sequence[Measured]) -> KernelRows:
    """The table of some measured calls."""
    rows = [row for one in measured for row in one.rows]
    n = len(rows)
    dims = np.zeros((n, MOST_SIZES, 2))
    for i, row in enumerate(rows):
        dims[i, : len(row.dims), 0] = row.dims

    def constant(name: str) -> np.ndarray:
        return np.stack(
            [np.array([getattr(row, name) for row in rows], float), np.zeros(n)], axis=1
        )

    table = KernelRows.__new__(KernelRows)
    table.kernel = np.repeat(np.arange(len(measured)), [len(one.rows) for one in measured])
    table.columns = {
        "kind": np.array([row.kind for row in rows]),
        "function": np.array([row.function for row in rows]),
        "half": np.array([row.half for row in rows]),
        "count": np.ones(n),
        "launches": np.array([float(row.launches) for row in rows]),
        "flops": constant("flops"),
        "read_bytes": constant("read_bytes"),
        "written_bytes": constant("written_bytes"),
        "dims": dims,
        "phase": np.full(n, "forward"),
    }
    table.cards, table.products = NO_CARDS, None
    table.batch = np.ones(n)
    table.compiled = np.zeros(n, bool)
    table.channels_last = np.array([one.channels_last for one in measured])[table.kernel]
    names = {name: find_device(name).name for name in {one.device for one in measured}}
    keys: list[Any] = [(names[one.device], one.precision) for one in measured]
    table.devices = {key: find_device(key[0]) for key in sorted(set(keys))}
    order = {key: i for i, key in enumerate(table.devices)}
    table.device_row = np.array([order[key] for key in keys])[table.kernel]
    table.device = np.array([key[0] for key in keys])
    table.measured_ms = np.array([one.us / 1e3 for one in measured])
    table.floor_ms = np.array([one.floor_us / 1e3 for one in measured])
    table.operator = np.array([one.operator for one in measured])
    table.source = np.array([one.source for one in measured])
    table.family = np.array([family_of(one.rows) for one in measured])
    return table


def joined(tables: Sequence[KernelRows]) -> KernelRows:
    """Several tables one below the other."""
    table = KernelRows.__new__(KernelRows)
    table.columns = {
        name: np.concatenate([part.columns[name] for part in tables]) for name in tables[0].columns
    }
    keys = [[list(part.devices)[i] for i in part.device_row] for part in tables]
    table.devices = {key: device for part in tables for key, device in part.devices.items()}
    order = {key: i for i, key in enumerate(table.devices)}
    table.device_row = np.array([order[key] for part in keys for key in part])
    before = np.cumsum([0, *(len(part.measured_ms) for part in tables)])
    table.kernel = np.concatenate(
        [part.kernel + start for part, start in zip(tables, before, strict=False)]
    )
    for name in ("batch", "compiled", "channels_last", *BY_KERNEL):
        setattr(table, name, np.concatenate([getattr(part, name) for part in tables]))
    table.cards, table.products = NO_CARDS, None
    return table
