"""Target of a forecast: a cluster, its software, and the kernel model of its devices.

Shapes: arrays of operator times have shape (batches, rows): one line per micro-batch size, and one
column per row of the operator table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.execution import PRECISIONS, Execution, Form, Precision
from trainpace.core.hardware import Cluster, Device, typical_host
from trainpace.core.outcome import Provenance
from trainpace.core.software import TODAY, Software
from trainpace.forecast.attention import implementation_on
from trainpace.forecast.constants import (
    CardConstants,
    KernelConstants,
    fitted_constants,
    measured_cards,
)
from trainpace.forecast.fusion import Fused
from trainpace.forecast.grid import Grid
from trainpace.forecast.kernels import KernelTable, KernelTimes, host_us
from trainpace.forecast.matmul import MatmulModel, Tiling
from trainpace.forecast.rates import Rates, sustained_rates
from trainpace.forecast.timings import (
    Interpolator,
    MachineModel,
    machine_spread,
    machine_times,
    step_factor,
)
from trainpace.forecast.uncertainty import Spread, composed_spread
from trainpace.workload import MATRIX_KINDS, Flags, Floats, Operators, form_of

HOST_SHARPNESS = 6.0
"""Exponent of the smooth maximum of host and device. If they are close, each sometimes waits."""
LIBRARY_KINDS = (*MATRIX_KINDS, "norm")
"""Kinds of operators with expensive host calls.

They choose an algorithm of cuBLAS, cuDNN or torch, allocate several tensors and save tensors for
the backward pass. In launch-bound steps on an H100's host, the forward call of a convolution took
132 microseconds, of a matmul 129, of a normalization 99, and of all others 10 to 23 (n 51;
fitting/data).
"""
REFERENCE_POINTS = 2750.0
"""PassMark single-thread points of the host for which the constants were fitted.

It is a desktop of 2017 to 2019 (a Core i7-8700K has 2,750). Most launch-bound runs in the fit have
cards of such desktops (RTX 2080 Ti, GTX 1080 Ti, Titan V). Their sources do not name the CPU.
"""
MOST_AT_ONCE = 128
"""Batch sizes that are evaluated in one pass. The limit bounds the memory."""
MOST_TIMED = 8
"""Number of cached kernel model results over all workloads."""
F = TypeVar("F", bound=Callable[..., object])


class Sharding(NamedTuple):
    """Settings that determine which operators a rank runs, and their sizes per sample."""

    form: Form
    tp: int
    cp: int
    sequence_parallel: bool
    ep: int = 1
    expert_tp: int = 1
    expert_load: float = 1.0


class KernelKey(NamedTuple):
    """Settings that determine the operator times of a rank, besides device and kernel model."""

    sharding: Sharding
    precision: Precision
    channels_last: bool
    compiled: bool
    software: Software


class KernelGroup(NamedTuple):
    """Executions of a grid whose ranks run the same operators.

    Attributes:
        key: Settings that the executions share.
        batches: Distinct micro-batch sizes, at most `MOST_AT_ONCE`.
        rows: Indices of the executions in the grid.
        batch_of: Index in `batches` for each of these executions.
    """

    key: KernelKey
    batches: tuple[float, ...]
    rows: NDArray[np.intp]
    batch_of: NDArray[np.intp]


def kernel_groups(grid: Grid, software: Software) -> Iterator[KernelGroup]:
    """Yield the executions of a grid in groups with the same kernels."""
    divided = grid.sequence_parallel & (grid.tp > 1)
    experts = grid.ep, grid.experts_tp, grid.expert_load
    flags = grid.channels_last, grid.compile
    for rows in grid.groups(grid.precision, grid.tp, grid.cp, divided, *experts, *flags):
        i = rows[0]
        precision = PRECISIONS[grid.precision[i]]
        sizes = int(grid.tp[i]), int(grid.cp[i]), bool(divided[i])
        of_experts = int(grid.ep[i]), int(grid.experts_tp[i]), float(grid.expert_load[i])
        sharding = Sharding(form_of(precision), *sizes, *of_experts)
        own_flags = bool(grid.channels_last[i]), bool(grid.compile[i])
        key = KernelKey(sharding, precision, *own_flags, software)
        batches, batch_of = np.unique(grid.micro_batch[rows], return_inverse=True)
        for start in range(0, len(batches), MOST_AT_ONCE):
            some = batches[start : start + MOST_AT_ONCE].astype(float)
            here = (batch_of >= start) & (batch_of < start + MOST_AT_ONCE)
            yield KernelGroup(key, tuple(some.tolist()), rows[here], batch_of[here] - start)


def kernel_key(execution: Execution, software: Software) -> KernelKey:
    return next(kernel_groups(Grid.of([execution]), software)).key


class RankTimes(NamedTuple):
    """Device and host times of one rank at several micro-batch sizes.

    Attributes:
        times: Device times, shape (batches, rows).
        host_ms: Host time of every row, shape (rows,).
        start_ms: Host time per step outside of the phases.
        log_sd: Standard deviation of the logarithm of each device time. 0 if the uncertainty is
            modeled for whole steps instead of rows.
    """

    times: KernelTimes
    host_ms: Floats
    start_ms: float
    log_sd: Floats


def together_ms(device_ms: Floats, host_ms: Floats) -> Floats:
    """Return the time of a phase in which host and device run in parallel: a smooth maximum.

    The host launches ahead of the device. A phase of many small kernels takes as long as launching
    them.
    """
    p = HOST_SHARPNESS
    return (device_ms**p + host_ms**p) ** (1 / p)


def host_sensitivity(parts: Mapping[str, Floats], step_ms: Floats) -> Floats:
    """Return d log(step) / d log(host time): percent of the step per percent of host time.

    The result is between 0 and 1. By `together_ms`, a phase with device time d takes a time t, and
    d ln t / d ln host = 1 - (d / t)^p. All phases are treated as one.
    """
    computing = parts["forward_ms"] + parts["backward_ms"] + parts["optimizer_ms"]
    together = computing + parts["host_overhead_ms"]
    some, steps = (np.where(together > 0, ms, 1.0) for ms in (together, step_ms))
    sensitivity = (1 - (computing / some) ** HOST_SHARPNESS) * together / steps
    return np.where(together > 0, sensitivity, 0.0)


def fitted_host_us(
    operators: Operators,
    c: KernelConstants,
    fused: Fused | None = None,
    compiled: Flags | bool = True,
) -> Floats:
    """Return the host time of every row in microseconds, shape (rows,).

    Compiled code enters no modules and makes no views. Each remaining launch takes `compile_host`
    times the eager time. The optimizer update is not compiled.

    Args:
        operators: Table of operators.
        c: Fitted constants.
        fused: Effect of torch.compile on the rows, or None in eager mode.
        compiled: Mask of the compiled rows.
    """
    updates = np.asarray(operators.phase) == "optimizer"
    launch_us = np.where(
        np.isin(operators.kind, LIBRARY_KINDS), c.host_library_us, c.host_launch_us
    )
    launch_us = np.where(updates, c.host_optimizer_us, launch_us)
    eager_us = host_us(operators, launch_us, c.host_view_us, c.host_module_us)
    if fused is None:
        return eager_us
    compiled_us = c.compile_host * launch_us * operators.launches * fused.launches * operators.count
    return np.where(compiled & ~updates, compiled_us, eager_us)


def with_inductor(c: KernelConstants, is_old: bool) -> KernelConstants:
    """Return the constants for torch.compile, adjusted if it is that of torch before 2.2."""
    if not is_old:
        return c
    return replace(
        c,
        compile_traffic=c.compile_traffic * c.compile_old_traffic,
        compile_host=c.compile_host * c.compile_old_host,
    )


_kept: Callable[[F], F] = cast(Any, lru_cache(MOST_TIMED))
"""Decorator that caches the last results of a method of a kernel model, which is frozen."""


class KernelModel(ABC):
    """Model of the operator times of one rank. It is frozen and safe to share between threads."""

    provenance: Provenance
    traces_cpu: bool
    """True if workloads must be traced as torch runs them on a CPU (`Variant.cpu`)."""

    @abstractmethod
    def rank_times(
        self, table: KernelTable, batches: tuple[float, ...], device: Device, key: KernelKey
    ) -> RankTimes | str:
        """Return the times of every row at some micro-batch sizes, or the reason if unknown."""

    def tiling(
        self, table: KernelTable, batches: Floats, device: Device, key: KernelKey
    ) -> Tiling | None:
        """Return the tiling of every row, shape (batches, rows), or None if unknown."""
        return None

    @abstractmethod
    def spread(self, shares: Floats, device: Device, device_s: Floats, log_sd: Floats) -> Spread:
        """Return the interval of a step, relative to its forecast.

        Args:
            shares: Composition of the step, in the order of `uncertainty.PARTS`.
            device: The device.
            device_s: Device seconds of every row, shape (rows,).
            log_sd: Standard deviation of the logarithm of these times, shape (rows,).
        """


class FittedKernels(KernelModel):
    """Kernel model of GPUs, from fitted constants and datasheets.

    Args:
        constants: Constants that all GPUs share. Defaults to those of the package.
        host_factor: Launch time of the host, divided by the time that CPU and software predict.
        matmuls: Matmul model. Defaults to that of the package.
        cards: Constants of measured cards. Defaults to those of the package.
    """

    provenance: Provenance = "fitted"
    traces_cpu = False

    def __init__(
        self,
        constants: KernelConstants | None = None,
        host_factor: float = 1.0,
        matmuls: MatmulModel | None = None,
        cards: CardConstants | None = None,
    ) -> None:
        self._constants, self.host_factor = constants, host_factor
        self._matmuls, self._cards = matmuls, cards

    @_kept
    def rank_times(
        self, table: KernelTable, batches: tuple[float, ...], device: Device, key: KernelKey
    ) -> RankTimes | str:
        if device.kind == "cpu":
            return f"{device.name} is a CPU: it has to be calibrated before it can be forecast."
        c, rates = self._rates(table, device, key)
        if isinstance(rates, str):
            return rates
        at, operators = np.array(batches)[:, None], table.operators
        matmuls = table.matmul_times(at, rates, self._matmuls) if operators.half.any() else None
        times = table.times(at, rates, c, key.channels_last, key.compiled, matmuls)
        times = KernelTimes(*np.broadcast_arrays(*times))
        slow_software = key.software.slow_host
        factor = self.host_factor * (getattr(c, slow_software) if slow_software else 1.0)
        host_us = fitted_host_us(operators, c, table.fused if key.compiled else None)
        start_ms = c.host_step_us * 1e-3 * factor
        return RankTimes(times, host_us * 1e-3 * factor, start_ms, np.zeros(times.device_s.shape))

    def _rates(
        self, table: KernelTable, device: Device, key: KernelKey
    ) -> tuple[KernelConstants, Rates | str]:
        cards = measured_cards() if self._cards is None else self._cards
        c = with_inductor(self._constants or fitted_constants(), key.software.has_old_inductor)
        c, half = cards.of(c, device), table.operators.half
        attention = (
            implementation_on(device, key.software.fused_attention) if table.has_attention else None
        )
        needs = bool((~half).any()), bool(half.any())
        return c, sustained_rates(device, key.precision, *needs, c, self._matmuls, attention)

    def tiling(
        self, table: KernelTable, batches: Floats, device: Device, key: KernelKey
    ) -> Tiling | None:
        c, rates = self._rates(table, device, key)
        if isinstance(rates, str):
            return None
        return table.tiling(batches[:, None], rates, c, key.channels_last, key.compiled)

    def spread(self, shares: Floats, device: Device, device_s: Floats, log_sd: Floats) -> Spread:
        return composed_spread(shares, device)


class CalibratedKernels(KernelModel):
    """The kernel model of one machine, from micro-benchmarks that were made with its software."""

    provenance: Provenance = "calibrated"
    traces_cpu = True

    def __init__(self, machine: MachineModel) -> None:
        self.machine = machine

    @cached_property
    def _interpolator(self) -> Interpolator:
        return Interpolator(self.machine.timings, self.machine.form)

    @_kept
    def rank_times(
        self, table: KernelTable, batches: tuple[float, ...], device: Device, key: KernelKey
    ) -> RankTimes | str:
        operators, machine = table.operators, self.machine
        needs_half = bool((operators.half & (operators.launches > 0)).any())
        if needs_half and not machine.timings.half.any():
            return f"{device.name} has been calibrated in fp32 only."
        predicted = [
            machine_times(operators, int(batch), machine, self._interpolator) for batch in batches
        ]
        factor = step_factor(machine)
        device_s, *bounds = (
            np.stack([np.broadcast_to(times[i], (len(operators),)) for times, _ in predicted])
            for i in range(4)
        )
        times = KernelTimes(device_s * factor, *bounds)
        per_call_us = (
            machine.host_us_per_operator,
            machine.host_us_per_view,
            machine.host_us_per_module,
        )
        host_ms = host_us(operators, *per_call_us) * 1e-3 * factor
        return RankTimes(times, host_ms, 0.0, np.stack([log_sd for _, log_sd in predicted]))

    def spread(self, shares: Floats, device: Device, device_s: Floats, log_sd: Floats) -> Spread:
        return machine_spread(self.machine, device_s, log_sd)


FITTED = FittedKernels()
"""Kernel model with the constants of the package. The first forecast reads their files."""

RATING_LOG_SD = 0.35
"""Standard deviation of log(host time) for effects that a CPU rating does not contain.

Such effects are virtual machines, the clock under load, the driver and memory. The value is the
deviation between five systems with torch versions of the same time, after dividing by their ratings
(lambda's A100 and RTX 3090, ryujaehun's GTX 1080 Ti, RTX 2080 Ti and Titan V). With a sixth system,
lambda's RTX 2080 Ti, it would be 0.57.
"""


class LaunchingHost(NamedTuple):
    """CPU that launches kernels.

    Attributes:
        name: Name of the CPU.
        points: PassMark single-thread points.
        log_sd: Standard deviation of log(host time). It is larger if the CPU is assumed.
    """

    name: str
    points: float
    log_sd: float


def host_of(cluster: Cluster) -> LaunchingHost:
    """Return the host of a cluster. If it is unknown, return a typical host of its devices."""
    if cluster.host is not None:
        return LaunchingHost(cluster.host.name, cluster.host.single_thread.value, RATING_LOG_SD)
    typical = typical_host(cluster.device)
    return LaunchingHost(typical.name, typical.points, math.hypot(typical.log_sd, RATING_LOG_SD))


class Target(NamedTuple):
    """Cluster, kernel model and software of a forecast.

    `host_copy_gb_per_s` is the rate of exposed copies of micro-batches to the device. It is
    infinite if the copies are hidden.
    """

    cluster: Cluster
    kernels: KernelModel = FITTED
    host_copy_gb_per_s: float = math.inf
    software: Software = TODAY

    @property
    def host(self) -> LaunchingHost | None:
        """CPU whose launches are forecast. None for a calibrated machine, which includes it."""
        return host_of(self.cluster) if self.kernels.provenance == "fitted" else None

    @property
    def host_factor(self) -> float:
        """Ratio of the host's launch time to that of the constants' reference host."""
        return 1.0 if self.host is None else REFERENCE_POINTS / self.host.points
