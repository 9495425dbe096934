"""NVIDIA GPUs through NVML (nvidia-ml-py).

The module describes GPUs, and monitors the clock, power and energy of one during a measurement.
Values that the driver does not report are None. For privacy, records do not contain UUIDs, serial
numbers or bus addresses.
"""

import contextlib
import os
import statistics
import threading
import time
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from trainpace.core.outcome import DeviceRun
from trainpace.core.records import Record
from trainpace.core.units import gib_from_bytes

THROTTLE_REASONS = {
    0x0000000000000002: "the application clocks that are set",
    0x0000000000000004: "its power limit",
    0x0000000000000008: "the hardware's slowdown",
    0x0000000000000010: "a sync boost group",
    0x0000000000000020: "its temperature",
    0x0000000000000040: "its temperature (hardware)",
    0x0000000000000080: "the power supply's brake",
}
"""Reasons of a low clock by bit of nvmlClocksEventReason* (nvml.h).

Bits 0 (idle) and 8 (display clocks) are not in the table, since they do not limit training.
"""
SAMPLED_EVERY_S = 0.05
"""Interval between samples of the sensors, in seconds.

Cards refresh their sensors every 20 to 100 ms (Yang et al. 2024, "Part-time Power Measurements:
nvidia-smi's Lack of Attention").
"""
LEAST_ENERGY_S = 0.4
"""Minimum duration of an energy measurement, in seconds.

During a shorter time, the counter and the power sensor refresh too rarely.
"""
FULL_CLOCK = 0.9
"""Share of the highest clock below which something limits the clock.

Under load, the clock normally stays a few steps of 15 MHz below the highest.
"""
STEADY_CLOCK = 0.03
"""Relative spread of the clock above which step times are not comparable."""
BUSY = 0.9


class Gpu(Record):
    """Current state of one GPU.

    `performance_state` 0 is the fastest and 8 is idle.

    Attributes:
        pcie_generation_max: PCIe generation that this GPU supports in this slot.
        pcie_width_max: Number of PCIe lanes that this GPU supports in this slot.
        throttled_by: Reasons why the clocks are held down.
        other_processes: Number of other programs that compute on this GPU. In a container, this
            process is counted as well once it computes, because its process id differs outside.
    """

    name: str | None
    driver: str | None = None
    cuda: str | None = None
    memory_gib: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    mig: bool | None = None
    performance_state: int | None = None
    throttled_by: tuple[str, ...] = ()
    other_processes: int | None = None


def detect_gpus(nvml: Any = None) -> tuple[tuple[Gpu, ...], str | None]:
    """Detect all NVIDIA GPUs, regardless of CUDA_VISIBLE_DEVICES.

    Args:
        nvml: The pynvml module. By default, it is imported.

    Returns:
        The GPUs, and the reason if the driver does not show all of them. The reason is None on a
        machine without a driver.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return (), None
    except nvml.NVMLError as error:
        return (), str(error)
    gpus, problem = [], None
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_describe(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
            except nvml.NVMLError as error:  # the GPU failed, or this user may not see it
                problem = f"GPU {index}: {error}"
    except nvml.NVMLError as error:
        problem = str(error)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return tuple(gpus), problem


def query(nvml: Any, name: str, *arguments: Any) -> Any:
    """Call the function nvml<name> of NVML.

    Returns None if this GPU, driver or module does not support it, or if the user may not call it.
    """
    try:
        return getattr(nvml, f"nvml{name}")(*arguments)
    except (AttributeError, nvml.NVMLError):
        return None


def _watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


def _reasons(nvml: Any, handle: Any) -> tuple[str, ...]:
    """Return the reasons why a GPU is currently throttled."""
    bits = query(nvml, "DeviceGetCurrentClocksEventReasons", handle)
    if bits is None:
        bits = query(nvml, "DeviceGetCurrentClocksThrottleReasons", handle)  # the older name
    return tuple(reason for bit, reason in THROTTLE_REASONS.items() if (bits or 0) & bit)


def _describe(nvml: Any, handle: Any) -> Gpu:
    def get(name: str, *arguments: Any) -> Any:
        return query(nvml, f"DeviceGet{name}", handle, *arguments)

    version = query(nvml, "SystemGetCudaDriverVersion")
    memory, users = get("MemoryInfo"), get("ComputeRunningProcesses")
    mig, state = get("MigMode"), get("PerformanceState")  # MigMode is (current, pending)
    return Gpu(
        name=get("Name"),
        driver=query(nvml, "SystemGetDriverVersion"),
        cuda=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
        memory_gib=None if memory is None else gib_from_bytes(memory.total),
        pcie_generation=get("CurrPcieLinkGeneration"),
        pcie_generation_max=get("MaxPcieLinkGeneration"),
        pcie_width=get("CurrPcieLinkWidth"),
        pcie_width_max=get("MaxPcieLinkWidth"),
        power_limit_w=_watts(get("PowerManagementLimit")),
        power_limit_default_w=_watts(get("PowerManagementDefaultLimit")),
        mig=None if mig is None else bool(mig[0]),
        performance_state=state if state is not None and 0 <= state <= 15 else None,
        throttled_by=_reasons(nvml, handle),
        other_processes=None if users is None else len({u.pid for u in users} - {os.getpid()}),
    )


class GpuMonitor:
    """Context manager that samples a GPU. Afterwards, `run_of` returns how the GPU ran.

    It samples nothing if NVML is missing or does not know the device.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self._nvml, self._handle = _handle_of(uuid, nvml)
        self._mhz: list[float] = []
        self._watts: list[float] = []
        self._reasons: dict[str, None] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._before_mhz = self._clock()

    def __enter__(self) -> Self:
        self._energy_mj = self._get("TotalEnergyConsumption")
        self._start = time.perf_counter()
        if self._handle is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._seconds = time.perf_counter() - self._start
        after_mj = self._get("TotalEnergyConsumption")
        known = None not in (self._energy_mj, after_mj)
        self._counted_j = (after_mj - self._energy_mj) / 1e3 if known else 0.0
        self._after_mhz = self._clock()
        self._stop.set()
        if self._handle is not None:
            self._thread.join()

    def run_of(self, steps: int, run: DeviceRun) -> DeviceRun:
        """Return `run` with the clock, power and energy that were sampled during these steps."""
        if self._handle is None:
            return run
        mhz = self._mhz or ([] if self._after_mhz is None else [self._after_mhz])
        power_w = statistics.fmean(self._watts) if self._watts else None
        energy_j, source = self._energy(power_w)
        known = bool(energy_j and steps and self._seconds >= LEAST_ENERGY_S)
        return replace(
            run,
            sm_mhz=statistics.median(mhz) if mhz else None,
            sm_mhz_low=min(mhz, default=None),
            sm_mhz_high=max(mhz, default=None),
            sm_mhz_before=self._before_mhz,
            sm_mhz_after=self._after_mhz,
            sm_mhz_max=self._get("MaxClockInfo", self._nvml.NVML_CLOCK_SM),
            held_by=tuple(self._reasons),
            power_w=power_w,
            energy_j=energy_j / steps if known else None,
            energy_source=source if known else "",
        )

    def _energy(self, power_w: float | None) -> tuple[float, str]:
        """Return the energy in joules and its source.

        The source is the card's counter if it has one, and the sampled power otherwise.
        """
        if self._counted_j or power_w is None:
            return self._counted_j, "counter"
        return power_w * self._seconds, "power"

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLED_EVERY_S):
            for values, value in (
                (self._mhz, self._clock()),
                (self._watts, _watts(self._get("PowerUsage"))),
            ):
                if value is not None:
                    values.append(value)
            self._reasons |= dict.fromkeys(_reasons(self._nvml, self._handle))

    def _clock(self) -> float | None:
        mhz: float | None = self._get("ClockInfo", getattr(self._nvml, "NVML_CLOCK_SM", None))
        return mhz

    def _get(self, name: str, *arguments: Any) -> Any:
        known = self._handle is not None
        return query(self._nvml, f"DeviceGet{name}", self._handle, *arguments) if known else None


def _handle_of(uuid: str, nvml: Any) -> tuple[Any, Any]:
    """Return (pynvml module, handle of the GPU or MIG slice), or (None, None) if unavailable."""
    if not uuid:
        return None, None
    if nvml is None:
        import pynvml

        nvml = pynvml
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for kind in ("GPU", "MIG"):
            handle = query(nvml, "DeviceGetHandleByUUID", f"{kind}-{uuid}")
            if handle is not None:
                return nvml, handle
    return None, None


def clock_in_words(run: DeviceRun) -> str:
    """Describe a clock that was held down, locked or drifting.

    Returns an empty string for a normal clock.
    """
    if run.sm_mhz is None:
        return ""
    low, high = run.sm_mhz_low or run.sm_mhz, run.sm_mhz_high or run.sm_mhz
    moved = high - low > STEADY_CLOCK * run.sm_mhz
    of_most = "" if run.sm_mhz_max is None else f" of {run.sm_mhz_max:,.0f}"
    between = f", moving between {low:,.0f} and {high:,.0f}" if moved else ""
    if run.held_by:
        return (
            f"The clock was held down by {' and '.join(run.held_by)}: {run.sm_mhz:,.0f}"
            f" MHz{of_most}{between}."
        )
    if run.sm_mhz_max is not None and run.sm_mhz < FULL_CLOCK * run.sm_mhz_max:
        return (
            f"The clock ran at {run.sm_mhz:,.0f} MHz{of_most}{between}, and the driver gives no"
            " reason: it may be locked (nvidia-smi --reset-gpu-clocks)."
        )
    if moved:
        return (
            f"The clock moved between {low:,.0f} and {high:,.0f} MHz during the steps, so they are"
            " not all alike."
        )
    return ""


def run_in_words(run: DeviceRun) -> list[str]:
    """Describe how a device ran during a measurement, the most disturbing fact first."""
    lines = [clock_in_words(run)]
    if run.settled is False:
        lines.append(
            "The step time had not settled when the warm-up ended: --seconds 10s gives it longer."
        )
    if run.busy_share is not None and run.busy_share < BUSY:
        launch = (
            "" if run.launch_ms is None else f", which needs {run.launch_ms:.3g} ms to launch it"
        )
        lines.append(
            f"The device works in {100 * run.busy_share:.0f}% of the step and waits for the host in"
            f" the rest{launch}."
        )
    if run.power_w is not None:
        energy = "" if run.energy_j is None else f", {run.energy_j:.3g} J per step"
        lines.append(f"The card drew {run.power_w:.0f} W{energy}.")
    return [line for line in lines if line]
