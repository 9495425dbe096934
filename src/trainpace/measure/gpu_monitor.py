"""An NVIDIA GPU while something runs on it: clocks, power and energy by NVML (nvidia-ml-py), sampled beside the work."""

import statistics
import threading
import time
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from trainpace.core.outcome import DeviceRun
from trainpace.measure.gpus import query, reasons_of, watts

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
