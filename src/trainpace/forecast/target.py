"""What a forecast is made for: a cluster, and the kernel model that answers for its devices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.execution import Execution, Form, Precision
from trainpace.forecast.cards import CardConstants, measured_cards
from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.intervals import Spread, class_spread
from trainpace.forecast.kernels import KernelTable, KernelTimes, host_us
from trainpace.forecast.rates import sustained_rates
from trainpace.forecast.timings import Interpolator, MachineModel, machine_spread, machine_times, step_factor
from trainpace.hardware import Cluster, Device
from trainpace.outcome import Provenance
from trainpace.workload import Floats, Operators, form_of

HOST_SHARPNESS = 6.0
"""Exponent of the smooth maximum of host and device: where they are close, each sometimes waits for the other."""


class Sharding(NamedTuple):
    """What decides which operators a rank runs."""

    form: Form
    tp: int
    cp: int
    sequence_parallel: bool


class KernelKey(NamedTuple):
    """What decides the times of a rank's operators, besides the device and its kernel model."""

    sharding: Sharding
    precision: Precision
    channels_last: bool
    compiled: bool


def kernel_key(e: Execution) -> KernelKey:
    sharding = Sharding(form_of(e.precision), e.tp, e.cp, e.sequence_parallel and e.tp > 1)
    return KernelKey(sharding, e.precision, e.channels_last, e.compile)


class RankTimes(NamedTuple):
    """Kernel times of one rank (batches x rows), the host's milliseconds of every row and outside of the phases, and
    the standard deviation of the logarithm of each time, 0 where the spread of a class of runs stands for all rows."""

    times: KernelTimes
    host_ms: Floats
    start_ms: float
    log_sd: Floats

    def at(self, rows: NDArray[np.intp]) -> RankTimes:
        """Some of the batches."""
        times = KernelTimes(*(seconds[rows] for seconds in self.times))
        return self._replace(times=times, log_sd=self.log_sd[rows])


def together_ms(device_ms: Floats, host_ms: Floats) -> Floats:
    """The later of host and device: the host launches ahead, so a phase of many small kernels takes as long as launching them."""
    p = HOST_SHARPNESS
    return (device_ms**p + host_ms**p) ** (1 / p)


def fitted_host_us(operators: Operators, c: KernelConstants) -> Floats:
    """The host's time for every row, all of its operators together, in microseconds, by the fitted constants."""
    launch_us = np.where(np.asarray(operators.phase) == "optimizer", c.host_optimizer_us, c.host_launch_us)
    return host_us(operators, launch_us, c.host_view_us, c.host_module_us)


class KernelModel(ABC):
    """The times of the operators of one rank. Frozen, and safe to share between threads."""

    provenance: Provenance

    @property
    @abstractmethod
    def traces_cpu(self) -> bool:
        """Whether workloads have to be traced as torch runs them on a CPU (`Variant.cpu`)."""

    @abstractmethod
    def rank_times(self, table: KernelTable, batches: Floats, device: Device, key: KernelKey) -> RankTimes | str:
        """Times of every row at some micro-batch sizes, or the reason why there are none."""

    @abstractmethod
    def spread(self, run_class: str, device: Device, device_s: Floats, log_sd: Floats) -> Spread:
        """The spread of a forecast whose rows take `device_s` (rows); `run_class` names what decides its time."""


class FittedKernels(KernelModel):
    """The kernel model of GPUs with constants that fit all of them, and those of cards whose kernels were measured; the
    package's where none are given.

    `host_factor` is how much slower than a common host this one launches kernels.
    """

    provenance: Provenance = "fitted"
    traces_cpu = False

    def __init__(
        self, constants: KernelConstants | None = None, host_factor: float = 1.0, cards: CardConstants | None = None
    ) -> None:
        self._constants, self.host_factor, self._cards = constants, host_factor, cards

    @property
    def constants(self) -> KernelConstants:
        return self._constants or fitted_constants()

    def rank_times(self, table: KernelTable, batches: Floats, device: Device, key: KernelKey) -> RankTimes | str:
        if device.kind == "cpu":
            return f"{device.name} is a CPU: it has to be calibrated before it can be forecast."
        cards = measured_cards() if self._cards is None else self._cards
        c, operators = cards.of(self.constants, device), table.operators
        rates = sustained_rates(device, key.precision, bool((~operators.half).any()), bool(operators.half.any()), c)
        if isinstance(rates, str):
            return rates
        times = table.times(batches[:, None], rates, c, key.channels_last, key.compiled)
        factor = self.host_factor * (c.compile_host if key.compiled else 1.0)
        host_ms = fitted_host_us(operators, c) * 1e-3 * factor
        times = KernelTimes(*np.broadcast_arrays(*times))
        return RankTimes(times, host_ms, c.host_step_us * 1e-3 * factor, np.zeros(times.device_s.shape))

    def spread(self, run_class: str, device: Device, device_s: Floats, log_sd: Floats) -> Spread:
        return class_spread(run_class, device)


class CalibratedKernels(KernelModel):
    """The kernel model of one machine, from its own micro-benchmarks."""

    provenance: Provenance = "calibrated"
    traces_cpu = True

    def __init__(self, machine: MachineModel) -> None:
        self.machine = machine

    @cached_property
    def _interpolator(self) -> Interpolator:
        return Interpolator(self.machine.timings, self.machine.form)

    def rank_times(self, table: KernelTable, batches: Floats, device: Device, key: KernelKey) -> RankTimes | str:
        operators, machine = table.operators, self.machine
        if bool((operators.half & (operators.launches > 0)).any()) and not bool(machine.timings.half.any()):
            return f"{device.name} has been calibrated in fp32 only."
        predicted = [machine_times(operators, int(batch), machine, self._interpolator) for batch in batches]
        factor = step_factor(machine)
        stacked = [np.stack([np.broadcast_to(t[i], (len(operators),)) for t, _ in predicted]) for i in range(4)]
        times = KernelTimes(stacked[0] * factor, *stacked[1:])
        works_us = machine.host_us_per_operator, machine.host_us_per_view, machine.host_us_per_module
        host_ms = host_us(operators, *works_us) * 1e-3 * factor
        return RankTimes(times, host_ms, 0.0, np.stack([log_sd for _, log_sd in predicted]))

    def spread(self, run_class: str, device: Device, device_s: Floats, log_sd: Floats) -> Spread:
        return machine_spread(self.machine, device_s, log_sd)


FITTED = FittedKernels()
"""The package's own constants, on a common host."""


class Target(NamedTuple):
    """A cluster with the kernel model that answers for its devices.

    `host_copy_gb_per_s` is the rate at which micro-batches are copied to the device where nothing hides it; infinite: hidden.
    """

    cluster: Cluster
    kernels: KernelModel = FITTED
    host_copy_gb_per_s: float = math.inf
