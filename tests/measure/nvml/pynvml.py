"""Stand-in for nvidia-ml-py with two GPUs. The second GPU is the simulated accelerator.

Functions and parameters have the names of the real ones (test_gpu_monitor.py compares them). A function that is missing here is
not supported by the driver.

SIM_NVML_MHZ: clocks of the second GPU, such as "900,1200", used in turn. SIM_NVML_WATTS, SIM_NVML_REASONS (bits).
SIM_NVML_ENERGY=none: a GPU without an energy counter. SIM_NVML_BROKEN: "init" raises in nvmlInit, "calls" in every later call,
"queries" in every query of a GPU.
"""

import itertools
import os
import time
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
MAX_MHZ = 1410
_STARTED = time.perf_counter()
_CALLS = itertools.count()


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(
            {
                3: "Not Supported",
                6: "Not Found",
                15: "GPU is lost",
                18: "Driver/library version mismatch",
            }[value]
        )


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801
    pass


class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801
    pass


def _setting(name: str, usual: str) -> str:
    return os.environ.get(f"SIM_NVML_{name}", usual)


def _check() -> None:
    if _setting("BROKEN", "") == "calls":
        raise NVMLError(15)


def nvmlInit() -> None:
    if _setting("BROKEN", "") == "init":
        raise NVMLError(18)


def nvmlShutdown() -> None:
    _check()


def nvmlDeviceGetCount() -> int:
    _check()
    return 2


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    _check()
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    _check()
    known = {"GPU-other": 0, f"GPU-{os.environ.get('SIM_UUID', 'sim')}": 1}
    if uuid not in known:
        raise NVMLError(6)
    return known[uuid]


def nvmlDeviceGetName(handle: int) -> str:
    _query()
    return os.environ.get("SIM_NAME", "Simulated accelerator") if handle else "Another card"


def _query() -> None:
    _check()
    if _setting("BROKEN", "") == "queries":
        raise NVMLError(15)


def nvmlDeviceGetClockInfo(handle: int, type: int) -> int:
    _query()
    if type != NVML_CLOCK_SM:
        raise NVMLError(3)
    clocks = [int(mhz) for mhz in _setting("MHZ", str(MAX_MHZ)).split(",")]
    return clocks[next(_CALLS) % len(clocks)] if handle else 210


def nvmlDeviceGetMaxClockInfo(handle: int, type: int) -> int:
    _query()
    return MAX_MHZ if type == NVML_CLOCK_SM else 1215


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    _query()
    return round(1e3 * float(_setting("WATTS", "300"))) if handle else 40_000


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    _query()
    if _setting("ENERGY", "") == "none":
        raise NVMLError(3)
    return round((time.perf_counter() - _STARTED) * nvmlDeviceGetPowerUsage(handle))


def nvmlDeviceGetCurrentClocksEventReasons(handle: int) -> int:
    _query()
    return int(_setting("REASONS", "0"), 0) if handle else 1


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> SimpleNamespace:
    _query()
    return SimpleNamespace(total=80 * 2**30, free=70 * 2**30, used=10 * 2**30)


def nvmlSystemGetDriverVersion() -> str:
    _query()
    return "580.65.06"
