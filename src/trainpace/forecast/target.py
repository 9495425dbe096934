"""What a forecast is made for: a cluster, and the kernel model that answers for its devices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.execution import Execution, Form, Precision
from trainpace.core.hardware import Cluster, Device, typical_host
from trainpace.core.outcome import Provenance
from trainpace.core.software import TODAY, Software
from trainpace.forecast.attention import implementation_on
from trainpace.forecast.cards import CardConstants, measured_cards
from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.cuts import Cut
from trainpace.forecast.fusion import Fused
from trainpace.forecast.intervals import Spread, composed_spread
from trainpace.forecast.kernels import KernelTable, KernelTimes, host_us
from trainpace.forecast.product_model import ProductModel
from trainpace.forecast.rates import Rates, sustained_rates
from trainpace.forecast.timings import (
    Interpolator,
    MachineModel,
    machine_spread,
    machine_times,
    step_factor,
)
from trainpace.workload import MATRIX_KINDS, Flags, Floats, Operators, form_of

HOST_SHARPNESS = 6.0
"""Exponent of the smooth maximum of host and device: where they are close, each sometimes waits for the other."""
LIBRARY_KINDS = (*MATRIX_KINDS, "norm")
"""Kinds whose calls choose an algorithm of cuBLAS, cuDNN or torch, make several tensors, and keep what the backward pass needs.
Of steps that hung on the lent H100's host a convolution's forward call took 132 microseconds, a product's 129, a normalisation's
99, all others 10 to 23 (n 51; fitting/data)."""
REFERENCE_POINTS = 2750.0
"""PassMark single-thread points of the host that the constants stand for: a desktop of 2017 to 2019 (a Core i7-8700K has 2,750).
Most fitted runs that hang on their host are of cards in such desktops (RTX 2080 Ti, GTX 1080 Ti, Titan V), whose sources do not
name the CPU."""


class Sharding(NamedTuple):
    """What decides which operators a rank runs."""

    form: Form
    tp: int
    cp: int
    sequence_parallel: bool
    ep: int = 1
    expert_tp: int = 1
    expert_load: float = 1.0


class KernelKey(NamedTuple):
    """What decides the times of a rank's operators, besides the device and its kernel model."""

    sharding: Sharding
    precision: Precision
    channels_last: bool
    compiled: bool
    software: Software


def kernel_key(e: Execution, software: Software) -> KernelKey:
    experts = e.ep, e.expert_tp or e.tp, e.expert_load
    sharding = Sharding(
        form_of(e.precision), e.tp, e.cp, e.sequence_parallel and e.tp > 1, *experts
    )
    return KernelKey(sharding, e.precision, e.channels_last, e.compile, software)


class RankTimes(NamedTuple):
    """Kernel times of one rank (batches x rows), the host's milliseconds of every row and outside of the phases, and
    the standard deviation of the logarithm of each time, 0 where the spread of a class of runs stands for all rows.
    """

    times: KernelTimes
    host_ms: Floats
    start_ms: float
    log_sd: Floats

    def at(self, rows: NDArray[np.intp]) -> RankTimes:
        """Some of the batches."""
        times = KernelTimes(*(seconds[rows] for seconds in self.times))
        return self._replace(times=times, log_sd=self.log_sd[rows])

    def hosted(self, factor: float) -> RankTimes:
        """The same with a host that takes `factor` times as long."""
        return self._replace(host_ms=self.host_ms * factor, start_ms=self.start_ms * factor)


def together_ms(device_ms: Floats, host_ms: Floats) -> Floats:
    """The later of host and device: the host launches ahead, so a phase of many small kernels takes as long as launching them."""
    p = HOST_SHARPNESS
    return (device_ms**p + host_ms**p) ** (1 / p)


def host_sensitivity(parts: Mapping[str, Floats], step_ms: Floats) -> Floats:
    """By how many per cent steps grow where their host takes one per cent longer, from 0 to 1.

    With `together_ms` a phase of device time d takes t, and d ln t / d ln host = 1 - (d / t)^p. The phases are taken as one.
    """
    computing = parts["forward_ms"] + parts["backward_ms"] + parts["optimizer_ms"]
    together = computing + parts["host_overhead_ms"]
    some, steps = (np.where(together > 0, ms, 1.0) for ms in (together, step_ms))
    return np.where(
        together > 0, (1 - (computing / some) ** HOST_SHARPNESS) * together / steps, 0.0
    )


def fitted_host_us(
    operators: Operators,
    c: KernelConstants,
    fused: Fused | None = None,
    compiled: Flags | bool = True,
) -> Floats:
    """The host's time for every row, all of its operators together, in microseconds, by the fitted constants.

    `fused`: what torch.compile leaves of the rows that are `compiled`: its wrapper enters no modules, makes no views, and
    launches what is left in `compile_host` times the time. The optimizer's update is not compiled.
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
    """The constants under today's torch.compile, or under that of torch before 2.2."""
    if not is_old:
        return c
    return replace(
        c,
        compile_traffic=c.compile_traffic * c.compile_old_traffic,
        compile_host=c.compile_host * c.compile_old_host,
    )


def software_host_factor(software: Software, c: KernelConstants) -> float:
    """How much slower than today's torch a software launches."""
    return float(getattr(c, software.slow_host)) if software.slow_host else 1.0


class KernelModel(ABC):
    """The times of the operators of one rank. Frozen, and safe to share between threads."""

    provenance: Provenance

    @property
    @abstractmethod
    def traces_cpu(self) -> bool:
        """Whether workloads have to be traced as torch runs them on a CPU (`Variant.cpu`)."""

    @abstractmethod
    def rank_times(
        self, table: KernelTable, batches: Floats, device: Device, key: KernelKey
    ) -> RankTimes | str:
        """Times of every row at some micro-batch sizes, or the reason why there are none."""

    def cut(
        self, table: KernelTable, batches: Floats, device: Device, key: KernelKey
    ) -> Cut | None:
        """How the work of every row is cut at some micro-batch sizes (batches x rows); None where that is not modelled."""
        return None

    @abstractmethod
    def spread(self, shares: Floats, device: Device, device_s: Floats, log_sd: Floats) -> Spread:
        """The spread of a forecast whose rows take `device_s` (rows); `shares` says what the step is made of."""


class FittedKernels(KernelModel):
    """The kernel model of GPUs with constants that fit all of them, and those of cards whose kernels were measured; the
    package's where none are given.

    `host_factor` is how much slower than its CPU and its software say a host launches kernels.
    """

    provenance: Provenance = "fitted"
    traces_cpu = False

    def __init__(
        self,
        constants: KernelConstants | None = None,
        host_factor: float = 1.0,
        products: ProductModel | None = None,
        cards: CardConstants | None = None,
    ) -> None:
        self._constants, self.host_factor, self._products, self._cards = (
            constants,
            host_factor,
            products,
            cards,
        )

    @property
    def constants(self) -> KernelConstants:
        return self._constants or fitted_constants()

    def rank_times(
        self, table: KernelTable, batches: Floats, device: Device, key: KernelKey
    ) -> RankTimes | str:
        if device.kind == "cpu":
            return f"{device.name} is a CPU: it has to be calibrated before it can be forecast."
        c, rates, operators = *self._rates(table, device, key), table.operators
        if isinstance(rates, str):
            return rates
        at = batches[:, None]
        products = table.product_times(at, rates, self._products) if operators.half.any() else None
        times = table.times(at, rates, c, key.channels_last, key.compiled, products)
        factor = self.host_factor * software_host_factor(key.software, c)
        host_ms = (
            fitted_host_us(operators, c, table.fused if key.compiled else None) * 1e-3 * factor
        )
        times = KernelTimes(*np.broadcast_arrays(*times))
        return RankTimes(
            times, host_ms, c.host_step_us * 1e-3 * factor, np.zeros(times.device_s.shape)
        )

    def _rates(
        self, table: KernelTable, device: Device, key: KernelKey
    ) -> tuple[KernelConstants, Rates | str]:
        cards = measured_cards() if self._cards is None else self._cards
        c, half = (
            cards.of(with_inductor(self.constants, key.software.has_old_inductor), device),
            table.operators.half,
        )
        attention = (
            implementation_on(device, key.software.fused_attention) if table.has_attention else None
        )
        needs = bool((~half).any()), bool(half.any())
        return c, sustained_rates(device, key.precision, *needs, c, self._products, attention)

    def cut(
        self, table: KernelTable, batches: Floats, device: Device, key: KernelKey
    ) -> Cut | None:
        c, rates = self._rates(table, device, key)
        return (
            None
            if isinstance(rates, str)
            else table.cut(batches[:, None], rates, c, key.channels_last, key.compiled)
        )

    def spread(self, shares: Floats, device: Device, device_s: Floats, log_sd: Floats) -> Spread:
        return composed_spread(shares, device)


class CalibratedKernels(KernelModel):
    """The kernel model of one machine, from its own micro-benchmarks, which were made with its own software."""

    provenance: Provenance = "calibrated"
    traces_cpu = True

    def __init__(self, machine: MachineModel) -> None:
        self.machine = machine

    @cached_property
    def _interpolator(self) -> Interpolator:
        return Interpolator(self.machine.timings, self.machine.form)

    def rank_times(
        self, table: KernelTable, batches: Floats, device: Device, key: KernelKey
    ) -> RankTimes | str:
        operators, machine = table.operators, self.machine
        if bool((operators.half & (operators.launches > 0)).any()) and not bool(
            machine.timings.half.any()
        ):
            return f"{device.name} has been calibrated in fp32 only."
        predicted = [
            machine_times(operators, int(batch), machine, self._interpolator) for batch in batches
        ]
        factor = step_factor(machine)
        stacked = [
            np.stack([np.broadcast_to(t[i], (len(operators),)) for t, _ in predicted])
            for i in range(4)
        ]
        times = KernelTimes(stacked[0] * factor, *stacked[1:])
        works_us = (
            machine.host_us_per_operator,
            machine.host_us_per_view,
            machine.host_us_per_module,
        )
        host_ms = host_us(operators, *works_us) * 1e-3 * factor
        return RankTimes(times, host_ms, 0.0, np.stack([log_sd for _, log_sd in predicted]))

    def spread(self, shares: Floats, device: Device, device_s: Floats, log_sd: Floats) -> Spread:
        return machine_spread(self.machine, device_s, log_sd)


FITTED = FittedKernels()
"""The package's own constants."""


UNSAID_LOG_SD = 0.35
"""What a rating leaves unsaid of a host (virtual machine, clock under load, driver, memory): the standard deviation of the
logarithm of its time between five systems with torch of one time, ratings taken out (lambda's A100 and RTX 3090, ryujaehun's
GTX 1080 Ti, RTX 2080 Ti and Titan V). A sixth, lambda's RTX 2080 Ti, would make it 0.57."""


class LaunchingHost(NamedTuple):
    """The CPU that launches kernels: its name, its PassMark single-thread points, and the standard deviation of the logarithm of
    the time that it takes, larger where it is only typical of such cards."""

    name: str
    points: float
    log_sd: float


def host_of(cluster: Cluster) -> LaunchingHost:
    """A cluster's host, or a typical one of its cards where it names none."""
    if cluster.host is not None:
        return LaunchingHost(cluster.host.name, cluster.host.single_thread.value, UNSAID_LOG_SD)
    typical = typical_host(cluster.device)
    return LaunchingHost(typical.name, typical.points, math.hypot(typical.log_sd, UNSAID_LOG_SD))


class Target(NamedTuple):
    """A cluster with the kernel model that answers for its devices, and the software that runs on it.

    `host_copy_gb_per_s` is the rate at which micro-batches are copied to the device where nothing hides it; infinite: hidden.
    """

    cluster: Cluster
    kernels: KernelModel = FITTED
    host_copy_gb_per_s: float = math.inf
    software: Software = TODAY

    @property
    def host(self) -> LaunchingHost | None:
        """Whose launches are forecast; None on a machine that was calibrated with its own."""
        return host_of(self.cluster) if self.kernels.provenance == "fitted" else None

    @property
    def host_factor(self) -> float:
        """How many times as long the host takes as the one that the constants stand for."""
        return 1.0 if self.host is None else REFERENCE_POINTS / self.host.points
