"""NVIDIA GPUs as the driver describes them through NVML (nvidia-ml-py).

A figure that the driver does not give is None. UUIDs, serial numbers and bus addresses are not kept.
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
"""nvml.h, nvmlClocksEventReason*; bit 0 (idle) and 8 (display clocks) limit nothing."""


class Gpu(Record):
    """One GPU now. Clocks are of the moment and low when idle; `performance_state` 0 is the fastest, 8 an idle one.

    `pcie_*_max`: what this GPU in this slot can do. `throttled_by`: why its clocks are held down. `mig_instances`: names of
    its MIG slices. `other_processes`: programs other than this one that compute on it (in a container this one
    counts too, once it has begun: its number outside is another).
    """

    name: str | None
    driver: str | None = None
    cuda: str | None = None
    memory_gib: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    sm_mhz: float | None = None
    sm_mhz_max: float | None = None
    memory_mhz: float | None = None
    memory_mhz_max: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    power_limit_max_w: float | None = None
    compute_capability: str | None = None
    mig: bool | None = None
    mig_instances: tuple[str, ...] = ()
    ecc: bool | None = None
    persistence: bool | None = None
    temperature_c: float | None = None
    performance_state: int | None = None
    throttled_by: tuple[str, ...] = ()
    other_processes: int | None = None


_QUERIES = {
    "name": "Name",
    "pcie_generation": "CurrPcieLinkGeneration",
    "pcie_generation_max": "MaxPcieLinkGeneration",
    "pcie_width": "CurrPcieLinkWidth",
    "pcie_width_max": "MaxPcieLinkWidth",
}
"""Fields of `Gpu` that are NVML's answer as it is, to nvmlDeviceGet..."""
_CLOCKS = {"sm_mhz": "NVML_CLOCK_SM", "memory_mhz": "NVML_CLOCK_MEM"}
_WATTS = {
    "power_limit_w": "PowerManagementLimit",
    "power_limit_default_w": "PowerManagementDefaultLimit",
}
_SWITCHES = {"mig": "MigMode", "ecc": "EccMode", "persistence": "PersistenceMode"}


def detect_gpus(nvml: Any = None) -> tuple[tuple[Gpu, ...], str | None]:
    """All NVIDIA GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says, and why the driver does not tell of all of them.

    There is no problem where there is no driver. `nvml` is the pynvml module, imported here if not given.
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
            except nvml.NVMLError as error:  # a GPU that has failed, or that this user may not see
                problem = f"GPU {index}: {error}"
    except nvml.NVMLError as error:
        problem = str(error)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return tuple(gpus), problem


def query(nvml: Any, name: str, *arguments: Any) -> Any:
    """The answer of nvmlNAME; None where this GPU, driver or user gets none, or the module does not know the name."""
    try:
        value = getattr(nvml, f"nvml{name}")(*arguments)
    except (AttributeError, nvml.NVMLError):
        return None
    return value.decode() if isinstance(value, bytes) else value  # modules before version 11.5


def watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


def reasons_of(nvml: Any, handle: Any) -> tuple[str, ...]:
    """Why the clocks of a GPU are held down now."""
    bits = query(nvml, "DeviceGetCurrentClocksEventReasons", handle)
    if bits is None:
        bits = query(nvml, "DeviceGetCurrentClocksThrottleReasons", handle)  # the older name
    return tuple(reason for bit, reason in THROTTLE_REASONS.items() if (bits or 0) & bit)


def _describe(nvml: Any, handle: Any) -> Gpu:
    def of_device(name: str, *arguments: Any) -> Any:
        return query(nvml, f"DeviceGet{name}", handle, *arguments)

    fields = {field: of_device(name) for field, name in _QUERIES.items()}
    fields |= {field: watts(of_device(name)) for field, name in _WATTS.items()}
    for field, clock in _CLOCKS.items():
        fields[field] = of_device("ClockInfo", getattr(nvml, clock))
        fields[f"{field}_max"] = of_device("MaxClockInfo", getattr(nvml, clock))
    for field, name in _SWITCHES.items():
        switch = of_device(name)
        fields[field] = (
            None
            if switch is None
            else bool(switch[0] if isinstance(switch, list | tuple) else switch)
        )
    version, memory, users = (
        query(nvml, "SystemGetCudaDriverVersion"),
        of_device("MemoryInfo"),
        of_device("ComputeRunningProcesses"),
    )
    capability, limits = (
        of_device("CudaComputeCapability"),
        of_device("PowerManagementLimitConstraints"),
    )
    slots = range(of_device("MaxMigDeviceCount") or 0) if fields["mig"] else ()
    slices = [part for i in slots if (part := of_device("MigDeviceHandleByIndex", i)) is not None]
    state = of_device("PerformanceState")
    return Gpu(
        **fields,
        driver=query(nvml, "SystemGetDriverVersion"),
        cuda=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
        memory_gib=None if memory is None else gib_from_bytes(memory.total),
        power_limit_max_w=None if limits is None else watts(limits[1]),
        compute_capability=None if capability is None else "{}.{}".format(*capability),
        mig_instances=tuple(
            str(query(nvml, "DeviceGetName", part) or "MIG").rpartition("MIG ")[2]
            for part in slices
        ),
        temperature_c=of_device("Temperature", nvml.NVML_TEMPERATURE_GPU),
        performance_state=state if state is not None and 0 <= state <= 15 else None,
        throttled_by=reasons_of(nvml, handle),
        other_processes=(
            None if users is None else len({user.pid for user in users} - {os.getpid()})
        ),
    )


SAMPLED_EVERY_S = 0.05
"""Cards refresh their sensors every 20 to 100 ms (Yang et al. 2024, "Part-time Power Measurements: nvidia-smi's Lack of
Attention")."""
LEAST_ENERGY_S = 0.4
"""A shorter time holds too few refreshes of the energy counter, and of the power, to divide it by steps."""


class GpuMonitor:
    """Within its context the GPU is sampled; afterwards `run_of` says how it ran. Without NVML, or for a device that NVML does
    not know, it samples nothing and says nothing."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self._nvml, self._handle = _handle_of(uuid, nvml)
        self._mhz: list[float] = []
        self._watts: list[float] = []
        self._reasons: dict[str, None] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seconds = 0.0
        self._before_mhz = self._clock()

    def __enter__(self) -> Self:
        self._energy_mj = self._ask("TotalEnergyConsumption")
        self._start = time.perf_counter()
        if self._handle is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._seconds = time.perf_counter() - self._start
        after_mj = self._ask("TotalEnergyConsumption")
        self._energy_j = (
            None if None in (self._energy_mj, after_mj) else (after_mj - self._energy_mj) / 1e3
        )
        self._after_mhz = self._clock()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def run_of(self, steps: int, run: DeviceRun) -> DeviceRun:
        """`run` with what was seen during so many steps."""
        if self._handle is None:
            return run
        mhz = self._mhz or [clock for clock in (self._after_mhz,) if clock is not None]
        power_w = statistics.fmean(self._watts) if self._watts else None
        energy_j, source = None, ""
        if steps and self._seconds >= LEAST_ENERGY_S:
            if self._energy_j:
                energy_j, source = self._energy_j / steps, "counter"
            elif power_w is not None:
                energy_j, source = power_w * self._seconds / steps, "power"
        return replace(
            run,
            sm_mhz=statistics.median(mhz) if mhz else None,
            sm_mhz_low=min(mhz, default=None),
            sm_mhz_high=max(mhz, default=None),
            sm_mhz_before=self._before_mhz,
            sm_mhz_after=self._after_mhz,
            sm_mhz_max=self._ask("MaxClockInfo", self._sm()),
            held_by=tuple(self._reasons),
            power_w=power_w,
            energy_j=energy_j,
            energy_source=source,
        )

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLED_EVERY_S):
            clock, power_w = self._clock(), watts(self._ask("PowerUsage"))
            self._mhz += [] if clock is None else [clock]
            self._watts += [] if power_w is None else [power_w]
            self._reasons |= dict.fromkeys(reasons_of(self._nvml, self._handle))

    def _sm(self) -> Any:
        return None if self._nvml is None else self._nvml.NVML_CLOCK_SM

    def _clock(self) -> float | None:
        clock: float | None = self._ask("ClockInfo", self._sm())
        return clock

    def _ask(self, name: str, *arguments: Any) -> Any:
        return (
            None
            if self._handle is None
            else query(self._nvml, f"DeviceGet{name}", self._handle, *arguments)
        )


def _handle_of(uuid: str, nvml: Any) -> tuple[Any, Any]:
    """(the module, NVML's handle of the GPU or MIG slice); None for both where there is none, without a word."""
    if not uuid:
        return None, None
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return None, None
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None, None
    handles = (query(nvml, "DeviceGetHandleByUUID", f"{kind}-{uuid}") for kind in ("GPU", "MIG"))
    handle = next((handle for handle in handles if handle is not None), None)
    return (None, None) if handle is None else (nvml, handle)


FULL_CLOCK = 0.9
"""Of the highest clock. Under load cards stay a few steps of 15 MHz below it; from here on something holds them."""
STEADY_CLOCK = 0.03
"""The spread of the clock during the steps, relative, from which on the steps are not alike."""
BUSY = 0.9


def clock_in_words(run: DeviceRun) -> str:
    """One sentence on clocks that were held down, locked or drifting; "" where there is nothing to say."""
    if run.sm_mhz is None:
        return ""
    low, high = run.sm_mhz_low or run.sm_mhz, run.sm_mhz_high or run.sm_mhz
    moved = high - low > STEADY_CLOCK * run.sm_mhz
    of_most = f" of {run.sm_mhz_max:,.0f}" if run.sm_mhz_max is not None else ""
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
            f"The clock moved between {low:,.0f} and {high:,.0f} MHz during the steps, so that they"
            " are not all alike."
        )
    return ""


def run_in_words(run: DeviceRun) -> list[str]:
    """Whatever is worth a sentence, the most disturbing first."""
    said = [clock_in_words(run)]
    if run.settled is False:
        said.append(
            "The steps' time had not settled when the warm-up ended: --seconds 10s gives it longer."
        )
    if run.busy_share is not None and run.busy_share < BUSY:
        launch = (
            "" if run.launch_ms is None else f", which needs {run.launch_ms:.3g} ms to launch it"
        )
        said.append(
            f"The device works in {100 * run.busy_share:.0f} % of the step and waits in the rest"
            f" for the host{launch}."
        )
    if run.power_w is not None:
        energy = "" if run.energy_j is None else f", {run.energy_j:.3g} J a step"
        said.append(f"The card drew {run.power_w:.0f} W{energy}.")
    return [sentence for sentence in said if sentence]
