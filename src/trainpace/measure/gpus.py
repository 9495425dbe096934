"""NVIDIA GPUs as the driver describes them through NVML (nvidia-ml-py).

A figure that the driver does not give is None. UUIDs, serial numbers and bus addresses are not kept.
"""

import contextlib
import os
from typing import Any

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
