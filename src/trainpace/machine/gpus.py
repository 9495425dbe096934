"""NVIDIA GPUs as the driver describes them through NVML (nvidia-ml-py).

A figure that the driver does not give is None. UUIDs, serial numbers and bus addresses are not kept.
"""

import contextlib
import os
from typing import Any, NamedTuple

from trainpace.records import Record
from trainpace.units import gib_from_bytes

THROTTLE_REASONS = {
    0x0000000000000002: "its application clocks are set",
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


class Gpus(NamedTuple):
    """The GPUs of a machine; `problem`: why the driver does not tell of all of them, None where there is no driver."""

    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None


def detect_gpus(nvml: Any = None) -> Gpus:
    """All NVIDIA GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says. `nvml` is the pynvml module, imported here if not
    given."""
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return Gpus()
    except nvml.NVMLError as error:
        return Gpus(problem=str(error))
    try:
        return _all_gpus(nvml)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _all_gpus(nvml: Any) -> Gpus:
    query = _Query(nvml)
    driver, version = query("SystemGetDriverVersion"), query("SystemGetCudaDriverVersion")
    cuda = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
    gpus, problem = [], None
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return Gpus(problem=str(error))
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:  # a GPU that has failed, or that this user may not see
            problem = f"GPU {index}: {error}"
            continue
        gpus.append(_describe(nvml, query, handle, driver, cuda))
    return Gpus(tuple(gpus), problem)


class _Query:
    """Calls nvmlNAME; None where this GPU, driver or user gets no answer, or the module does not know the name."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def __call__(self, name: str, *arguments: Any) -> Any:
        try:
            value = getattr(self._nvml, f"nvml{name}")(*arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None
        return value.decode() if isinstance(value, bytes) else value  # modules before version 11.5


def _describe(nvml: Any, query: _Query, handle: Any, driver: str | None, cuda: str | None) -> Gpu:
    def of(name: str, *arguments: Any) -> Any:
        return query(f"DeviceGet{name}", handle, *arguments)

    def watts(value: float | None) -> float | None:
        return None if value is None else value / 1e3

    def switch(value: Any) -> bool | None:
        return None if value is None else bool(value[0] if isinstance(value, list | tuple) else value)

    memory, capability, limits = of("MemoryInfo"), of("CudaComputeCapability"), of("PowerManagementLimitConstraints")
    reasons = of("CurrentClocksEventReasons")
    if reasons is None:
        reasons = of("CurrentClocksThrottleReasons")  # the older name
    users = of("ComputeRunningProcesses")
    mig = switch(of("MigMode"))
    slices = [of("MigDeviceHandleByIndex", i) for i in range(of("MaxMigDeviceCount") or 0)] if mig else []
    names = [str(query("DeviceGetName", part) or "MIG") for part in slices if part is not None]
    state = of("PerformanceState")
    return Gpu(
        name=of("Name"),
        driver=driver,
        cuda=cuda,
        memory_gib=None if memory is None else gib_from_bytes(memory.total),
        pcie_generation=of("CurrPcieLinkGeneration"),
        pcie_generation_max=of("MaxPcieLinkGeneration"),
        pcie_width=of("CurrPcieLinkWidth"),
        pcie_width_max=of("MaxPcieLinkWidth"),
        sm_mhz=of("ClockInfo", nvml.NVML_CLOCK_SM),
        sm_mhz_max=of("MaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_mhz=of("ClockInfo", nvml.NVML_CLOCK_MEM),
        memory_mhz_max=of("MaxClockInfo", nvml.NVML_CLOCK_MEM),
        power_limit_w=watts(of("PowerManagementLimit")),
        power_limit_default_w=watts(of("PowerManagementDefaultLimit")),
        power_limit_max_w=None if limits is None else watts(limits[1]),
        compute_capability=None if capability is None else "{}.{}".format(*capability),
        mig=mig,
        mig_instances=tuple(name.rpartition("MIG ")[2] for name in names),
        ecc=switch(of("EccMode")),
        persistence=switch(of("PersistenceMode")),
        temperature_c=of("Temperature", nvml.NVML_TEMPERATURE_GPU),
        performance_state=state if state is not None and 0 <= state <= 15 else None,
        throttled_by=tuple(reason for bit, reason in THROTTLE_REASONS.items() if (reasons or 0) & bit),
        other_processes=None if users is None else len({user.pid for user in users} - {os.getpid()}),
    )
