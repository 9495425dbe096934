"""NVIDIA GPUs as the driver describes them: through NVML (nvidia-ml-py), else through the nvidia-smi program.

The two tell the same things; a figure that the driver does not give is None. UUIDs, serial numbers and bus addresses
are not kept.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
from typing import Any

from trainpace.records import Record
from trainpace.units import gib_from_bytes

SMI_TIMEOUT_S = 20.0

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


def detect_gpus(nvml: Any = None) -> tuple[Gpu, ...]:
    """All NVIDIA GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says; none where there is no driver to ask.

    `nvml` is the pynvml module, imported here if not given.
    """
    if nvml is None:
        with contextlib.suppress(ImportError):
            nvml = importlib.import_module("pynvml")
    found = () if nvml is None else _through_nvml(nvml)
    return found or _through_smi()


def _through_nvml(nvml: Any) -> tuple[Gpu, ...]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        ask = _Asker(nvml)
        driver, version = ask("SystemGetDriverVersion"), ask("SystemGetCudaDriverVersion")
        cuda = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
        handles = (ask("DeviceGetHandleByIndex", i) for i in range(ask("DeviceGetCount") or 0))
        return tuple(_nvml_gpu(nvml, ask, handle, driver, cuda) for handle in handles if handle is not None)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


class _Asker:
    """Calls nvmlNAME; None where this GPU, driver or module does not know it."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def __call__(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._nvml, f"nvml{name}", None)
        if function is None:
            return None
        try:
            value = function(*arguments)
        except self._nvml.NVMLError:
            return None
        return value.decode() if isinstance(value, bytes) else value  # modules before version 11.5


def _nvml_gpu(nvml: Any, ask: _Asker, handle: Any, driver: str | None, cuda: str | None) -> Gpu:
    def of(name: str, *arguments: Any) -> Any:
        return ask(f"DeviceGet{name}", handle, *arguments)

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
    names = [str(ask("DeviceGetName", part) or "MIG") for part in slices if part is not None]
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
        throttled_by=_reasons(reasons),
        other_processes=None if users is None else len({user.pid for user in users} - {os.getpid()}),
    )


_SMI_FIELDS = (
    "pci.bus_id", "name", "driver_version", "memory.total", "pcie.link.gen.current", "pcie.link.gen.max",
    "pcie.link.width.current", "pcie.link.width.max", "clocks.current.sm", "clocks.max.sm", "clocks.current.memory",
    "clocks.max.memory", "power.limit", "power.default_limit", "power.max_limit", "compute_cap", "mig.mode.current",
    "ecc.mode.current", "persistence_mode", "temperature.gpu", "pstate", "clocks_throttle_reasons.active",
)  # fmt: skip
_NEWER_NAMES = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}


def _through_smi() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    fields = list(_SMI_FIELDS)
    out = _run(program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if out is None:  # one name that this release does not know fails the whole question
        fields = [_NEWER_NAMES.get(field, field) for field in fields]
        out = _run(program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if out is None:
        fields = [field for field in _SMI_FIELDS if field not in ("compute_cap", *_NEWER_NAMES)]
        out = _run(program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits") or ""
    told = re.search(r"CUDA (?:\w+ )?Version\s*:\s*(\d+\.\d+)", _run(program) or "")
    users = _run(program, "--query-compute-apps=gpu_bus_id,pid", "--format=csv,noheader,nounits")
    rows = [[value.strip() for value in line.split(",")] for line in out.splitlines()]
    slices = _smi_slices(program) if any("Enabled" in row for row in rows) else []
    gpus = []
    for i, row in enumerate(rows):
        if len(row) == len(_SMI_FIELDS) or len(row) == len(fields):
            values = {_OLDER_NAMES.get(f, f): v for f, v in zip(fields, row, strict=True) if not _is_unknown(v)}
            gpus.append(_smi_gpu(values, told.group(1) if told else None, users, slices[i] if i < len(slices) else ()))
    return tuple(gpus)


_OLDER_NAMES = {new: old for old, new in _NEWER_NAMES.items()}


def _smi_gpu(values: dict[str, str], cuda: str | None, users: str | None, slices: tuple[str, ...]) -> Gpu:
    def number(name: str) -> float | None:
        try:
            return float(values[name])
        except (KeyError, ValueError):
            return None

    def whole(name: str) -> int | None:
        value = number(name)
        return None if value is None else int(value)

    def switch(name: str) -> bool | None:
        return {"enabled": True, "disabled": False}.get(values.get(name, "").casefold())

    memory = number("memory.total")
    state = re.fullmatch(r"P(\d+)", values.get("pstate", ""))
    active = values.get("clocks_throttle_reasons.active", "")
    mig = switch("mig.mode.current")
    return Gpu(
        name=values.get("name"),
        driver=values.get("driver_version"),
        cuda=cuda,
        memory_gib=None if memory is None else memory / 1024,
        pcie_generation=whole("pcie.link.gen.current"),
        pcie_generation_max=whole("pcie.link.gen.max"),
        pcie_width=whole("pcie.link.width.current"),
        pcie_width_max=whole("pcie.link.width.max"),
        sm_mhz=number("clocks.current.sm"),
        sm_mhz_max=number("clocks.max.sm"),
        memory_mhz=number("clocks.current.memory"),
        memory_mhz_max=number("clocks.max.memory"),
        power_limit_w=number("power.limit"),
        power_limit_default_w=number("power.default_limit"),
        power_limit_max_w=number("power.max_limit"),
        compute_capability=values.get("compute_cap"),
        mig=mig,
        mig_instances=slices if mig else (),
        ecc=switch("ecc.mode.current"),
        persistence=switch("persistence_mode"),
        temperature_c=number("temperature.gpu"),
        performance_state=int(state.group(1)) if state else None,
        throttled_by=_reasons(int(active, 16) if re.fullmatch(r"0[xX][0-9a-fA-F]+", active) else None),
        other_processes=None if users is None else _others(users, values.get("pci.bus_id", "?")),
    )


def _others(users: str, bus: str) -> int:
    pairs = (line.split(",") for line in users.splitlines())
    pids = {pair[1].strip() for pair in pairs if len(pair) == 2 and pair[0].strip().casefold() == bus.casefold()}
    return len(pids - {str(os.getpid())})


def _smi_slices(program: str) -> list[tuple[str, ...]]:
    """Names of the MIG instances of each GPU, in the order of the listing."""
    found: list[tuple[str, ...]] = []
    for line in (_run(program, "-L") or "").splitlines():
        if line.startswith("GPU "):
            found.append(())
        elif found and (match := re.match(r"\s+MIG (\S+)", line)):
            found[-1] += (match.group(1),)
    return found


def _reasons(bits: int | None) -> tuple[str, ...]:
    return tuple(reason for bit, reason in THROTTLE_REASONS.items() if bits is not None and bits & bit)


def _is_unknown(value: str) -> bool:
    return value.startswith("[") or value.casefold() in ("", "n/a", "unknown error")


def _run(program: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=SMI_TIMEOUT_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
